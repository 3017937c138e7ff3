//! Proposals from the text itself: the longest end of the text that stood in it before says what comes next. The index is a
//! suffix automaton, extended by one token in amortised constant time, so a long text costs no search. Knows tokens only.

use super::{Drafter, DrafterKind, Proposals, SpeculateError};
use crate::decode::kv::KvCounters;

/// Shortest end of the text that says anything.
const SHORTEST_MATCH: u32 = 2;
/// How many shorter ends are told of the latest place that they were seen at; longer chains keep an earlier one.
const NOTED_ENDS: usize = 16;
/// The state of the empty string.
const ROOT: u32 = 0;
/// No state, no edge.
const NONE: u32 = u32::MAX;

/// A set of strings of the text that end at the same places.
#[derive(Clone, Copy, Debug)]
struct State {
    /// Length of the longest of them.
    len: u32,
    /// The state of the longest end of these strings that ends elsewhere too.
    link: u32,
    /// One past a place where they end: the latest that was noted.
    end: u32,
    /// Newest edge out of it.
    edge: u32,
}

/// What a token leads to.
#[derive(Clone, Copy, Debug)]
struct Edge {
    from: u32,
    token: u32,
    to: u32,
    /// The next edge out of the same state.
    next: u32,
}

/// Every string of a text, by a suffix automaton: at most two states and three edges for each token.
#[derive(Debug)]
struct Index {
    states: Vec<State>,
    edges: Vec<Edge>,
    /// Places of edges by state and token, open addressing; at most half full.
    table: Vec<u32>,
    /// The state of the whole text.
    last: u32,
    /// Length of the longest end of the text that stood before, and one past where it did.
    matched: (u32, u32),
}

impl Index {
    fn new() -> Self {
        let mut index =
            Self { states: Vec::new(), edges: Vec::new(), table: vec![NONE; 64], last: ROOT, matched: (0, 0) };
        index.clear();
        index
    }

    fn clear(&mut self) {
        self.states.clear();
        self.states.push(State { len: 0, link: NONE, end: 0, edge: NONE });
        self.edges.clear();
        self.table.fill(NONE);
        (self.last, self.matched) = (ROOT, (0, 0));
    }

    /// Makes room for a text of `tokens`.
    fn reserve(&mut self, tokens: usize) {
        let more = |have: usize, want: usize| want.saturating_sub(have);
        self.states.reserve(more(self.states.len(), 2 * tokens + 1));
        self.edges.reserve(more(self.edges.len(), 3 * tokens + 1));
        if self.table.len() < 6 * tokens {
            self.rehash((6 * tokens).next_power_of_two());
        }
    }

    fn rehash(&mut self, places: usize) {
        self.table.clear();
        self.table.resize(places, NONE);
        for id in 0..self.edges.len() as u32 {
            self.put(id);
        }
    }

