//! The table of a benchmark that compares modes.

use super::{
    figures::{ModeFigures, STAGES},
    report::{Table, milliseconds},
};

/// One line per mode: rates with their spread, what a step costs by stage, ratios to the baselines that ran, and how many
/// answers are the first mode's.
pub(super) fn mode_table(results: &[ModeFigures]) -> Table {
    let titles = ["mode", "tok/s", "min", "max", "tok/step", "ms/step"];
    let baselines: Vec<String> = results
        .first()
        .into_iter()
        .flat_map(|figures| &figures.ratios)
        .map(|ratio| format!("/ {}", ratio.to))
        .collect();
    let baselines = baselines.iter().map(String::as_str);
    let titles = titles
        .into_iter()
        .chain(STAGES)
        .chain(["first ms"])
        .chain(baselines)
        .chain(["same"]);
    let mut table = Table::new(titles);
    for result in results {
        let rate = result.tokens_per_second;
        let mut cells = vec![
            result.mode.clone(),
            format!("{:.1}", rate.median),
            format!("{:.1}", rate.min),
            format!("{:.1}", rate.max),
            format!("{:.2}", result.tokens_per_step.median),
            milliseconds(result.step_ms.median),
        ];
        cells.extend(result.stage_ms.0.map(|stage| milliseconds(stage.median)));
        cells.push(milliseconds(result.time_to_first_token_ms.median));
        let ratios = result.ratios.iter();
        cells.extend(ratios.map(|ratio| format!("{:.3}", ratio.tokens_per_second.median)));
        cells.push(format!("{}/{}", result.same_answers, result.answers));
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bench::figures::{ByStage, Cost, Run},
        mode::Mode,
    };

    #[test]
    fn a_line_has_the_figures_and_its_ratios() {
        let run = |seconds: f64, steps: u32| Run {
            repetition: 0,
            prompt: 0,
            cost: Cost {
                answers: 1,
                completion_tokens: 101,
                steps,
                forwards: steps,
                decode_seconds: seconds,
                time_to_first_token_seconds: 0.02,
                stage_seconds: ByStage([0.0, 0.0, 0.0, 0.0, seconds, 0.0]),
            },
            same_answers: 1,
        };
        let modes = [Mode::Ar, Mode::Tree(Some(8))];
        let runs = vec![vec![run(0.1, 100)], vec![run(0.05, 25)]];
        let text = mode_table(&ModeFigures::of_modes(&modes, runs)).render();
        let cells = |line: usize| -> Vec<&str> {
            text.lines().nth(line).unwrap().split_whitespace().collect()
        };
        assert_eq!(
            cells(2),
            [
                "tree:8", "2000.0", "2000.0", "2000.0", "4.00", "2.000", "0.000", "0.000", "0.000",
                "0.000", "2.000", "0.000", "20.00", "2.000", "1/1"
            ]
        );
        assert!(text.starts_with("mode"), "{text}");
        assert!(
            text.lines().next().unwrap().ends_with("/ ar  same"),
            "{text}"
        );
    }
}
