//! What every benchmark leaves behind: a table for people, one JSON schema for programs.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Version of [`Report`]'s fields; grows when one changes its meaning or goes away.
const SCHEMA_VERSION: u32 = 2;

/// One benchmark run as JSON. `Config` and `Results` belong to the benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Report<Config, Results> {
    schema_version: u32,
    /// For example `bench sweep`.
    command: &'static str,
    treespec_version: &'static str,
    machine: Machine,
    /// The commit of the checkout in the current directory, with `-dirty` when files differ from it.
    revision: Option<String>,
    config: Config,
    results: Vec<Results>,
}

#[derive(Debug, Serialize)]
struct Machine {
    cpu: Option<String>,
    cores: usize,
    /// The GPU that was measured, where this process used one.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
}

impl<Config: Serialize, Results: Serialize> Report<Config, Results> {
    /// A report about this machine.
    pub(crate) fn new(command: &'static str, config: Config, results: Vec<Results>) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            command,
            treespec_version: env!("CARGO_PKG_VERSION"),
            machine: Machine {
                cpu: fs::read_to_string("/proc/cpuinfo")
                    .ok()
                    .and_then(|info| cpu_model(&info)),
                cores: thread::available_parallelism().map_or(1, usize::from),
                gpu: None,
            },
            revision: revision(),
            config,
            results,
        }
    }

    /// Names the GPU that was measured.
    #[must_use]
    pub(crate) fn with_gpu(mut self, name: Option<String>) -> Self {
        self.machine.gpu = name;
        self
    }

    /// Writes the report to `path`.
    ///
    /// # Errors
    /// When the file can't be written.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut text =
            serde_json::to_string_pretty(self).context("cannot write the report as JSON")?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

fn revision() -> Option<String> {
    let output = Command::new("git")
        .args([
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
            "--exclude=*",
        ])
        .stderr(Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned())
}

/// Milliseconds for a table: four digits, and no finer than a microsecond.
pub(crate) fn milliseconds(value: f64) -> String {
    let decimals = match value {
        value if value < 10.0 => 3,
        value if value < 100.0 => 2,
        value if value < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// A table with right-aligned cells under left-aligned first cells.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub(crate) fn new<'a>(titles: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            rows: vec![titles.into_iter().map(str::to_owned).collect()],
        }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table as text, one line a row.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows
                    .iter()
                    .filter_map(|row| row.get(column))
                    .map(|cell| cell.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, &width))| {
                    if column == 0 {
                        format!("{cell:<width$}")
                    } else {
                        format!("{cell:>width$}")
                    }
                })
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned() {
        let mut table = Table::new(["mode", "tok/s"]);
        table.row(["ar".into(), "9.5".into()]);
        table.row(["tree:16".into(), "120.0".into()]);
        assert_eq!(
            table.render(),
            "mode     tok/s\nar         9.5\ntree:16  120.0\n"
        );
    }

    #[test]
    fn the_schema_has_its_fields() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        Report::new("bench sweep", serde_json::json!({"a": 1}), vec![1])
            .write(&path)
            .unwrap();
        let json: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(json["schema_version"], 2);
        assert_eq!(json["command"], "bench sweep");
        assert!(json["machine"]["cores"].as_u64().unwrap() > 0);
        assert_eq!(json["config"]["a"], 1);
        assert_eq!(json["results"][0], 1);
    }

    #[test]
    fn milliseconds_have_four_digits() {
        let shown = [0.0051, 0.25, 9.7, 44.61, 250.0, 1234.5].map(milliseconds);
        assert_eq!(shown, ["0.005", "0.250", "9.700", "44.61", "250.0", "1234"]);
    }

    #[test]
    fn the_cpu_name_is_found() {
        let info = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n";
        assert_eq!(cpu_model(info), Some("A CPU @ 2 GHz".into()));
        assert_eq!(cpu_model("processor: 0"), None);
    }
}
