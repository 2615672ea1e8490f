//! Coupled drafting on the device: candidates ranked with the noise of the target's choice, as
//! [`treespec_engine::CoupledRanking`] ranks them.

use std::sync::Arc;

use treespec_checkpoint::{CouplingProfile, TemperatureFit};
use treespec_engine::CoupledRanking;
use treespec_sampling::{Coupling, Ranking};

use crate::draft_tree::DraftCandidates;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "candidate_ranking.cu",
    text: concat!(
        include_str!("kernels/noise.cuh"),
        "\n#line 1 \"candidate_ranking.cu\"\n",
        include_str!("kernels/candidate_ranking.cu")
    ),
};

/// Most candidates of a depth, as in the kernel file.
const THREADS: usize = 256;

/// The ranking without a fit, as in the kernel file.
const UNFITTED: u32 = u32::MAX - 1;

/// How the candidates of one sequence are ranked, as the kernel reads it: seed, its upper half, bits of the temperature,
/// number of the fit. All bits set is a ranking by probability alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceRanking(pub [u32; 4]);

/// The kernel of `candidate_ranking.cu` with the profile of a drafter.
pub struct CandidateRanking {
    device: Arc<Device>,
    rank: Function,
    profile: Option<CouplingProfile>,
    gaps: DeviceBuffer<f32>,
    /// `[fits][4]`: depths, ranks, index of tau, index of the log-probabilities.
    fits: DeviceBuffer<u32>,
    values: DeviceBuffer<f32>,
}

impl CandidateRanking {
    /// Compiles it and copies the tables of `profile` for drafts of up to `depths` tokens.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], and as [`Device::module`].
    pub fn load(
        device: &Arc<Device>,
        profile: Option<&CouplingProfile>,
        depths: usize,
    ) -> Result<Self, CudaError> {
        let tables = profile.map(|profile| Tables::new(profile, depths));
        let tables = tables.unwrap_or_default();
        Ok(Self {
            device: device.clone(),
            rank: device.module(&SOURCE, &[])?.function("rank_candidates")?,
            gaps: DeviceBuffer::from_slice(device, profile.map_or(&[], |p| &p.gaps))?,
            fits: DeviceBuffer::from_slice(device, &tables.fits)?,
            values: DeviceBuffer::from_slice(device, &tables.values)?,
            profile: profile.cloned(),
        })
    }

    /// What was fitted to the drafter.
    pub fn profile(&self) -> Option<&CouplingProfile> {
        self.profile.as_ref()
    }

    /// How a sequence's candidates are ranked; `None` by their probability alone.
    pub fn of(&self, coupling: Option<Coupling>) -> Option<SequenceRanking> {
        let coupling = coupling?;
        CoupledRanking::new(coupling, self.profile(), 0)?;
        let fit = match (coupling.ranking, &self.profile) {
            (Ranking::Fitted, Some(profile)) => {
                let fit = profile.fit(coupling.temperature);
                let is_it = |other: &TemperatureFit| std::ptr::eq(other, fit);
                profile.fits.iter().position(is_it)? as u32
            }
            _ => UNFITTED,
        };
        Some(SequenceRanking([
            coupling.seed as u32,
            (coupling.seed >> 32) as u32,
            coupling.temperature.to_bits(),
            fit,
        ]))
    }

    /// Ranks `candidates` of `sequences` sequences in place. Of their `count` per depth the best `kept` come back, best
    /// first, as log-probabilities with a normaliser of 0. `committed` (u32 per sequence) are the positions of the roots,
    /// `rankings` a [`SequenceRanking`] per sequence.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for more candidates than a depth can have, or when the launch is refused.
    pub fn rank(
        &self,
        sequences: usize,
        candidates: DraftCandidates,
        kept: usize,
        committed: DevicePtr,
        rankings: DevicePtr,
    ) -> Result<(), CudaError> {
        let count = candidates.count;
        if !(1..=THREADS.min(candidates.top.stride)).contains(&count) {
            return Err(CudaError::Unsupported(format!(
                "{count} candidates to rank: 1 to {} work",
                THREADS.min(candidates.top.stride)
            )));
        }
        Launch::new(&self.rank)
            .grid(candidates.depths, sequences, 1)
            .block(count.next_multiple_of(32))
            .arg(candidates.top.ids)
            .arg(candidates.top.logits)
            .arg(candidates.top.normaliser)
            .arg(candidates.rows as u32)
            .arg(candidates.top.stride as u32)
            .arg(count as u32)
            .arg(kept as u32)
            .arg(committed)
            .arg(rankings)
            .arg(self.gaps.ptr())
            .arg(self.gaps.len() as u32)
            .arg(self.fits.ptr())
            .arg(self.values.ptr())
            .run(&self.device)
    }
}

/// A profile in the kernel's layout.
#[derive(Debug, Default, PartialEq)]
struct Tables {
    fits: Vec<u32>,
    values: Vec<f32>,
}

impl Tables {
    fn new(profile: &CouplingProfile, depths: usize) -> Self {
        let mut tables = Self::default();
        for fit in &profile.fits {
            let depths = depths.min(fit.tau.len());
            let ranks = fit.acceptance.first().map_or(0, Vec::len);
            let tau = tables.values.len();
            tables.values.extend(&fit.tau[..depths]);
            let log_probs = tables.values.len();
            let cells = fit.acceptance[..depths].iter().flatten().flatten();
            // The logarithm is taken here: the device's differs in the last place.
            let log_probs_of = cells.map(|&share| CoupledRanking::log_prob(share));
            tables.values.extend(log_probs_of);
            let words = [depths, ranks, tau, log_probs];
            tables.fits.extend(words.map(|word| word as u32));
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_the_depths_of_a_draft() {
        let fit = |temperature: f32| TemperatureFit {
            temperature,
            tau: vec![0.5, 0.25, 0.125],
            acceptance: vec![vec![vec![1.0, 0.0]; 2]; 3],
        };
        let profile = CouplingProfile {
            gaps: vec![1.0],
            fits: vec![fit(0.5), fit(1.0)],
        };
        let tables = Tables::new(&profile, 2);
        assert_eq!(tables.fits, [2, 2, 0, 2, 2, 2, 10, 12]);
        assert_eq!(tables.values.len(), 20);
        let least = CoupledRanking::log_prob(0.0);
        assert_eq!(tables.values[..6], [0.5, 0.25, 0.0, least, 0.0, least]);
    }
}
