//! Where the time of a step goes on a GPU, by the kind of kernel.

use serde::Serialize;

use super::statistics::Spread;

/// Kinds of kernels, as the tables name them, in the order of a step.
const CLASSES: [&str; 10] = [
    "rows",
    "linear",
    "rotary",
    "attention",
    "head",
    "select",
    "sampling",
    "tree",
    "acceptance",
    "other",
];

/// The kernels of one kind in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct KernelClass {
    pub(super) class: &'static str,
    /// Launches of a step.
    pub(super) launches: usize,
    /// Milliseconds of a step.
    pub(super) ms: Spread,
    /// Names of the kernels.
    pub(super) kernels: Vec<&'static str>,
}

/// The kind of the kernel `name`. The first part that occurs in the name decides.
fn class_of(name: &str) -> &'static str {
    const PARTS: [(&str, &str); 17] = [
        ("head_", "select"),
        ("linear", "linear"),
        ("attention", "attention"),
        ("rotary", "rotary"),
        ("accepted_rows", "rows"),
        ("accept", "acceptance"),
        ("advance", "acceptance"),
        ("compact", "acceptance"),
        ("draft_", "tree"),
        ("sampl", "sampling"),
        ("penal", "sampling"),
        ("process", "sampling"),
        ("choose", "sampling"),
        ("row", "rows"),
        ("embed", "rows"),
        ("norm", "rows"),
        ("copy", "rows"),
    ];
    PARTS
        .iter()
        .find(|(part, _)| name.contains(part))
        .map_or("other", |&(_, class)| class)
}

/// A kernel of a profiled step and its milliseconds.
type Launch = (&'static str, f32);

/// The kinds of the kernels of a step. The head is a linear layer like others: the one whose logits are selected from.
fn classes_of(step: &[Launch]) -> Vec<&'static str> {
    let mut classes: Vec<&'static str> = step.iter().map(|(name, _)| class_of(name)).collect();
    for index in 1..classes.len() {
        if matches!(classes[index], "select" | "sampling") && classes[index - 1] == "linear" {
            classes[index - 1] = "head";
        }
    }
    classes
}

/// The split of several profiled steps, each a list of kernels in order of their launch.
pub(super) fn split(steps: &[Vec<Launch>]) -> Vec<KernelClass> {
    let classified: Vec<Vec<(&'static str, Launch)>> = steps
        .iter()
        .map(|step| {
            classes_of(step)
                .into_iter()
                .zip(step.iter().copied())
                .collect()
        })
        .collect();
    CLASSES
        .iter()
        .filter_map(|&wanted| {
            let mut kernels = Vec::new();
            let mut launches = 0;
            let mut totals = Vec::with_capacity(steps.len());
            for step in &classified {
                let of_class = step.iter().filter(|(class, _)| *class == wanted);
                let of_class: Vec<Launch> = of_class.map(|&(_, launch)| launch).collect();
                launches = launches.max(of_class.len());
                totals.push(of_class.iter().map(|&(_, ms)| f64::from(ms)).sum());
                kernels.extend(of_class.iter().map(|&(name, _)| name));
            }
            kernels.sort_unstable();
            kernels.dedup();
            (launches > 0).then_some(KernelClass {
                class: wanted,
                launches,
                ms: Spread::of(totals)?,
                kernels,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_sorted_by_their_names() {
        let names = [
            ("linear_128x16", "linear"),
            ("head_select", "select"),
            ("head_argmax", "select"),
            ("attention_splits", "attention"),
            ("rotary_context", "rotary"),
            ("accept_tree", "acceptance"),
            ("advance_root", "acceptance"),
            ("kv_compaction", "acceptance"),
            ("draft_tree_64", "tree"),
            ("draft_chain", "tree"),
            ("gather_rows", "rows"),
            ("accepted_rows", "rows"),
            ("copy_words", "rows"),
            ("memset", "other"),
        ];
        for (name, class) in names {
            assert_eq!(class_of(name), class, "{name}");
            assert!(CLASSES.contains(&class));
        }
    }

    #[test]
    fn the_head_is_the_linear_layer_before_the_selection() {
        let step = [
            ("linear_64x16", 1.0),
            ("linear_256x16", 4.0),
            ("head_argmax", 0.5),
        ];
        assert_eq!(classes_of(&step), ["linear", "head", "select"]);
    }

    #[test]
    fn classes_are_summed_per_step() {
        let step = |scale: f32| {
            vec![
                ("embed_rows", scale),
                ("linear_128x8", 2.0 * scale),
                ("linear_64x8", scale),
            ]
        };
        let split = split(&[step(1.0), step(2.0), step(4.0)]);
        let [rows, linear] = &split[..] else {
            panic!("{split:?}")
        };
        assert_eq!(
            (rows.class, rows.launches, rows.ms.median),
            ("rows", 1, 2.0)
        );
        assert_eq!((linear.launches, linear.ms.median), (2, 6.0));
        assert_eq!((linear.ms.min, linear.ms.max), (3.0, 12.0));
        assert_eq!(linear.kernels, ["linear_128x8", "linear_64x8"]);
    }
}
