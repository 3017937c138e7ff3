//! The reference kernels in portable Rust. Sums run over eight interleaved partial sums, so that the compiler may
//! vectorise them and their rounding is of the same kind as that of the vector kernels.

use super::out::Out;
use super::{Data, KdaInputs, MX_GROUP, Matrix, Rows, row_scale};

/// The eight magnitudes of e2m1 (codes 0..7; bit 3 is the sign).
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of a bfloat16 given its two bytes.
pub fn bf16(low: u8, high: u8) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16)
}

/// The value of a byte of an int8 matrix, without its scale.
pub fn int8(code: u8) -> f32 {
    f32::from(code.cast_signed())
}

/// The value of a 4-bit e2m1 code (the upper bits of `code` are ignored).
pub fn e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// `2^(scale - 127)`. Scale 0 is the subnormal 2^-127; 255 (refused at import) is NaN.
pub fn e8m0(scale: u8) -> f32 {
    match scale {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

/// Widens row `row` of `m` into `out`.
pub fn widen_row(m: Matrix<'_>, row: usize, out: &mut [f32]) {
    widen_codes(m, row, out);
    if let Some(scale) = scale_of(m, row) {
        for v in &mut out[..m.cols] {
            *v *= scale;
        }
    }
}

/// The scale that belongs to the whole row, in forms that have one.
pub fn scale_of(m: Matrix<'_>, row: usize) -> Option<f32> {
    match m.data {
        Data::Int8 { scales, .. } => Some(row_scale(scales, row)),
        Data::F32(_) | Data::Bf16(_) | Data::Mxfp4 { .. } => None,
    }
}

/// As [`widen_row`], without the row's scale.
pub fn widen_codes(m: Matrix<'_>, row: usize, out: &mut [f32]) {
    let (start, cols) = (row * m.cols, m.cols);
    match m.data {
        Data::F32(data) => out[..cols].copy_from_slice(&data[start..start + cols]),
        Data::Bf16(bytes) => {
            let row = &bytes[start * 2..(start + cols) * 2];
            for (o, b) in out.iter_mut().zip(row.chunks_exact(2)) {
                *o = bf16(b[0], b[1]);
            }
        }
        Data::Int8 { codes, .. } => {
            for (o, &code) in out.iter_mut().zip(&codes[start..start + cols]) {
                *o = int8(code);
            }
        }
        Data::Mxfp4 { packed, scales } => {
            let packed = &packed[start / 2..(start + cols) / 2];
            let scales = &scales[start / MX_GROUP..(start + cols) / MX_GROUP];
            let groups = out.chunks_exact_mut(MX_GROUP).zip(packed.chunks_exact(MX_GROUP / 2)).zip(scales);
            for ((out, packed), &scale) in groups {
                let scale = e8m0(scale);
                for (pair, &byte) in out.chunks_exact_mut(2).zip(packed) {
                    pair[0] = e2m1(byte) * scale;
                    pair[1] = e2m1(byte >> 4) * scale;
                }
            }
        }
    }
}

/// See [`super::Kernels::matmul`].
pub fn matmul(m: Matrix<'_>, x: Rows<'_>, out: &mut Out<'_>, wide: &mut [f32]) {
    let cols = m.cols;
    let wide_fits = wide.len() >= cols;
    for o in 0..m.rows {
        if wide_fits {
            widen_codes(m, o, wide);
        }
        let scale = scale_of(m, o);
        for r in 0..x.count {
            let row = &x.data[r * x.stride..r * x.stride + cols];
            let sum = if wide_fits { dot(&wide[..cols], row) } else { dot_widening(m, o, row) };
            out.put(r, o, &[scale.map_or(sum, |scale| scale * sum)]);
        }
    }
}

/// [`dot`] with weights widened in pieces on the stack: the same sums in the same order.
fn dot_widening(m: Matrix<'_>, o: usize, x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    let whole = m.cols / 8 * 8;
    for c in (0..whole).step_by(8) {
        for (lane, acc) in lanes.iter_mut().enumerate() {
            *acc += weight(m, o, c + lane) * x[c + lane];
        }
    }
    let mut sum = reduce(lanes);
    for (c, x) in x.iter().enumerate().take(m.cols).skip(whole) {
        sum += weight(m, o, c) * x;
    }
    sum
}

/// A weight, without its row's scale.
pub fn weight(m: Matrix<'_>, row: usize, col: usize) -> f32 {
    let i = row * m.cols + col;
    match m.data {
        Data::F32(data) => data[i],
        Data::Bf16(bytes) => bf16(bytes[2 * i], bytes[2 * i + 1]),
        Data::Int8 { codes, .. } => int8(codes[i]),
        Data::Mxfp4 { packed, scales } => e2m1(packed[i / 2] >> (4 * (i % 2))) * e8m0(scales[i / MX_GROUP]),
    }
}

fn reduce(l: [f32; 8]) -> f32 {
    ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}

/// See [`super::Kernels::dot`].
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let (a_tail, b_tail) = (a8.remainder(), b8.remainder());
    let mut lanes = [0.0f32; 8];
    for (a, b) in a8.zip(b8) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut sum = reduce(lanes);
    for (a, b) in a_tail.iter().zip(b_tail) {
        sum += a * b;
    }
    sum
}

/// See [`super::Kernels::axpy`].
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// See [`super::Kernels::combine_onto`]; one sum.
pub fn combine(weights: &[f32], rows: Rows<'_>, out: &mut [f32]) {
    for (i, &w) in weights.iter().enumerate() {
        axpy(w, &rows.data[i * rows.stride..i * rows.stride + out.len()], out);
    }
}

/// See [`super::Kernels::combine_matrix`].
pub fn combine_matrix(weights: &[f32], m: Matrix<'_>, out: &mut [f32]) {
    out.fill(0.0);
    for (i, &w) in weights.iter().enumerate() {
        add_row(w, m, i, 0, out);
    }
}

/// Adds `w` times the columns `from..` of row `row` to `out`, which has as many values as there are such columns.
pub fn add_row(w: f32, m: Matrix<'_>, row: usize, from: usize, out: &mut [f32]) {
    let w = scale_of(m, row).map_or(w, |scale| w * scale);
    let (start, end) = (row * m.cols + from, (row + 1) * m.cols);
    match m.data {
        Data::F32(data) => axpy(w, &data[start..end], out),
        Data::Bf16(bytes) => {
            for (o, b) in out.iter_mut().zip(bytes[start * 2..end * 2].chunks_exact(2)) {
                *o += w * bf16(b[0], b[1]);
            }
        }
        Data::Int8 { codes, .. } => {
            for (o, &code) in out.iter_mut().zip(&codes[start..end]) {
                *o += w * int8(code);
            }
        }
        Data::Mxfp4 { .. } => {
            for (c, o) in (from..m.cols).zip(out) {
                *o += w * weight(m, row, c);
            }
        }
    }
}

/// See [`super::Kernels::kda_step`]. `out` holds the read and then the correction on the way.
pub fn kda_step(state: &mut [f32], i: &KdaInputs<'_>, out: &mut [f32]) {
    let d = out.len();
    let mut j = 0;
    // Columns never mix, so they are taken in blocks that fit on the stack.
    while j < d {
        let n = 64.min(d - j);
        let mut read = [0.0f32; 64];
        for (key, row) in state.chunks_exact(d).enumerate() {
            for (r, s) in read.iter_mut().zip(&row[j..j + n]) {
                *r += i.k[key] * (i.decay[key] * s);
            }
        }
        for (r, v) in read.iter_mut().zip(&i.v[j..j + n]) {
            *r = i.beta * (v - *r);
        }
        out[j..j + n].fill(0.0);
        for (key, row) in state.chunks_exact_mut(d).enumerate() {
            for ((s, delta), o) in row[j..j + n].iter_mut().zip(&read).zip(&mut out[j..j + n]) {
                *s = i.decay[key] * *s + i.k[key] * delta;
                *o += i.q[key] * *s;
            }
        }
        j += n;
    }
}

/// See [`super::Kernels::exp`].
pub fn exp(x: &mut [f32]) {
    for v in x {
        *v = v.exp();
    }
}

/// The logistic function.
pub fn sigmoid_one(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// See [`super::Kernels::sigmoid`].
pub fn sigmoid(x: &mut [f32]) {
    for v in x {
        *v = sigmoid_one(*v);
    }
}

/// See [`super::Kernels::silu`].
pub fn silu(x: &mut [f32]) {
    for v in x {
        *v *= sigmoid_one(*v);
    }
}

/// See [`super::Kernels::situ`].
pub fn situ(gate: &mut [f32], up: &[f32], beta: f32, linear: Option<f32>) {
    for (g, &u) in gate.iter_mut().zip(up) {
        let u = linear.map_or(u, |l| l * (u / l).tanh());
        *g = beta * (*g / beta).tanh() * sigmoid_one(*g) * u;
    }
}

/// See [`super::Kernels::softmax`].
pub fn softmax(x: &mut [f32], scale: f32) {
    softmax_with(x, scale, exp);
}

/// The softmax of `x * scale`, with an exponential of the caller's; compiled into it, so that it has the caller's instructions.
#[inline(always)]
pub(super) fn softmax_with(x: &mut [f32], scale: f32, exp: impl Fn(&mut [f32])) {
    let max = lanes(x, f32::NEG_INFINITY, f32::max);
    for v in x.iter_mut() {
        *v = (*v - max) * scale;
    }
    exp(x);
    let sum = lanes(x, 0.0, |a, b| a + b);
    for v in x.iter_mut() {
        *v /= sum;
    }
}

/// Folds `x` over eight interleaved lanes and then over these.
#[inline(always)]
fn lanes(x: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut all = [start; 8];
    let chunks = x.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in all.iter_mut().zip(chunk) {
            *lane = f(*lane, *v);
        }
    }
    let [a, b, c, d, e, g, h, i] = all;
    let all = f(f(f(a, b), f(c, d)), f(f(e, g), f(h, i)));
    rest.iter().fold(all, |all, v| f(all, *v))
}
