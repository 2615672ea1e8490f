//! Target, drafter and both together on the tiny models of the reference cases, against the CPU and against themselves.

use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_cuda::{CudaDrafter, CudaSpeculator, CudaTarget, Device};
use treespec_engine::{
    Backend, BlockPool, BlockRequest, BlockTable, ContextId, CpuDrafter, CpuOptions, CpuTarget,
    DraftRequest, DraftShape, Drafter, DrafterOptions, HeadRequest, HeadRow, RowBatch, RowShape,
    SequenceRows, SpeculativeStep, Speculator, StepBatch, TargetOptions, TreeRows, build_draft,
    step_by_forward,
};
use treespec_tree::TokenTree;

const CASES: [&str; 2] = ["01_llama_gqa_tied", "03_qwen3_headdim"];
const KV_TOKENS: usize = 4_096;

/// The best three with their normaliser.
const TOP: HeadRequest = HeadRequest {
    top_k: 3,
    normaliser: true,
    ..HeadRequest::ARGMAX
};

fn case(name: &str) -> PathBuf {
    let here = PathBuf::from("tests/fixtures/cases").join(name);
    if here.exists() {
        return here;
    }
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/cases")
        .join(name)
}

fn checkpoints(name: &str, drafter: &str) -> (TargetCheckpoint, DrafterCheckpoint) {
    (
        TargetCheckpoint::open(&case(name).join("model")).unwrap(),
        DrafterCheckpoint::open(&case(name).join(drafter)).unwrap(),
    )
}

fn target(device: &Arc<Device>, name: &str) -> CudaTarget {
    let (target, drafter) = checkpoints(name, "drafter_fit");
    CudaTarget::load(device, &target, Some(&drafter), KV_TOKENS, &mut |_| {}).unwrap()
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..len).map(|_| random.random_range(5..500)).collect()
}

/// Blocks for one sequence after another.
struct Tables {
    pool: BlockPool,
}

impl Tables {
    fn new(backend: &impl Backend) -> Self {
        Self {
            pool: BlockPool::new(backend.spec().num_blocks),
        }
    }

    fn table(&mut self, rows: usize) -> BlockTable {
        let mut table = BlockTable::default();
        self.pool.grow(&mut table, rows).unwrap();
        table
    }
}

fn chain<'a>(
    table: &'a BlockTable,
    committed: usize,
    tokens: &'a [u32],
    head: &'a [Option<HeadRequest>],
) -> SequenceRows<'a> {
    SequenceRows {
        table,
        committed,
        tokens,
        shape: RowShape::Chain,
        head,
        sampling: None,
        features: false,
    }
}

fn run_chain(
    backend: &mut impl Backend,
    table: &BlockTable,
    committed: usize,
    tokens: &[u32],
) -> Vec<HeadRow> {
    let head = vec![Some(TOP); tokens.len()];
    let sequences = vec![chain(table, committed, tokens, &head)];
    backend
        .forward(&RowBatch { sequences })
        .unwrap()
        .remove(0)
        .head
}

fn bits(rows: &[HeadRow]) -> Vec<Vec<(u32, u32)>> {
    let row = |row: &HeadRow| {
        let mut bits: Vec<(u32, u32)> = row
            .top
            .iter()
            .map(|s| (s.token, s.score.to_bits()))
            .collect();
        bits.push((u32::MAX, row.log_normaliser.to_bits()));
        bits
    };
    rows.iter().map(row).collect()
}

