//! What a checkpoint in the released layout is: configuration, tensors, tokenizer, chat form. No weights are
//! computed with here and nothing is written.

pub mod arriving;
mod byte_level;
pub mod chat;
pub mod checkpoint;
pub mod config;
mod jinja;
pub mod reply;
pub mod safetensors;
mod shards;
pub mod tensors;
pub mod text_stream;
mod tiktoken;
pub mod tokenizer;
mod vocab;
mod xtml;

#[cfg(test)]
mod test_models {
    //! Where tests find the models and golden data of the repository.
    use std::path::{Path, PathBuf};

    pub fn argo_mini() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini")
    }

    pub fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oracle/tiny")
    }

    pub fn golden(name: &str) -> serde_json::Value {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oracle").join(name);
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    }
}
