//! Progress of loading weights: events for a parent process, or a bar for a person at a terminal.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{Announcer, Event};

/// Shortest time between two events; the loader reports every tensor.
const EVENT_INTERVAL: Duration = Duration::from_millis(100);

/// Reports how far a load is. The bar disappears when the reporter is dropped.
#[derive(Debug)]
pub struct LoadReporter {
    announcer: Announcer,
    bar: ProgressBar,
    last_event: Option<Instant>,
}

impl LoadReporter {
    /// A reporter for one load. `label` names what is loaded. The bar shows only when nobody listens to events and
    /// stderr is a terminal.
    pub fn new(announcer: Announcer, label: &str) -> Self {
        let bar = if announcer.is_active() || !std::io::stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
        };
        let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.set_message(label.to_owned());
        Self {
            announcer,
            bar,
            last_event: None,
        }
    }

    /// Reports `done_bytes` of `total_bytes`.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        self.bar.set_length(total_bytes);
        self.bar.set_position(done_bytes);
        let due = self
            .last_event
            .is_none_or(|last| last.elapsed() >= EVENT_INTERVAL);
        if due || done_bytes >= total_bytes {
            self.last_event = Some(Instant::now());
            self.announcer.announce(&Event::Loading {
                done_bytes,
                total_bytes,
            });
        }
    }
}

impl Drop for LoadReporter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_thinned_out_but_the_last_is_always_sent() {
        let (read, write) = std::io::pipe().expect("pipe");
        let mut reporter = LoadReporter::new(Announcer::to(write), "weights");
        for done in 0..=1000 {
            reporter.update(done, 1000);
        }
        drop(reporter);
        let written = std::io::read_to_string(read).expect("utf-8");
        let events: Vec<Event> = written
            .lines()
            .map(|line| Event::parse(line).expect("event"))
            .collect();
        assert!(events.len() < 100, "{} events", events.len());
        let last = Event::Loading {
            done_bytes: 1000,
            total_bytes: 1000,
        };
        assert_eq!(events.last(), Some(&last));
    }
}
