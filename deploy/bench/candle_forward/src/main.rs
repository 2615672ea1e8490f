//! Times one forward of M tokens with candle's own CPU operations, to stand beside `treespec bench engine`.
//!
//! A verifier needs the logits at every position it was given, which candle-transformers' models do not return. So this is
//! a plain llama forward over candle's operations, with a key/value cache and logits at all M positions, on the weights of
//! a GGUF file: as they are in the file, or converted when loading. It also times greedy decoding token by token.
//!
//! ```sh
//! RUSTFLAGS=-Ctarget-cpu=native RAYON_NUM_THREADS=2 cargo run --release -- --model models/SmolLM2-135M-Instruct.Q4_1.gguf
//! ```
//!
//! candle has no explicit kernel for Q4_1 on x86, so `target-cpu=native` more than doubles its speed.

mod model;

use std::{path::PathBuf, time::Instant};

use anyhow::{Result, ensure};
use candle_core::{D, Tensor};
use clap::Parser;
use serde::Serialize;

use model::{Model, Weights};

#[derive(Parser)]
#[command(about = "Times forwards of M tokens with candle on the CPU")]
struct Args {
    /// GGUF file of a llama model
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Weights of the linear layers
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["file", "q8-0", "f32", "bf16"])]
    weights: Vec<Weights>,
    /// Tokens of one forward
    #[arg(long, value_delimiter = ',', default_values = ["1", "2", "4", "8", "16", "17", "32"])]
    rows: Vec<usize>,
    /// Tokens in the cache before the forward
    #[arg(long, default_value_t = 128)]
    context: usize,
    /// Tokens to decode greedily behind the context; 0 leaves this out
    #[arg(long, default_value_t = 100)]
    decode: usize,
    /// Measurements after the warm-up
    #[arg(long, default_value_t = 15)]
    repetitions: usize,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Figure {
    Rows {
        weights: Weights,
        rows: usize,
        ms: f64,
        min_ms: f64,
    },
    Decode {
        weights: Weights,
        decoded: usize,
        tokens_per_second: f64,
    },
}

fn milliseconds(work: impl FnOnce() -> Result<Tensor>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Greedy decoding of `count` tokens behind the context, in tokens per second.
fn decode(model: &Model, context: usize, count: usize) -> Result<f64> {
    let mut token = 1;
    let start = Instant::now();
    for position in context..context + count {
        token = model
            .forward(&[token], position)?
            .squeeze(0)?
            .argmax(D::Minus1)?
            .to_scalar()?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(model: &Model, weights: Weights, args: &Args) -> Result<Vec<Figure>> {
    // Any tokens will do: no operation's cost depends on them.
    let tokens = |count: usize| {
        (0..count as u32)
            .map(|index| 100 + 37 * index % 1000)
            .collect::<Vec<_>>()
    };
    model.forward(&tokens(args.context), 0)?;
    let mut times = vec![Vec::new(); args.rows.len()];
    for repetition in 0..args.repetitions + 2 {
        // The row counts take turns, so that a slow moment of the machine hits all of them.
        for (&rows, times) in args.rows.iter().zip(&mut times) {
            let elapsed = milliseconds(|| model.forward(&tokens(rows), args.context))?;
            if repetition >= 2 {
                times.push(elapsed);
            }
        }
    }
    let mut figures = Vec::new();
    for (&rows, times) in args.rows.iter().zip(times) {
        let min_ms = times.iter().copied().fold(f64::INFINITY, f64::min);
        figures.push(Figure::Rows {
            weights,
            rows,
            ms: median(times),
            min_ms,
        });
    }
    if args.decode > 0 {
        let speeds = (0..3)
            .map(|_| decode(model, args.context, args.decode))
            .collect::<Result<_>>()?;
        figures.push(Figure::Decode {
            weights,
            decoded: args.decode,
            tokens_per_second: median(speeds),
        });
    }
    Ok(figures)
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.context > 0 && args.repetitions > 0,
        "--context and --repetitions must be positive"
    );
    ensure!(
        !args.rows.is_empty() && !args.rows.contains(&0),
        "--rows must be positive"
    );
    let most_rows = args.rows.iter().copied().max().unwrap_or(0);
    let positions = args.context + args.decode.max(most_rows);
    let mut figures = Vec::new();
    for &weights in &args.weights {
        let model = Model::load(&args.model, weights, positions)?;
        for figure in measure(&model, weights, &args)? {
            println!("{}", serde_json::to_string(&figure)?);
            figures.push(figure);
        }
    }
    if let Some(path) = &args.json {
        let report = serde_json::json!({
            "command": "deploy/bench/candle_forward",
            "model": args.model.file_name().map(|name| name.to_string_lossy()),
            "threads": candle_core::utils::get_num_threads(),
            "context": args.context,
            "repetitions": args.repetitions,
            "results": figures,
        });
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
