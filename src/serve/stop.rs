//! Stop strings in a text that comes in pieces: what may still become one is held back, and nothing from one on comes out. The
//! result does not depend on where the text is cut. Knows nothing of tokens.

/// Looks for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopFinder {
    stops: Vec<String>,
    /// The end of the text that may be the beginning of a stop string.
    held: String,
}

impl StopFinder {
    /// For these strings, none of which is empty.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Adds text. Returns what is certain, and whether a stop string has come: the text then ends before it. Of several that end
    /// at the same character the longest counts.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (text.to_string(), false);
        }
        for c in text.chars() {
            self.held.push(c);
            let found = self.stops.iter().filter(|s| self.held.ends_with(s.as_str())).map(String::len).max();
            if let Some(len) = found {
                self.held.truncate(self.held.len() - len);
                return (std::mem::take(&mut self.held), true);
            }
        }
        let tail = self.stops.iter().map(|s| longest_beginning(&self.held, s)).max().unwrap_or(0);
        let keep = self.held.split_off(self.held.len() - tail);
        (std::mem::replace(&mut self.held, keep), false)
    }

    /// Ends the text: what was held back was no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that `stop` begins with, fewer than all of it.
fn longest_beginning(text: &str, stop: &str) -> usize {
    let (text, stop) = (text.as_bytes(), stop.as_bytes());
    (1..stop.len()).rev().find(|&len| text.ends_with(&stop[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(text: &str, stops: &[&str], cuts: &[usize]) -> (String, bool) {
        let mut finder = StopFinder::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = String::new();
        let mut at = 0;
        for &end in cuts.iter().chain([&text.len()]) {
            if end < at || !text.is_char_boundary(end) {
                continue;
            }
            let (piece, stopped) = finder.push(&text[at..end]);
            out += &piece;
            if stopped {
                return (out, true);
            }
            at = end;
        }
        (out + &finder.finish(), false)
    }

    #[test]
    fn a_stop_string_over_several_pieces_ends_the_text_before_it() {
        assert_eq!(cut("one\n\ntwo", &["\n\n"], &[4]), ("one".into(), true));
        assert_eq!(cut("abcabd", &["abd"], &[1, 2, 4, 5]), ("abc".into(), true));
        assert_eq!(cut("aab", &["ab"], &[1, 2]), ("a".into(), true));
        assert_eq!(cut("no stop en", &["end"], &[9]), ("no stop en".into(), false));
        assert_eq!(cut("xé🙂y", &["🙂"], &[1]), ("xé".into(), true));
        assert_eq!(cut("abc", &["b", "abc"], &[]), ("a".into(), true), "the one that is whole first");
        assert_eq!(cut("abc", &["c", "bc"], &[]), ("a".into(), true), "the longest of two that end together");
    }

    proptest! {
        #[test]
        fn cutting_changes_nothing(
            text in "[ab🙂]{0,20}", stops in prop::collection::vec("[ab🙂]{1,4}", 1..4),
            cuts in prop::collection::vec(0usize..60, 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len()).collect();
            cuts.sort_unstable();
            let whole = cut(&text, &stops, &[]);
            prop_assert_eq!(cut(&text, &stops, &cuts), whole.clone());
            prop_assert!(text.starts_with(&whole.0));
            prop_assert!(stops.iter().all(|s| !whole.0.contains(s)));
            prop_assert_eq!(whole.1, stops.iter().any(|s| text.contains(s)));
        }
    }
}
