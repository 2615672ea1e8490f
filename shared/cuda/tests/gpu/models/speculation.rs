//! Answers through a speculator: drafts, rules and couplings change how fast they come and no token.

use rand::SeedableRng;
use rand::rngs::StdRng;
use treespec_checkpoint::{CouplingProfile, TemperatureFit};
use treespec_cuda::CudaSpeculator;
use treespec_engine::{
    Backend, BlockTable, ContextId, DraftShape, DrafterOptions, HeadRequest, RowBatch, RowChoices,
    SequenceRows, SpeculativeStep, Speculator, StepBatch, TreeRows,
};
use treespec_sampling::{Coupling, Ranking, TokenCounts, TokenRules};
use treespec_tree::TokenTree;

use super::rules::random_rules;
use super::scene::{CASES, KV_TOKENS, Tables, chain, checkpoints, prompt};

/// How answers are made; without a shape by plain decoding.
#[derive(Debug, Clone, Copy)]
struct Way {
    shape: Option<DraftShape>,
    ranking: Option<Ranking>,
}

const PLAIN: Way = Way {
    shape: None,
    ranking: None,
};

/// An answer under way.
struct Answer {
    table: BlockTable,
    context: ContextId,
    rules: TokenRules,
    prompt: usize,
    ids: Vec<u32>,
}

impl Answer {
    /// Runs the prompt and opens a context.
    fn start(
        speculator: &mut CudaSpeculator,
        table: BlockTable,
        tokens: &[u32],
        rules: &TokenRules,
    ) -> Self {
        let mut rules = rules.clone();
        if rules.counts_tokens() {
            rules.counts = TokenCounts::from_prompt(tokens);
        }
        let mut head = vec![None; tokens.len()];
        head[tokens.len() - 1] = Some(HeadRequest::ARGMAX);
        let rows = SequenceRows {
            sampling: Some(RowChoices {
                processors: rules.processors(),
                grammar: &[],
                counted_rows: tokens.len(),
            }),
            features: true,
            ..chain(&table, 0, tokens, &head)
        };
        let sequences = vec![rows];
        let output = speculator
            .forward(&RowBatch { sequences })
            .unwrap()
            .remove(0);
        let context = speculator.drafter().open().unwrap();
        speculator
            .drafter()
            .append_context(context, 0, &output.features)
            .unwrap();
        let row = &output.head[0];
        let first = row.chosen.unwrap_or(row.top[0]).token;
        Self {
            context,
            rules,
            prompt: tokens.len(),
            ids: vec![first],
            table,
        }
    }

    fn committed(&self) -> usize {
        self.prompt + self.ids.len() - 1
    }

    fn root(&self) -> u32 {
        *self.ids.last().unwrap()
    }

    /// Takes what a step accepted. The counts end before the new root.
    fn extend(&mut self, accepted: Vec<u32>, bonus: u32) {
        if self.rules.counts_tokens() {
            self.rules.counts.push(self.root());
            accepted.iter().for_each(|&id| self.rules.counts.push(id));
        }
        self.ids.extend(accepted);
        self.ids.push(bonus);
    }

    fn step(&self, shape: DraftShape, ranking: Option<Ranking>) -> SpeculativeStep<'_> {
        SpeculativeStep {
            table: &self.table,
            committed: self.committed(),
            root: self.root(),
            context: self.context,
            shape,
            max_depth: 60,
            head: HeadRequest::ARGMAX,
            sampling: Some(self.rules.processors()),
            coupling: ranking.map(|ranking| Coupling {
                seed: self.rules.params.seed.unwrap_or(0),
                temperature: self.rules.params.temperature,
                ranking,
            }),
        }
    }
}

/// Answers of `count` tokens, and the steps that they took.
fn generate(
    speculator: &mut CudaSpeculator,
    tables: &mut Tables,
    prompts: &[Vec<u32>],
    rules: &[TokenRules],
    way: Way,
    count: usize,
) -> (Vec<Vec<u32>>, usize) {
    let mut answers: Vec<Answer> = prompts
        .iter()
        .zip(rules)
        .map(|(tokens, rules)| {
            let table = tables.table(tokens.len() + 300);
            Answer::start(speculator, table, tokens, rules)
        })
        .collect();
    let mut steps = 0;
    while answers.iter().any(|answer| answer.ids.len() < count) {
        steps += 1;
        let paths: Vec<(Vec<u32>, u32)> = match way.shape {
            Some(shape) => {
                let batch: Vec<SpeculativeStep<'_>> = answers
                    .iter()
                    .map(|answer| answer.step(shape, way.ranking))
                    .collect();
                let done = speculator.speculate(&batch).unwrap();
                done.iter()
                    .map(|s| {
                        let path = &s.verified.acceptance.path;
                        let tokens = path[1..].iter().map(|&n| s.tree.tokens()[n]).collect();
                        (tokens, s.verified.acceptance.bonus)
                    })
                    .collect()
            }
            None => {
                let roots: Vec<TokenTree> = answers
                    .iter()
                    .map(|answer| TokenTree::root_only(answer.root()))
                    .collect();
                let trees = answers
                    .iter()
                    .zip(&roots)
                    .map(|(answer, tree)| TreeRows {
                        table: &answer.table,
                        committed: answer.committed(),
                        tree,
                        head: HeadRequest::ARGMAX,
                        sampling: Some(RowChoices::from(answer.rules.processors())),
                        features: false,
                    })
                    .collect();
                let rows = Vec::new();
                let output = speculator.step(&StepBatch { rows, trees }).unwrap();
                output
                    .trees
                    .iter()
                    .map(|t| (Vec::new(), t.acceptance.bonus))
                    .collect()
            }
        };
        for (answer, (accepted, bonus)) in answers.iter_mut().zip(paths) {
            answer.extend(accepted, bonus);
        }
    }
    let done = answers.into_iter().map(|mut answer| {
        speculator.drafter().close(answer.context);
        tables.pool.release(&mut answer.table);
        answer.ids.truncate(count);
        answer.ids
    });
    (done.collect(), steps)
}

