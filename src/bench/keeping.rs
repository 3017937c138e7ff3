//! How many texts are kept to be gone on with, and what they take, asked before anything is allocated. Sizes only; which texts
//! are kept is `turns`' business.

use super::config::RunConfig;
use super::fits;
use crate::decode::kv::KvPlan;
use crate::decode::memory::SessionBytes;
use crate::open::Model;
use crate::reader::PrefetchPolicy;

/// Texts that are kept where nobody says how many, if memory allows.
const DEFAULT_TEXTS: usize = 4;
/// Most that can be asked for.
const MOST_TEXTS: usize = 1024;

/// Texts that are kept, and their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Most texts, the one at work included.
    pub texts: usize,
    /// Memory of each: recurrent states where it ended, and where its prompt did.
    pub state_bytes: u64,
    /// Memory for each of its tokens; 0 = latent caches are held to a bound together.
    pub token_bytes: u64,
}

/// As many as are asked for, else up to four as memory allows. Where latent caches are held to a bound one: the bound is for
/// them together, so that more texts have less of it each.
///
/// # Errors
/// A sentence that says what would fit.
pub fn keeping(model: &Model, config: &RunConfig, asked: Option<usize>) -> Result<Keeping, String> {
    let cfg = model.decoder.config();
    let bytes = SessionBytes::of(cfg, 1, 1);
    // each is there twice
    let state_bytes = bytes.kda_state_bytes.saturating_add(bytes.conv_history_bytes).saturating_mul(2);
    let bounded = config.kv.kv_ram_bytes > 0;
    let token_bytes = if bounded { 0 } else { bytes.latent_cache_bytes };
    let context = match config.model.max_context {
        0 => cfg.max_position_embeddings,
        context => context,
    };
    let fits = |texts: usize| {
        if bounded {
            KvPlan::of(cfg, texts, context, config.draft.rows(), config.kv.kv_ram_bytes).map_err(|e| e.to_string())?;
        }
        fits::check_turn(model, config, 1, (0, state_bytes.saturating_mul(texts as u64 - 1)))
    };
    let of = |texts| Keeping { texts, state_bytes, token_bytes };
    let one = config.reader.prefetch == PrefetchPolicy::Draft;
    match asked {
        Some(texts) if !(1..=MOST_TEXTS).contains(&texts) => Err(format!("--sessions {texts}: give 1 to {MOST_TEXTS}")),
        Some(texts @ 2..) if one => Err(format!(
            "--sessions {texts}: guesses of --prefetch draft follow one text; give --sessions 1, or another --prefetch"
        )),
        Some(texts) => match fits(texts) {
            Err(_) if texts > 1 && fits(1).is_ok() => {
                let most = (1..texts).rev().find(|texts| fits(*texts).is_ok()).unwrap_or(1);
                let mib = state_bytes.div_ceil(1 << 20);
                Err(format!("--sessions {texts}: each takes {mib} MiB before its first token; --sessions {most} fits"))
            }
            fits => fits.map(|()| of(texts)),
        },
        None if one || bounded => Ok(of(1)),
        None => Ok(of((1..=DEFAULT_TEXTS).rev().find(|texts| fits(*texts).is_ok()).unwrap_or(1))),
    }
}
