//! Misspelt names: which known one was probably meant. Pure.

/// Adds "did you mean" to serde's message about an unknown key or an unknown word for a setting.
pub fn with_nearest(message: &str) -> String {
    let message = message.trim_end().replace("\nin `", " in `");
    let rest = ["unknown field `", "unknown variant `"].iter().find_map(|what| message.split_once(what));
    let Some((_, rest)) = rest else { return message };
    let mut quoted = rest.split('`');
    let unknown = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.skip(1).step_by(2).collect();
    match nearest(unknown, &known) {
        Some(best) => format!("{message}; did you mean `{best}`?"),
        None => message,
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