#[test]
fn speculation_changes_no_token() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        for kind in ["drafter", "drafter_fit"] {
            let (target, drafter) = checkpoints(name, kind);
            let options = DrafterOptions::default();
            let mut speculator =
                CudaSpeculator::load(&device, &target, &drafter, KV_TOKENS, &options, &mut |_| {})
                    .unwrap();
            let mut tables = Tables::new(&speculator);
            for prompts in [
                vec![prompt(20, 33)],
                vec![prompt(21, 5), prompt(22, 64), prompt(23, 130)],
            ] {
                let rules = vec![TokenRules::default(); prompts.len()];
                let mut run =
                    |way| generate(&mut speculator, &mut tables, &prompts, &rules, way, 60);
                let (plain, plain_steps) = run(PLAIN);
                for shape in [
                    DraftShape::Chain,
                    DraftShape::Tree { budget: 1 },
                    DraftShape::Tree { budget: 8 },
                    DraftShape::Tree { budget: 33 },
                    DraftShape::Tree { budget: 63 },
                ] {
                    let (ids, steps) = run(Way {
                        shape: Some(shape),
                        ranking: None,
                    });
                    assert_eq!(ids, plain, "{name} {kind} {shape:?}");
                    println!("{name} {kind} {shape:?}: {steps} steps for {plain_steps}");
                }
            }
        }
    }
}

/// A fit that takes some of the noise at the first depths and none behind them.
pub(super) fn profile(depths: usize) -> CouplingProfile {
    let gaps = vec![0.25, 0.5, 1.0, 2.0, 4.0];
    let share = |rank: usize, gap: usize| match rank {
        0 => 0.4 + 0.1 * gap as f32,
        rank => 0.3 / (rank * (gap + 1)) as f32,
    };
    let ranks = |_| (0..12).map(|rank| (0..6).map(|gap| share(rank, gap)).collect());
    let fit = |temperature| TemperatureFit {
        temperature,
        tau: (0..depths).map(|depth| 0.8 / (1 + depth) as f32).collect(),
        acceptance: (0..depths).map(|depth| ranks(depth).collect()).collect(),
    };
    CouplingProfile {
        gaps,
        fits: vec![fit(0.4), fit(1.0)],
    }
}

#[test]
fn rules_and_couplings_change_no_token() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let (target, mut drafter) = checkpoints(name, "drafter_fit");
        drafter.coupling = Some(profile(3));
        let options = DrafterOptions::default();
        let mut speculator =
            CudaSpeculator::load(&device, &target, &drafter, KV_TOKENS, &options, &mut |_| {})
                .unwrap();
        assert_eq!(
            speculator.drafter().coupling_profile(),
            drafter.coupling.as_ref()
        );
        let vocabulary = speculator.spec().vocab_size;
        let mut tables = Tables::new(&speculator);
        let mut random = StdRng::seed_from_u64(44);
        let prompts = [prompt(31, 12), prompt(32, 64), prompt(33, 130)];
        let mut before: Option<(Vec<TokenRules>, Vec<Vec<u32>>)> = None;
        for round in 0..5 {
            let rules: Vec<TokenRules> = prompts
                .iter()
                .map(|tokens| {
                    let mut rules = random_rules(&mut random, vocabulary, tokens);
                    // Within the answer.
                    rules.early.until += 8;
                    rules
                })
                .collect();
            let mut run = |rules: &[TokenRules], way| {
                generate(&mut speculator, &mut tables, &prompts, rules, way, 40)
            };
            let (plain, plain_steps) = run(&rules, PLAIN);
            for shape in [
                DraftShape::Chain,
                DraftShape::Tree { budget: 8 },
                DraftShape::Tree { budget: 63 },
            ] {
                for ranking in [None, Some(Ranking::Full), Some(Ranking::Fitted)] {
                    let way = Way {
                        shape: Some(shape),
                        ranking,
                    };
                    let (ids, steps) = run(&rules, way);
                    assert_eq!(ids, plain, "{name}, round {round}, {way:?}, {rules:?}");
                    println!("{name} {way:?}: {steps} steps for {plain_steps}");
                }
            }
            // What was here in between leaves nothing behind.
            if let Some((rules, ids)) = &before {
                assert_eq!(&run(rules, PLAIN).0, ids, "{name}, round {round}");
            }
            before = Some((rules, plain));
        }
    }
}