#[test]
fn log_probs_are_near_those_of_the_cpu() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let (checkpoint, _) = checkpoints(name, "drafter");
        let options = TargetOptions {
            cpu: CpuOptions::f32(1),
            kv_tokens: KV_TOKENS,
        };
        let mut cpu = CpuTarget::load(&checkpoint, None, &options, &mut |_| {}).unwrap();
        let mut gpu = target(&device, name);
        let tokens = prompt(1, 150);
        let table = Tables::new(&cpu).table(tokens.len());
        let expected = run_chain(&mut cpu, &table, 0, &tokens);
        let got = run_chain(&mut gpu, &table, 0, &tokens);
        let mut worst = 0f32;
        for (got, expected) in got.iter().zip(&expected) {
            worst = worst.max((got.log_prob(0).unwrap() - expected.log_prob(0).unwrap()).abs());
            worst = worst.max((got.log_normaliser - expected.log_normaliser).abs());
        }
        assert!(worst < 0.15, "{name}: {worst}");
        println!("{name}: log-probs within {worst}");
    }
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_its_batch() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let mut gpu = target(&device, name);
        let mut tables = Tables::new(&gpu);
        let tokens = prompt(2, 330);
        let whole = tables.table(tokens.len());
        let expected = bits(&run_chain(&mut gpu, &whole, 0, &tokens));
        for chunk in [1usize, 2, 5, 17, 65, 300] {
            let table = tables.table(tokens.len());
            let end = tokens.len().min(chunk * 40);
            let mut committed = 0;
            for tokens in tokens[..end].chunks(chunk) {
                let got = bits(&run_chain(&mut gpu, &table, committed, tokens));
                assert_eq!(
                    got,
                    expected[committed..committed + tokens.len()],
                    "{name}: chunks of {chunk} at {committed}"
                );
                committed += tokens.len();
            }
        }
    }
}

fn random_tree(random: &mut StdRng, nodes: usize) -> TokenTree {
    let mut tree = TokenTree::root_only(random.random_range(5..500));
    while tree.len() < nodes {
        let parent = if random.random_range(0..3) == 0 {
            random.random_range(0..tree.len())
        } else {
            tree.len() - 1
        };
        let _ = tree.push(parent, random.random_range(5..500), 0.0);
    }
    tree
}

#[test]
fn tree_nodes_have_the_bits_of_their_own_path() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let mut gpu = target(&device, name);
        let mut tables = Tables::new(&gpu);
        let mut random = StdRng::seed_from_u64(3);
        for (committed, nodes) in [(0, 9), (15, 20), (120, 40), (131, 33)] {
            let tokens = prompt(4, committed);
            let tree = random_tree(&mut random, nodes);
            let ancestors = tree.ancestors();
            let table = tables.table(committed + nodes);
            if committed > 0 {
                run_chain(&mut gpu, &table, 0, &tokens);
            }
            let head = vec![Some(TOP); nodes];
            let rows = SequenceRows {
                shape: RowShape::tree(&tree, &ancestors),
                ..chain(&table, committed, tree.tokens(), &head)
            };
            let sequences = vec![rows];
            let as_tree = gpu.forward(&RowBatch { sequences }).unwrap().remove(0).head;
            for node in 0..nodes {
                let path: Vec<u32> = tree.path(node).iter().map(|&n| tree.tokens()[n]).collect();
                let own = tables.table(committed + path.len());
                if committed > 0 {
                    run_chain(&mut gpu, &own, 0, &tokens);
                }
                let alone = run_chain(&mut gpu, &own, committed, &path);
                assert_eq!(
                    bits(&as_tree[node..=node]),
                    bits(&alone[path.len() - 1..]),
                    "{name}: node {node} behind {committed}"
                );
                tables.pool.release(&mut own.clone());
            }
        }
    }
}

