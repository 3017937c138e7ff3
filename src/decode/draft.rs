//! Guesses from the text: the token that probably comes next (the longest earlier match of the text's end says what came
//! behind it there), and the experts that each token went to when it was last read. Bounded memory; pure bookkeeping that
//! knows no weights and no source.

use crate::ids::ExpertId;

/// Longest end of the text that is looked for.
const LONGEST_MATCH: usize = 6;
/// Shortest end of the text that says anything.
const SHORTEST_MATCH: usize = 2;
/// How far back the text is searched.
const SEARCHED_TOKENS: usize = 16_384;
/// Most memory for the experts that tokens went to.
const MEMORY_BYTES: usize = 32 << 20;
/// No expert known.
const NOTHING: ExpertId = ExpertId(u16::MAX);
/// No slot, no token.
const NONE: u32 = u32::MAX;

/// The token that followed the longest earlier occurrence of the end of `text` (6 to 2 tokens), the latest one if there are
/// several.
pub(super) fn propose(text: &[u32]) -> Option<u32> {
    let window = &text[text.len().saturating_sub(SEARCHED_TOKENS)..];
    let mut best = (SHORTEST_MATCH - 1, None);
    // `end` is one past an earlier occurrence's last token, and the place of the token that followed it.
    for end in (1..window.len()).rev() {
        let behind = window[..end].iter().rev().zip(window.iter().rev());
        let matched = behind.take(LONGEST_MATCH).take_while(|(a, b)| a == b).count();
        if matched > best.0 {
            best = (matched, Some(window[end]));
            if matched == LONGEST_MATCH {
                break;
            }
        }
    }
    best.1
}

/// The experts that tokens went to when they were last read, for as many tokens as fit; the ones not read for long go
/// first.
#[derive(Default)]
struct RouteMemory {
    layers: usize,
    top_k: usize,
    slot_of: Vec<u32>,
    token_of: Vec<u32>,
    /// By slot: read since the hand passed last.
    recent: Vec<bool>,
    hand: usize,
    /// `[slot][layer][top_k]`, best first.
    routes: Vec<ExpertId>,
}

impl RouteMemory {
    fn new(vocab: usize, layers: usize, top_k: usize, bytes: usize) -> Self {
        let each = layers * top_k;
        let slots = (bytes / (each * size_of::<ExpertId>()).max(1)).clamp(1, vocab.max(1));
        Self {
            layers,
            top_k,
            slot_of: vec![NONE; vocab],
            token_of: vec![NONE; slots],
            recent: vec![false; slots],
            hand: 0,
            routes: vec![NOTHING; slots * each],
        }
    }

    /// The token is read: it has a slot from now on.
    fn touch(&mut self, token: u32) {
        let Some(&slot) = self.slot_of.get(token as usize) else { return };
        if slot != NONE {
            self.recent[slot as usize] = true;
            return;
        }
        while std::mem::take(&mut self.recent[self.hand]) {
            self.hand = (self.hand + 1) % self.recent.len();
        }
        let slot = self.hand;
        self.hand = (self.hand + 1) % self.recent.len();
        if let Some(old) = self.slot_of.get_mut(self.token_of[slot] as usize) {
            *old = NONE;
        }
        self.token_of[slot] = token;
        self.slot_of[token as usize] = slot as u32;
        self.recent[slot] = true;
        let each = self.layers * self.top_k;
        self.routes[slot * each..(slot + 1) * each].fill(NOTHING);
    }

    fn place(&self, token: u32, at: usize) -> Option<std::ops::Range<usize>> {
        let slot = *self.slot_of.get(token as usize).filter(|s| **s != NONE)? as usize;
        let start = (slot * self.layers + at) * self.top_k;
        Some(start..start + self.top_k)
    }

    fn keep(&mut self, token: u32, at: usize, ids: &[ExpertId]) {
        if let Some(place) = self.place(token, at) {
            self.routes[place].copy_from_slice(ids);
        }
    }

    /// Adds what speaks for each expert: the earlier it was chosen, the more.
    fn recall(&self, token: u32, at: usize, sums: &mut [f32]) {
        let Some(place) = self.place(token, at) else { return };
        for (rank, id) in self.routes[place].iter().enumerate() {
            if let Some(sum) = sums.get_mut(id.index()) {
                *sum += (self.top_k - rank) as f32;
            }
        }
    }
}

/// The text so far and what is known of its tokens.
#[derive(Default)]
pub(super) struct Drafter {
    text: Vec<u32>,
    /// Rows of the current pass: the last so many tokens of the text.
    rows: usize,
    /// Pass and token that the current pass foresees.
    next: Option<(u64, u32)>,
    memory: RouteMemory,
}

impl Drafter {
    /// For a text of at most `max_context` tokens.
    pub(super) fn new(vocab: usize, layers: usize, top_k: usize, max_context: usize) -> Self {
        let memory = RouteMemory::new(vocab, layers, top_k, MEMORY_BYTES);
        Self { text: Vec::with_capacity(max_context), rows: 0, next: None, memory }
    }

    /// Forgets the text; what its tokens went to stays known.
    pub(super) fn forget_text(&mut self) {
        self.text.clear();
    }

