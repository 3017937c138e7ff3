//! Whether a run fits into memory, asked before anything is allocated or measured. Knows sizes only; the text is as long as the
//! prompt and what may be generated, however long a context the model allows.

use super::config::RunConfig;
use super::guards::available_bytes;
use crate::decode::memory::SessionBytes;
use crate::model::config::ModelConfig;

/// Memory of a run that cannot be given back while it lasts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunBytes {
    /// States, cache and working memory of the session.
    pub session_bytes: u64,
    /// Slots for experts on their way, or every expert.
    pub expert_bytes: u64,
}

impl RunBytes {
    /// For a prompt of `prompt` tokens that is fed in passes of `rows`.
    pub fn of(model: &ModelConfig, config: &RunConfig, prompt: usize, rows: usize) -> Self {
        let longest = match config.model.max_context {
            0 => model.max_position_embeddings,
            context => context.min(model.max_position_embeddings),
        };
        let text = prompt.saturating_add(config.max_new).min(longest).max(1);
        let session = SessionBytes::of(model, text, rows.min(prompt).max(1));
        let bank = || {
            let moe = model.moe.as_ref()?;
            let experts = (model.moe_layers().count() as u64).saturating_mul(moe.experts as u64);
            Some(experts.saturating_mul(moe.expert_bytes()))
        };
        let expert_bytes = match (&model.moe, config.resident) {
            (None, _) => 0,
            (Some(_), true) => bank().unwrap_or(0),
            (Some(_), false) => config.reader.buffer_bytes,
        };
        Self { session_bytes: session.total_bytes(), expert_bytes }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.session_bytes.saturating_add(self.expert_bytes)
    }
}

/// Says what is too large and what would fit, or nothing where the system does not tell how much memory there is.
pub fn check(model: &ModelConfig, config: &RunConfig, prompt: usize) -> Result<(), String> {
    available_bytes().map_or(Ok(()), |available| check_against(model, config, prompt, available))
}

fn check_against(model: &ModelConfig, config: &RunConfig, prompt: usize, available: u64) -> Result<(), String> {
    let rows = config.model.prefill_rows;
    let fits = |prompt: usize, rows: usize| RunBytes::of(model, config, prompt, rows).total_bytes() <= available;
    if fits(prompt, rows) {
        return Ok(());
    }
    let needed = RunBytes::of(model, config, prompt, rows);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let said = format!(
        "a prompt of {prompt} tokens in passes of {} takes {} MiB and experts {} MiB; {} MiB can be had",
        rows.min(prompt),
        mib(needed.session_bytes),
        mib(needed.expert_bytes),
        mib(available)
    );
    let advice = if fits(prompt, 1) {
        let rows = largest(rows.min(prompt), |rows| fits(prompt, rows));
        format!("--prefill-rows {rows} fits")
    } else if fits(1, 1) {
        let longest = largest(prompt, |prompt| fits(prompt, 1));
        format!("with --prefill-rows 1 the longest prompt that fits has {longest} tokens")
    } else if config.resident {
        "without --resident experts stream".into()
    } else {
        "a smaller --buffer-bytes takes less".into()
    };
    Err(format!("{said}: {advice}"))
}

/// The largest number up to `most` for which `fits` holds; it holds for 1 and for every number below one that fits.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (1, most.max(1));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_would_fit_is_said_exactly() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini/config.json");
        let model = ModelConfig::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut config = RunConfig { max_new: 16, ..RunConfig::default() };
        config.reader.buffer_bytes = 1 << 20;
        let need = |prompt, rows| RunBytes::of(&model, &config, prompt, rows).total_bytes();
        let check = |prompt, available| check_against(&model, &config, prompt, available);
        assert_eq!(check(1000, need(1000, 1000)), Ok(()));
        let says = check(1000, need(1000, 700)).unwrap_err();
        assert!(says.contains("1000 tokens in passes of 1000") && says.ends_with("--prefill-rows 700 fits"), "{says}");
        let says = check(1000, need(300, 1)).unwrap_err();
        assert!(says.ends_with("the longest prompt that fits has 300 tokens"), "{says}");
        assert!(check(1000, 1 << 20).unwrap_err().ends_with("a smaller --buffer-bytes takes less"));
        let resident = RunConfig { resident: true, ..config.clone() };
        assert!(check_against(&model, &resident, 10, 1 << 20).unwrap_err().ends_with("experts stream"));
    }
}