#[test]
fn a_step_is_a_forward_a_walk_and_a_compaction() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let mut gpu = target(&device, name);
        let mut tables = Tables::new(&gpu);
        let mut random = StdRng::seed_from_u64(5);
        let prompts: Vec<Vec<u32>> = (0..3)
            .map(|i| prompt(10 + i, 40 + 7 * i as usize))
            .collect();
        let trees: Vec<TokenTree> = [1, 20, 12].map(|n| random_tree(&mut random, n)).to_vec();
        for head in [HeadRequest::ARGMAX, TOP] {
            let mut outputs = Vec::new();
            for graph in [false, true] {
                let own: Vec<BlockTable> = prompts
                    .iter()
                    .map(|tokens| {
                        let table = tables.table(tokens.len() + 40);
                        run_chain(&mut gpu, &table, 0, tokens);
                        table
                    })
                    .collect();
                let batch = StepBatch {
                    rows: Vec::new(),
                    trees: (0..3)
                        .map(|i| TreeRows {
                            table: &own[i],
                            committed: prompts[i].len(),
                            tree: &trees[i],
                            head,
                            sampling: None,
                            features: true,
                        })
                        .collect(),
                };
                let output = if graph {
                    gpu.step(&batch).unwrap()
                } else {
                    step_by_forward(&mut gpu, &batch).unwrap()
                };
                // What was committed is there for the next row.
                let next: Vec<_> = (0..3)
                    .map(|i| {
                        let committed = prompts[i].len() + output.trees[i].acceptance.path.len();
                        let bonus = output.trees[i].acceptance.bonus;
                        bits(&run_chain(&mut gpu, &own[i], committed, &[bonus]))
                    })
                    .collect();
                outputs.push((output.trees, next));
            }
            let (graph, plain) = (outputs.pop().unwrap(), outputs.pop().unwrap());
            for (got, expected) in graph.0.iter().zip(&plain.0) {
                assert_eq!(got.acceptance, expected.acceptance, "{name}");
                assert_eq!(got.features, expected.features, "{name}");
                let tokens = |rows: &[HeadRow]| -> Vec<u32> {
                    rows.iter().map(|row| row.top[0].token).collect()
                };
                assert_eq!(tokens(&got.head), tokens(&expected.head), "{name}");
            }
            assert_eq!(graph.1, plain.1, "{name}");
        }
    }
}

/// Feature rows as a target would send them.
fn features(rows: usize, width: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..rows * width)
        .map(|_| random.random_range(-1.5f32..1.5))
        .collect()
}

#[test]
fn blocks_are_near_those_of_the_cpu_and_drafts_are_made_of_them() {
    let Some(device) = crate::device() else {
        return;
    };
    for name in CASES {
        let (target, drafter) = checkpoints(name, "drafter_fit");
        let options = DrafterOptions {
            cpu: CpuOptions::f32(1),
            ..DrafterOptions::default()
        };
        let mut cpu = CpuDrafter::load(&drafter, &target, &options, &mut |_| {}).unwrap();
        let mut gpu = CudaDrafter::load(&device, &drafter, &target, &options, &mut |_| {}).unwrap();
        let width = gpu.spec().hidden_size;
        let rows = [
            features(70, width, 1),
            features(300, width, 2),
            features(5, width, 3),
        ];
        let open = |drafter: &mut dyn Drafter| -> Vec<BlockRequest> {
            rows.iter()
                .enumerate()
                .map(|(i, rows)| {
                    let context = drafter.open().unwrap();
                    drafter.append_context(context, 3, rows).unwrap();
                    BlockRequest {
                        context,
                        root_token: 30 + i as u32,
                    }
                })
                .collect()
        };
        let (on_cpu, on_gpu) = (open(&mut cpu), open(&mut gpu));
        let expected = cpu.block_hidden(&on_cpu).unwrap();
        let got = gpu.block_hidden(&on_gpu).unwrap();
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
        let error = norm(&mut got.iter().zip(&expected).map(|(a, b)| a - b))
            / norm(&mut expected.iter().copied());
        assert!(error < 0.03, "{name}: {error}");
        println!("{name}: block rows within {error}");

        for shape in [
            DraftShape::Chain,
            DraftShape::Tree { budget: 3 },
            DraftShape::Tree { budget: 16 },
            DraftShape::Tree { budget: 63 },
        ] {
            let requests: Vec<DraftRequest> = on_gpu
                .iter()
                .map(|&block| DraftRequest {
                    block,
                    shape,
                    max_depth: 4,
                    coupling: None,
                })
                .collect();
            let drafted = gpu.draft(&requests).unwrap();
            let size = gpu.spec().block_size - 1;
            for (i, request) in requests.iter().enumerate() {
                let slots = &got[i * size * width..(i + 1) * size * width];
                let rows = gpu.head_topk(slots, 64).unwrap();
                let mut tree = build_draft(request.block.root_token, &rows, shape, None);
                tree.truncate_depth(4);
                // The head's input is rounded behind the norm on one way and in front of it on the other.
                let (expected, got) = (paths(&tree), paths(&drafted[i].tree));
                let same = expected.iter().filter(|path| got.contains(path)).count();
                assert!(
                    same * 10 >= tree.len() * 8,
                    "{name} {shape:?}: {same} of {}",
                    tree.len()
                );
            }
        }
    }
}

