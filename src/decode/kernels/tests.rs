//! The kernels against exact values, against each other, and row against batch.

use super::*;

pub(super) fn all() -> Vec<Kernels> {
    KernelIsa::ALL.into_iter().filter_map(Kernels::new).collect()
}

pub(super) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.f32() * 2.0 - 1.0).collect()
}

pub(super) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.u8(..)).collect()
}

/// Bytes of bfloat16 values of ordinary size.
pub(super) fn bf16_bytes(seed: u64, n: usize) -> Vec<u8> {
    noise(seed, n).iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

/// Scales of int8 rows, as they are stored.
fn scale_bytes(seed: u64, rows: usize) -> Vec<u8> {
    noise(seed, rows).iter().flat_map(|v| (0.01 + v.abs() / 100.0).to_le_bytes()).collect()
}

fn close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "at {i}: {a} and {b}");
    }
}

/// Unit vectors through `matmul` read out single weights.
fn weights_of(k: &Kernels, m: Matrix<'_>, wide: &mut [f32]) -> Vec<f32> {
    let mut identity = vec![0.0; m.cols() * m.cols()];
    (0..m.cols()).for_each(|c| identity[c * m.cols() + c] = 1.0);
    let mut y = vec![0.0; m.cols() * m.rows()];
    k.matmul(m, Rows::packed(&identity, m.cols()), &mut y, m.rows(), wide);
    y
}

