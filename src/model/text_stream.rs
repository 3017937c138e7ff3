//! Bytes in, whole characters out: a token may end inside a UTF-8 character, so text is given out only up to the
//! last whole one. Knows nothing of tokens.

/// Holds back the bytes of an unfinished character.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    /// At most three bytes: the beginning of a character that may still become valid.
    held: Vec<u8>,
}

impl TextStream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes and returns the text that is now certain. Bytes that can never become a character are replaced by
    /// U+FFFD, one for each maximal invalid sequence, as `String::from_utf8_lossy` does.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let keep = unfinished_tail(&self.held);
        let certain = self.held.len() - keep;
        let text = String::from_utf8_lossy(&self.held[..certain]).into_owned();
        self.held.drain(..certain);
        text
    }

    /// Ends the stream: a character that was never finished becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}

/// Length of the tail that is the beginning of a character, 0 to 3 bytes.
fn unfinished_tail(bytes: &[u8]) -> usize {
    for chunk in bytes.utf8_chunks() {
        let invalid = chunk.invalid();
        let at_end = std::ptr::eq(invalid.as_ptr_range().end, bytes.as_ptr_range().end);
        // `from_utf8` alone tells "unexpected end" (no error length) from "never valid".
        if at_end && matches!(std::str::from_utf8(invalid), Err(e) if e.error_len().is_none()) {
            return invalid.len();
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_split_over_tokens_comes_out_once_it_is_whole() {
        let mut s = TextStream::new();
        let bytes = "🙂".as_bytes();
        assert_eq!(s.push(b"a"), "a");
        assert_eq!(s.push(&bytes[..1]), "");
        assert_eq!(s.push(&bytes[1..3]), "");
        assert_eq!(s.push(&bytes[3..]), "🙂");
        assert_eq!(s.finish(), "");
    }

    #[test]
    fn hopeless_bytes_do_not_hold_back_what_follows() {
        let mut s = TextStream::new();
        assert_eq!(s.push(b"\xff"), "\u{fffd}");
        assert_eq!(s.push(b"\xe8\xaf"), "");
        assert_eq!(s.push(b"x"), "\u{fffd}x", "the character can no longer be finished");
        assert_eq!(s.push(b"\xf0\x9f\x99"), "");
        assert_eq!(s.finish(), "\u{fffd}");
        assert_eq!(s.finish(), "");
        // A surrogate (ED A0 80) and an overlong form (C0 AF) are never valid.
        assert_eq!(s.push(b"\xed\xa0\x80\xc0\xaf."), String::from_utf8_lossy(b"\xed\xa0\x80\xc0\xaf."));
    }

    proptest! {
        #[test]
        fn cutting_changes_nothing(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..60),
                any::<String>().prop_map(String::into_bytes),
                prop::collection::vec(prop::sample::select(vec![0xf0u8, 0x9f, 0x99, 0x82, 0xe8, 0xaf, b'a']), 0..40),
            ],
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut ends: Vec<usize> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
            ends.push(bytes.len());
            ends.sort_unstable();
            let (mut s, mut out, mut start) = (TextStream::new(), String::new(), 0);
            for end in ends {
                out += &s.push(&bytes[start..end]);
                prop_assert!(s.held.len() <= 3);
                start = end;
            }
            out += &s.finish();
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }
    }
}
