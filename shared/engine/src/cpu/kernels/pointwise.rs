//! RMS norms and rotary embeddings: row by row, in one fixed order, without fused operations, so that every instruction
//! set gives the same bits.

use super::lanes::{LANES, Lanes};
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch};

/// Values below which a parallel section costs more than it saves.
const PARALLEL_VALUES: usize = 16 * 1024;

/// Rows per range: all of them for the calling thread when they are few.
fn grain(rows: usize, width: usize, threads: usize) -> usize {
    if rows * width < PARALLEL_VALUES {
        rows
    } else {
        rows.div_ceil(threads)
    }
}

/// Weights of an RMS norm.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NormWeights {
    /// Scale per element.
    pub(crate) weight: Vec<f32>,
    /// Added to the mean square.
    pub(crate) eps: f32,
}

impl NormWeights {
    /// Normalises rows of `weight.len()` elements in place.
    pub(crate) fn apply(&self, isa: Isa, rows: &mut [f32]) {
        let norm = self;
        dispatch!(isa, normalise_in_place(norm: &NormWeights, rows: &mut [f32]));
    }

    /// Likewise from `x` to `out`.
    fn normalise(&self, isa: Isa, x: &[f32], out: &mut [f32]) {
        let norm = self;
        dispatch!(isa, normalise_rows(norm: &NormWeights, x: &[f32], out: &mut [f32]));
    }
}

/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn normalise_in_place<L: Lanes>(norm: &NormWeights, rows: &mut [f32]) {
    for row in rows.chunks_exact_mut(norm.weight.len()) {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = scale_of_row::<L>(norm, row);
            let row = row.as_mut_ptr();
            scale_row::<L>(norm, scale, row, row);
        }
    }
}

/// # Safety
/// The processor has the lanes' instruction set; `x` and `out` are of one size.
#[inline(always)]
unsafe fn normalise_rows<L: Lanes>(norm: &NormWeights, x: &[f32], out: &mut [f32]) {
    let width = norm.weight.len();
    for (row, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = scale_of_row::<L>(norm, row);
            scale_row::<L>(norm, scale, row.as_ptr(), out.as_mut_ptr());
        }
    }
}

/// `1 / sqrt(mean of squares + eps)`, the squares summed in lanes.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn scale_of_row<L: Lanes>(norm: &NormWeights, row: &[f32]) -> f32 {
    let (whole, rest) = row.as_chunks::<LANES>();
    // SAFETY: the caller's contract; every chunk holds sixteen elements.
    let mut sums = unsafe {
        let mut sums = L::splat(0.0);
        for x in whole {
            let x = L::load(x.as_ptr());
            sums = sums.add(x.mul(x));
        }
        sums.to_array()
    };
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    let mean = sums.iter().sum::<f32>() / row.len() as f32;
    1.0 / (mean + norm.eps).sqrt()
}

/// `out = x * scale * weight`; `x` and `out` may be the same.
///
/// # Safety
/// The processor has the lanes' instruction set; `x` and `out` hold one row.
#[inline(always)]
unsafe fn scale_row<L: Lanes>(norm: &NormWeights, scale: f32, x: *const f32, out: *mut f32) {
    let width = norm.weight.len();
    let whole = width / LANES * LANES;
    // SAFETY: the caller's contract; sixteen elements lie behind each index below `whole`.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let scaled = L::load(x.add(i)).mul(L::splat(scale));
            let weight = L::load(norm.weight[i..].as_ptr());
            scaled.mul(weight).store(out.add(i));
        }
        for i in whole..width {
            *out.add(i) = *x.add(i) * scale * norm.weight[i];
        }
    }
}

/// `out = rms_norm(x)` for rows of `norm.weight.len()` elements.
pub(crate) fn rms_norm(
    pool: &mut ThreadPool,
    isa: Isa,
    norm: &NormWeights,
    x: &[f32],
    out: &mut [f32],
) {
    let width = norm.weight.len();
    assert_eq!(x.len(), out.len(), "norm input and output");
    let rows = x.len() / width;
    let out = SharedMut::new(out);
    pool.for_ranges(rows, grain(rows, width, pool.threads()), &|range| {
        // SAFETY: the ranges of the threads are disjoint.
        let target = unsafe { out.part(range.start * width, range.len() * width) };
        norm.normalise(isa, &x[range.start * width..range.end * width], target);
    });
}