    /// Where the search for an edge begins.
    fn home(&self, from: u32, token: u32) -> usize {
        let key = (u64::from(from) << 32 | u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (key >> 32) as usize & (self.table.len() - 1)
    }

    fn put(&mut self, id: u32) {
        let Edge { from, token, .. } = self.edges[id as usize];
        let mut at = self.home(from, token);
        while self.table[at] != NONE {
            at = (at + 1) & (self.table.len() - 1);
        }
        self.table[at] = id;
    }

    fn find(&self, from: u32, token: u32) -> Option<u32> {
        let mut at = self.home(from, token);
        loop {
            let edge = self.edges.get(self.table[at] as usize)?;
            if edge.from == from && edge.token == token {
                return Some(self.table[at]);
            }
            at = (at + 1) & (self.table.len() - 1);
        }
    }

    fn connect(&mut self, from: u32, token: u32, to: u32) {
        if 2 * (self.edges.len() + 1) > self.table.len() {
            self.rehash(2 * self.table.len());
        }
        let id = self.edges.len() as u32;
        let next = std::mem::replace(&mut self.states[from as usize].edge, id);
        self.edges.push(Edge { from, token, to, next });
        self.put(id);
    }

    fn add_state(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    /// The text is one token longer: `token`, which ends at `end` (counted from 1).
    fn push(&mut self, token: u32, end: u32) {
        let len = self.states[self.last as usize].len + 1;
        let whole = self.add_state(State { len, link: ROOT, end, edge: NONE });
        let mut at = self.last;
        let met = loop {
            if at == NONE {
                break None;
            }
            if let Some(edge) = self.find(at, token) {
                break Some(edge);
            }
            self.connect(at, token, whole);
            at = self.states[at as usize].link;
        };
        if let Some(edge) = met {
            self.states[whole as usize].link = self.split(at, token, self.edges[edge as usize].to);
        }
        self.last = whole;
        let mut shorter = self.states[whole as usize].link;
        let State { len, end: before, .. } = self.states[shorter as usize];
        self.matched = (len, before);
        for _ in 0..NOTED_ENDS {
            if shorter == ROOT {
                break;
            }
            self.states[shorter as usize].end = end;
            shorter = self.states[shorter as usize].link;
        }
    }

    /// The state of exactly the longest string of `at` and `token`, which leads to `to`: `to` itself, or a new state for
    /// the shorter strings of `to`, which from now on end at more places than the longer ones.
    fn split(&mut self, mut at: u32, token: u32, to: u32) -> u32 {
        let len = self.states[at as usize].len + 1;
        if self.states[to as usize].len == len {
            return to;
        }
        let State { link, end, edge, .. } = self.states[to as usize];
        let new = self.add_state(State { len, link, end, edge: NONE });
        let mut next = edge;
        while next != NONE {
            let Edge { token, to, next: after, .. } = self.edges[next as usize];
            self.connect(new, token, to);
            next = after;
        }
        while at != NONE {
            match self.find(at, token) {
                Some(edge) if self.edges[edge as usize].to == to => self.edges[edge as usize].to = new,
                _ => break,
            }
            at = self.states[at as usize].link;
        }
        self.states[to as usize].link = new;
        new
    }
}

/// Looks proposals up in the text.
#[derive(Debug)]
pub struct NgramDrafter {
    text: Vec<u32>,
    index: Index,
}

impl Default for NgramDrafter {
    fn default() -> Self {
        Self::new()
    }
}

impl NgramDrafter {
    /// One without a text.
    pub fn new() -> Self {
        Self { text: Vec::new(), index: Index::new() }
    }

    /// Length of the longest end of the text that stood in it before.
    pub fn matched(&self) -> usize {
        self.index.matched.0 as usize
    }
}

impl Drafter for NgramDrafter {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Ngram
    }

    fn caches(&self) -> KvCounters {
        KvCounters::default()
    }

    fn begin(&mut self, prompt: &[u32], longest: usize) -> Result<(), SpeculateError> {
        self.text.clear();
        self.index.clear();
        self.text.reserve(longest);
        self.index.reserve(longest);
        prompt.iter().for_each(|&token| self.extend(token));
        Ok(())
    }

    fn extend(&mut self, token: u32) {
        self.text.push(token);
        self.index.push(token, self.text.len() as u32);
    }

    /// What followed the match; where that reaches the end of the text, the proposals themselves follow.
    fn propose(&mut self, depth: usize, out: &mut Proposals) -> Result<(), SpeculateError> {
        let (len, end) = self.index.matched;
        if len < SHORTEST_MATCH {
            return Ok(());
        }
        for at in end as usize..end as usize + depth {
            let token = self.text.get(at).or_else(|| out.tokens().get(at - self.text.len())).copied();
            match token {
                Some(token) => out.push(token),
                None => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drafter(text: &[u32]) -> NgramDrafter {
        let mut d = NgramDrafter::new();
        d.begin(text, text.len()).unwrap();
        d
    }

    fn proposed(text: &[u32], depth: usize) -> Vec<u32> {
        let mut out = Proposals::default();
        drafter(text).propose(depth, &mut out).unwrap();
        out.tokens().to_vec()
    }

    #[test]
    fn what_followed_the_longest_and_latest_match_is_proposed() {
        assert_eq!(proposed(&[1, 2, 3, 9, 1, 2], 2), [3, 9]);
        assert_eq!(proposed(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4], "of equals the latest");
        assert_eq!(proposed(&[5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 1), [3], "the longer one wins over the later one");
        assert_eq!(proposed(&[1, 2, 3, 4, 1], 4), [0u32; 0], "one token alone says nothing");
        assert_eq!(proposed(&[1, 2, 3], 4), [0u32; 0]);
        assert_eq!(proposed(&[], 4), [0u32; 0]);
        assert_eq!(proposed(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2], "a run goes on beyond the text");
        assert_eq!(proposed(&[7, 7, 7], 3), [7, 7, 7]);
        assert_eq!(proposed(&[1, 2, 3, 1, 2], 0), [0u32; 0]);
    }

    #[test]
    fn the_index_stays_linear_and_takes_no_memory_beyond_what_was_reserved() {
        let text: Vec<u32> = (0..20_000u32).map(|i| i * i % 7 % 3).collect();
        let mut d = NgramDrafter::new();
        d.begin(&text[..100], text.len()).unwrap();
        let room = (d.text.capacity(), d.index.states.capacity(), d.index.edges.capacity(), d.index.table.len());
        text[100..].iter().for_each(|&t| d.extend(t));
        assert!(d.index.states.len() <= 2 * text.len() && d.index.edges.len() <= 3 * text.len());
        assert_eq!(room, (d.text.capacity(), d.index.states.capacity(), d.index.edges.capacity(), d.index.table.len()));
        d.begin(&[1, 2], 2).unwrap();
        assert_eq!((d.text.len(), d.matched()), (2, 0), "another text knows nothing of the one before");
    }

    /// Length of the longest end of `text` that stands in it before its end, by trying all.
    fn longest(text: &[u32]) -> usize {
        let n = text.len();
        (1..n).rev().find(|&len| (len..n).any(|end| text[end - len..end] == text[n - len..])).unwrap_or(0)
    }

    proptest! {
        #[test]
        fn the_match_is_the_longest_there_is_and_real(text in prop::collection::vec(0u32..3, 0..60)) {
            let mut d = NgramDrafter::new();
            d.begin(&[], 4).unwrap();
            for n in 0..text.len() {
                d.extend(text[n]);
                let (so_far, (len, end)) = (&text[..=n], d.index.matched);
                let (len, end) = (len as usize, end as usize);
                prop_assert_eq!(len, longest(so_far), "{:?}", so_far);
                prop_assert!(len == 0 || end <= n);
                prop_assert_eq!(&so_far[end - len..end], &so_far[n + 1 - len..]);
            }
        }
    }
}
