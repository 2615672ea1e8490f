//! Matrices with their products in f64, and what compares results with them.

use std::sync::Arc;

use half::bf16;
use treespec_checkpoint::StoredMatrix;
use treespec_cuda::{
    Device, DeviceBuffer, DeviceValue, Layout, LinearShape, PackedLinear, PackedRows, RowScale,
};

/// Row buckets under test: partial blocks of 64, and both kinds of whole ones.
pub(crate) const BUCKETS: [usize; 6] = [8, 16, 32, 64, 128, 320];
pub(crate) const MOST_ROWS: usize = 320;
pub(crate) const EPS: f32 = 1e-5;

/// Orders of sums; the first is for small matrices.
pub(crate) const SHAPES: [LinearShape; 11] = [
    LinearShape::new(1, 1),
    with_depth_warps(4, 2, 1),
    with_depth_warps(4, 2, 2),
    with_depth_warps(8, 2, 1),
    with_depth_warps(8, 2, 3),
    with_depth_warps(8, 2, 8),
    with_depth_warps(4, 4, 1),
    with_depth_warps(4, 4, 3),
    with_depth_warps(8, 4, 2),
    LinearShape::new(16, 1),
    LinearShape::new(16, 4),
];

const fn with_depth_warps(panels: usize, depth_warps: usize, split: usize) -> LinearShape {
    LinearShape {
        panels,
        depth_warps,
        split,
    }
}

/// SplitMix64: seeded numbers that need no crate.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    /// Values that bf16 holds exactly.
    pub(crate) fn rounded(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| bf16::from_f32(self.value()).to_f32())
            .collect()
    }
}

/// A matrix, input rows and their products in f64.
pub(crate) struct Case {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    weights: Vec<f32>,
    inputs: Vec<f32>,
    /// `[input row][matrix row]`.
    pub(crate) products: Vec<f64>,
    /// Sums of the absolute products: what rounding errors are measured by.
    pub(crate) sizes: Vec<f64>,
}

impl Case {
    pub(crate) fn new(rows: usize, depth: usize, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let weights = numbers.rounded(rows * depth);
        let inputs = numbers.rounded(MOST_ROWS * depth);
        let mut products = Vec::with_capacity(MOST_ROWS * rows);
        let mut sizes = Vec::with_capacity(MOST_ROWS * rows);
        for x in inputs.chunks(depth) {
            for w in weights.chunks(depth) {
                let (mut product, mut size) = (0.0f64, 0.0f64);
                for (w, x) in w.iter().zip(x) {
                    let term = f64::from(*w) * f64::from(*x);
                    product += term;
                    size += term.abs();
                }
                products.push(product);
                sizes.push(size);
            }
        }
        Self {
            rows,
            depth,
            weights,
            inputs,
            products,
            sizes,
        }
    }

    pub(crate) fn linear(
        &self,
        device: &Arc<Device>,
        layout: Layout,
        shape: LinearShape,
    ) -> Option<PackedLinear> {
        let too_short = layout == Layout::Head && shape.panels == 1;
        if shape.split > self.depth.div_ceil(32) || too_short {
            return None;
        }
        let matrix = StoredMatrix::from_f32(&self.weights, self.depth);
        Some(PackedLinear::pack_with(device, &[&matrix], layout, shape).unwrap())
    }

    /// The first `rows` inputs, packed. `order(i)` is the input that becomes row i.
    pub(crate) fn packed_inputs(&self, rows: usize, order: impl Fn(usize) -> usize) -> Vec<bf16> {
        let mut packed = vec![bf16::ZERO; PackedRows::len(rows, self.depth)];
        for n in 0..rows {
            for k in 0..self.depth {
                let value = self.inputs[order(n) * self.depth + k];
                packed[place(n, k, self.depth.div_ceil(32), rows)] = bf16::from_f32(value);
            }
        }
        packed
    }
}

/// Index of row `n`, depth `k` in packed rows; see `xp_offset` in the kernels' prelude.
pub(crate) fn place(n: usize, k: usize, k32: usize, rows: usize) -> usize {
    let tiles = rows.min(64) / 8;
    let lane = n % 8 * 4 + k % 32 / 8;
    ((n / 64 * k32 + k / 32) * tiles + n % 64 / 8) * 256 + lane * 8 + k % 8
}

/// A buffer whose every value is NaN (f32 and bf16 alike).
pub(crate) fn poisoned<T: DeviceValue>(device: &Arc<Device>, len: usize) -> DeviceBuffer<T> {
    let buffer = DeviceBuffer::uninit(device, len).unwrap();
    buffer.fill_bytes(0xFF).unwrap();
    buffer
}

/// Collects the largest error and stops at the first that is too large.
pub(crate) struct Check {
    what: String,
    worst: f64,
}

impl Check {
    pub(crate) fn new(what: String) -> Self {
        Self { what, worst: 0.0 }
    }

    /// `allowed` is absolute; NaN never passes.
    pub(crate) fn near(&mut self, got: f32, expected: f64, allowed: f64, place: (usize, usize)) {
        let error = (f64::from(got) - expected).abs();
        assert!(
            error <= allowed,
            "{}: row {} column {}: {got} instead of {expected}, off by {error:e} (allowed {allowed:e})",
            self.what,
            place.0,
            place.1
        );
        self.worst = self.worst.max(error / allowed.max(f64::MIN_POSITIVE));
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            println!(
                "{}: largest error {:.3} of what is allowed",
                self.what, self.worst
            );
        }
    }
}

/// Random parts of a sum of squares, and the scale of each row in f64.
pub(crate) struct Scales {
    count: usize,
    parts: DeviceBuffer<f32>,
    pub(crate) scale: Vec<f64>,
    width: usize,
}

impl Scales {
    pub(crate) fn new(
        device: &Arc<Device>,
        rows: usize,
        count: usize,
        width: usize,
        seed: u64,
    ) -> Self {
        let mut numbers = Numbers(seed);
        let parts: Vec<f32> = numbers
            .values(rows * count)
            .iter()
            .map(|v| v.abs() + 0.01)
            .collect();
        let scale = parts
            .chunks(count)
            .map(|parts| {
                let sum: f64 = parts.iter().map(|part| f64::from(*part)).sum();
                1.0 / (sum / width as f64 + f64::from(EPS)).sqrt()
            })
            .collect();
        Self {
            count,
            parts: DeviceBuffer::from_slice(device, &parts).unwrap(),
            scale,
            width,
        }
    }

    pub(crate) fn row_scale(&self) -> RowScale {
        RowScale {
            parts: self.parts.ptr(),
            count: self.count as u32,
            eps: EPS,
            width: self.width as u32,
        }
    }
}

/// All shapes, row buckets and matrices for one epilogue.
pub(crate) fn for_all(
    device: &Arc<Device>,
    layout: Layout,
    cases: &[Case],
    run: impl Fn(&Case, &PackedLinear, PackedRows, String),
) {
    for case in cases {
        for shape in SHAPES {
            let Some(linear) = case.linear(device, layout, shape) else {
                continue;
            };
            for rows in BUCKETS {
                let inputs =
                    DeviceBuffer::from_slice(device, &case.packed_inputs(rows, |n| n)).unwrap();
                let x = PackedRows::new(inputs.ptr(), case.depth, rows);
                let what = format!("{}x{} {shape:?} {rows} rows", case.rows, case.depth);
                run(case, &linear, x, what);
            }
        }
    }
}
