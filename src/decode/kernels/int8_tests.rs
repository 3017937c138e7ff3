//! Products with int8 activations against a calculation of their own, bit for bit, and against exact ones.

use super::tests::{all, bytes, noise};
use super::*;

const SHAPES: [(usize, usize, usize); 6] =
    [(1, 32, 1), (5, 96, 2), (9, 288, 3), (37, 544, 9), (70, 160, 6), (12, 1024, 4)];

fn int8(k: &Kernels, m: Matrix<'_>, x: Rows<'_>) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.count * m.rows()];
    k.use_activations(Activations::Int8);
    k.matmul(m, x, &mut y, m.rows(), &mut []);
    y
}

/// A group's codes and scale, as they are described.
fn quantized(x: &[f32]) -> (Vec<i32>, f32) {
    let most = x.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let code = |v: &f32| if most == 0.0 { 0 } else { (v * (127.0 / most)).round_ties_even() as i32 };
    (x.iter().map(code).collect(), most / 127.0)
}

/// Sums over `together` columns, each added to one of sixteen in the order of groups; then all of these, in the order `last`.
fn described(
    w: &dyn Fn(usize) -> i32,
    x: &[f32],
    together: usize,
    factor: &dyn Fn(usize, f32) -> f32,
    last: [usize; 8],
) -> f32 {
    let mut sums = [0.0f32; 16];
    for (g, x) in x.chunks(MX_GROUP).enumerate() {
        let (codes, scale) = quantized(x);
        for (j, codes) in codes.chunks(together).enumerate() {
            let integers: i32 = (g * MX_GROUP + j * together..).zip(codes).map(|(c, code)| code * w(c)).sum();
            let sum = &mut sums[(g * (MX_GROUP / together) + j) % 16];
            *sum = (integers as f32).mul_add(factor(g, scale), *sum);
        }
    }
    let h = last.map(|i| sums[i] + sums[i + 8]);
    ((h[0] + h[1]) + (h[2] + h[3])) + ((h[4] + h[5]) + (h[6] + h[7]))
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_description() {
    for (rows, cols, n) in SHAPES {
        let x = noise(100, n * cols);
        let (packed, codes) = (bytes(101, rows * cols / 2), bytes(102, rows * cols));
        // every scale that is a number, the subnormal one too; small ones mostly, so that nothing becomes infinite
        let scales: Vec<u8> = bytes(103, rows * cols / MX_GROUP).iter().map(|b| b % 130).collect();
        let row_scales: Vec<u8> = noise(104, rows).iter().flat_map(|s| s.to_le_bytes()).collect();
        // 77 of the columns are no whole groups
        let narrow = cols.min(77);
        let mx = Matrix::mxfp4(&packed, &scales, rows, cols);
        let (wide, odd) =
            (Matrix::int8_rows(&codes, &row_scales, rows, cols), Matrix::int8_rows(&codes, &row_scales, rows, narrow));
        let mut want = [Vec::new(), Vec::new(), Vec::new()];
        for x in x.chunks_exact(cols) {
            for o in 0..rows {
                let doubled = |c: usize| {
                    let code = packed[(o * cols + c) / 2] >> (4 * (c % 2));
                    (2.0 * scalar::e2m1(code)) as i32
                };
                let factor = |g: usize, s: f32| scalar::e8m0(scales[o * cols / MX_GROUP + g]) * (0.5 * s);
                want[0].push(described(&doubled, x, 32, &factor, [0, 2, 4, 6, 1, 3, 5, 7]));
                for (at, cols) in [(1, cols), (2, narrow)] {
                    let code = |c: usize| i32::from(codes[o * cols + c].cast_signed());
                    let sum = described(&code, &x[..cols], 4, &|_, s| s, [0, 1, 2, 3, 4, 5, 6, 7]);
                    want[at].push(row_scale(&row_scales, o) * sum);
                }
            }
        }
        for k in all() {
            for threads in [1, 3] {
                k.use_threads(threads);
                for ((m, cols), want) in [(mx, cols), (wide, cols), (odd, narrow)].into_iter().zip(&want) {
                    let rows = Rows { data: &x, stride: x.len() / n, count: n };
                    let y = int8(&k, m, rows);
                    let same = y.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{} {:?} {cols}: {y:?} {want:?}", k.isa(), m.form());
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let (rows, cols, n) = (71, 352, 11);
    let (packed, codes, x) = (bytes(110, rows * cols / 2), bytes(111, rows * cols), noise(112, n * cols));
    let (scales, row_scales) = (vec![124u8; rows * cols / 32], 0.01f32.to_le_bytes().repeat(rows));
    for k in all() {
        for m in [Matrix::mxfp4(&packed, &scales, rows, cols), Matrix::int8_rows(&codes, &row_scales, rows, cols)] {
            let together = int8(&k, m, Rows::packed(&x, n));
            for count in 1..=n {
                for first in 0..=n - count {
                    let part = int8(&k, m, Rows::packed(&x[first * cols..(first + count) * cols], count));
                    assert_eq!(part, together[first * rows..(first + count) * rows], "{count} rows of {}", k.isa());
                }
            }
            // more rows than are turned into int8 together
            let many = x.repeat(7);
            assert_eq!(int8(&k, m, Rows::packed(&many, 7 * n)), together.repeat(7), "{}", k.isa());
            for cut in [1, 4, 33, 70] {
                let x = Rows::packed(&x[..cols], 1);
                let parts = [int8(&k, m.part(0, cut), x), int8(&k, m.part(cut, rows - cut), x)].concat();
                assert_eq!(parts, together[..rows], "{} cut at {cut}", k.isa());
            }
        }
    }
}

#[test]
fn errors_are_those_of_rounding_to_bytes() {
    let (rows, cols) = (40, 1024);
    let (packed, scales) = (bytes(120, rows * cols / 2), vec![125u8; rows * cols / 32]);
    let (codes, row_scales) = (bytes(121, rows * cols), 0.01f32.to_le_bytes().repeat(rows));
    // groups of very different size: a scale for all columns would lose most of them
    let x: Vec<f32> = noise(122, cols).iter().enumerate().map(|(c, v)| v * [1.0, 1e-3, 40.0][c / 32 % 3]).collect();
    for k in all() {
        for m in [Matrix::mxfp4(&packed, &scales, rows, cols), Matrix::int8_rows(&codes, &row_scales, rows, cols)] {
            let mut exact = vec![0.0; rows];
            k.use_activations(Activations::F32);
            k.matmul(m, Rows::packed(&x, 1), &mut exact, rows, &mut []);
            let seen = int8(&k, m, Rows::packed(&x, 1));
            let mut w = vec![0.0; cols];
            for o in 0..rows {
                k.widen_row(m, o, &mut w);
                let half_steps = w.chunks(32).zip(x.chunks(32)).map(|(w, x)| {
                    let most = x.iter().fold(0.0f32, |most, v| most.max(v.abs()));
                    0.501 * most / 127.0 * w.iter().map(|w| w.abs()).sum::<f32>()
                });
                let bound: f32 = half_steps.sum();
                let error = (seen[o] - exact[o]).abs();
                assert!(error <= bound, "{}: {error} is more than {bound}", k.isa());
                assert_ne!(error, 0.0, "{}: f32 activations in disguise", k.isa());
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_visible_and_nothing_stays_nothing() {
    let (rows, cols) = (9, 96);
    let (packed, codes) = (bytes(130, rows * cols / 2), bytes(131, rows * cols));
    let (mut scales, row_scales) = (vec![120u8; rows * cols / 32], 0.5f32.to_le_bytes().repeat(rows));
    for k in all() {
        let mx = Matrix::mxfp4(&packed, &scales, rows, cols);
        for m in [mx, Matrix::int8_rows(&codes, &row_scales, rows, cols)] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = noise(132, cols);
                x[40] = bad;
                assert!(int8(&k, m, Rows::packed(&x, 1)).iter().all(|y| !y.is_finite()), "{} {bad}", k.isa());
            }
            for nothing in [0.0, -0.0, 1e-40] {
                assert_eq!(int8(&k, m, Rows::packed(&[nothing; 96], 1)), vec![0.0; rows]);
            }
        }
    }
    scales[3] = 255;
    for k in all() {
        let y = int8(&k, Matrix::mxfp4(&packed, &scales, rows, cols), Rows::packed(&noise(133, cols), 1));
        let seen: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
        assert_eq!(seen, (0..rows).map(|o| o == 1).collect::<Vec<_>>(), "{}", k.isa());
    }
}

#[test]
fn products_are_counted_by_form_and_only_two_forms_have_int8_activations() {
    let (rows, cols) = (8, 64);
    let (stored, x) = (bytes(140, rows * cols * 2), noise(141, cols));
    let single = noise(142, rows * cols);
    let forms = [
        Matrix::f32(&single, rows, cols),
        Matrix::bf16(&stored, rows, cols),
        Matrix::int8_rows(&stored, &stored, rows, cols),
        Matrix::mxfp4(&stored, &stored, rows, cols),
    ];
    for k in all() {
        for (m, form) in forms.into_iter().zip(WeightForm::ALL) {
            assert_eq!(m.form(), form);
            let before = k.activation_counts();
            int8(&k, m, Rows::packed(&x, 1));
            k.use_activations(Activations::F32);
            k.matmul(m, Rows::packed(&x, 1), &mut [0.0; 8], rows, &mut []);
            let seen = k.activation_counts().since(&before);
            for other in WeightForm::ALL {
                let of = Activations::ALL.map(|a| seen.of(other, a));
                let want = if other != form {
                    [0, 0]
                } else if form.takes_int8() {
                    [1, 1]
                } else {
                    [2, 0]
                };
                assert_eq!(of, want, "{} {}", k.isa(), other.name());
            }
        }
    }
    assert_eq!("int8".parse(), Ok(Activations::Int8));
    assert!("int4".parse::<Activations>().unwrap_err().contains("int4"));
}
