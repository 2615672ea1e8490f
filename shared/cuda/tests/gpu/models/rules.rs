//! Rows choose by the whole rules of their request: on the device what `treespec_sampling::sample` chooses from the
//! device's own logits.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_engine::{
    Backend, BlockTable, HeadRequest, HeadRow, RowBatch, RowChoices, RowSampling, SequenceRows,
    StepBatch, TreeRows, VerifiedTree, step_by_forward,
};
use treespec_sampling::{EarlyBans, LogitBias, TokenCounts, TokenMask, TokenRules, sample};
use treespec_tree::TokenTree;

use super::scene::{CASES, Tables, chain, prompt, run_chain, target};

/// Tokens that no rules of these tests forbid, so that there always is a choice.
const FREE: std::ops::Range<u32> = 5..12;
/// Tokens of trees and masks: few, so that choices are often nodes.
const COMMON: std::ops::Range<u32> = 5..15;

fn one_of<T: Copy>(random: &mut StdRng, values: &[T]) -> T {
    values[random.random_range(0..values.len())]
}

fn some_tokens(random: &mut StdRng, count: usize) -> Vec<u32> {
    (0..count)
        .map(|_| random.random_range(FREE.end..550))
        .collect()
}

/// Every rule now and then, some sequences without any. Early bans end within the next positions.
pub(super) fn random_rules(random: &mut StdRng, vocabulary: usize, tokens: &[u32]) -> TokenRules {
    let mut rules = TokenRules::default();
    if random.random_bool(0.15) {
        return rules;
    }
    rules.params.temperature = one_of(random, &[0.0, 0.5, 1.0, 3.0]);
    rules.params.seed = Some(random.random());
    if random.random_bool(0.3) {
        rules.params.top_k = Some(one_of(random, &[1, 4, 40]));
    }
    if random.random_bool(0.3) {
        rules.params.top_p = 0.8;
    }
    if random.random_bool(0.3) {
        rules.params.min_p = 0.02;
    }
    if random.random_bool(0.6) {
        rules.params.repetition_penalty = one_of(random, &[1.0, 1.3]);
        rules.params.presence_penalty = random.random_range(-1.0..1.0);
        rules.params.frequency_penalty = random.random_range(-1.0..1.0);
        rules.counts = TokenCounts::from_prompt(tokens);
        for _ in 0..random.random_range(0..20) {
            rules.counts.push(random.random_range(COMMON));
        }
    }
    if random.random_bool(0.4) {
        let count = one_of(random, &[3, 200]);
        let bias = some_tokens(random, count)
            .into_iter()
            .chain(COMMON)
            .map(|token| (token, random.random_range(-1.0f32..4.0)));
        rules.bias = LogitBias::new(bias.collect::<Vec<_>>()).unwrap();
    }
    if random.random_bool(0.6) {
        rules.allowed = Some(TokenMask::from_tokens(vocabulary, COMMON));
    }
    if random.random_bool(0.3) {
        rules.banned = some_tokens(random, 20);
    }
    if random.random_bool(0.4) {
        rules.early = EarlyBans {
            tokens: some_tokens(random, 200),
            until: (tokens.len() + random.random_range(0..4)) as u32,
        };
    }
    rules
}

/// A mask per row, or none.
fn random_masks(random: &mut StdRng, vocabulary: usize, rows: usize) -> Vec<TokenMask> {
    if random.random_bool(0.6) {
        return Vec::new();
    }
    (0..rows)
        .map(|_| {
            let own = COMMON.filter(|_| random.random_bool(0.4));
            TokenMask::from_tokens(vocabulary, own.chain([FREE.start]).collect::<Vec<u32>>())
        })
        .collect()
}

fn random_request(random: &mut StdRng) -> HeadRequest {
    HeadRequest {
        top_k: one_of(random, &[1, 5]),
        normaliser: random.random(),
        gather: None,
        rank: random.random(),
        processed: random.random_bool(0.3),
    }
}

