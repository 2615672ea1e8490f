//! The signals that end a service or a command.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

/// Completes at the first Ctrl-C (SIGINT) or SIGTERM. Handlers are installed now, not at the first poll, so that no
/// signal in between ends the process the hard way.
///
/// # Errors
/// When the process may not install a handler.
pub(crate) fn shutdown() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
