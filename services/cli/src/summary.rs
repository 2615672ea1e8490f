//! The statistics of a generation for a person, on stderr.

use std::fmt::Write as _;

use console::style;
use treespec_rpc::proto::{
    coordinator::v1::finished::Stop,
    verify::v1::{SpeculationStats, StageSeconds},
};

use crate::answer::{Answer, finish_reason_name};

const BAR_CELLS: usize = 24;
/// Depths below this share of the steps are left out: they add lines, not information.
const SMALLEST_SHARE: f64 = 0.005;

/// The summary, several lines with a final newline. Colours only when stderr shows them.
pub(crate) fn render(answer: &Answer, mode: &str) -> String {
    let stats = &answer.stats;
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = writeln!(
        text,
        "{} tokens · {} tok/s · {} tokens per step · mode {mode}",
        emphasis(&answer.usage.completion_tokens.to_string()),
        emphasis(&format!("{:.1}", answer.tokens_per_second())),
        emphasis(&format!("{:.2}", stats.tokens_per_step)),
    );
    let _ = writeln!(
        text,
        "{} prompt {} tokens · first token {} · decode {} in {} steps · finish {}{}",
        label("run"),
        answer.usage.prompt_tokens,
        seconds(stats.time_to_first_token_seconds),
        seconds(stats.decode_seconds),
        stats.steps,
        finish_reason_name(answer.finish_reason),
        match &answer.stop {
            Some(Stop::StopString(string)) => format!(" {string:?}"),
            Some(Stop::StopTokenId(_)) | None => String::new(),
        },
    );
    // Unknown when a stop string ended the answer.
    if let Some(spent) = stats.stage_seconds {
        let _ = writeln!(text, "{} {}", label("stages"), stages(spent));
    }
    if stats.fallback_steps > 0 || stats.stale_drafts > 0 {
        let _ = writeln!(
            text,
            "{} {} steps without a draft, {} drafts too late",
            label("lost"),
            stats.fallback_steps,
            stats.stale_drafts,
        );
    }
    text.push_str(&acceptance(stats));
    text
}

fn stages(spent: StageSeconds) -> String {
    let StageSeconds {
        draft,
        head,
        tree,
        wire,
        verify,
        accept,
    } = spent;
    [
        ("draft", draft),
        ("head", head),
        ("tree", tree),
        ("wire", wire),
        ("verify", verify),
        ("accept", accept),
    ]
    .map(|(stage, spent)| format!("{stage} {}", seconds(spent)))
    .join(" · ")
}

/// One line per depth: in how many steps the accepted path reached it.
fn acceptance(stats: &SpeculationStats) -> String {
    let mut text = String::new();
    if stats.steps == 0 {
        return text;
    }
    let shares = stats
        .accepted_by_depth
        .iter()
        .map(|&steps| f64::from(steps) / f64::from(stats.steps))
        .take_while(|&share| share >= SMALLEST_SHARE);
    for (index, share) in shares.enumerate() {
        let name = if index == 0 { "accepted" } else { "" };
        let _ = writeln!(
            text,
            "{} depth {:>2} {} {:>3.0} %",
            label(name),
            index + 1,
            style(bar(share)).for_stderr().green(),
            share * 100.0
        );
    }
    text
}

/// A bar of [`BAR_CELLS`] cells, in eighths of a cell.
fn bar(share: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR_CELLS * 8) as f64).round() as usize;
    let drawn = "█".repeat(eighths / 8) + EIGHTHS[eighths % 8];
    format!("{drawn:<BAR_CELLS$}")
}

fn label(text: &str) -> String {
    style(format!("{text:>9}")).for_stderr().dim().to_string()
}

fn emphasis(text: &str) -> String {
    style(text).for_stderr().bold().to_string()
}

/// Milliseconds below a second, seconds above.
fn seconds(value: f64) -> String {
    if value < 1.0 {
        format!("{:.1} ms", value * 1e3)
    } else {
        format!("{value:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use treespec_rpc::proto::verify::v1::Usage;

    use super::*;

    #[test]
    fn the_numbers_of_a_person_are_there() {
        console::set_colors_enabled_stderr(false);
        let answer = Answer {
            usage: Usage {
                prompt_tokens: 38,
                completion_tokens: 101,
                cached_tokens: 0,
            },
            stats: SpeculationStats {
                steps: 40,
                tokens_per_step: 2.5,
                accepted_by_depth: vec![40, 20, 0, 0],
                decode_seconds: 2.0,
                time_to_first_token_seconds: 0.19,
                fallback_steps: 3,
                ..Default::default()
            },
            ..Default::default()
        };
        let text = render(&answer, "tree:8");
        assert!(
            text.starts_with("101 tokens · 50.0 tok/s · 2.50 tokens per step · mode tree:8\n"),
            "{text}"
        );
        assert!(
            text.contains("first token 190.0 ms · decode 2.00 s in 40 steps"),
            "{text}"
        );
        assert!(text.contains("3 steps without a draft"), "{text}");
        assert!(
            text.contains("depth  1 ████████████████████████ 100 %\n"),
            "{text}"
        );
        assert!(
            text.contains("depth  2 ████████████             "),
            "{text}"
        );
        assert!(!text.contains("depth  3"), "{text}");
    }

    #[test]
    fn plain_decoding_has_no_acceptance_lines() {
        assert_eq!(
            acceptance(&SpeculationStats {
                steps: 5,
                ..Default::default()
            }),
            ""
        );
        assert_eq!(acceptance(&SpeculationStats::default()), "");
    }

    #[test]
    fn bars_are_filled_in_eighths() {
        assert_eq!(bar(0.0), " ".repeat(BAR_CELLS));
        assert_eq!(bar(7.0), "█".repeat(BAR_CELLS));
        assert_eq!(bar(1.0 / 48.0).trim_end(), "▌");
    }
}