fn tree_of_common_tokens(random: &mut StdRng, nodes: usize) -> TokenTree {
    let mut tree = TokenTree::root_only(random.random_range(COMMON));
    while tree.len() < nodes {
        let parent = random.random_range(0..tree.len());
        // Siblings differ: a token that is there already is refused.
        let _ = tree.push(parent, random.random_range(COMMON), 0.0);
    }
    tree
}

/// What a step says of its accepted path, as far as `request` asks.
fn said(verified: &VerifiedTree, request: HeadRequest) -> Vec<HeadRow> {
    let row = |row: &HeadRow| HeadRow {
        // NaN is unequal to itself.
        log_normaliser: match request.normaliser {
            true => row.log_normaliser,
            false => 0.0,
        },
        top: match request == HeadRequest::ARGMAX {
            true => Vec::new(),
            false => row.top.clone(),
        },
        ..row.clone()
    };
    verified.head.iter().map(row).collect()
}

#[test]
fn steps_choose_what_sampling_chooses_from_the_devices_logits() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut accepted = 0;
    for name in CASES {
        let mut gpu = target(&device, name);
        let vocabulary = gpu.spec().vocab_size;
        let mut tables = Tables::new(&gpu);
        let mut random = StdRng::seed_from_u64(40);
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|i| prompt(50 + i, 20 + 9 * i as usize))
            .collect();
        let own: Vec<BlockTable> = prompts
            .iter()
            .map(|tokens| {
                let table = tables.table(tokens.len() + 64);
                run_chain(&mut gpu, &table, 0, tokens);
                table
            })
            .collect();
        let mut rules: Vec<TokenRules> = prompts
            .iter()
            .map(|tokens| random_rules(&mut random, vocabulary, tokens))
            .collect();
        // Places and rows of a batch are used by other sequences, trees and rules from round to round.
        for round in 0..60 {
            let count = random.random_range(1..=prompts.len());
            let most = one_of(&mut random, &[1, 1, 6, 25, 60]);
            let trees: Vec<TokenTree> = (0..count)
                .map(|_| {
                    let nodes = random.random_range(1..=most);
                    tree_of_common_tokens(&mut random, nodes)
                })
                .collect();
            let places: Vec<usize> = (0..count).map(|i| (i + round) % prompts.len()).collect();
            for (rules, tokens) in rules.iter_mut().zip(&prompts) {
                match random.random_range(0..3) {
                    0 => *rules = random_rules(&mut random, vocabulary, tokens),
                    _ if rules.counts_tokens() => rules.counts.push(random.random_range(5..500)),
                    _ => {}
                }
            }
            let masks: Vec<Vec<TokenMask>> = trees
                .iter()
                .map(|tree| random_masks(&mut random, vocabulary, tree.len()))
                .collect();
            let plain = round % 3 == 0;
            let requests: Vec<HeadRequest> = (0..count)
                .map(|_| match plain {
                    true => HeadRequest::ARGMAX,
                    false => random_request(&mut random),
                })
                .collect();
            let batch = StepBatch {
                rows: Vec::new(),
                trees: (0..count)
                    .map(|i| TreeRows {
                        table: &own[places[i]],
                        committed: prompts[places[i]].len(),
                        tree: &trees[i],
                        head: requests[i],
                        sampling: Some(RowChoices {
                            processors: rules[places[i]].processors(),
                            grammar: &masks[i],
                            counted_rows: 0,
                        }),
                        features: false,
                    })
                    .collect(),
            };
            // There the host chooses, row by row.
            let expected = step_by_forward(&mut gpu, &batch).unwrap().trees;
            let got = gpu.step(&batch).unwrap().trees;
            for i in 0..count {
                let what = format!(
                    "{name}, round {round}, {} nodes, {} masks, {:?}, {:?}",
                    trees[i].len(),
                    masks[i].len(),
                    requests[i],
                    rules[places[i]]
                );
                assert_eq!(got[i].acceptance, expected[i].acceptance, "{what}");
                let (got, expected) = (said(&got[i], requests[i]), said(&expected[i], requests[i]));
                assert_eq!(got, expected, "{what}");
                accepted += got.len() - 1;
            }
        }
    }
    assert!(accepted > 20, "{accepted} accepted nodes show little");
}

