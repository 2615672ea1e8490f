//! Prompts by a library's matrix products, for who prefers their speed to bits that depend on nothing but a row's path.

use std::sync::Arc;

use half::bf16;
use treespec_engine::{EngineError, PrefillMode, RowShape, SequenceRows};

use super::{MOST_FORWARD_SEQUENCES, TargetCore};
use crate::activations::Activations;
use crate::decoder::Taps;
use crate::linear::PrefillLinear;
use crate::row_metadata::{RowBuffers, RowLimits};
use crate::{CudaError, Device, DeviceBuffer};

/// Rows of one forward: unpacking the weights costs the same for any number.
pub(super) const MOST_ROWS: usize = 2048;

/// Rows below which unpacking the weights costs more than the library saves.
const FEWEST_ROWS: usize = 768;

/// What marks the profile of a target whose prompts are computed this way.
const PROFILE_MARK: &str = "/prefill-fast";

/// What the forwards of prompts work in. It is apart from what steps work in, whose addresses are in their graphs.
pub(super) struct Prefill {
    pub(super) linear: PrefillLinear,
    pub(super) activations: Activations,
    pub(super) ragged: RowBuffers,
    pub(super) taps: Option<(DeviceBuffer<bf16>, Taps)>,
}

impl Prefill {
    fn new(device: &Arc<Device>, core: &TargetCore) -> Result<Self, CudaError> {
        let decoder = &core.decoder;
        Ok(Self {
            linear: PrefillLinear::new(device, decoder.matrices(), MOST_ROWS)?,
            activations: Activations::new(device, decoder.shape, MOST_ROWS, decoder.most_parts())?,
            ragged: RowBuffers::new(
                device,
                RowLimits {
                    rows: MOST_ROWS,
                    sequences: MOST_FORWARD_SEQUENCES,
                    blocks: core.ragged.limits().blocks,
                },
            )?,
            taps: core
                .projection
                .as_ref()
                .map(|projection| projection.more_taps(device, MOST_ROWS))
                .transpose()?,
        })
    }

    /// Whether a forward is of prompts long enough. Single rows and trees are steps, which stay exact.
    pub(super) fn takes(group: &[SequenceRows<'_>]) -> bool {
        let rows: usize = group.iter().map(|sequence| sequence.tokens.len()).sum();
        rows >= FEWEST_ROWS
            && group.iter().all(|sequence| {
                matches!(sequence.shape, RowShape::Chain) && sequence.tokens.len() > 1
            })
    }
}

impl TargetCore {
    /// See [`treespec_engine::Backend::set_prefill`]. [`PrefillMode::Fast`] takes device memory for itself: plain copies
    /// of the largest matrix and of [`MOST_ROWS`] rows. After an error the mode is what it was.
    pub(super) fn set_prefill(&mut self, mode: PrefillMode) -> Result<(), EngineError> {
        self.device.bind()?;
        self.prefill = match mode {
            PrefillMode::Exact => None,
            PrefillMode::Fast => Some(Prefill::new(&self.device, self)?),
        };
        let profile = self.spec.numerics_profile.trim_end_matches(PROFILE_MARK);
        self.spec.numerics_profile = match mode {
            PrefillMode::Exact => profile.to_owned(),
            PrefillMode::Fast => format!("{profile}{PROFILE_MARK}"),
        };
        Ok(())
    }
}
