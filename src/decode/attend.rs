//! The attention of rows over a latent cache, in absorbed form: scores, softmax, weighted sum of latent rows. A row's sums run over
//! positions in ascending order, wherever the rows are, so that blocks which come back from a drive change no bit. Knows no file.

use super::error::DecodeError;
use super::kernels::{Matrix, OWN_VALUES, PART_ROWS, Rows};
use super::kv::Blocks;
use super::latent::Latent;
use super::weights::{Mla, View};
use std::ops::Range;

/// Multiplications of scores that are worth another thread's attention.
pub(super) const SHARED_PRODUCTS: usize = 64 * 1024;

/// Rows of a cache that queries of several rows meet before the next ones are fetched: they stay in the nearest cache.
const TILE_ROWS: usize = 64;

/// The heads of an MLA layer.
pub(super) struct Heads<'a> {
    dec: View<'a>,
    w: &'a Mla,
    heads: usize,
    rank: usize,
    /// Values of a cached row.
    cached: usize,
    /// Of a head's query: without positions, and all.
    dn: usize,
    dq: usize,
    dv: usize,
    scale: f32,
}

/// Some heads of one row, out of heads that follow one another row by row.
struct Share {
    row: usize,
    head: usize,
    count: usize,
    /// How many heads lie before them in the share of a thread.
    before: usize,
}

impl<'a> Heads<'a> {
    pub(super) fn new(dec: View<'a>, w: &'a Mla) -> Self {
        let m = &dec.config.mla;
        let (rank, dn, dr, dv) = (m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim);
        let (cached, dq) = (rank + dr, dn + dr);
        Self { dec, w, heads: m.heads, rank, cached, dn, dq, dv, scale: 1.0 / (dq as f32).sqrt() }
    }

    /// The queries of some heads of a row, in the space of the cache.
    fn queries(&self, first: usize, q: &[f32], out: &mut [f32]) {
        for (head, query) in (first..).zip(out.chunks_exact_mut(self.cached)) {
            let q = &q[head * self.dq..(head + 1) * self.dq];
            let keys = self.dec.matrix_rows(self.w.kv_b, head * (self.dn + self.dv), self.dn);
            self.dec.kernels.combine_matrix(&q[..self.dn], keys, &mut query[..self.rank]);
            query[self.rank..].copy_from_slice(&q[self.dn..]);
        }
    }

    /// Scores of `queries` with `rows`, those of a query `stride` behind the one before.
    fn score(&self, rows: &[f32], queries: &[f32], scores: &mut [f32], stride: usize) {
        let (count, queries) = (rows.len() / self.cached, Rows::packed(queries, queries.len() / self.cached));
        if count > 0 {
            self.dec.kernels.matmul(Matrix::f32(rows, count, self.cached), queries, scores, stride, &mut []);
        }
    }

    /// Adds the sums of `rows`, weighted by scores, onto `latent`.
    fn sum(&self, rows: &[f32], scores: &[f32], stride: usize, latent: &mut [f32]) {
        let (count, sums) = (rows.len() / self.cached, latent.len() / self.rank);
        if count > 0 {
            let weights = Rows { data: scores, stride, count: sums };
            self.dec.kernels.combine_onto(weights, Rows { data: rows, stride: self.cached, count }, latent);
        }
    }

    /// One row over positions `seen`, all of which are in memory. `query` is `[heads, cached]`, `scores` `[heads, seen]`.
    pub(super) fn attend(
        &self,
        cache: &Latent,
        seen: Range<usize>,
        q: &[f32],
        query: &mut [f32],
        scores: &mut [f32],
        latent: &mut [f32],
    ) {
        let (k, n, pieces) = (&self.dec.kernels, seen.len(), cache.pieces(seen));
        // Each thread has some heads, which go through the cache together.
        let some = self.some_heads(1, n);
        let shares = [(query, some * self.cached), (scores, some * n), (latent, some * self.rank)];
        k.by_parts(1, shares, &|share, [query, scores, latent]| {
            self.queries(share * some, q, query);
            let mut at = 0;
            for rows in pieces {
                self.score(rows, query, &mut scores[at..], n);
                at += rows.len() / self.cached;
            }
            scores.chunks_exact_mut(n).for_each(|scores| k.softmax(scores, self.scale));
            latent.fill(0.0);
            at = 0;
            for rows in pieces {
                self.sum(rows, &scores[at..], n, latent);
                at += rows.len() / self.cached;
            }
        });
    }

