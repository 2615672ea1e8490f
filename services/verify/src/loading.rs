//! From checkpoints to a model on its device.

use treespec_checkpoint::{CouplingProfile, DrafterCheckpoint, TargetCheckpoint, TextTokenizer};
use treespec_engine::{
    Backend, Colocated, CpuDrafter, CpuOptions, CpuTarget, DeviceChoice, DrafterOptions,
    EngineError, LoadProgress, Speculator, TargetOptions, TargetSpec,
};
use treespec_rpc::handshake::Fingerprint;
use treespec_telemetry::{Announcer, LoadReporter};

use crate::config::DraftPlacement;
use crate::{Config, Error};

/// A target, alone or with its drafter.
pub enum LoadedModel {
    /// Drafts come from draft services, or from nowhere.
    Target(Box<dyn Backend>),
    /// The drafter is here.
    Speculator(Box<dyn Speculator>),
}

/// A model that is ready to decode, and what clients are told about it.
pub struct LoadedTarget {
    /// The model.
    pub model: LoadedModel,
    /// Identity of the drafter whose features the model computes, or which it hosts.
    pub drafter: Option<Fingerprint>,
    /// What was fitted to that drafter for sampled answers.
    pub coupling: Option<CouplingProfile>,
    /// The target's own end-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// The target's tokenizer.
    pub tokenizer: TextTokenizer,
}

impl LoadedModel {
    pub(crate) fn spec(&self) -> &TargetSpec {
        match self {
            Self::Target(target) => target.spec(),
            Self::Speculator(speculator) => speculator.spec(),
        }
    }

    pub(crate) fn backend(&mut self) -> &mut dyn Backend {
        match self {
            Self::Target(target) => target.as_mut(),
            Self::Speculator(speculator) => speculator.as_mut(),
        }
    }

    /// The model as the host of its drafter.
    pub(crate) fn speculator(&mut self) -> Option<&mut dyn Speculator> {
        match self {
            Self::Target(_) => None,
            Self::Speculator(speculator) => Some(speculator.as_mut()),
        }
    }

    pub(crate) fn hosts_drafter(&self) -> bool {
        matches!(self, Self::Speculator(_))
    }
}

/// Reads the checkpoints that `config` names and puts the models on their device.
///
/// # Errors
/// A missing or malformed file, a drafter that was made for another target, or a device that does not take them.
pub fn load(config: &Config, announcer: &Announcer) -> Result<LoadedTarget, Error> {
    let target = TargetCheckpoint::open(&config.target).map_err(Error::Target)?;
    let tokenizer = TextTokenizer::open(&config.target).map_err(Error::Target)?;
    let drafter = config
        .drafter
        .as_deref()
        .map(DrafterCheckpoint::open)
        .transpose()
        .map_err(Error::Drafter)?;
    let fingerprint = drafter
        .as_ref()
        .map(|drafter| {
            drafter.check_target(&target.config)?;
            Fingerprint::of(drafter, &target, &tokenizer)
        })
        .transpose()
        .map_err(Error::Drafter)?;
    let mut reporter = LoadReporter::new(announcer.clone(), "target");
    let mut progress = |progress: LoadProgress| {
        reporter.update(progress.done_bytes, progress.total_bytes);
    };
    let cpu = CpuOptions {
        threads: config.threads,
        isa: config.cpu_isa,
        precision: config.cpu_precision,
    };
    let options = TargetOptions {
        cpu,
        kv_tokens: config.kv_tokens,
    };
    let mut model = match (config.draft_placement, &drafter) {
        (DraftPlacement::Local, Some(drafter)) => {
            let drafter_options = DrafterOptions {
                cpu,
                context_window: config.feature_window,
                max_contexts: config.drafter_contexts,
                ..DrafterOptions::default()
            };
            let options = (&options, &drafter_options);
            LoadedModel::Speculator(load_speculator(
                config.device,
                &target,
                drafter,
                options,
                &mut progress,
            )?)
        }
        _ => LoadedModel::Target(load_target(
            config.device,
            &target,
            drafter.as_ref(),
            &options,
            &mut progress,
        )?),
    };
    model.backend().set_prefill(config.prefill)?;
    Ok(LoadedTarget {
        model,
        drafter: fingerprint,
        coupling: drafter.and_then(|drafter| drafter.coupling),
        eos_token_ids: target.config.eos_token_ids.clone(),
        tokenizer,
    })
}

/// The target on `device`. With a drafter's checkpoint it also computes that drafter's features. What the options say of
/// the CPU is for that alone.
///
/// # Errors
/// [`EngineError::DeviceNotBuilt`] without the feature `cuda`, [`EngineError::Device`], or what is wrong with the
/// checkpoints.
pub fn load_target(
    device: DeviceChoice,
    target: &TargetCheckpoint,
    drafter: Option<&DrafterCheckpoint>,
    options: &TargetOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Box<dyn Backend>, EngineError> {
    match device {
        DeviceChoice::Cpu => Ok(Box::new(CpuTarget::load(
            target, drafter, options, progress,
        )?)),
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(ordinal) => {
            let device = treespec_cuda::Device::open(ordinal).map_err(EngineError::from)?;
            Ok(Box::new(treespec_cuda::CudaTarget::load(
                &device,
                target,
                drafter,
                options.kv_tokens,
                progress,
            )?))
        }
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Err(EngineError::DeviceNotBuilt(device)),
    }
}

/// The target together with its drafter on `device`.
///
/// # Errors
/// As [`load_target`].
pub fn load_speculator(
    device: DeviceChoice,
    target: &TargetCheckpoint,
    drafter: &DrafterCheckpoint,
    (options, drafter_options): (&TargetOptions, &DrafterOptions),
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Box<dyn Speculator>, EngineError> {
    match device {
        DeviceChoice::Cpu => {
            let total_bytes = target.total_bytes() + drafter.total_bytes();
            let mut report = |before: u64, part: LoadProgress| {
                progress(LoadProgress {
                    done_bytes: before + part.done_bytes,
                    total_bytes,
                });
            };
            let loaded = CpuTarget::load(target, Some(drafter), options, &mut |part| {
                report(0, part);
            })?;
            let before = target.total_bytes();
            let drafter =
                CpuDrafter::load_beside(&loaded, drafter, target, drafter_options, &mut |part| {
                    report(before, part);
                })?;
            Ok(Box::new(Colocated::new(loaded, drafter)?))
        }
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(ordinal) => {
            let device = treespec_cuda::Device::open(ordinal).map_err(EngineError::from)?;
            Ok(Box::new(treespec_cuda::CudaSpeculator::load(
                &device,
                target,
                drafter,
                options.kv_tokens,
                drafter_options,
                progress,
            )?))
        }
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Err(EngineError::DeviceNotBuilt(device)),
    }
}
