//! Progress bars of the services that load weights, on stderr when it is a terminal.

use std::collections::HashMap;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::role::Role;

/// One bar per loading service.
pub(super) struct LoadDisplay {
    bars: MultiProgress,
    by_role: HashMap<Role, ProgressBar>,
}

impl LoadDisplay {
    /// Without a terminal on stderr nothing is drawn.
    pub(super) fn new() -> Self {
        Self {
            bars: MultiProgress::new(),
            by_role: HashMap::new(),
        }
    }

    /// A handle to print lines above the bars.
    pub(super) fn bars(&self) -> MultiProgress {
        self.bars.clone()
    }

    /// Shows that `role` has read `done` of `total` bytes.
    pub(super) fn update(&mut self, role: Role, done: u64, total: u64) {
        let bar = self.by_role.entry(role).or_insert_with(|| {
            let bar = self.bars.add(ProgressBar::new(total).with_style(style()));
            bar.set_prefix(role.name());
            bar.set_message("loading weights");
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Shows that `role` is ready.
    pub(super) fn finish(&mut self, role: Role) {
        if let Some(bar) = self.by_role.get(&role) {
            bar.finish_with_message("ready");
        }
    }

    /// Removes all bars from the screen.
    pub(super) fn clear(&mut self) {
        for (_, bar) in self.by_role.drain() {
            bar.finish_and_clear();
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template(
        "{prefix:>11} {wide_bar:.cyan/dim} {bytes:>10} of {total_bytes:10} {msg:15}",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_valid_and_a_life_cycle_needs_no_terminal() {
        assert!(ProgressStyle::with_template("{prefix:>11} {wide_bar:.cyan/dim}").is_ok());
        let mut display = LoadDisplay::new();
        display.update(Role::Draft, 1, 10);
        display.update(Role::Draft, 10, 10);
        display.finish(Role::Draft);
        display.finish(Role::Verify);
        display.clear();
    }
}
