//! Sampling above temperature 0: a step chooses what `treespec_sampling::sample` chooses from the dense logits, and
//! drafts change nothing.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockPool, BlockTable, Colocated, CpuDrafter, CpuOptions, CpuTarget, DraftShape,
    Drafter as _, DrafterOptions, EngineError, ForwardOutput, HeadRequest, HeadRow, RowBatch,
    RowChoices, RowShape, SequenceRows, SpeculativeStep, Speculator as _, StepBatch, TargetOptions,
    TargetSpec, TreeRows, VerifiedTree, cpu::Isa,
};
use treespec_sampling::{Coupling, Processors, Ranking, SamplingParams, sample};
use treespec_tests::{DENSE_CASES, Expected, case_json, case_path};
use treespec_tree::TokenTree;

/// Tokens of an answer.
const ANSWER: usize = 32;

fn isas() -> Vec<Isa> {
    let mut isas = vec![Isa::detect(), Isa::Portable];
    if isas[0] == Isa::Avx512 {
        isas.push(Isa::Avx2);
    }
    isas
}

fn params(
    temperature: f32,
    top_k: Option<u32>,
    top_p: f32,
    min_p: f32,
    seed: u64,
) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed: Some(seed),
        ..SamplingParams::default()
    }
}

/// Temperatures with every filter, alone and together.
fn all_params() -> Vec<SamplingParams> {
    let mut all = Vec::new();
    for temperature in [0.3, 1.0, 1.5] {
        for (top_k, top_p, min_p) in [
            (None, 1.0, 0.0),
            (Some(5), 1.0, 0.0),
            (None, 0.9, 0.0),
            (None, 1.0, 0.05),
            (Some(20), 0.8, 0.01),
        ] {
            let seed = 1 + all.len() as u64 * 0x1234_5678_9ABC;
            all.push(params(temperature, top_k, top_p, min_p, seed));
        }
    }
    all
}

fn target(
    case: &str,
    drafter: Option<&DrafterCheckpoint>,
    threads: usize,
    isa: Option<Isa>,
) -> CpuTarget {
    let checkpoint = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
    let options = TargetOptions {
        cpu: CpuOptions {
            isa,
            ..CpuOptions::f32(threads)
        },
        kv_tokens: 1_024,
    };
    CpuTarget::load(&checkpoint, drafter, &options, &mut |_| {}).unwrap()
}

fn prompt(case: &str) -> Vec<u32> {
    let expected: Expected = case_json(case, "expected.json");
    let mut prompts = expected.prompts.into_iter().map(|one| one.prompt);
    prompts.find(|prompt| prompt.len() > 8).unwrap()
}

fn table(backend: &impl Backend, tokens: usize) -> BlockTable {
    let mut table = BlockTable::default();
    BlockPool::new(backend.spec().num_blocks)
        .grow(&mut table, tokens)
        .unwrap();
    table
}

/// A prompt in the cache: all of it but its last token, which is the root of the first step.
fn prefill(
    backend: &mut impl Backend,
    table: &BlockTable,
    prompt: &[u32],
    features: bool,
) -> Vec<f32> {
    let tokens = &prompt[..prompt.len() - 1];
    let head = vec![None; tokens.len()];
    let sequences = vec![SequenceRows {
        table,
        committed: 0,
        tokens,
        shape: RowShape::Chain,
        head: &head,
        sampling: None,
        features,
    }];
    backend
        .forward(&RowBatch { sequences })
        .unwrap()
        .remove(0)
        .features
}

fn step(
    backend: &mut impl Backend,
    table: &BlockTable,
    committed: usize,
    tree: &TokenTree,
    sampling: Option<&SamplingParams>,
    head: HeadRequest,
) -> Result<VerifiedTree, EngineError> {
    let trees = vec![TreeRows {
        table,
        committed,
        tree,
        head,
        sampling: sampling.map(|params| Processors::new(params).into()),
        features: false,
    }];
    let rows = Vec::new();
    let mut output = backend.step(&StepBatch { rows, trees })?;
    Ok(output.trees.remove(0))
}