#[test]
fn all_sixteen_codes_low_nibble_first() {
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    // Byte i holds code i in its low and code 15 - i in its high nibble.
    let packed: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    for k in all() {
        for scale in [1u8, 100, 127, 128, 250] {
            let factor = 2f32.powi(i32::from(scale) - 127);
            let want: Vec<f32> = (0..16).flat_map(|i| [values[i] * factor, values[15 - i] * factor]).collect();
            let mut row = [0.0; 32];
            k.widen_row(Matrix::mxfp4(&packed, &[scale], 1, 32), 0, &mut row);
            assert_eq!(row.map(f32::to_bits).to_vec(), want.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            for wide in [0, 4 * 32] {
                let got = weights_of(&k, Matrix::mxfp4(&packed, &[scale], 1, 32), &mut vec![0.0; wide]);
                assert_eq!(got, want, "{} scale {scale}", k.isa());
            }
        }
    }
}

#[test]
fn extreme_scales() {
    // codes 1 (0.5) and 3 (1.5), then zeros
    let mut packed = [0u8; 16];
    packed[0] = 0x31;
    for k in all() {
        for wide in [0, 4 * 32] {
            let mut wide = vec![0.0; wide];
            let lowest = weights_of(&k, Matrix::mxfp4(&packed, &[0], 1, 32), &mut wide);
            assert_eq!(lowest[..3], [2f32.powi(-128), 1.5 * 2f32.powi(-127), 0.0], "{}: 2^-127 is subnormal", k.isa());
            let highest = weights_of(&k, Matrix::mxfp4(&packed, &[254], 1, 32), &mut wide);
            assert_eq!(highest[..3], [2f32.powi(126), 1.5 * 2f32.powi(127), 0.0], "{}", k.isa());
            let none = weights_of(&k, Matrix::mxfp4(&packed, &[255], 1, 32), &mut wide);
            assert!(none.iter().all(|v| v.is_nan()), "{}: 255 is no number", k.isa());
        }
    }
}

#[test]
fn bfloat16_is_widened_exactly() {
    let raw = [0x3f80u16, 0xbf80, 0x0001, 0x7f7f, 0x4049, 0x8000, 0x3eab, 0xc2f7, 0x3c00];
    let stored: Vec<u8> = raw.iter().flat_map(|v| v.to_le_bytes()).collect();
    let want: Vec<f32> = raw.iter().map(|&v| f32::from_bits(u32::from(v) << 16)).collect();
    for k in all() {
        for wide in [0, 4 * 9] {
            assert_eq!(weights_of(&k, Matrix::bf16(&stored, 1, 9), &mut vec![0.0; wide]), want, "{}", k.isa());
        }
    }
}

#[test]
fn matmul_agrees_with_double_precision_for_ragged_shapes() {
    for (rows, cols, n) in [(1, 1, 1), (3, 7, 2), (4, 8, 3), (9, 40, 5), (13, 33, 7), (17, 64, 4)] {
        let (stored, x) = (bf16_bytes(1, rows * cols), noise(2, n * cols));
        let m = Matrix::bf16(&stored, rows, cols);
        let mut w = vec![0.0; cols];
        let mut want = vec![0.0; n * rows];
        for o in 0..rows {
            scalar::widen_row(m, o, &mut w);
            for r in 0..n {
                let sum: f64 = w.iter().zip(&x[r * cols..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                want[r * rows + o] = sum as f32;
            }
        }
        for k in all() {
            for wide in [0, cols * WIDE_ROWS] {
                let mut y = vec![0.0; n * rows];
                k.matmul(m, Rows::packed(&x, n), &mut y, rows, &mut vec![0.0; wide]);
                close(&y, &want, 1e-6);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    // Rows that fill a panel of widened weights, and some more.
    let (rows, cols, n) = (matrix::panel_rows(96) + 21, 96, 11);
    let stored = bf16_bytes(3, rows * cols);
    let (packed, scales) = (bytes(4, rows * cols / 2), vec![124u8; rows * cols / 32]);
    let single = noise(5, rows * cols);
    let (codes, row_scales) = (bytes(22, rows * cols), scale_bytes(23, rows));
    let x = noise(6, n * cols);
    for k in all() {
        for m in [
            Matrix::bf16(&stored, rows, cols),
            Matrix::mxfp4(&packed, &scales, rows, cols),
            Matrix::f32(&single, rows, cols),
            Matrix::int8_rows(&codes, &row_scales, rows, cols),
        ] {
            let mut wide = vec![0.0; WIDE_ROWS * cols];
            let mut together = vec![0.0; n * rows];
            k.matmul(m, Rows::packed(&x, n), &mut together, rows, &mut wide);
            for count in 1..=n {
                for first in 0..=n - count {
                    let mut part = vec![0.0; count * rows];
                    let x = Rows::packed(&x[first * cols..(first + count) * cols], count);
                    k.matmul(m, x, &mut part, rows, if count % 2 == 0 { &mut [] } else { &mut wide });
                    assert_eq!(part, together[first * rows..(first + count) * rows], "{} rows of {}", count, k.isa());
                }
            }
        }
    }
}

#[test]
fn output_rows_can_be_split_anywhere() {
    let (rows, cols) = (23, 64);
    let stored = bf16_bytes(7, rows * cols);
    let x = noise(8, cols);
    for k in all() {
        let mut whole = vec![0.0; rows];
        k.matmul(Matrix::bf16(&stored, rows, cols), Rows::packed(&x, 1), &mut whole, rows, &mut []);
        for cut in 1..rows {
            let mut parts = vec![0.0; rows];
            let (top, bottom) = parts.split_at_mut(cut);
            let (a, b) = stored.split_at(cut * cols * 2);
            k.matmul(Matrix::bf16(a, cut, cols), Rows::packed(&x, 1), top, cut, &mut []);
            k.matmul(Matrix::bf16(b, rows - cut, cols), Rows::packed(&x, 1), bottom, rows - cut, &mut []);
            assert_eq!(parts, whole, "{} cut at {cut}", k.isa());
        }
    }
}

#[test]
fn large_batches_are_cut_into_hot_blocks() {
    let (rows, cols) = (5, 2048);
    let n = HOT_BYTES / 4 / cols + 3;
    let stored = bf16_bytes(9, rows * cols);
    let x = noise(10, n * cols);
    for k in all() {
        let (mut y, mut wide) = (vec![0.0; n * rows], vec![0.0; WIDE_ROWS * cols]);
        k.matmul(Matrix::bf16(&stored, rows, cols), Rows::packed(&x, n), &mut y, rows, &mut wide);
        let mut last = vec![0.0; rows];
        k.matmul(Matrix::bf16(&stored, rows, cols), Rows::packed(&x[(n - 1) * cols..], 1), &mut last, rows, &mut wide);
        assert_eq!(y[(n - 1) * rows..], last);
    }
}

#[test]
fn instruction_sets_agree() {
    let sets = all();
    let Some((reference, others)) = sets.split_first() else { panic!("there is always a scalar one") };
    for k in others {
        for n in [1, 7, 8, 31, 64, 77] {
            let (a, b) = (noise(11, n), noise(12, n));
            close(&[k.dot(&a, &b)], &[reference.dot(&a, &b)], 1e-6);
            let run = |k: &Kernels| {
                let mut y = b.clone();
                k.axpy(0.3, &a, &mut y);
                let mut sum = vec![0.0; n];
                let rows = noise(13, 5 * (n + 2));
                k.combine(&noise(14, 5), Rows { data: &rows, stride: n + 2, count: 5 }, &mut sum);
                y.extend(sum.clone());
                k.combine_matrix(&noise(15, 6), Matrix::bf16(&bf16_bytes(16, 6 * n), 6, n), &mut sum);
                y.extend(sum);
                y
            };
            close(&run(k), &run(reference), 1e-6);
        }
        for d in [1, 8, 16, 40, 64, 77] {
            let state = noise(17, d * d);
            let decay: Vec<f32> = noise(18, d).iter().map(|v| v.abs()).collect();
            let (q, key, v) = (noise(19, d), noise(20, d), noise(21, d));
            let run = |k: &Kernels| {
                let (mut s, mut o) = (state.clone(), vec![0.0; d]);
                k.kda_step(&mut s, &KdaInputs { decay: &decay, q: &q, k: &key, v: &v, beta: 0.7 }, &mut o);
                s.extend(o);
                s
            };
            close(&run(k), &run(reference), 2e-5);
        }
    }
}

#[test]
fn kda_step_is_decay_then_correction_then_read() {
    // one key channel and one value channel: S' = a S + k b (v - k a S), o = q S'
    for k in all() {
        let (mut s, mut o) = ([2.0], [0.0]);
        k.kda_step(&mut s, &KdaInputs { decay: &[0.5], q: &[3.0], k: &[0.25], v: &[4.0], beta: 0.5 }, &mut o);
        assert_eq!(s, [1.0 + 0.25 * 0.5 * (4.0 - 0.25)]);
        assert_eq!(o, [3.0 * s[0]]);
    }
}

#[test]
fn functions_agree_with_double_precision() {
    let x: Vec<f32> = (-4000..=4000).map(|i| i as f32 * 0.02).chain([1e-6, -1e-4, 0.999, 1.001, -0.0]).collect();
    let relative = |name: &str, got: &[f32], want: &dyn Fn(f64) -> f64, tolerance: f64| {
        for (x, got) in x.iter().zip(got) {
            let want = want(f64::from(*x));
            let error = (f64::from(*got) - want).abs();
            assert!(error <= tolerance * want.abs() + 1e-37, "{name}({x}) is {got}, should be {want}");
        }
    };
    let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
    for k in all() {
        let mut y = x.clone();
        k.exp(&mut y);
        relative("exp", &y, &f64::exp, 3e-7);
        y.copy_from_slice(&x);
        k.sigmoid(&mut y);
        relative("sigmoid", &y, &logistic, 4e-7);
        y.copy_from_slice(&x);
        k.silu(&mut y);
        relative("silu", &y, &|x| x * logistic(x), 5e-7);
        y.copy_from_slice(&x);
        k.situ(&mut y, &x, 4.0, Some(25.0));
        let branch = |x: f64| 4.0 * (x / 4.0).tanh() * logistic(x);
        relative("situ", &y, &|x| branch(x) * 25.0 * (x / 25.0).tanh(), 1e-6);
        y.copy_from_slice(&x);
        k.situ(&mut y, &x, 4.0, None);
        relative("situ without a linear beta", &y, &|x| branch(x) * x, 1e-6);
    }
}

#[test]
fn not_a_number_stays_visible() {
    for k in all() {
        for n in [1, 8, 9] {
            let mut x = vec![1.0; n];
            x[n - 1] = f32::NAN;
            for f in [Kernels::exp, Kernels::sigmoid, Kernels::silu] {
                let mut y = x.clone();
                f(&k, &mut y);
                assert!(y[n - 1].is_nan() && y[..n - 1].iter().all(|v| v.is_finite()));
            }
            let mut y = x.clone();
            k.situ(&mut y, &vec![1.0; n], 4.0, Some(25.0));
            assert!(y[n - 1].is_nan());
            y.fill(1.0);
            k.situ(&mut y, &x, 4.0, Some(25.0));
            assert!(y[n - 1].is_nan());
        }
    }
}

#[test]
fn wider_registers_change_no_bit_of_a_function() {
    let (Some(narrow), Some(wide)) = (Kernels::new(KernelIsa::Avx2), Kernels::new(KernelIsa::Avx512)) else { return };
    for d in [64, 77, 128] {
        let (x, up, state) = (noise(60, 8 * d), noise(61, 8 * d), noise(62, d * d));
        let run = |k: &Kernels| {
            let mut all = Vec::new();
            for f in [Kernels::exp, Kernels::sigmoid, Kernels::silu] {
                let mut y: Vec<f32> = x.iter().map(|v| v * 30.0).collect();
                f(k, &mut y);
                all.extend(y);
            }
            let mut y: Vec<f32> = x.iter().map(|v| v * 30.0).collect();
            k.situ(&mut y, &up, 4.0, Some(25.0));
            k.softmax(&mut all[..d], 0.3);
            let (mut s, mut o) = (state.clone(), vec![0.0; d]);
            let inputs =
                KdaInputs { decay: &x[..d], q: &x[d..2 * d], k: &x[2 * d..3 * d], v: &x[3 * d..4 * d], beta: 0.7 };
            k.kda_step(&mut s, &inputs, &mut o);
            let mut sums = vec![0.5; 4 * d];
            k.combine_onto(Rows::packed(&up[..4 * 8], 4), Rows::packed(&x, 8), &mut sums);
            [all, y, s, o, sums].concat().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        assert!(run(&narrow) == run(&wide), "width {d}");
    }
}

#[test]
fn softmax_sums_to_one_and_survives_large_scores() {
    for k in all() {
        let mut x = vec![1000.0, 999.0, -1000.0];
        k.softmax(&mut x, 1.0);
        close(&x, &[0.731_058_6, 0.268_941_43, 0.0], 1e-6);
    }
}

#[test]
fn instruction_sets_have_names() {
    for isa in KernelIsa::ALL {
        assert_eq!(isa.name().parse(), Ok(isa));
    }
    assert!("neon9".parse::<KernelIsa>().unwrap_err().contains("neon9"));
    assert!(KernelIsa::detect().is_available());
}

#[test]
fn int8_rows_are_codes_times_their_rows_scale() {
    let (rows, cols, n) = (11, 77, 5);
    let mut codes = bytes(30, rows * cols);
    codes[..2].copy_from_slice(&[0x80, 0x7f]);
    let scales = scale_bytes(31, rows);
    let m = Matrix::int8_rows(&codes, &scales, rows, cols);
    let (x, sums) = (noise(32, n * cols), noise(33, rows));
    let scale = |o: usize| f32::from_le_bytes(scales[4 * o..4 * o + 4].try_into().unwrap());
    let weight = |o: usize, c: usize| scale(o) * f32::from(codes[o * cols + c] as i8);
    let double = |terms: &mut dyn Iterator<Item = (f32, f32)>| -> f32 {
        terms.map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
    };
    let mut product = Vec::new();
    for r in 0..n {
        product.extend((0..rows).map(|o| double(&mut (0..cols).map(|c| (weight(o, c), x[r * cols + c])))));
    }
    let combined: Vec<f32> = (0..cols).map(|c| double(&mut (0..rows).map(|o| (weight(o, c), sums[o])))).collect();
    for k in all() {
        for o in 0..rows {
            let mut row = vec![0.0; cols];
            k.widen_row(m, o, &mut row);
            assert_eq!(row, (0..cols).map(|c| weight(o, c)).collect::<Vec<_>>());
        }
        for wide in [0, WIDE_ROWS * cols] {
            let mut y = vec![0.0; n * rows];
            k.matmul(m, Rows::packed(&x, n), &mut y, rows, &mut vec![0.0; wide]);
            close(&y, &product, 2e-6);
        }
        let mut out = vec![0.0; cols];
        k.combine_matrix(&sums, m, &mut out);
        close(&out, &combined, 1e-6);
        let (mut part, mut whole) = (vec![0.0; 3], vec![0.0; rows]);
        k.matmul(m.part(4, 3), Rows::packed(&x[..cols], 1), &mut part, 3, &mut []);
        k.matmul(m, Rows::packed(&x[..cols], 1), &mut whole, rows, &mut []);
        assert_eq!(part, whole[4..7]);
    }
}

#[test]
fn sums_of_rows_agree_for_every_form() {
    let (rows, cols) = (6, 96);
    let (stored, single) = (bf16_bytes(40, rows * cols), noise(41, rows * cols));
    let (codes, row_scales) = (bytes(42, rows * cols), scale_bytes(43, rows));
    let (packed, scales) = (bytes(44, rows * cols / 2), vec![125u8; rows * cols / 32]);
    let weights = noise(45, rows);
    for m in [
        Matrix::bf16(&stored, rows, cols),
        Matrix::f32(&single, rows, cols),
        Matrix::int8_rows(&codes, &row_scales, rows, cols),
        Matrix::mxfp4(&packed, &scales, rows, cols),
    ] {
        let mut want = vec![0.0f64; cols];
        let mut row = vec![0.0; cols];
        for (o, w) in weights.iter().enumerate() {
            scalar::widen_row(m, o, &mut row);
            want.iter_mut().zip(&row).for_each(|(sum, v)| *sum += f64::from(*w) * f64::from(*v));
        }
        let want: Vec<f32> = want.iter().map(|v| *v as f32).collect();
        for k in all() {
            let mut out = vec![f32::NAN; cols];
            k.combine_matrix(&weights, m, &mut out);
            close(&out, &want, 1e-6);
        }
    }
}

#[test]
fn mxfp4_products_agree_with_double_precision() {
    for (rows, cols, n) in [(1, 32, 1), (5, 64, 2), (9, 288, 3), (37, 320, 9), (70, 96, 6)] {
        let (packed, x) = (bytes(50, rows * cols / 2), noise(51, n * cols));
        let scales: Vec<u8> = bytes(52, rows * cols / MX_GROUP).iter().map(|b| 120 + b % 16).collect();
        let m = Matrix::mxfp4(&packed, &scales, rows, cols);
        let (mut w, mut want, mut size) = (vec![0.0; cols], vec![0.0; n * rows], vec![0.0; n * rows]);
        for o in 0..rows {
            scalar::widen_row(m, o, &mut w);
            for r in 0..n {
                let terms = || w.iter().zip(&x[r * cols..]).map(|(a, b)| f64::from(*a) * f64::from(*b));
                want[r * rows + o] = terms().sum();
                size[r * rows + o] = terms().map(f64::abs).sum();
            }
        }
        for k in all() {
            for wide in [0, cols, cols * WIDE_ROWS] {
                let mut y = vec![0.0; n * rows];
                k.matmul(m, Rows::packed(&x, n), &mut y, rows, &mut vec![0.0; wide]);
                for ((y, want), size) in y.iter().zip(&want).zip(&size) {
                    assert!((f64::from(*y) - want).abs() <= 1e-6 * size, "{}: {y} and {want}", k.isa());
                }
            }
        }
    }
}

#[test]
fn threads_share_heads_and_functions_without_changing_a_bit() {
    let (rows, heads, d) = (37, 3, 40);
    let width = heads * d;
    let decay: Vec<f32> = noise(60, rows * width).iter().map(|v| v.abs()).collect();
    let (q, key, v) = (noise(61, rows * width), noise(62, rows * width), noise(63, rows * width));
    let beta = noise(64, rows * heads);
    let (gate, up) = (noise(65, 20_011), noise(66, 20_011));
    for isa in KernelIsa::ALL {
        let mut seen = Vec::new();
        for threads in [0, 1, 3] {
            let Some(k) = Kernels::new(isa) else { continue };
            let (mut state, mut o) = (noise(67, heads * d * d), vec![0.0; rows * width]);
            let mut values = gate.clone();
            if threads == 0 {
                // the same without any sharing
                for (head, state) in state.chunks_exact_mut(d * d).enumerate() {
                    for row in 0..rows {
                        let at = row * width + head * d..row * width + (head + 1) * d;
                        let beta = beta[row * heads + head];
                        let at = || at.clone();
                        let i = KdaInputs { decay: &decay[at()], q: &q[at()], k: &key[at()], v: &v[at()], beta };
                        k.kda_step(state, &i, &mut o[at()]);
                    }
                }
                for (gate, up) in values.chunks_mut(1000).zip(up.chunks(1000)) {
                    k.situ(gate, up, 4.0, Some(25.0));
                    k.silu(gate);
                }
            } else {
                k.use_threads(threads);
                let inputs = KdaRows { decay: &decay, q: &q, k: &key, v: &v, beta: &beta };
                k.kda_rows(&mut state, d, &inputs, &mut o);
                k.situ(&mut values, &up, 4.0, Some(25.0));
                k.silu(&mut values);
                let taken = k.pool().taken();
                assert!(threads == 1 || taken.iter().sum::<u64>() >= 3, "nothing was shared: {taken:?}");
            }
            seen.push([state, o, values]);
        }
        assert!(seen.windows(2).all(|w| w[0] == w[1]), "{isa}");
    }
}

#[test]
fn every_part_is_worked_on_once_and_products_within_are_the_threads_own() {
    let k = Kernels::new(KernelIsa::detect()).unwrap();
    k.use_threads(2);
    let (weights, x) = (noise(70, 64 * 96), noise(71, 96));
    let m = Matrix::f32(&weights, 64, 96);
    let mut want = vec![0.0; 64];
    k.matmul(m, Rows::packed(&x, 1), &mut want, 64, &mut []);
    let (mut seen, mut sums) = (vec![0.0; 23], vec![0.0; 8 * 64]);
    k.by_parts(2, [(&mut seen, 3), (&mut sums, 64)], &|i, [seen, sums]| {
        seen.iter_mut().for_each(|v| *v += i as f32 + 1.0);
        k.matmul(m, Rows::packed(&x, 1), sums, 64, &mut []);
    });
    assert_eq!(seen, (0..23).map(|i| (i / 3 + 1) as f32).collect::<Vec<_>>());
    assert!(sums.chunks_exact(64).all(|sums| sums == want));
}
