//! Evidence for the settings of decoding: where experts are, kernels, limits, sampling, trace, monitor.

use super::affinity::Affinity;
use super::config::ModelOptions;
use super::evidence::{Case, Judged, Verdict, limit, on_off, switch};
use super::seen::Traced;
use crate::decode::batch::seed_of;
use crate::decode::generate::StopReason;
use crate::decode::sampler::SamplerState;
use crate::decode::{Activations, KernelIsa, WeightForm};

/// On: memory handed experts out and no drive was read. Off: memory handed out nothing.
pub(super) fn resident(case: &Case<'_>, asked: bool) -> Judged {
    let reads: u64 = case.seen.reader.iter().flat_map(|c| &c.drives).map(|d| d.reads).sum();
    let leases = case.seen.resident_leases;
    let seen = format!("{leases} experts from memory, {reads} from drives");
    let verdict = match (asked, leases, reads) {
        (true, 1.., 0) | (false, 0, _) => Verdict::Proved,
        _ => Verdict::Contradicted,
    };
    (on_off(asked), verdict, seen)
}

/// Products were computed by the code of the instruction set asked for, and by no other.
pub(super) fn kernels(case: &Case<'_>, asked: &str) -> Judged {
    let wanted = asked.parse().unwrap_or_else(|_| KernelIsa::detect());
    let calls = |isa: KernelIsa| case.seen.kernel_calls.iter().find(|(i, _)| *i == isa).map_or(0, |(_, n)| *n);
    let others: u64 = KernelIsa::ALL.iter().filter(|i| **i != wanted).map(|&i| calls(i)).sum();
    let text: Vec<String> = KernelIsa::ALL.iter().map(|&i| format!("{i} {}", calls(i))).collect();
    let verdict = match (calls(wanted), others) {
        (1.., 0) => Verdict::Proved,
        (0, 0) => Verdict::Unverified,
        _ => Verdict::Contradicted,
    };
    let int8: u64 = WeightForm::ALL.into_iter().map(|f| case.seen.activations.of(f, Activations::Int8)).sum();
    let portable = match (wanted, int8) {
        (KernelIsa::Neon, 1..) => format!("; of these, the {int8} with int8 activations are portable Rust"),
        _ => String::new(),
    };
    let asked = if asked == "auto" { format!("auto ({wanted})") } else { asked.to_string() };
    (asked, verdict, format!("matrix products: {}{portable}", text.join(", ")))
}

/// On: every product of weights that take int8 activations had them. Off: there were products, and none had.
pub(super) fn activations(case: &Case<'_>, asked: Activations) -> Judged {
    let count = |form, activations| case.seen.activations.of(form, activations);
    let forms = |takes: bool| WeightForm::ALL.into_iter().filter(move |f| f.takes_int8() == takes);
    let sum = |takes, activations| forms(takes).map(|form| count(form, activations)).sum::<u64>();
    let int8 = sum(true, Activations::Int8) + sum(false, Activations::Int8);
    // of weights that take int8 activations, and of all others
    let (f32, others) = (sum(true, Activations::F32), sum(false, Activations::F32));
    let verdict = match (asked, int8, f32, f32 + others) {
        (Activations::Int8, 1.., 0, _) | (Activations::F32, 0, _, 1..) => Verdict::Proved,
        (_, 0, 0, _) => Verdict::Unverified,
        _ => Verdict::Contradicted,
    };
    let text: Vec<String> = forms(true)
        .map(|form| {
            let [int8, f32] = [Activations::Int8, Activations::F32].map(|a| count(form, a));
            format!("{} {int8} with int8 activations and {f32} with f32", form.name())
        })
        .collect();
    let nothing = match int8 + f32 {
        0 => format!(": the model has no such weights; {others} of others with f32"),
        _ => String::new(),
    };
    (asked.to_string(), verdict, format!("products of {}{nothing}", text.join(", ")))
}

/// So many threads shared products, and each of them computed parts of some.
pub(super) fn threads(case: &Case<'_>, asked: usize, affinity: &Affinity) -> Judged {
    let options = ModelOptions { threads: asked, affinity: affinity.clone(), ..ModelOptions::default() };
    let (wanted, parts) = (options.compute_threads(), &case.seen.thread_chunks);
    let took_part = parts.iter().filter(|&&n| n > 0).count();
    let text: Vec<String> = parts.iter().map(u64::to_string).collect();
    let mut seen = format!("parts of products by thread: {}", text.join(", "));
    let verdict = match (parts.len() == wanted, took_part == wanted) {
        (true, true) => Verdict::Proved,
        (true, false) => {
            seen.push_str(": no work for all of them");
            Verdict::Unverified
        }
        (false, _) => Verdict::Contradicted,
    };
    (if asked == 0 { format!("auto ({wanted})") } else { asked.to_string() }, verdict, seen)
}

