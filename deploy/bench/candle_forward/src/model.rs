//! The forward of a llama model over candle's operations.

use std::{fs::File, io::BufReader, path::Path};

use anyhow::{Context, Result};
use candle_core::{
    DType, Device, Module, Tensor,
    quantized::{GgmlDType, QMatMul, QTensor, gguf_file},
};
use candle_nn::{ops, rotary_emb::rope_i};
use clap::ValueEnum;
use serde::Serialize;

/// Weights of the linear layers.
#[derive(Clone, Copy, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// As they are in the file
    File,
    #[value(name = "q4-0")]
    #[serde(rename = "q4_0")]
    Q4_0,
    #[value(name = "q8-0")]
    #[serde(rename = "q8_0")]
    Q8_0,
    F32,
    Bf16,
}

enum Linear {
    Quantized(QMatMul),
    Dense(Tensor),
}

impl Linear {
    fn new(tensor: QTensor, weights: Weights) -> Result<Self> {
        let dense = || tensor.dequantize(&Device::Cpu);
        Ok(match weights {
            Weights::File => Self::Quantized(QMatMul::from_qtensor(tensor)?),
            Weights::Q4_0 => Self::requantized(&dense()?, GgmlDType::Q4_0)?,
            Weights::Q8_0 => Self::requantized(&dense()?, GgmlDType::Q8_0)?,
            Weights::F32 => Self::Dense(dense()?),
            Weights::Bf16 => Self::Dense(dense()?.to_dtype(DType::BF16)?),
        })
    }

    fn requantized(dense: &Tensor, dtype: GgmlDType) -> Result<Self> {
        Ok(Self::Quantized(QMatMul::from_qtensor(QTensor::quantize(
            dense, dtype,
        )?)?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Quantized(weight) => weight.forward(x)?,
            Self::Dense(weight) => x
                .to_dtype(weight.dtype())?
                .matmul(&weight.t()?)?
                .to_dtype(DType::F32)?,
        })
    }
}

struct Layer {
    attention_norm: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    mlp_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Keys and values, `[key/value heads, positions, head width]`.
    cache: [Tensor; 2],
}

pub struct Model {
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    epsilon: f32,
    /// Cosines and sines of the rotary embedding, `[positions, head width / 2]`.
    rotary: [Tensor; 2],
}

impl Model {
    pub fn load(path: &Path, weights: Weights, positions: usize) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut file = BufReader::new(file);
        let content = gguf_file::Content::read(&mut file)?;
        let value = |key: &str| {
            let key = format!("llama.{key}");
            content
                .metadata
                .get(&key)
                .with_context(|| format!("no {key} in {}", path.display()))
        };
        let number = |key: &str| Ok::<_, anyhow::Error>(value(key)?.to_u32()? as usize);
        let (heads, kv_heads) = (
            number("attention.head_count")?,
            number("attention.head_count_kv")?,
        );
        let head_width = number("embedding_length")? / heads;
        let epsilon = value("attention.layer_norm_rms_epsilon")?.to_f32()?;
        let theta = value("rope.freq_base")?.to_f32()?;
        let blocks = number("block_count")?;

        let mut tensor =
            |name: &str| content.tensor(&mut file, &format!("{name}.weight"), &Device::Cpu);
        let embedding = tensor("token_embd")?;
        let head = if content.tensor_infos.contains_key("output.weight") {
            "output"
        } else {
            "token_embd"
        };
        let head = Linear::new(tensor(head)?, weights)?;
        let norm = tensor("output_norm")?.dequantize(&Device::Cpu)?;
        let mut layers = Vec::with_capacity(blocks);
        for index in 0..blocks {
            let mut of_layer = |name: &str| tensor(&format!("blk.{index}.{name}"));
            let cache =
                || Tensor::zeros((kv_heads, positions, head_width), DType::F32, &Device::Cpu);
            layers.push(Layer {
                attention_norm: of_layer("attn_norm")?.dequantize(&Device::Cpu)?,
                query: Linear::new(of_layer("attn_q")?, weights)?,
                key: Linear::new(of_layer("attn_k")?, weights)?,
                value: Linear::new(of_layer("attn_v")?, weights)?,
                output: Linear::new(of_layer("attn_output")?, weights)?,
                mlp_norm: of_layer("ffn_norm")?.dequantize(&Device::Cpu)?,
                gate: Linear::new(of_layer("ffn_gate")?, weights)?,
                up: Linear::new(of_layer("ffn_up")?, weights)?,
                down: Linear::new(of_layer("ffn_down")?, weights)?,
                cache: [cache()?, cache()?],
            });
        }

