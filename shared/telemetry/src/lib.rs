//! What a service tells the outside besides its answers: logs, load progress, and start-up events for a parent process.

mod announce;
mod load_progress;
mod logging;
mod parent;

pub use announce::{Announcer, Event, EventError};
pub use load_progress::LoadReporter;
pub use logging::{LogError, LogFormat, LogGuard, init};
pub use parent::shutdown_with_parent;
