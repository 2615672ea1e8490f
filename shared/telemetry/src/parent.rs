//! The life of the parent process, seen through stdin.

use std::io::{self, Read};

use tokio::sync::oneshot;

/// Resolves with `shutdown`, or when stdin is closed and the service was started with `--exit-with-stdin`.
pub async fn shutdown_with_parent(shutdown: impl Future<Output = ()>, exit_with_stdin: bool) {
    if !exit_with_stdin {
        return shutdown.await;
    }
    tokio::select! {
        () = shutdown => {}
        () = stdin_closed() => tracing::info!("stdin is closed, shutting down"),
    }
}

/// Resolves when stdin is closed, which a service started with `--exit-with-stdin` takes as the end of its parent.
/// What arrives before is discarded.
///
/// stdin is read by a thread of its own: a read inside the runtime could not be cancelled and would keep the process
/// from ending for other reasons.
async fn stdin_closed() {
    let (sender, closed) = oneshot::channel();
    let spawned = std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            drain(io::stdin().lock());
            // The receiver is gone when the service is already ending.
            let _ = sender.send(());
        });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot watch stdin; the service will not end with its parent");
        return std::future::pending().await;
    }
    // An error means that the thread is gone, and with it the way to see the parent.
    let _ = closed.await;
}

/// Reads until the end. A read error means the same: nobody will ever write again.
fn drain(mut input: impl Read) {
    let mut buffer = [0; 256];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_ends_with_the_input() {
        drain(io::Cursor::new(vec![b'x'; 10_000]));
        drain(io::empty());
    }
}