    /// Rows that go through the cache together on one thread, of `count` from `position` on; 0 where they had better go one by one:
    /// they are too long, or do not look back to the same position.
    pub(super) fn together(&self, cache: &Latent, position: usize, count: usize) -> usize {
        let last = position + count;
        if count < 2 || cache.seen(last - 1).start > 0 {
            return 0;
        }
        let fit = OWN_VALUES / (self.heads * (self.cached + last));
        fit.min(PART_ROWS).min(count.div_ceil(self.dec.kernels.pool().threads()))
    }

    /// Rows from `position` on, `some` of them at a time, over all positions up to their own, which are in memory. Tile by tile of the
    /// cache, all heads of these rows meet what lies in the nearest cache.
    pub(super) fn attend_together(&self, cache: &Latent, position: usize, some: usize, q: &[f32], latent: &mut [f32]) {
        let (k, cached, heads) = (&self.dec.kernels, self.cached, self.heads);
        let (q_row, out_row) = (heads * self.dq, heads * self.rank);
        k.by_parts_with([(latent, some * out_row)], &|share, [latent], own| {
            let (first, rows) = (share * some, latent.len() / out_row);
            let common = position + first + 1;
            let seen = common + rows - 1;
            let (query, rest) = own.split_at_mut(rows * heads * cached);
            let scores = &mut rest[..rows * heads * seen];
            for (q, query) in q[first * q_row..].chunks_exact(q_row).zip(query.chunks_exact_mut(heads * cached)) {
                self.queries(0, q, query);
            }
            for (at, tile) in self.tiles(cache, 0..seen) {
                self.score(tile, query, &mut scores[at..], seen);
            }
            for (row, scores) in scores.chunks_exact_mut(heads * seen).enumerate() {
                scores.chunks_exact_mut(seen).for_each(|s| k.softmax(&mut s[..common + row], self.scale));
            }
            latent.fill(0.0);
            for (at, tile) in self.tiles(cache, 0..common) {
                self.sum(tile, &scores[at..], seen, latent);
            }
            // what only the later of these rows look at
            for (row, latent) in latent.chunks_exact_mut(out_row).enumerate().skip(1) {
                for (at, tile) in self.tiles(cache, common..common + row) {
                    self.sum(tile, &scores[row * heads * seen + at..], seen, latent);
                }
            }
        });
    }

