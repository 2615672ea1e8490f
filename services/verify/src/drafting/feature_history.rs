//! The last feature rows of a sequence, to prime a drafter with.

/// Keeps the last `window` rows.
pub(crate) struct FeatureHistory {
    hidden_size: usize,
    window: usize,
    /// Position after the last row.
    end: u32,
    /// At most twice the window, so that old rows are dropped in bulk.
    rows: Vec<f32>,
}

impl FeatureHistory {
    pub(crate) fn new(hidden_size: usize, window: usize) -> Self {
        Self {
            hidden_size,
            window,
            end: 0,
            rows: Vec::new(),
        }
    }

    /// Appends rows `[n, hidden_size]` for the positions from `start`. A gap makes everything before it useless.
    pub(crate) fn push(&mut self, start: u32, rows: &[f32]) {
        if start != self.end {
            self.rows.clear();
        }
        self.rows.extend_from_slice(rows);
        self.end = start + (rows.len() / self.hidden_size) as u32;
        let limit = self.window * self.hidden_size;
        if self.rows.len() > 2 * limit {
            self.rows.drain(..self.rows.len() - limit);
        }
    }

    /// The last rows, at most the window and at most `most`, with the position of the first.
    pub(crate) fn last(&self, most: usize) -> (u32, &[f32]) {
        let held = self.rows.len() / self.hidden_size;
        let count = held.min(self.window).min(most);
        let rows = &self.rows[(held - count) * self.hidden_size..];
        (self.end - count as u32, rows)
    }

    pub(crate) fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_last_window() {
        let mut history = FeatureHistory::new(2, 3);
        for position in 0..20u32 {
            let value = position as f32;
            history.push(position, &[value, -value]);
            let (start, rows) = history.last(10);
            assert_eq!(start + rows.len() as u32 / 2, position + 1);
            assert_eq!(rows.len(), 2 * 3.min(position as usize + 1));
            assert_eq!(rows[rows.len() - 2], value);
            assert_eq!(rows[0], start as f32);
        }
        assert_eq!(history.last(1), (19, &[19.0, -19.0][..]));
    }

    #[test]
    fn a_gap_starts_anew() {
        let mut history = FeatureHistory::new(1, 8);
        history.push(0, &[1.0, 2.0]);
        history.push(5, &[6.0]);
        assert_eq!(history.last(8), (5, &[6.0][..]));
    }
}
