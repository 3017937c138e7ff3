//! A check over the whole text of a manifest or plan, so that a flipped bit anywhere in one is found when it is read, also where
//! what it makes of the file could be true. Its last field is `"check"`, the XXH3-128 of all that stands before it. A file without
//! one (older, or written by hand) is read unchecked.

use std::borrow::Cow;
use xxhash_rust::xxh3::xxh3_128;

const KEY: &str = ",\"check\":\"";
/// Key, 32 hex digits, closing quote and brace.
const TAIL: usize = KEY.len() + 32 + 2;
const MISMATCH: &str = "its contents do not have the digest in `check` at its end, so it was damaged, or changed by hand: restore it or \
     make it again, and take `check` out only if the change is your own";

/// The JSON object `json` with its check as last field. Text that is no object stays as it is.
pub fn seal(json: &str) -> String {
    match json.strip_suffix('}').filter(|body| !body.trim_end().ends_with('{')) {
        Some(body) => format!("{body}{KEY}{:032x}\"}}", xxh3_128(body.as_bytes())),
        None => json.to_string(),
    }
}

/// A file's text without its check, and whether the check matches. Both, because what is wrong with the text says more. Damage to
/// the check's own name makes it a field that no reader knows.
pub fn unseal(text: &str) -> (Cow<'_, str>, Result<(), String>) {
    let end = text.strip_suffix('\n').unwrap_or(text);
    let tail = end.len().checked_sub(TAIL).and_then(|at| end.get(at..)).and_then(|tail| tail.strip_prefix(KEY));
    let Some(digits) = tail.and_then(|tail| tail.strip_suffix("\"}")) else {
        // with other white space in it, for instance
        let named = |(at, name): (usize, &str)| text[at + name.len()..].trim_start().starts_with(':');
        let moved = text.match_indices("\"check\"").any(named);
        return (text.into(), if moved { Err(MISMATCH.to_string()) } else { Ok(()) });
    };
    let body = &end[..end.len() - TAIL];
    let matches = digits == format!("{:032x}", xxh3_128(body.as_bytes()));
    let verdict = if matches { Ok(()) } else { Err(MISMATCH.to_string()) };
    (format!("{body}}}").into(), verdict)
}

/// What to say of text that was unsealed with this verdict and could not be read.
pub fn explain(error: &serde_json::Error, intact: &Result<(), String>) -> String {
    match (error.to_string(), intact) {
        // the check itself is the field that stands in the way
        (said, Err(why)) if said.contains("`check`") => why.clone(),
        (said, _) => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_found_or_leaves_a_name_that_nobody_knows() {
        let json = r#"{"version":1,"layers":{"1":[[0],[1]]}}"#;
        let sealed = seal(json);
        assert_eq!(unseal(&sealed), (json.into(), Ok(())));
        assert_eq!(unseal(json), (json.into(), Ok(())), "files without a check stay readable");
        for at in 0..sealed.len() * 8 {
            let mut bytes = sealed.clone().into_bytes();
            bytes[at / 8] ^= 1 << (at % 8);
            let Ok(text) = String::from_utf8(bytes) else { continue };
            let (text, verdict) = unseal(&text);
            if verdict.is_ok() {
                let value: Result<serde_json::Value, _> = serde_json::from_str(&text);
                let fields = value.map(|v| v.as_object().map_or(0, |o| o.len()));
                assert!(fields.map_or(true, |n| n > 2), "bit {at} passes for a file without a check");
            }
        }
    }
}