    /// Cached rows of `positions` in tiles, each with its first position.
    fn tiles<'c>(
        &self,
        cache: &'c Latent,
        positions: Range<usize>,
    ) -> impl Iterator<Item = (usize, &'c [f32])> + use<'c> {
        let cached = self.cached;
        let pieces = cache.pieces(positions.clone()).into_iter();
        let mut at = positions.start;
        pieces.flat_map(move |piece| piece.chunks(TILE_ROWS * cached)).map(move |tile| {
            let first = at;
            at += tile.len() / cached;
            (first, tile)
        })
    }

    /// Heads that a thread takes together: of one row, or all of a row where there are several.
    fn some_heads(&self, rows: usize, positions: usize) -> usize {
        match rows {
            _ if rows * self.heads * positions * self.cached < SHARED_PRODUCTS => rows * self.heads,
            1 => self.heads.div_ceil(self.dec.kernels.pool().threads()),
            _ => self.heads,
        }
    }

    /// The heads from number `first` on, of all rows, row by row.
    fn by_row(&self, first: usize, count: usize) -> impl Iterator<Item = Share> + use<> {
        let (heads, mut before) = (self.heads, 0);
        std::iter::from_fn(move || {
            let at = first + before;
            let own = (heads - at % heads).min(count - before);
            let share = Share { row: at / heads, head: at % heads, count: own, before };
            before += own;
            (own > 0).then_some(share)
        })
    }

    /// Rows from `position` on together, whose older positions come block by block: once backwards for the scores, so that the
    /// last block is at hand when it is needed again, and once forwards for the sums.
    pub(super) fn attend_spilled(
        &self,
        cache: &Latent,
        position: usize,
        q: &[f32],
        (mut blocks, query, scores): (Blocks<'_>, &mut [f32], &mut [f32]),
        latent: &mut [f32],
    ) -> Result<(), DecodeError> {
        let (k, cached) = (&self.dec.kernels, self.cached);
        let group = q.len() / (self.heads * self.dq);
        let span = position + group;
        let ((count, base), first, block_rows) = (cache.spilled(), cache.first(), cache.block_rows());
        let (query, scores) = (&mut query[..group * self.heads * cached], &mut scores[..group * self.heads * span]);
        let row_of_q = |row: usize| &q[row * self.heads * self.dq..(row + 1) * self.heads * self.dq];

        let some = self.some_heads(group, self.dn);
        k.by_parts(1, [(&mut *query, some * cached)], &|share, [query]| {
            for s in self.by_row(share * some, query.len() / cached) {
                self.queries(s.head, row_of_q(s.row), &mut query[s.before * cached..(s.before + s.count) * cached]);
            }
        });
        let query = &*query;
        let queries =
            |heads: usize, s: &Share| &query[(heads + s.before) * cached..(heads + s.before + s.count) * cached];

        let some = self.some_heads(group, block_rows);
        for block in (0..count).rev() {
            // the first one stays at hand for the sums
            let next = if block > 0 { Some(base + block - 1) } else { (count > 1).then_some(base + 1) };
            let rows = blocks.block(base + block, next, block_rows * cached)?;
            k.by_parts(1, [(&mut *scores, some * span)], &|share, [scores]| {
                for s in self.by_row(share * some, scores.len() / span) {
                    let scores = &mut scores[s.before * span..(s.before + s.count) * span];
                    self.score(rows, queries(share * some, &s), &mut scores[block * block_rows..], span);
                }
            });
        }
        let resident = self.some_heads(group, span - first);
        k.by_parts(1, [(&mut *scores, resident * span)], &|share, [scores]| {
            for s in self.by_row(share * resident, scores.len() / span) {
                let seen = position + s.row + 1;
                let scores = &mut scores[s.before * span..(s.before + s.count) * span];
                let mut at = first;
                for rows in cache.pieces(first..seen) {
                    self.score(rows, queries(share * resident, &s), &mut scores[at..], span);
                    at += rows.len() / cached;
                }
                scores.chunks_exact_mut(span).for_each(|scores| k.softmax(&mut scores[..seen], self.scale));
            }
        });

        let scores = &*scores;
        latent.fill(0.0);
        let weights = |heads: usize, s: &Share, at: usize| &scores[(heads + s.before) * span + at..];
        let own = |s: &Share| s.before * self.rank..(s.before + s.count) * self.rank;
        for block in 0..count {
            let next = (block + 1 < count).then_some(base + block + 1);
            let rows = blocks.block(base + block, next, block_rows * cached)?;
            k.by_parts(1, [(&mut *latent, some * self.rank)], &|share, [latent]| {
                for s in self.by_row(share * some, latent.len() / self.rank) {
                    self.sum(rows, weights(share * some, &s, block * block_rows), span, &mut latent[own(&s)]);
                }
            });
        }
        k.by_parts(1, [(&mut *latent, resident * self.rank)], &|share, [latent]| {
            for s in self.by_row(share * resident, latent.len() / self.rank) {
                let mut at = first;
                for rows in cache.pieces(first..position + s.row + 1) {
                    self.sum(rows, weights(share * resident, &s, at), span, &mut latent[own(&s)]);
                    at += rows.len() / cached;
                }
            }
        });
        Ok(())
    }
}
