//! Misspelt names: which known one was probably meant. Pure.

/// Adds "did you mean" to serde's message about an unknown key.
pub(super) fn with_nearest(message: &str) -> String {
    let Some((_, rest)) = message.split_once("unknown field `") else { return message.trim_end().to_string() };
    let mut quoted = rest.split('`');
    let unknown = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.skip(1).step_by(2).collect();
    match nearest(unknown, &known) {
        Some(best) => format!("{}; did you mean `{best}`?", message.trim_end()),
        None => message.trim_end().to_string(),
    }
}

/// The known name with the fewest edits from `word`, if it is close enough to be meant.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let best = known.iter().map(|k| (edits(word, k), *k)).min()?;
    (best.0 <= word.len().max(best.1.len()).div_ceil(3)).then_some(best.1)
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
