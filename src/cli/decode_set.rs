//! What `argodrive decode --prompts` shows: the texts in the order of their prompts, what became of each, and what they
//! shared.

use super::WIDTH;
use super::decode::ended;
use crate::bench::run::RunResult;
use crate::model::text_stream::TextStream;
use crate::report::table::{Align, Table};
use crate::report::units;
use anyhow::Result;
use serde_json::{Value, json};
use std::io::Write;
use std::ops::ControlFlow;

/// Texts while they grow.
pub(super) struct SetText(Vec<(TextStream, String)>);

impl SetText {
    /// Room for so many.
    pub(super) fn new(count: usize) -> Self {
        Self((0..count).map(|_| (TextStream::new(), String::new())).collect())
    }

    /// A token's bytes extend the text at `place`.
    pub(super) fn push(&mut self, place: usize, bytes: &[u8]) -> ControlFlow<()> {
        if let Some((stream, text)) = self.0.get_mut(place) {
            text.push_str(&stream.push(bytes));
        }
        ControlFlow::Continue(())
    }

    /// The texts as far as they came.
    pub(super) fn finish(self) -> Vec<String> {
        self.0.into_iter().map(|(mut stream, text)| text + &stream.finish()).collect()
    }
}

/// Prints the texts, each under its name.
pub(super) fn print(names: &[String], texts: &[String]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for (at, (name, text)) in names.iter().zip(texts).enumerate() {
        writeln!(out, "{}==> {name} <==\n{text}", if at > 0 { "\n" } else { "" })?;
    }
    out.flush()?;
    Ok(())
}

/// Adds the texts and what they shared to the JSON of a run.
pub(super) fn add(value: &mut Value, names: &[String], texts: &[String], result: &RunResult) {
    let Some(set) = &result.record.set else { return };
    let each = names.iter().zip(texts).zip(&result.texts).zip(&set.texts).map(|(((name, text), s), r)| {
        json!({"name": name, "text": text, "token_ids": s.token_ids, "prompt_tokens": r.prompt_tokens,
            "stopped": r.stopped, "waited_s": r.waited_s, "ttft_s": r.ttft_s, "tok_s": r.tok_s,
            "token_hash": r.token_hash})
    });
    value["texts"] = each.collect::<Vec<_>>().into();
    value["set"] = json!({"widest_pass": set.widest_pass, "shared_passes": set.shared_passes, "experts": set.experts,
        "text_experts": set.text_experts, "experts_per_token": set.experts_per_token,
        "served_per_expert": set.served_per_expert, "total_tok_s": set.total_tok_s});
}

/// A line for each text and the totals, on stderr.
pub(super) fn report(names: &[String], result: &RunResult) {
    let Some(set) = &result.record.set else { return };
    let mut table = Table::new([
        ("prompt", Align::Left),
        ("tokens", Align::Right),
        ("of prompt", Align::Right),
        ("ended", Align::Left),
        ("waited", Align::Right),
        ("first token", Align::Right),
        ("tok/s", Align::Right),
    ]);
    let time = |s: f64| units::duration((s * 1e9) as u64);
    for (name, text) in names.iter().zip(&set.texts) {
        table.row([
            name.clone(),
            text.generated_tokens.to_string(),
            text.prompt_tokens.to_string(),
            ended(text.stopped).into(),
            time(text.waited_s),
            time(text.ttft_s),
            units::tokens_per_s(text.tok_s),
        ]);
    }
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "\n{}", table.render(WIDTH));
    let _ = writeln!(
        out,
        "{} texts, up to {} in a pass: {} tokens at {} tok/s together\n{:.1} experts a token; one that was awaited served {:.2} \
         texts",
        set.texts.len(),
        set.widest_pass,
        result.record.generated_tokens,
        units::tokens_per_s(set.total_tok_s),
        set.experts_per_token,
        set.served_per_expert,
    );
}
