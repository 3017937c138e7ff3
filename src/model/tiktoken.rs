//! Byte-pair encoding from a ranks file (`tiktoken.model`: one `base64 rank` per line), with the split pattern of
//! this model family (k3-architecture.md section 5). Ordinary text only: control tokens are the tokenizer's business.

use super::vocab::{MAX_TOKEN_ID, TokenizerError, read_text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::Path;

/// Largest ranks file read. K3's has 2,795,286 bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Longest token accepted; K3's longest has 128 bytes.
const MAX_TOKEN_BYTES: usize = 4096;
/// Characters of one slice; the pattern never sees more at once.
const SLICE_CHARS: usize = 400_000;
/// Longest run of characters that are all white space or all not, before it is cut.
const RUN_CHARS: usize = 25_000;
/// The eight alternatives of the split, in order.
const SPLIT: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// The ranks and the split.
#[derive(Debug)]
pub(super) struct Ranks {
    ranks: HashMap<Box<[u8]>, u32>,
    longest: usize,
    split: fancy_regex::Regex,
}

impl Ranks {
    /// Reads a ranks file: contiguous ranks from 0 in order, no token twice, all 256 single bytes present.
    pub(super) fn open(file: &Path) -> Result<Self, TokenizerError> {
        let text = read_text(file, MAX_FILE_BYTES)?;
        let mut ranks = HashMap::new();
        let mut longest = 0;
        for (index, line) in text.lines().enumerate() {
            let bad = |what: String| TokenizerError::Line { file: file.to_path_buf(), line: index + 1, what };
            let (word, rank) =
                line.split_once(' ').ok_or_else(|| bad("expected a base64 token, one space and its rank".into()))?;
            let expected = ranks.len() as u32;
            if rank.trim_end().parse() != Ok(expected) {
                return Err(bad(format!(
                    "rank is {:?}; ranks must run from 0 without a gap, so {expected}",
                    rank.trim_end()
                )));
            }
            if expected > MAX_TOKEN_ID {
                return Err(bad(format!("more than {MAX_TOKEN_ID} ranks")));
            }
            let bytes = STANDARD.decode(word).map_err(|e| bad(format!("the token is not base64: {e}")))?;
            if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES {
                return Err(bad(format!("the token has {} bytes; expected 1 to {MAX_TOKEN_BYTES}", bytes.len())));
            }
            longest = longest.max(bytes.len());
            if let Some(first) = ranks.insert(bytes.into_boxed_slice(), expected) {
                return Err(bad(format!("the token of rank {first} again; every token must stand once")));
            }
        }
        if let Some(byte) = (0..=u8::MAX).find(|b| !ranks.contains_key(&[*b][..])) {
            let what = format!("no rank for the single byte {byte:#04x}; every byte needs one");
            return Err(TokenizerError::content(file, what));
        }
        let split = fancy_regex::Regex::new(SPLIT).map_err(|e| TokenizerError::content(file, format!("split: {e}")))?;
        Ok(Self { ranks, longest, split })
    }

    /// Number of ranks = the first control id.
    pub(super) fn len(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Every token with its rank.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (u32, &[u8])> {
        self.ranks.iter().map(|(bytes, &rank)| (rank, &**bytes))
    }

    /// Appends the tokens of ordinary text.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        for slice in guarded_slices(text) {
            let mut end = 0;
            for piece in self.split.find_iter(slice) {
                let piece = piece.map_err(|e| TokenizerError::Text(format!("the split gave up: {e}")))?;
                // The alternatives cover every character; a gap would only mean lost text, so keep it.
                self.encode_piece(&slice.as_bytes()[end..piece.start()], out);
                self.encode_piece(piece.as_str().as_bytes(), out);
                end = piece.end();
            }
            self.encode_piece(&slice.as_bytes()[end..], out);
        }
        Ok(())
    }

    /// Merges one piece: always the adjacent pair with the lowest joint rank, the leftmost of equals. A linked list
    /// of parts and a heap of candidate pairs, so that n bytes cost n log n.
    fn encode_piece(&self, piece: &[u8], out: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        if let Some(&rank) = self.ranks.get(piece) {
            out.push(rank);
            return;
        }
        const GONE: usize = usize::MAX;
        let n = piece.len();
        // Part i covers bytes i..next[i]; GONE marks a start that was merged into the part before it.
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<usize> = (0..=n).map(|i| i.wrapping_sub(1)).collect();
        let mut heap = BinaryHeap::new();
        let offer = |heap: &mut BinaryHeap<_>, left: usize, middle: usize, end: usize| {
            if end - left <= self.longest
                && let Some(&rank) = self.ranks.get(&piece[left..end])
            {
                heap.push(Reverse((rank, left, middle, end)));
            }
        };
        for left in 0..n.saturating_sub(1) {
            offer(&mut heap, left, left + 1, left + 2);
        }
        while let Some(Reverse((_, left, middle, end))) = heap.pop() {
            // Stale unless both parts still are what they were when the pair was offered.
            if next[left] != middle || next[middle] != end {
                continue;
            }
            next[left] = end;
            next[middle] = GONE;
            previous[end] = left;
            if left > 0 {
                offer(&mut heap, previous[left], left, end);
            }
            if end < n {
                offer(&mut heap, left, end, next[end]);
            }
        }
        let mut at = 0;
        while at < n {
            let part = &piece[at..next[at]];
            // Every part is a single byte or was a rank when it was merged, so the lookup succeeds.
            out.extend(self.ranks.get(part));
            at = next[at];
        }
    }
}

