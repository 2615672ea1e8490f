//! Prompts by a library's matrix products, against those by our kernels.

use std::path::PathBuf;
use std::sync::Arc;

use treespec_checkpoint::{Architecture, DrafterCheckpoint, TargetCheckpoint, TargetConfig};
use treespec_cuda::{CudaTarget, Device};
use treespec_engine::{
    Backend, BlockPool, BlockTable, ForwardOutput, HeadRequest, PrefillMode, RowBatch, RowShape,
    SequenceRows,
};

const KV_TOKENS: usize = 8_192;

/// The best one with the normaliser, and one that both modes are asked for.
const HEAD: HeadRequest = HeadRequest {
    top_k: 1,
    normaliser: true,
    gather: Some(7),
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

/// Prompts of these lengths in one batch.
fn run(
    target: &mut CudaTarget,
    lengths: &[usize],
    features: bool,
    vocab: usize,
) -> Vec<ForwardOutput> {
    let mut pool = BlockPool::new(target.spec().num_blocks);
    let prompts: Vec<Vec<u32>> = lengths
        .iter()
        .enumerate()
        .map(|(sequence, &len)| {
            (0..len)
                .map(|i| ((i * 7_919 + sequence * 104_729 + 11) % vocab) as u32)
                .collect()
        })
        .collect();
    let tables: Vec<BlockTable> = lengths
        .iter()
        .map(|&len| {
            let mut table = BlockTable::default();
            pool.grow(&mut table, len).unwrap();
            table
        })
        .collect();
    let heads: Vec<Vec<Option<HeadRequest>>> =
        lengths.iter().map(|&len| vec![Some(HEAD); len]).collect();
    let sequences = prompts
        .iter()
        .zip(&tables)
        .zip(&heads)
        .map(|((tokens, table), head)| SequenceRows {
            table,
            committed: 0,
            tokens,
            shape: RowShape::Chain,
            head,
            sampling: None,
            features,
        })
        .collect();
    target.forward(&RowBatch { sequences }).unwrap()
}

/// The largest difference of a log-probability, of the normaliser and of a feature, and the first row that is off by more
/// than `limit`.
fn compare(name: &str, fast: &[ForwardOutput], exact: &[ForwardOutput], limit: f32) {
    let (mut worst, mut worst_feature, mut first) = (0f32, 0f32, None);
    for (sequence, (fast, exact)) in fast.iter().zip(exact).enumerate() {
        assert_eq!(fast.head.len(), exact.head.len());
        assert_eq!(fast.features.len(), exact.features.len());
        for (row, (fast, exact)) in fast.head.iter().zip(&exact.head).enumerate() {
            let log_prob = |row: &treespec_engine::HeadRow| {
                row.gathered.expect("it was asked for") - row.log_normaliser
            };
            let best = (fast.log_prob(0).unwrap() - exact.log_prob(0).unwrap()).abs();
            let difference = best.max((log_prob(fast) - log_prob(exact)).abs());
            // Not a number is a difference.
            if (difference.is_nan() || difference > limit) && first.is_none() {
                first = Some((sequence, row, difference));
            }
            worst = worst.max(difference);
        }
        for (fast, exact) in fast.features.iter().zip(&exact.features) {
            let difference = (fast - exact).abs() / exact.abs().max(1.0);
            assert!(difference.is_finite(), "{name}: feature {fast} for {exact}");
            worst_feature = worst_feature.max(difference);
        }
    }
    println!("{name}: log-probs within {worst}, features within {worst_feature}");
    assert_eq!(first, None, "{name}: first bad (sequence, row, difference)");
    assert!(
        worst_feature <= limit,
        "{name}: features off by {worst_feature}"
    );
}

fn bits(outputs: &[ForwardOutput]) -> Vec<u32> {
    outputs
        .iter()
        .flat_map(|output| {
            let heads = output.head.iter().map(|row| row.log_normaliser.to_bits());
            heads.chain(output.features.iter().map(|value| value.to_bits()))
        })
        .collect()
}

/// Fast near exact where it applies, exact to the bit where it does not and after it was switched off.
fn check(name: &str, target: &mut CudaTarget, features: bool, vocab: usize) {
    // One forward of 900 rows; three prompts in one; more than a forward takes, the rest a short one.
    let batches: [&[usize]; 3] = [&[900], &[500, 17, 440], &[2_150]];
    let short = run(target, &[100, 30], features, vocab);
    let exact: Vec<_> = batches
        .iter()
        .map(|lengths| run(target, lengths, features, vocab))
        .collect();
    let profile = target.spec().numerics_profile.clone();
    if let Err(error) = target.set_prefill(PrefillMode::Fast) {
        let text = error.to_string();
        assert!(text.contains("libcublasLt.so.13"), "{text}");
        assert_eq!(target.spec().numerics_profile, profile);
        eprintln!("skipped: {text}");
        return;
    }
    assert_eq!(
        target.spec().numerics_profile,
        format!("{profile}/prefill-fast")
    );
    for (lengths, exact) in batches.iter().zip(&exact) {
        let fast = run(target, lengths, features, vocab);
        compare(&format!("{name} {lengths:?}"), &fast, exact, 0.15);
        assert_eq!(
            bits(&fast),
            bits(&run(target, lengths, features, vocab)),
            "{name} {lengths:?}: not the same twice"
        );
        assert_ne!(bits(&fast), bits(exact), "{name}: it was not fast at all");
    }
    let still_short = run(target, &[100, 30], features, vocab);
    assert_eq!(bits(&still_short), bits(&short), "{name}: short prompts");
    target.set_prefill(PrefillMode::Exact).unwrap();
    assert_eq!(target.spec().numerics_profile, profile);
    let again = run(target, batches[0], features, vocab);
    assert_eq!(bits(&again), bits(&exact[0]), "{name}: exact again");
}

fn fixture(device: &Arc<Device>, name: &str) {
    let checkpoint = TargetCheckpoint::open(&case(name).join("model")).unwrap();
    let drafter = DrafterCheckpoint::open(&case(name).join("drafter_fit")).unwrap();
    let mut target =
        CudaTarget::load(device, &checkpoint, Some(&drafter), KV_TOKENS, &mut |_| {}).unwrap();
    check(name, &mut target, true, checkpoint.config.vocab_size);
}

#[test]
fn fast_prompts_of_small_models_are_near_exact_ones() {
    let Some(device) = crate::device() else {
        return;
    };
    fixture(&device, "01_llama_gqa_tied");
    fixture(&device, "03_qwen3_headdim");
}

/// Large enough for tiles of four panels and split depths, with widths that are no multiple of 64 rows.
#[test]
fn fast_prompts_of_a_larger_model_are_near_exact_ones() {
    let Some(device) = crate::device() else {
        return;
    };
    let config = TargetConfig {
        architecture: Architecture::Qwen3,
        vocab_size: 4_000,
        hidden_size: 2_056,
        intermediate_size: 5_000,
        num_layers: 3,
        num_heads: 16,
        num_kv_heads: 4,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        context_length: 4_096,
        tie_word_embeddings: false,
        eos_token_ids: vec![1],
        bos_token_id: None,
    };
    let mut target = CudaTarget::random(&device, &config, KV_TOKENS).unwrap();
    check("random", &mut target, false, config.vocab_size);
}
