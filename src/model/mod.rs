//! What a checkpoint in the released layout is: configuration, tensors, tokenizer, chat form. No weights are
//! computed with here and nothing is written.

pub mod config;
pub mod tensors;