/// The tokens on the way to every node.
fn paths(tree: &TokenTree) -> Vec<Vec<u32>> {
    (0..tree.len())
        .map(|node| tree.path(node).iter().map(|&n| tree.tokens()[n]).collect())
        .collect()
}

/// A greedy generation through a speculator; `shape` `None` is plain decoding.
fn generate(
    speculator: &mut CudaSpeculator,
    tables: &mut Tables,
    prompts: &[Vec<u32>],
    shape: Option<DraftShape>,
    count: usize,
) -> (Vec<Vec<u32>>, usize) {
    let own: Vec<BlockTable> = prompts
        .iter()
        .map(|p| tables.table(p.len() + 300))
        .collect();
    let mut ids = Vec::new();
    let mut contexts: Vec<ContextId> = Vec::new();
    for (tokens, table) in prompts.iter().zip(&own) {
        let mut head = vec![None; tokens.len()];
        head[tokens.len() - 1] = Some(HeadRequest::ARGMAX);
        let rows = SequenceRows {
            sampling: None,
            features: true,
            ..chain(table, 0, tokens, &head)
        };
        let sequences = vec![rows];
        let output = speculator
            .forward(&RowBatch { sequences })
            .unwrap()
            .remove(0);
        ids.push(vec![output.head[0].top[0].token]);
        let context = speculator.drafter().open().unwrap();
        speculator
            .drafter()
            .append_context(context, 0, &output.features)
            .unwrap();
        contexts.push(context);
    }
    let mut steps = 0;
    while ids.iter().any(|ids| ids.len() < count) {
        steps += 1;
        let state =
            |i: usize, ids: &[u32]| (prompts[i].len() + ids.len() - 1, *ids.last().unwrap());
        let paths: Vec<(Vec<u32>, u32)> = match shape {
            Some(shape) => {
                let batch: Vec<SpeculativeStep<'_>> = (0..prompts.len())
                    .map(|i| SpeculativeStep {
                        table: &own[i],
                        committed: state(i, &ids[i]).0,
                        root: state(i, &ids[i]).1,
                        context: contexts[i],
                        shape,
                        max_depth: 60,
                        head: HeadRequest::ARGMAX,
                        sampling: None,
                        coupling: None,
                    })
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
                let roots: Vec<TokenTree> = (0..prompts.len())
                    .map(|i| TokenTree::root_only(state(i, &ids[i]).1))
                    .collect();
                let trees = (0..prompts.len())
                    .map(|i| TreeRows {
                        table: &own[i],
                        committed: state(i, &ids[i]).0,
                        tree: &roots[i],
                        head: HeadRequest::ARGMAX,
                        sampling: None,
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
        for (ids, (accepted, bonus)) in ids.iter_mut().zip(paths) {
            ids.extend(accepted);
            ids.push(bonus);
        }
    }
    for context in contexts {
        speculator.drafter().close(context);
    }
    for table in own {
        tables.pool.release(&mut table.clone());
    }
    (
        ids.into_iter()
            .map(|mut ids| {
                ids.truncate(count);
                ids
            })
            .collect(),
        steps,
    )
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
                let (plain, plain_steps) =
                    generate(&mut speculator, &mut tables, &prompts, None, 60);
                for shape in [
                    DraftShape::Chain,
                    DraftShape::Tree { budget: 1 },
                    DraftShape::Tree { budget: 8 },
                    DraftShape::Tree { budget: 33 },
                    DraftShape::Tree { budget: 63 },
                ] {
                    let (ids, steps) =
                        generate(&mut speculator, &mut tables, &prompts, Some(shape), 60);
                    assert_eq!(ids, plain, "{name} {kind} {shape:?}");
                    println!("{name} {kind} {shape:?}: {steps} steps for {plain_steps}");
                }
            }
        }
    }
}
