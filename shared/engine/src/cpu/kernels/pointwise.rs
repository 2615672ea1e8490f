//! RMS norms and rotary embeddings: row by row, in one fixed order.

use super::SharedMut;
use super::lanes::LANES;
use super::pool::ThreadPool;

/// Rows below which a parallel section costs more than it saves.
const PARALLEL_ROWS: usize = 4;

/// Weights of an RMS norm.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NormWeights {
    /// Scale per element.
    pub(crate) weight: Vec<f32>,
    /// Added to the mean square.
    pub(crate) eps: f32,
}

impl NormWeights {
    /// Normalises one row of `weight.len()` elements in place.
    pub(crate) fn apply(&self, row: &mut [f32]) {
        let scale = self.scale(row);
        for (x, w) in row.iter_mut().zip(&self.weight) {
            *x = *x * scale * w;
        }
    }

    fn scale(&self, row: &[f32]) -> f32 {
        let mut sums = [0.0f32; LANES];
        for chunk in row.chunks(LANES) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += x * x;
            }
        }
        let mean = sums.iter().sum::<f32>() / row.len() as f32;
        1.0 / (mean + self.eps).sqrt()
    }
}

/// `out = rms_norm(x)` for rows of `norm.weight.len()` elements.
pub(crate) fn rms_norm(pool: &mut ThreadPool, norm: &NormWeights, x: &[f32], out: &mut [f32]) {
    let width = norm.weight.len();
    assert_eq!(x.len(), out.len(), "norm input and output");
    let rows = x.len() / width;
    let grain = if rows < PARALLEL_ROWS {
        rows
    } else {
        rows.div_ceil(pool.threads())
    };
    let out = SharedMut::new(out);
    pool.for_ranges(rows, grain, &|range| {
        // SAFETY: the ranges of the threads are disjoint.
        let target = unsafe { out.part(range.start * width, range.len() * width) };
        target.copy_from_slice(&x[range.start * width..range.end * width]);
        target
            .chunks_exact_mut(width)
            .for_each(|row| norm.apply(row));
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

    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.half..(row + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Normalises (when the model has a norm per head) and rotates the first `heads` heads of every row of `x`,
/// `[rows, width]`, then multiplies by `scale`. Dimension `i` is paired with `i + head_dim / 2`.
pub(crate) fn rotate(
    pool: &mut ThreadPool,
    x: &mut [f32],
    width: usize,
    heads: usize,
    norm: Option<&NormWeights>,
    rotary: &RotaryRows,
    scale: f32,
) {
    let rows = x.len() / width;
    let head_dim = 2 * rotary.half;
    assert!(heads * head_dim <= width && rotary.cos.len() == rows * rotary.half);
    let grain = if rows < PARALLEL_ROWS {
        rows
    } else {
        rows.div_ceil(pool.threads())
    };
    let x = SharedMut::new(x);
    pool.for_ranges(rows, grain, &|range| {
        for row in range {
            let (cos, sin) = rotary.row(row);
            // SAFETY: every row is one part, handled by one thread.
            let heads = unsafe { x.part(row * width, heads * head_dim) };
            for head in heads.chunks_exact_mut(head_dim) {
                if let Some(norm) = norm {
                    norm.apply(head);
                }
                let (low, high) = head.split_at_mut(rotary.half);
                for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (x, y) = (*a, *b);
                    *a = (x * c - y * s) * scale;
                    *b = (y * c + x * s) * scale;
                }
            }
        }
    });
}
