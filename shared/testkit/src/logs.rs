//! What the services log during a test.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::DefaultGuard;

use crate::PATIENCE;

/// Captures the log of this thread until it is dropped. Services log there when their tasks run on this thread, as
/// they do on tokio's current-thread runtime, the default of `#[tokio::test]`.
pub struct Logs {
    text: Buffer,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Logs {
    /// Starts to capture, from level INFO up.
    pub fn capture() -> Self {
        let text = Buffer::default();
        let writer = text.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::INFO)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        Self {
            text,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// Everything so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock()).into_owned()
    }

    /// Waits for a line that has all `parts` and returns it.
    ///
    /// # Panics
    /// When none comes, with the whole log.
    pub async fn wait_for_line(&self, parts: &[&str]) -> String {
        let found = async {
            loop {
                let text = self.text();
                let mut lines = text.lines();
                if let Some(line) = lines.find(|line| parts.iter().all(|part| line.contains(part)))
                {
                    return line.to_owned();
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, found)
            .await
            .unwrap_or_else(|_| panic!("no line of the log has {parts:?}:\n{}", self.text()))
    }
}

impl Buffer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        // Bytes are whole whoever panicked while adding some.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
