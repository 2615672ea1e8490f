use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TextTokenizer};
use treespec_engine::{CpuDrafter, Drafter, DrafterOptions};
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
        threads: config.threads.map_or(0, usize::from),
        context_window: config.context_window,
        max_contexts: config.max_sequences,
        with_head: !config.no_head,
        ..DrafterOptions::default()
    };
    let mut reporter = LoadReporter::new(announcer.clone(), &drafter.label());
    let drafter = CpuDrafter::load(&drafter, &target, &options, &mut |progress| {
        reporter.update(progress.done_bytes, progress.total_bytes);
    })?;
    Ok(LoadedDrafter {
        drafter: Box::new(drafter),
        fingerprint,
    })
}