/// The logits of the last rows of a chain, which lies in the cache.
fn dense(gpu: &mut impl Backend, table: &BlockTable, tokens: &[u32], rows: usize) -> Vec<Vec<f32>> {
    let first = tokens.len() - rows;
    let mut logits = vec![Vec::new(); rows];
    for token in 0..gpu.spec().vocab_size as u32 {
        let request = HeadRequest {
            gather: Some(token),
            ..HeadRequest::ARGMAX
        };
        let head = vec![Some(request); rows];
        let sequences = vec![chain(table, first, &tokens[first..], &head)];
        let output = gpu.forward(&RowBatch { sequences }).unwrap().remove(0);
        for (row, output) in logits.iter_mut().zip(output.head) {
            row.push(output.gathered.unwrap());
        }
    }
    logits
}

#[test]
fn prompt_rows_choose_what_sampling_chooses_from_their_logits() {
    let Some(device) = crate::device() else {
        return;
    };
    /// More than one forward takes.
    const TOKENS: usize = 530;
    for name in CASES {
        let mut gpu = target(&device, name);
        let vocabulary = gpu.spec().vocab_size;
        let mut random = StdRng::seed_from_u64(41);
        let tokens = prompt(60, TOKENS);
        let table = Tables::new(&gpu).table(TOKENS);
        run_chain(&mut gpu, &table, 0, &tokens);
        let asking = 4;
        let first = TOKENS - asking;
        let logits = dense(&mut gpu, &table, &tokens, asking);
        for round in 0..30 {
            let mut rules = random_rules(&mut random, vocabulary, &tokens[..40]);
            // Some of the rows that ask are on each side.
            rules.early.until += (first - 39) as u32;
            let masks = random_masks(&mut random, vocabulary, TOKENS);
            let choices = RowChoices {
                processors: rules.processors(),
                grammar: &masks,
                counted_rows: one_of(&mut random, &[0, 500, first + 2, TOKENS]),
            };
            let mut head = vec![None; TOKENS];
            for request in &mut head[first..] {
                *request = Some(random_request(&mut random));
            }
            let silent = random.random_range(first..TOKENS);
            head[silent] = Some(HeadRequest {
                top_k: 0,
                gather: Some(9),
                ..HeadRequest::ARGMAX
            });
            let rows = SequenceRows {
                sampling: Some(choices),
                ..chain(&table, 0, &tokens, &head)
            };
            let sequences = vec![rows];
            let got = gpu.forward(&RowBatch { sequences }).unwrap().remove(0).head;
            assert_eq!(got.len(), asking);
            for (at, got) in got.iter().enumerate() {
                let row = first + at;
                let request = head[row].unwrap();
                let what = format!("{name}, round {round}, row {row}, {request:?}, {rules:?}");
                if choices.is_argmax() || row == silent {
                    assert_eq!((got.chosen, got.rank), (None, None), "{what}");
                    continue;
                }
                let sampling = RowSampling::new(choices, row, row as u32 + 1, || {
                    let counted = choices.counted_rows.min(row + 1);
                    tokens[counted..=row].to_vec()
                });
                let mut expected = got.clone();
                let own = &mut logits[at].clone();
                sampling.decide(own, &request, sample, &mut expected);
                assert!(got.chosen.is_some(), "{what}");
                assert_eq!(got.chosen, expected.chosen, "{what}");
                assert_eq!(
                    (got.rank, &got.top),
                    (expected.rank, &expected.top),
                    "{what}"
                );
                assert_eq!(got.rank.is_some(), request.rank, "{what}");
                let normalisers = (got.log_normaliser, expected.log_normaliser);
                assert_eq!(normalisers.0.to_bits(), normalisers.1.to_bits(), "{what}");
            }
        }
    }
}
