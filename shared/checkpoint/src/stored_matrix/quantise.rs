//! Quantisation to Q8_0, as ggml's `quantize_row_q8_0_ref`.

use half::f16;

use super::{MatrixFormat, Q8_0Block, StoredMatrix};

/// The largest stored integer; -128 is not used.
const LIMIT: f32 = 127.0;

impl StoredMatrix {
    /// An f32 or bf16 matrix in Q8_0, for engines that compute with integers.
    ///
    /// In each block `d` is the largest magnitude divided by 127 and a stored integer is `x * (1 / d)`, rounded with halves
    /// away from zero. `d` is rounded to f16 only after that, so a value comes back within `d / 2` and 127 times the
    /// error of that rounding: a relative 2^-11, or up to 2^-25 for `d` below 2^-14. Magnitudes up to about 3.8e-6 in a
    /// block that has no larger one come back as zeros.
    ///
    /// `None` when the matrix has another format, its rows are not whole blocks of [`MatrixFormat::BLOCK`], a value is not
    /// finite, or a magnitude is above about 8.3e6, so that `d` has no finite f16.
    pub fn quantised_q8_0(&self) -> Option<Self> {
        if !matches!(self.format(), MatrixFormat::F32 | MatrixFormat::Bf16) {
            return None;
        }
        let row_bytes = MatrixFormat::Q8_0.row_bytes(self.columns())?;
        let mut bytes = Vec::with_capacity(row_bytes * self.rows());
        for row in 0..self.rows() {
            let values = self.row_f32(row);
            let (blocks, _) = values.as_chunks();
            for block in blocks {
                bytes.extend(Q8_0Block::nearest(block)?.bytes());
            }
        }
        Self::new(MatrixFormat::Q8_0, [self.rows(), self.columns()], bytes)
    }
}

impl Q8_0Block {
    /// The block for `values`, `None` when one of them or the scale as f16 is not finite.
    fn nearest(values: &[f32; MatrixFormat::BLOCK]) -> Option<Self> {
        if !values.iter().all(|value| value.is_finite()) {
            return None;
        }
        let largest = values
            .iter()
            .fold(0.0, |largest: f32, value| largest.max(value.abs()));
        let exact_scale = largest / LIMIT;
        let scale = f16::from_f32(exact_scale);
        let inverse = if exact_scale == 0.0 {
            0.0
        } else {
            exact_scale.recip()
        };
        // The inverse of a subnormal number may be infinite. Its f16 is zero, and the integers only have to be in range.
        let quants = values.map(|x| (x * inverse).round().clamp(-LIMIT, LIMIT) as i8);
        scale.is_finite().then_some(Self { scale, quants })
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        let quants = self.quants.map(|q| q as u8);
        self.scale.to_le_bytes().into_iter().chain(quants)
    }
}