    /// Pass `step` over `tokens` begins. Says whether the pass before foresaw just this (`None` = it foresaw nothing), and
    /// looks for the token behind, if the pass will lead to one.
    pub(super) fn begin(&mut self, step: u64, tokens: &[u32], continues: bool) -> Option<bool> {
        let before = self.next.take().filter(|(pass, _)| *pass == step);
        self.text.extend_from_slice(tokens);
        self.rows = tokens.len();
        for &token in tokens {
            self.memory.touch(token);
        }
        if continues {
            self.next = propose(&self.text).map(|token| (step + 1, token));
        }
        before.map(|(_, token)| tokens == [token])
    }

    /// The last `rows` tokens of the text were proposals that are not kept. What they went to stays known.
    pub(super) fn take_back(&mut self, rows: usize) {
        self.text.truncate(self.text.len().saturating_sub(rows));
        self.rows = self.rows.saturating_sub(rows);
    }

    /// The pass's rows went to `ids` `[rows, top_k]` in layer number `at`.
    pub(super) fn keep(&mut self, at: usize, ids: &[ExpertId]) {
        let tokens = &self.text[self.text.len() - self.rows..];
        for (&token, ids) in tokens.iter().zip(ids.chunks_exact(self.memory.top_k.max(1))) {
            self.memory.keep(token, at, ids);
        }
    }

    /// Adds up what is known of layer number `at` for the tokens of this pass, or for the one foreseen for the `next`.
    pub(super) fn recall(&self, at: usize, next: bool, sums: &mut [f32]) {
        if next {
            if let Some((_, token)) = self.next {
                self.memory.recall(token, at, sums);
            }
            return;
        }
        for &token in &self.text[self.text.len() - self.rows..] {
            self.memory.recall(token, at, sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_match_says_what_comes_next() {
        assert_eq!(propose(&[1, 2, 3, 9, 1, 2]), Some(3));
        assert_eq!(propose(&[1, 2, 3, 7, 2, 4, 1, 2]), Some(3), "one token alone says nothing, two do");
        assert_eq!(propose(&[1, 2, 3, 1, 2, 4, 1, 2]), Some(4), "of equals the latest");
        assert_eq!(propose(&[5, 1, 2, 3, 1, 2, 4, 5, 1, 2]), Some(3), "the longer one wins over the later one");
        assert_eq!(propose(&[7, 7, 7]), Some(7), "a run continues");
        for nothing in [&[][..], &[1], &[1, 1], &[1, 2, 3, 4], &[3, 1, 3]] {
            assert_eq!(propose(nothing), None, "{nothing:?}");
        }
        let mut long: Vec<u32> = (0..SEARCHED_TOKENS as u32 * 2).collect();
        long.extend([0, 1]);
        assert_eq!(propose(&long), None, "the search is bounded");
    }

    fn ids(list: &[u16]) -> Vec<ExpertId> {
        list.iter().copied().map(ExpertId).collect()
    }

    fn recalled(d: &Drafter, at: usize, next: bool) -> Vec<f32> {
        let mut sums = vec![0.0; 6];
        d.recall(at, next, &mut sums);
        sums
    }

    #[test]
    fn tokens_are_remembered_by_where_they_went_last() {
        let mut d = Drafter::new(10, 2, 2, 64);
        assert_eq!(d.begin(0, &[4, 5, 4], false), None);
        d.keep(1, &ids(&[0, 1, 2, 3, 5, 1]));
        assert_eq!(d.begin(1, &[4], true), None, "nothing was foreseen");
        assert_eq!(recalled(&d, 1, false), [0.0, 1.0, 0.0, 0.0, 0.0, 2.0], "its last row, best first");
        assert_eq!(recalled(&d, 0, false), [0.0; 6], "nothing is known of that layer");
        d.keep(1, &ids(&[3, 2]));
        assert_eq!(recalled(&d, 1, true), [0.0; 6], "4 4 has not stood before");
        assert_eq!(d.begin(2, &[5], true), None);
        assert_eq!(d.next, Some((3, 4)), "4 5 was followed by 4");
        assert_eq!(recalled(&d, 1, true), [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]);
        assert_eq!(d.begin(3, &[4], true), Some(true));
        assert_eq!(d.next, Some((4, 4)), "5 4 was followed by 4");
        assert_eq!(d.begin(4, &[9], true), Some(false));
        d.begin(5, &[5, 4, 1], true);
        d.take_back(2);
        assert_eq!((d.text.last(), d.rows), (Some(&5), 1), "proposals that were not kept are no text");
        d.forget_text();
        assert_eq!(d.begin(6, &[4], true), None);
        assert_eq!(recalled(&d, 1, false), [0.0, 0.0, 1.0, 2.0, 0.0, 0.0], "kept beyond the text");
    }

    #[test]
    fn memory_is_bounded_and_drops_what_was_not_read_for_long() {
        let mut m = RouteMemory::new(100, 1, 1, 3 * size_of::<ExpertId>());
        for token in [1, 2, 3] {
            m.touch(token);
            m.keep(token, 0, &[ExpertId(token as u16)]);
        }
        m.touch(4); // all three were recent: the hand goes round and takes the first
        assert_eq!((m.place(1, 0), m.routes.len()), (None, 3));
        m.touch(2);
        m.touch(5);
        assert!(m.place(2, 0).is_some() && m.place(3, 0).is_none(), "2 was read again, 3 was not");
        let mut sums = [0.0; 3];
        m.recall(5, 0, &mut sums);
        m.recall(99, 0, &mut sums);
        assert_eq!(sums, [0.0; 3], "a slot begins empty");
        m.recall(2, 0, &mut sums);
        assert_eq!(sums, [0.0, 0.0, 1.0]);
    }
}
