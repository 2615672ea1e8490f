//! Target, drafter and both together on the tiny models of the reference cases, against the CPU and against themselves.

mod rules;
mod scene;
mod speculation;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::CudaDrafter;
use treespec_engine::{
    Backend, BlockRequest, BlockTable, CoupledRanking, CpuDrafter, CpuOptions, CpuTarget,
    DraftRequest, DraftShape, Drafter, DrafterOptions, HeadRequest, HeadRow, RowBatch, RowShape,
    SequenceRows, StepBatch, TargetOptions, TreeRows, build_draft, step_by_forward,
};
use treespec_sampling::{Coupling, Ranking};
use treespec_tree::TokenTree;

use scene::{
    CASES, KV_TOKENS, TOP, Tables, bits, chain, checkpoints, prompt, random_tree, run_chain, target,
};

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
        let (target, mut drafter) = checkpoints(name, "drafter_fit");
        drafter.coupling = Some(speculation::profile(3));
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

        let mut all = [(0, 0); 2];
        for shape in [
            DraftShape::Chain,
            DraftShape::Tree { budget: 3 },
            DraftShape::Tree { budget: 16 },
            DraftShape::Tree { budget: 63 },
        ] {
            for ranking in [None, Some(Ranking::Full), Some(Ranking::Fitted)] {
                let coupling = |i: usize| {
                    ranking.map(|ranking| Coupling {
                        seed: 77 + i as u64,
                        temperature: 0.7,
                        ranking,
                    })
                };
                let requests: Vec<DraftRequest> = on_gpu
                    .iter()
                    .enumerate()
                    .map(|(i, &block)| DraftRequest {
                        block,
                        shape,
                        max_depth: 4,
                        coupling: coupling(i),
                    })
                    .collect();
                let drafted = gpu.draft(&requests).unwrap();
                let size = gpu.spec().block_size - 1;
                for (i, request) in requests.iter().enumerate() {
                    let slots = &got[i * size * width..(i + 1) * size * width];
                    let rows = gpu.head_topk(slots, 64).unwrap();
                    let position = gpu.context(request.block.context).unwrap().end;
                    let profile = drafter.coupling.as_ref();
                    let ranking = request
                        .coupling
                        .and_then(|coupling| CoupledRanking::new(coupling, profile, position));
                    let root = request.block.root_token;
                    let mut tree = build_draft(root, &rows, shape, ranking.as_ref());
                    tree.truncate_depth(4);
                    // The head's input is rounded behind the norm on one way and in front of it on the other.
                    let (expected, got) = (paths(&tree), paths(&drafted[i].tree));
                    let same = expected.iter().filter(|path| got.contains(path)).count();
                    // Noise decides between far candidates, so that one that differs takes more with it.
                    let coupled = request.coupling.is_some();
                    assert!(
                        coupled || same * 10 >= tree.len() * 8,
                        "{name} {shape:?}: {same} of {}",
                        tree.len()
                    );
                    all[usize::from(coupled)].0 += same;
                    all[usize::from(coupled)].1 += tree.len();
                }
            }
        }
        println!("{name}: nodes of drafts without and with noise {all:?}");
        for (same, nodes) in all {
            assert!(same * 10 >= nodes * 8, "{name}: {same} of {nodes}");
        }
    }
}

/// The tokens on the way to every node.
fn paths(tree: &TokenTree) -> Vec<Vec<u32>> {
    (0..tree.len())
        .map(|node| tree.path(node).iter().map(|&n| tree.tokens()[n]).collect())
        .collect()
}