fn decided(tree: &TokenTree, verified: &VerifiedTree) -> Vec<u32> {
    let acceptance = &verified.acceptance;
    let path = acceptance.path[1..].iter().map(|&node| tree.tokens()[node]);
    path.chain([acceptance.bonus]).collect()
}

/// The answer without drafts.
fn plain(backend: &mut impl Backend, prompt: &[u32], sampling: &SamplingParams) -> Vec<u32> {
    let table = table(backend, prompt.len() + ANSWER);
    prefill(backend, &table, prompt, false);
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + ANSWER {
        let committed = tokens.len() - 1;
        let root = TokenTree::root_only(tokens[committed]);
        let head = HeadRequest::ARGMAX;
        let verified = step(backend, &table, committed, &root, Some(sampling), head).unwrap();
        tokens.push(verified.acceptance.bonus);
    }
    tokens.split_off(prompt.len())
}

fn dense(row: &HeadRow, vocab_size: usize) -> Vec<f32> {
    let mut logits = vec![f32::NAN; vocab_size];
    for scored in &row.top {
        logits[scored.token as usize] = scored.score;
    }
    logits
}

/// The root of a tree is at position `committed`; a node of depth d chooses the token at `committed + d + 1`.
#[test]
fn every_node_chooses_what_sampling_chooses_from_its_dense_logits() {
    for case in DENSE_CASES {
        let prompt = prompt(case);
        for isa in isas() {
            for threads in [1, 3] {
                let mut backend = target(case, None, threads, Some(isa));
                let vocab_size = backend.spec().vocab_size;
                let table = table(&backend, prompt.len() + 32);
                prefill(&mut backend, &table, &prompt, false);
                let committed = prompt.len() - 1;
                let mut tree = TokenTree::root_only(prompt[committed]);
                for node in 0..14 {
                    tree.push(node / 2, 7 + node as u32, 0.0).unwrap();
                }
                let ancestors = tree.ancestors();
                let everything = HeadRequest {
                    top_k: vocab_size,
                    normaliser: true,
                    ..HeadRequest::ARGMAX
                };
                let head = vec![Some(everything); tree.len()];
                for sampling in all_params() {
                    let rows = SequenceRows {
                        table: &table,
                        committed,
                        tokens: tree.tokens(),
                        shape: RowShape::tree(&tree, &ancestors),
                        head: &head,
                        sampling: Some(Processors::new(&sampling).into()),
                        features: false,
                    };
                    let sequences = vec![rows];
                    let output = backend.forward(&RowBatch { sequences }).unwrap();
                    let processors = Processors::new(&sampling);
                    let expected: Vec<(u32, f32)> = output[0]
                        .head
                        .iter()
                        .zip(tree.depths())
                        .map(|(row, depth)| {
                            let position = committed as u32 + depth + 1;
                            let logits = &mut dense(row, vocab_size);
                            let choice = sample(logits, &processors, position).unwrap();
                            (choice.token, choice.logit)
                        })
                        .collect();
                    let rows = output[0].head.iter().map(|row| row.chosen.unwrap());
                    let chosen: Vec<(u32, f32)> = rows.map(|c| (c.token, c.score)).collect();
                    let what = format!("{case} {isa:?} {threads} threads {sampling:?}");
                    assert_eq!(chosen, expected, "{what}");

                    let sampled = Some(&sampling);
                    let verified =
                        step(&mut backend, &table, committed, &tree, sampled, everything).unwrap();
                    let path = &verified.acceptance.path;
                    let last = path.last().copied().unwrap();
                    assert_eq!(verified.acceptance.bonus, expected[last].0, "{what}");
                    for (row, &node) in verified.head.iter().zip(path) {
                        assert_eq!(row, &output[0].head[node], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn drafts_of_any_quality_change_no_token() {
    for case in DENSE_CASES {
        let prompt = prompt(case);
        let samplings = [
            params(1.0, None, 1.0, 0.0, 3),
            params(1.0, None, 0.9, 0.0, 4),
            params(0.6, Some(30), 0.95, 0.02, u64::MAX),
        ];
        for sampling in &samplings {
            let answer = plain(&mut target(case, None, 1, None), &prompt, sampling);
            let other = plain(&mut target(case, None, 3, None), &prompt, sampling);
            assert_eq!(answer, other, "{case} on other threads");
            let mut accepted = Vec::new();
            for drafter in ["drafter_fit", "drafter"] {
                for shape in [DraftShape::Chain, DraftShape::Tree { budget: 16 }] {
                    for ranking in [Ranking::Plain, Ranking::Full] {
                        let (tokens, drafted) =
                            speculative(case, drafter, &prompt, shape, sampling, ranking);
                        let what = format!("{case} {drafter} {shape:?} {ranking:?} {sampling:?}");
                        assert_eq!(tokens, answer, "{what}");
                        accepted.push(drafted);
                    }
                }
            }
            assert!(
                accepted[2] > 0 && accepted[3] > 0,
                "the fitted drafter's trees: {accepted:?}"
            );
            let tokens = with_random_trees(case, &prompt, &answer, sampling);
            assert_eq!(tokens, answer, "{case} random trees {sampling:?}");
        }
    }
}

/// The answer with a drafter, and how many of its drafted tokens were accepted.
fn speculative(
    case: &str,
    drafter: &str,
    prompt: &[u32],
    shape: DraftShape,
    sampling: &SamplingParams,
    ranking: Ranking,
) -> (Vec<u32>, usize) {
    let coupling = Coupling::of(sampling, ranking);
    let checkpoint = DrafterCheckpoint::open(&case_path(case, drafter)).unwrap();
    let model = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
    let options = DrafterOptions {
        cpu: CpuOptions::f32(1),
        ..DrafterOptions::default()
    };
    let mut drafter = CpuDrafter::load(&checkpoint, &model, &options, &mut |_| {}).unwrap();
    let mut backend = target(case, Some(&checkpoint), 2, None);
    let table = table(&backend, prompt.len() + ANSWER + 64);
    let features = prefill(&mut backend, &table, prompt, true);
    let context = drafter.open().unwrap();
    drafter.append_context(context, 0, &features).unwrap();
    let mut speculator = Colocated::new(backend, drafter).unwrap();
    let mut tokens = prompt.to_vec();
    let mut committed = prompt.len() - 1;
    let mut accepted = 0;
    while tokens.len() < prompt.len() + ANSWER {
        let steps = [SpeculativeStep {
            table: &table,
            committed,
            root: tokens[committed],
            context,
            shape,
            max_depth: 100,
            head: HeadRequest::ARGMAX,
            sampling: Some(Processors::new(sampling)),
            coupling,
        }];
        let done = speculator.speculate(&steps).unwrap().remove(0);
        tokens.extend(decided(&done.tree, &done.verified));
        committed += done.verified.acceptance.path.len();
        accepted += done.verified.acceptance.accepted();
    }
    tokens.truncate(prompt.len() + ANSWER);
    (tokens.split_off(prompt.len()), accepted)
}

/// The answer with trees of arbitrary shapes that hold the answer's own tokens in places.
fn with_random_trees(
    case: &str,
    prompt: &[u32],
    answer: &[u32],
    sampling: &SamplingParams,
) -> Vec<u32> {
    let mut backend = target(case, None, 3, None);
    let table = table(&backend, prompt.len() + ANSWER + 64);
    prefill(&mut backend, &table, prompt, false);
    let mut state = 12_345u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + ANSWER {
        let committed = tokens.len() - 1;
        let ahead = &answer[tokens.len() - prompt.len()..];
        let mut tree = TokenTree::root_only(tokens[committed]);
        for _ in 0..random(20) {
            let parent = random(tree.len());
            let right = ahead.get(tree.depths()[parent] as usize).copied();
            let token = match right {
                Some(token) if random(2) == 0 => token,
                _ => random(500) as u32,
            };
            // A second child of the same token is refused: one fewer node.
            let _ = tree.push(parent, token, 0.0);
        }
        let head = HeadRequest::ARGMAX;
        let verified = step(&mut backend, &table, committed, &tree, Some(sampling), head).unwrap();
        tokens.extend(decided(&tree, &verified));
    }
    tokens.truncate(prompt.len() + ANSWER);
    tokens.split_off(prompt.len())
}

/// A greedy sequence, a sampled one and a prompt whose last row is sampled, each as if alone.
#[test]
fn a_step_samples_some_of_its_sequences() {
    let case = DENSE_CASES[0];
    let prompt = prompt(case);
    let sampling = params(1.0, None, 0.9, 0.0, 8);
    let mut backend = target(case, None, 2, None);
    let mut pool = BlockPool::new(backend.spec().num_blocks);
    let tables = [(); 3].map(|()| {
        let mut table = BlockTable::default();
        pool.grow(&mut table, prompt.len() + 4).unwrap();
        table
    });
    let committed = prompt.len() - 1;
    let root = TokenTree::root_only(prompt[committed]);
    let mut expected = Vec::new();
    for sampling in [None, Some(&sampling)] {
        prefill(&mut backend, &tables[0], &prompt, false);
        let head = HeadRequest::ARGMAX;
        let verified = step(&mut backend, &tables[0], committed, &root, sampling, head).unwrap();
        assert_eq!(verified.head[0].chosen.is_some(), sampling.is_some());
        expected.push(verified.acceptance.bonus);
    }
    prefill(&mut backend, &tables[0], &prompt, false);
    prefill(&mut backend, &tables[1], &prompt, false);
    let mut head = vec![None; prompt.len()];
    head[committed] = Some(HeadRequest::ARGMAX);
    let choices = RowChoices::from(Processors::new(&sampling));
    let tree = |table, sampling| TreeRows {
        table,
        committed,
        tree: &root,
        head: HeadRequest::ARGMAX,
        sampling,
        features: false,
    };
    let output = backend
        .step(&StepBatch {
            rows: vec![SequenceRows {
                table: &tables[2],
                committed: 0,
                tokens: &prompt,
                shape: RowShape::Chain,
                head: &head,
                sampling: Some(RowChoices {
                    counted_rows: prompt.len(),
                    ..choices
                }),
                features: false,
            }],
            trees: vec![tree(&tables[0], None), tree(&tables[1], Some(choices))],
        })
        .unwrap();
    let bonus: Vec<u32> = output.trees.iter().map(|t| t.acceptance.bonus).collect();
    assert_eq!(bonus, expected);
    let row = &output.rows[0].head[0];
    assert_eq!(row.chosen.map(|chosen| chosen.token), Some(expected[1]));
    assert_eq!(row.top[0].token, expected[0]);
}

/// A device that knows the best token only.
struct BestOnly(CpuTarget);

impl Backend for BestOnly {
    fn spec(&self) -> &TargetSpec {
        self.0.spec()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        let sequences = batch.sequences.iter().map(|rows| SequenceRows {
            sampling: None,
            ..rows.clone()
        });
        self.0.forward(&RowBatch {
            sequences: sequences.collect(),
        })
    }

    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError> {
        self.0.compact(table, committed, path)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        self.0.head_topk(hidden, k)
    }
}

#[test]
fn a_device_that_does_not_sample_says_so() {
    let case = DENSE_CASES[0];
    let prompt = prompt(case);
    let mut backend = BestOnly(target(case, None, 1, None));
    let table = table(&backend, prompt.len() + 4);
    prefill(&mut backend, &table, &prompt, false);
    let committed = prompt.len() - 1;
    let root = TokenTree::root_only(prompt[committed]);
    let mut run = |sampling: &SamplingParams| {
        let head = HeadRequest::ARGMAX;
        step(&mut backend, &table, committed, &root, Some(sampling), head)
    };
    let error = run(&params(1.0, None, 1.0, 0.0, 1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("use temperature 0"), "{error}");
    assert!(run(&SamplingParams::default()).is_ok());
}