        let frequencies: Vec<f32> = (0..head_width / 2)
            .map(|pair| theta.powf(-2.0 * pair as f32 / head_width as f32))
            .collect();
        let frequencies = Tensor::new(frequencies, &Device::Cpu)?.unsqueeze(0)?;
        let angles = Tensor::arange(0u32, positions as u32, &Device::Cpu)?
            .to_dtype(DType::F32)?
            .unsqueeze(1)?
            .matmul(&frequencies)?;
        Ok(Self {
            embedding: embedding.dequantize(&Device::Cpu)?,
            layers,
            norm,
            head,
            heads,
            kv_heads,
            head_width,
            epsilon,
            rotary: [angles.cos()?, angles.sin()?],
        })
    }

    /// Logits `[tokens, vocabulary]` of tokens behind `past` cached positions; overwrites what the cache holds there.
    pub fn forward(&self, tokens: &[u32], past: usize) -> Result<Tensor> {
        let rows = tokens.len();
        let mask = if rows == 1 {
            None
        } else {
            Some(causal_mask(rows, past)?)
        };
        let tokens = Tensor::new(tokens, &Device::Cpu)?;
        let mut hidden = self.embedding.index_select(&tokens, 0)?;
        for layer in &self.layers {
            let x = ops::rms_norm(&hidden, &layer.attention_norm, self.epsilon)?;
            let query = self.split_heads(&layer.query.forward(&x)?, self.heads)?;
            let key = self.split_heads(&layer.key.forward(&x)?, self.kv_heads)?;
            let value = self.split_heads(&layer.value.forward(&x)?, self.kv_heads)?;
            layer.cache[0].slice_set(&self.rotate(&key, past)?, 1, past)?;
            layer.cache[1].slice_set(&value, 1, past)?;
            let x = self.attention(
                &self.rotate(&query, past)?,
                layer,
                past + rows,
                mask.as_ref(),
            )?;
            hidden = (hidden + layer.output.forward(&x)?)?;
            let x = ops::rms_norm(&hidden, &layer.mlp_norm, self.epsilon)?;
            let x = (ops::silu(&layer.gate.forward(&x)?)? * layer.up.forward(&x)?)?;
            hidden = (hidden + layer.down.forward(&x)?)?;
        }
        self.head
            .forward(&ops::rms_norm(&hidden, &self.norm, self.epsilon)?)
    }

    fn split_heads(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        let rows = x.dim(0)?;
        Ok(x.reshape((rows, heads, self.head_width))?
            .transpose(0, 1)?
            .contiguous()?)
    }

    fn rotate(&self, x: &Tensor, past: usize) -> Result<Tensor> {
        let rows = x.dim(1)?;
        let [cosines, sines] = &self.rotary;
        let (cosines, sines) = (cosines.narrow(0, past, rows)?, sines.narrow(0, past, rows)?);
        Ok(rope_i(&x.unsqueeze(0)?, &cosines, &sines)?.squeeze(0)?)
    }

    /// The query heads that share a key/value head are rows of one matrix product, so that nothing is repeated.
    fn attention(
        &self,
        query: &Tensor,
        layer: &Layer,
        length: usize,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let rows = query.dim(1)?;
        let grouped = (self.kv_heads, self.heads / self.kv_heads * rows, ());
        let [key, value] = &layer.cache;
        let (key, value) = (key.narrow(1, 0, length)?, value.narrow(1, 0, length)?);
        let query = (query.reshape(grouped)? * (self.head_width as f64).powf(-0.5))?;
        let mut scores = query.matmul(&key.t()?)?;
        if let Some(mask) = mask {
            let by_head = scores.reshape((self.heads, rows, length))?;
            scores = by_head.broadcast_add(mask)?.reshape(grouped)?;
        }
        let mixed = ops::softmax_last_dim(&scores)?.matmul(&value)?;
        let by_head = mixed.reshape((self.heads, rows, self.head_width))?;
        Ok(by_head
            .transpose(0, 1)?
            .reshape((rows, self.heads * self.head_width))?)
    }
}

fn causal_mask(rows: usize, past: usize) -> Result<Tensor> {
    let allowed = |row, position| {
        if position <= past + row {
            0.0
        } else {
            f32::NEG_INFINITY
        }
    };
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| (0..past + rows).map(move |position| allowed(row, position)))
        .collect();
    Ok(Tensor::from_vec(mask, (rows, past + rows), &Device::Cpu)?)
}
