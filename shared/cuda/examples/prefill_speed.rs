//! Time of a prompt through a target of Qwen3-8B's sizes with random weights, exact and fast.
//!
//! `cargo run --release -p treespec-cuda --example prefill_speed [-- --json]`. Modes take turns; each figure is the median
//! of all forwards of a mode, from the call to the logits of the last row on the host. Operations are counted as two per
//! weight of the layers and row: attention is time, but no operation.

use std::process::ExitCode;
use std::time::Instant;

use treespec_checkpoint::{Architecture, TargetConfig};
use treespec_cuda::{CudaTarget, Device};
use treespec_engine::{
    Backend, BlockPool, BlockTable, EngineError, HeadRequest, PrefillMode, RowBatch, RowShape,
    SequenceRows,
};

const ROWS: [usize; 4] = [384, 512, 1_024, 2_048];
const ROUNDS: usize = 5;
const FORWARDS: usize = 5;

fn main() -> ExitCode {
    let json = std::env::args().any(|argument| argument == "--json");
    match measure(json) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn config() -> TargetConfig {
    TargetConfig {
        architecture: Architecture::Qwen3,
        vocab_size: 151_936,
        hidden_size: 4_096,
        intermediate_size: 12_288,
        num_layers: 36,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        context_length: 40_960,
        tie_word_embeddings: false,
        eos_token_ids: vec![151_645],
        bos_token_id: None,
    }
}

/// Weights of all layers.
fn weights(config: &TargetConfig) -> usize {
    let query = config.num_heads * config.head_dim;
    let key = config.num_kv_heads * config.head_dim;
    let attention = config.hidden_size * 2 * (query + key);
    config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
}

fn measure(json: bool) -> Result<(), EngineError> {
    let device = Device::open(0)?;
    let config = config();
    let most = ROWS.into_iter().max().unwrap_or(0);
    let mut target = CudaTarget::random(&device, &config, most)?;
    let mut table = BlockTable::default();
    BlockPool::new(target.spec().num_blocks).grow(&mut table, most)?;
    let modes = [PrefillMode::Exact, PrefillMode::Fast];
    let mut times = vec![[const { Vec::new() }; 2]; ROWS.len()];
    for _ in 0..ROUNDS {
        for (mode, place) in modes.into_iter().zip(0..) {
            target.set_prefill(mode)?;
            for (rows, times) in ROWS.into_iter().zip(&mut times) {
                // The first one plans the products.
                forward(&mut target, &table, rows)?;
                for _ in 0..FORWARDS {
                    let started = Instant::now();
                    forward(&mut target, &table, rows)?;
                    times[place].push(started.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
    }
    if !json {
        println!("{}: ms (median, fastest, slowest), TFLOP/s", device.name());
    }
    for (rows, times) in ROWS.into_iter().zip(&mut times) {
        for (mode, times) in modes.into_iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let (median, fastest) = (times[times.len() / 2], times[0]);
            let slowest = times[times.len() - 1];
            let tflops = 2.0 * weights(&config) as f64 * rows as f64 / median / 1e9;
            if json {
                let line = serde_json::json!({
                    "device": device.name(), "rows": rows, "prefill": mode.to_string(), "median_ms": median,
                    "fastest_ms": fastest, "slowest_ms": slowest, "forwards": times.len(), "tflops": tflops,
                });
                println!("{line}");
            } else {
                println!(
                    "{rows:>5} {mode:<6} {median:>8.2} {fastest:>8.2} {slowest:>8.2} {tflops:>7.1}"
                );
            }
        }
    }
    Ok(())
}

/// One prompt from its first token, of which the last row asks for the best token.
fn forward(target: &mut CudaTarget, table: &BlockTable, rows: usize) -> Result<(), EngineError> {
    let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 7_919 % 150_000).collect();
    let mut head = vec![None; rows];
    if let Some(last) = head.last_mut() {
        *last = Some(HeadRequest::ARGMAX);
    }
    target.forward(&RowBatch {
        sequences: vec![SequenceRows {
            table,
            committed: 0,
            tokens: &tokens,
            shape: RowShape::Chain,
            head: &head,
            sampling: None,
            features: false,
        }],
    })?;
    Ok(())
}
