//! Where the time of a step goes, read from the device's clock in one step of many: a clock read ends the overlap of the
//! kernels around it.

use std::sync::Arc;
use std::time::Duration;

use crate::rows::RowKernels;
use crate::{CudaError, Device, PinnedBuffer};

/// Stages of a step: draft, head, tree, verify, accept.
pub(super) const STAGES: usize = 5;

/// Every how many steps the clock is read.
const INTERVAL: u32 = 32;

/// Clock readings of a step, and what share of a step each stage had in the last one that was read.
pub(super) struct StageTimes {
    clock: PinnedBuffer<u64>,
    shares: [f64; STAGES],
    steps: u32,
}

impl StageTimes {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            clock: PinnedBuffer::new(device, STAGES + 1)?,
            shares: [0.0; STAGES],
            steps: 0,
        })
    }

    /// Launches the reading in front of stage `stage`, or behind the last one.
    pub(super) fn mark(&self, rows: &RowKernels, stage: usize) -> Result<(), CudaError> {
        rows.mark(self.clock.device_offset(stage))
    }

    /// Whether the next step reads the clock.
    pub(super) fn next_is_read(&mut self) -> bool {
        let read = self.steps.is_multiple_of(INTERVAL);
        self.steps = self.steps.wrapping_add(1);
        read
    }

    /// Takes the readings of a step that has ended.
    pub(super) fn read(&mut self) {
        let clock = self.clock.as_slice();
        self.shares = shares(clock);
    }

    /// The parts of a step that took `whole`.
    pub(super) fn split(&self, whole: Duration) -> [Duration; STAGES] {
        self.shares.map(|share| whole.mul_f64(share))
    }
}

/// The share of each stage between the first and the last reading; nothing when the clock stood still.
fn shares(clock: &[u64]) -> [f64; STAGES] {
    let whole = clock[STAGES].saturating_sub(clock[0]);
    std::array::from_fn(|stage| match whole {
        0 => 0.0,
        whole => clock[stage + 1].saturating_sub(clock[stage]) as f64 / whole as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_step() {
        let shares = shares(&[100, 120, 130, 140, 190, 200]);
        assert_eq!(shares, [0.2, 0.1, 0.1, 0.5, 0.1]);
        assert_eq!(super::shares(&[7; STAGES + 1]), [0.0; STAGES]);
    }
}