/// A pass was that wide, and the prompt needed more than one. A prompt that one pass can hold asked for no expert twice.
pub(super) fn prefill_rows(case: &Case<'_>, asked: usize) -> Judged {
    let widest = case.seen.widest_rows;
    let prompt = case.seen.generation.as_ref().map_or(0, |g| g.prompt_tokens as u64);
    let asked_rows = asked as u64;
    let (experts, distinct) = case.seen.generation.as_ref().map_or((0, 0), |g| (g.prefill_experts, g.prefill_distinct));
    let twice = prompt <= asked_rows && experts != distinct;
    let verdict = limit(widest == asked_rows, prompt > asked_rows, widest > asked_rows || twice);
    let mut seen =
        format!("widest pass {widest} rows, prompt {prompt}; {experts} experts asked for, {distinct} distinct");
    if verdict == Verdict::Unverified && prompt <= asked_rows {
        seen.push_str(": not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// A decode pass had so many texts; with 1, none was shared.
pub(super) fn parallel(case: &Case<'_>, asked: usize) -> Judged {
    let (widest, shared) = (case.seen.widest_lanes, case.seen.shared_passes);
    let verdict = match asked as u64 {
        0 | 1 => switch(false, shared > 0),
        asked => limit(widest == asked, shared > 0, widest > asked),
    };
    let mut seen = format!("{shared} decode passes of several texts, the widest of {widest}");
    if verdict == Verdict::Unverified {
        seen.push_str(": never so many at once");
    }
    (asked.to_string(), verdict, seen)
}

/// A text reached it and ended there.
pub(super) fn max_context(case: &Case<'_>, asked: usize) -> Judged {
    let texts = &case.seen.texts;
    let used = texts.iter().map(|t| t.context_used).max().unwrap_or(0);
    let full = texts.iter().any(|t| t.stopped == StopReason::ContextFull);
    if asked == 0 {
        return ("the model's own".into(), Verdict::Unverified, format!("{used} tokens used"));
    }
    let verdict = limit(used == asked as u64, full, used > asked as u64);
    let mut seen = format!("{used} tokens used");
    if verdict == Verdict::Unverified {
        seen.push_str(": not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// So many tokens of a text were generated and it ended for that reason.
pub(super) fn max_new(case: &Case<'_>, asked: usize) -> Judged {
    let Some(longest) = case.seen.texts.iter().max_by_key(|t| (t.generated, t.stopped == StopReason::MaxNew)) else {
        return (asked.to_string(), Verdict::Unverified, "nothing was generated".into());
    };
    let count = longest.generated;
    let verdict = limit(count == asked, longest.stopped == StopReason::MaxNew, count > asked);
    let mut seen = format!("{count} tokens");
    if verdict == Verdict::Unverified {
        seen.push_str(", ended earlier: not binding");
    }
    (asked.to_string(), verdict, seen)
}

/// Above 0 every token was drawn; at 0 none.
pub(super) fn temperature(case: &Case<'_>, asked: f32) -> Judged {
    let s = &case.seen.sampler;
    let verdict = match asked > 0.0 {
        true if s.tokens == 0 => Verdict::Unverified,
        true => switch(true, s.drawn == s.tokens),
        false => switch(false, s.drawn > 0),
    };
    let seen = format!("{} of {} tokens drawn, {} not the most likely", s.drawn, s.tokens, s.not_greedy);
    (asked.to_string(), verdict, seen)
}

fn filter(asked: String, on: bool, cuts: u64, draws: u64) -> Judged {
    let verdict = match (on, cuts) {
        (true, 1..) | (false, 0) => Verdict::Proved,
        (true, 0) => Verdict::Unverified,
        (false, _) => Verdict::Contradicted,
    };
    let mut seen = format!("cut candidates in {cuts} of {draws} draws");
    if verdict == Verdict::Unverified {
        seen.push_str(": not binding");
    }
    (asked, verdict, seen)
}

/// It removed candidates.
pub(super) fn top_p(case: &Case<'_>, asked: f32) -> Judged {
    let on = asked < 1.0;
    let s = &case.seen.sampler;
    filter(if on { asked.to_string() } else { "off".into() }, on, s.cut_by_top_p, s.drawn)
}

/// It removed candidates.
pub(super) fn top_k(case: &Case<'_>, asked: u32) -> Judged {
    let on = asked > 0;
    let s = &case.seen.sampler;
    filter(if on { asked.to_string() } else { "off".into() }, on, s.cut_by_top_k, s.drawn)
}

/// The generator of every text stood where the seed puts it when its first token was drawn.
pub(super) fn seed(case: &Case<'_>, asked: u64) -> Judged {
    let drew = case.seen.texts.iter().enumerate().filter(|(_, t)| t.sampler.drawn > 0);
    let drew: Vec<bool> =
        drew.map(|(i, t)| t.sampler.first_words == SamplerState::seeded(seed_of(asked, i)).words).collect();
    if drew.is_empty() {
        return (asked.to_string(), Verdict::Unverified, "nothing was drawn".into());
    }
    let same = drew.iter().all(|same| *same);
    let seen = match (same, drew.len()) {
        (true, 1) => "the first draw came from this seed".into(),
        (true, n) => format!("the first draws of {n} texts came from this seed and those behind it"),
        (false, _) => "the first draw came from another seed".into(),
    };
    (asked.to_string(), switch(true, same), seen)
}

/// On: the prompt held special tokens. Off: it held none.
pub(super) fn special(case: &Case<'_>, asked: bool) -> Judged {
    let count = case.seen.prompt_control_tokens;
    let verdict = match (asked, count) {
        (true, 0) => Verdict::Unverified,
        (true, _) | (false, 0) => Verdict::Proved,
        (false, _) => Verdict::Contradicted,
    };
    (on_off(asked), verdict, format!("{count} special tokens in the prompt"))
}

/// On: reads, barriers and routes were written. Off: no read was kept (barriers are, for the verdict; they are not
/// written).
pub(super) fn trace(case: &Case<'_>, asked: bool) -> Judged {
    let (verdict, seen) = match (asked, case.seen.traced) {
        (true, Some(Traced { reads: reads @ 1.., barriers: barriers @ 1.., routes: routes @ 1.., .. })) => {
            (Verdict::Proved, format!("{reads} reads, {barriers} barriers, {routes} routes written"))
        }
        (true, _) => (Verdict::Contradicted, "nothing was written".into()),
        (false, None) => (Verdict::Proved, "no read kept, nothing written".into()),
        (false, Some(Traced { reads, .. })) => (Verdict::Contradicted, format!("{reads} reads were traced")),
    };
    (on_off(asked), verdict, seen)
}

/// On: memory handed experts out in a second run, which gave the same tokens. Off: there was no second run.
pub(super) fn reference(case: &Case<'_>, asked: bool) -> Judged {
    let interrupted = case.seen.generation.as_ref().is_some_and(|g| g.stopped == StopReason::Interrupted);
    let (verdict, seen) = match (asked, &case.seen.reference) {
        (true, Some(r)) if !r.same_tokens => {
            (Verdict::Contradicted, "with every expert in memory the tokens are others: one of the two is wrong".into())
        }
        (true, Some(r)) if r.leases > 0 => {
            (Verdict::Proved, format!("the same tokens with {} experts from memory", r.leases))
        }
        (true, None) if interrupted || case.seen.reference_interrupted => {
            (Verdict::Unverified, "interrupted before it was over".into())
        }
        (true, _) => (Verdict::Contradicted, "there was no run from memory".into()),
        (false, None) => (Verdict::Proved, "no second run".into()),
        (false, Some(r)) => (Verdict::Contradicted, format!("{} experts from memory in a second run", r.leases)),
    };
    (on_off(asked), verdict, seen)
}

/// On: devices were sampled and windows written. Off: nothing was sampled.
pub(super) fn monitor(case: &Case<'_>, asked: bool) -> Judged {
    let (verdict, seen) = match (asked, case.seen.sampled) {
        (true, None) => (Verdict::Contradicted, "nothing was sampled".into()),
        (false, None) => (Verdict::Proved, "nothing sampled".into()),
        (false, Some(s)) => (Verdict::Contradicted, format!("{} ticks were sampled", s.ticks)),
        (true, Some(s)) if s.devices == 0 => {
            (Verdict::Unverified, "the drives' block devices could not be found: drives alone have windows".into())
        }
        (true, Some(s)) => {
            let seen =
                format!("windows: {} of devices ({}), {} of drives", s.device_windows, s.devices, s.drive_windows);
            (switch(true, s.device_windows > 0 && s.drive_windows > 0), seen)
        }
    };
    (on_off(asked), verdict, seen)
}