/// Cosines and sines of the rotary embedding for the positions of some rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RotaryRows {
    /// `[rows, head_dim / 2]`
    cos: Vec<f32>,
    /// `[rows, head_dim / 2]`
    sin: Vec<f32>,
    half: usize,
}

impl RotaryRows {
    /// Angles for `positions`; `inverse_frequencies` has one entry per pair of dimensions.
    pub(crate) fn new(
        inverse_frequencies: &[f32],
        positions: impl IntoIterator<Item = usize>,
    ) -> Self {
        let mut rows = Self {
            half: inverse_frequencies.len(),
            ..Self::default()
        };
        for position in positions {
            for frequency in inverse_frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                rows.cos.push(cos);
                rows.sin.push(sin);
            }
        }
        rows
    }

    /// The angles of the rows `kept`.
    pub(crate) fn select(&self, kept: &[usize]) -> Self {
        let rows = |all: &[f32]| {
            let row = |&row: &usize| all[row * self.half..(row + 1) * self.half].to_vec();
            kept.iter().flat_map(row).collect()
        };
        Self {
            cos: rows(&self.cos),
            sin: rows(&self.sin),
            half: self.half,
        }
    }

    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.half..(row + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Some heads of every row, as a projection leaves them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads<'a> {
    /// `[rows, width]`
    pub(crate) rows: &'a [f32],
    pub(crate) width: usize,
    /// First element of the first head in a row.
    pub(crate) first: usize,
    /// How many.
    pub(crate) count: usize,
    /// Norm per head (Qwen3 and DFlash).
    pub(crate) norm: Option<&'a NormWeights>,
    /// Multiplied last.
    pub(crate) scale: f32,
}

/// Normalises, rotates and scales `heads` into `out`, `[rows, out_width]`, from the start of its rows on. Dimension `i` is
/// paired with `i + head_dim / 2`.
pub(crate) fn rotate(
    pool: &mut ThreadPool,
    isa: Isa,
    heads: Heads<'_>,
    rotary: &RotaryRows,
    out: &mut [f32],
    out_width: usize,
) {
    if heads.rows.is_empty() {
        return;
    }
    let head_dim = 2 * rotary.half;
    let taken = heads.count * head_dim;
    let rows = heads.rows.len() / heads.width;
    assert!(heads.first + taken <= heads.width && taken <= out_width);
    assert!(out.len() == rows * out_width && rotary.cos.len() == rows * rotary.half);
    let grain = grain(rows, taken, pool.threads());
    let out = SharedMut::new(out);
    pool.for_ranges(rows, grain, &|range| {
        for row in range {
            let source = &heads.rows[row * heads.width + heads.first..][..taken];
            // SAFETY: every row is one part, handled by one thread.
            let target = unsafe { out.part(row * out_width, taken) };
            target.copy_from_slice(source);
            if let Some(norm) = heads.norm {
                norm.apply(isa, target);
            }
            let (angles, scale) = (rotary.row(row), heads.scale);
            dispatch!(isa, rotate_row(target: &mut [f32], angles: (&[f32], &[f32]), scale: f32));
        }
    });
}

/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn rotate_row<L: Lanes>(row: &mut [f32], (cos, sin): (&[f32], &[f32]), scale: f32) {
    let half = cos.len();
    let whole = half / LANES * LANES;
    for head in row.chunks_exact_mut(2 * half) {
        let (low, high) = head.split_at_mut(half);
        for i in (0..whole).step_by(LANES) {
            // SAFETY: sixteen elements lie behind each index below `whole`.
            unsafe {
                let [x, y] = [L::load(low[i..].as_ptr()), L::load(high[i..].as_ptr())];
                let [c, s] = [L::load(cos[i..].as_ptr()), L::load(sin[i..].as_ptr())];
                let negated = y.mul(s).mul(L::splat(-1.0));
                let first = x.mul(c).add(negated).mul(L::splat(scale));
                let second = y.mul(c).add(x.mul(s)).mul(L::splat(scale));
                first.store(low[i..].as_mut_ptr());
                second.store(high[i..].as_mut_ptr());
            }
        }
        for i in whole..half {
            let (x, y) = (low[i], high[i]);
            low[i] = (x * cos[i] - y * sin[i]) * scale;
            high[i] = (y * cos[i] + x * sin[i]) * scale;
        }
    }
}
