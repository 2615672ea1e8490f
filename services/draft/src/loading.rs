use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TextTokenizer};
use treespec_engine::{
    CpuDrafter, CpuOptions, DeviceChoice, Drafter, DrafterOptions, EngineError, LoadProgress,
};
use treespec_rpc::handshake::Fingerprint;
use treespec_telemetry::{Announcer, LoadReporter};

use crate::{Config, Error};

/// A drafter that is ready to draft, and what it is to a verifier.
pub struct LoadedDrafter {
    /// The model.
    pub drafter: Box<dyn Drafter>,
    /// Its identity together with its target.
    pub fingerprint: Fingerprint,
}

/// Reads the drafter and, of the target, its embeddings, head and vocabulary.
///
/// # Errors
/// A missing or malformed file, or a drafter that was made for another target.
pub fn load(config: &Config, announcer: &Announcer) -> Result<LoadedDrafter, Error> {
    let drafter = DrafterCheckpoint::open(&config.drafter)?;
    let target = TargetCheckpoint::open(&config.target)?;
    drafter.check_target(&target.config)?;
    let tokenizer = TextTokenizer::open(&config.target)?;
    let fingerprint = Fingerprint::of(&drafter, &target, &tokenizer)?;
    let options = DrafterOptions {
        cpu: CpuOptions {
            threads: config.threads.map_or(0, usize::from),
            isa: config.cpu_isa,
            precision: config.cpu_precision,
        },
        context_window: config.context_window,
        max_contexts: config.max_sequences,
        with_head: !config.no_head,
    };
    let mut reporter = LoadReporter::new(announcer.clone(), &drafter.label());
    let drafter = load_drafter(
        config.device,
        &drafter,
        &target,
        &options,
        &mut |progress| {
            reporter.update(progress.done_bytes, progress.total_bytes);
        },
    )?;
    Ok(LoadedDrafter {
        drafter,
        fingerprint,
    })
}

/// The drafter on `device`. What the options say of the CPU is for that alone.
///
/// # Errors
/// [`EngineError::DeviceNotBuilt`] without the feature `cuda`, [`EngineError::Device`], or what is wrong with the
/// checkpoints.
pub fn load_drafter(
    device: DeviceChoice,
    drafter: &DrafterCheckpoint,
    target: &TargetCheckpoint,
    options: &DrafterOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Box<dyn Drafter>, EngineError> {
    match device {
        DeviceChoice::Cpu => Ok(Box::new(CpuDrafter::load(
            drafter, target, options, progress,
        )?)),
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(ordinal) => {
            let device = treespec_cuda::Device::open(ordinal).map_err(EngineError::from)?;
            Ok(Box::new(treespec_cuda::CudaDrafter::load(
                &device, drafter, target, options, progress,
            )?))
        }
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Err(EngineError::DeviceNotBuilt(device)),
    }
}
