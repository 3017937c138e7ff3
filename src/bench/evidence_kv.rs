//! Evidence for the memory of latent caches: that of the model, and that of the draft model.

use super::evidence::{Case, Judged, Verdict, switch};

/// On: rows left memory and came back, and no more bytes were resident than allowed. Never that far: not binding. Off: none left.
pub(super) fn ram(case: &Case<'_>, asked: u64) -> Judged {
    let (c, file) = (&case.seen.kv.passes, case.seen.kv.file.unwrap_or_default());
    let seen = format!(
        "{} rows left memory in {} bytes, {} bytes came back; at most {} bytes were resident",
        c.spilled_rows, file.written_bytes, file.read_bytes, c.peak_bytes
    );
    if asked == 0 {
        return ("off".into(), switch(false, c.spilled_rows > 0 || file.written_blocks > 0), seen);
    }
    let verdict = match (c.spilled_rows, file.read_bytes) {
        _ if c.peak_bytes > asked => Verdict::Contradicted,
        (1.., 1..) => Verdict::Proved,
        (0, _) => Verdict::Unverified,
        // nothing looked at them: the text ended there
        (1.., 0) => Verdict::Unverified,
    };
    let binding = if c.spilled_rows == 0 { ": not binding" } else { "" };
    (format!("{asked} bytes"), verdict, format!("{seen}{binding}"))
}

/// On: rows were dropped, and none looked at more than so many. Off: none was dropped.
pub(super) fn window(case: &Case<'_>, asked: usize) -> Judged {
    let c = case.seen.speculation.as_ref().map(|s| s.caches).unwrap_or_default();
    let seen = format!(
        "the draft model dropped {} rows, looked at {} at most and held {} bytes",
        c.dropped_rows, c.widest_seen, c.peak_bytes
    );
    if asked == 0 {
        return ("off".into(), switch(false, c.dropped_rows > 0), seen);
    }
    let verdict = match c.dropped_rows {
        _ if c.widest_seen > asked as u64 => Verdict::Contradicted,
        0 => Verdict::Unverified,
        _ => Verdict::Proved,
    };
    let binding = if verdict == Verdict::Unverified { ": not binding" } else { "" };
    (asked.to_string(), verdict, format!("{seen}{binding}"))
}
