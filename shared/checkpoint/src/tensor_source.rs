use crate::{CheckpointError, DrafterCheckpoint, StoredMatrix, TargetCheckpoint};

/// A checkpoint that layers are loaded from: targets and drafters store theirs under the same names.
pub trait TensorSource {
    /// The tensor `name` with a known shape, row-major, as f32.
    ///
    /// # Errors
    /// When it is missing, has another shape, or is stored in a number format without a conversion.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError>;

    /// The matrix `name`, `[rows, columns]`, in its stored format.
    ///
    /// # Errors
    /// As [`TensorSource::tensor`].
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<StoredMatrix, CheckpointError>;
}

impl TensorSource for TargetCheckpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.tensor(name, shape)
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<StoredMatrix, CheckpointError> {
        self.matrix(name, shape)
    }
}

impl TensorSource for DrafterCheckpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.tensor(name, shape)
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<StoredMatrix, CheckpointError> {
        self.matrix(name, shape)
    }
}