/// White space as Python's `str.isspace` sees it: Unicode's, and the four information separators.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Cuts huge inputs: slices of [`SLICE_CHARS`], and inside them after every [`RUN_CHARS`] characters of one class.
fn guarded_slices(text: &str) -> Vec<&str> {
    guarded_slices_of(text, SLICE_CHARS, RUN_CHARS)
}

fn guarded_slices_of(text: &str, slice_chars: usize, run_chars: usize) -> Vec<&str> {
    let mut slices = Vec::new();
    let (mut start, mut in_slice, mut run, mut class) = (0, 0, 0, false);
    for (at, c) in text.char_indices() {
        if in_slice == slice_chars {
            slices.push(&text[start..at]);
            (start, in_slice, run) = (at, 0, 0);
        }
        let space = is_python_space(c);
        if run > 0 && space == class {
            if run == run_chars {
                slices.push(&text[start..at]);
                (start, run) = (at, 0);
            }
        } else {
            run = 0;
        }
        class = space;
        run += 1;
        in_slice += 1;
    }
    if start < text.len() {
        slices.push(&text[start..]);
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::PathBuf;
    use std::sync::LazyLock;

    fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oracle/tiny/tiktoken.model")
    }

    static RANKS: LazyLock<Ranks> = LazyLock::new(|| Ranks::open(&tiny()).unwrap());

    fn encode(text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        RANKS.encode(text, &mut out).unwrap();
        out
    }

    /// The rule as it is stated, quadratic: scan for the lowest rank, merge, repeat.
    fn by_definition(piece: &[u8]) -> Vec<u32> {
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|b| vec![*b]).collect();
        loop {
            let ranks = parts.windows(2).map(|w| RANKS.ranks.get(&*w.concat()));
            let best = ranks.enumerate().filter_map(|(i, r)| r.map(|r| (*r, i))).min();
            let Some((_, i)) = best else { break };
            let right = parts.remove(i + 1);
            parts[i].extend(right);
        }
        parts.iter().map(|p| RANKS.ranks[&**p]).collect()
    }

    fn write(lines: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines).unwrap();
        file
    }

    #[test]
    fn damaged_files_name_the_line() {
        let good = std::fs::read_to_string(tiny()).unwrap();
        let lines: Vec<&str> = good.lines().collect();
        let with = |index: usize, line: &str| {
            let mut changed = lines.clone();
            changed[index] = line;
            Ranks::open(write(&changed.join("\n")).path()).unwrap_err().to_string()
        };
        assert!(with(6, "BgYG").contains("line 7: expected a base64 token"));
        assert!(with(6, "BgYG 7").contains("line 7: rank is \"7\""));
        assert!(with(6, "BgYG -6").contains("line 7: rank"));
        assert!(with(6, "?? 6").contains("line 7: the token is not base64"));
        assert!(with(6, " 6").contains("line 7: the token has 0 bytes"));
        assert!(with(6, "AA== 6").contains("line 7: the token of rank 0 again"));
        assert!(with(6, "BgYG 6").contains("no rank for the single byte 0x06"));
        let short = lines[..100].join("\n");
        assert!(Ranks::open(write(&short).path()).unwrap_err().to_string().contains("single byte 0x64"));
        assert!(Ranks::open(write("").path()).unwrap_err().to_string().contains("0x00"));
        let e = Ranks::open(Path::new("/nonexistent/tiktoken.model")).unwrap_err().to_string();
        assert!(e.contains("/nonexistent/tiktoken.model"), "{e}");
    }

    #[test]
    fn the_split_pattern_is_the_golden_one() {
        let golden = tiny().with_file_name("tokenizer_golden.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
        assert_eq!(golden["pattern"], SPLIT);
        assert_eq!(golden["base_vocab"], RANKS.len());
    }

    #[test]
    fn runs_and_slices_are_cut_where_the_release_cuts_them() {
        let cut = |text| guarded_slices_of(text, 8, 3);
        assert_eq!(cut("aaa"), ["aaa"]);
        assert_eq!(cut("aaaa"), ["aaa", "a"]);
        assert_eq!(cut("a aaaa"), ["a aaa", "a"]);
        assert_eq!(cut(" \u{1c}\u{1f}\u{a0}x"), [" \u{1c}\u{1f}", "\u{a0}x"], "information separators are white space");
        assert_eq!(cut("a b c d e f"), ["a b c d ", "e f"]);
        assert_eq!(cut("aaaaaaaaaa"), ["aaa", "aaa", "aa", "aa"], "a slice starts its own run");
        assert!(cut("").is_empty());
    }

    #[test]
    fn a_piece_of_the_longest_length_is_encoded() {
        for unit in ["a", "t", "the", " ", "\n", "é", "读"] {
            let text = unit.repeat(RUN_CHARS * 2);
            let bytes: usize =
                encode(&text).iter().map(|id| RANKS.tokens().find(|t| t.0 == *id).unwrap().1.len()).sum();
            assert_eq!(bytes, text.len(), "{unit:?}");
        }
    }

    proptest! {
        #[test]
        fn damaged_files_are_errors_and_never_panics(
            at in any::<prop::sample::Index>(), len in 0usize..30, with in prop::collection::vec(any::<u8>(), 0..12),
        ) {
            let mut bytes = std::fs::read(tiny()).unwrap();
            let start = at.index(bytes.len());
            bytes.splice(start..(start + len).min(bytes.len()), with);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            if let Ok(ranks) = Ranks::open(file.path()) {
                ranks.encode("The router 读 12", &mut Vec::new()).unwrap();
            }
        }

        #[test]
        fn the_heap_merges_as_defined(piece in "[ater hinsoTHE<|>]{1,60}") {
            let mut got = Vec::new();
            RANKS.encode_piece(piece.as_bytes(), &mut got);
            // A piece that is a rank is emitted directly, whatever merging would give.
            let want = RANKS.ranks.get(piece.as_bytes()).map_or_else(|| by_definition(piece.as_bytes()), |r| vec![*r]);
            prop_assert_eq!(got, want);
        }

        #[test]
        fn no_byte_is_lost(text: String) {
            let mut bytes = Vec::new();
            for id in encode(&text) {
                bytes.extend_from_slice(RANKS.tokens().find(|t| t.0 == id).unwrap().1);
            }
            prop_assert_eq!(bytes, text.as_bytes());
        }

        #[test]
        fn slices_join_to_the_text(text in "[a \t\u{1c}é]{0,40}", slice in 1usize..9, run in 1usize..5) {
            let slices = guarded_slices_of(&text, slice, run);
            prop_assert!(slices.iter().all(|s| !s.is_empty() && s.chars().count() <= slice));
            prop_assert_eq!(slices.concat(), text);
        }
    }
}
