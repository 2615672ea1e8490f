//! Every kernel file with the definitions that real models compile it with, for checks without a device.

use crate::{
    KernelSource, acceptance, attention, candidate_ranking, draft_tree, head_select, kv_cache,
    linear, rotary, rows, sampling,
};

/// A kernel file and the definitions of one use.
#[derive(Debug, Clone)]
pub struct KernelVariant {
    /// The file.
    pub source: KernelSource,
    /// Macro names and values.
    pub defines: Vec<(&'static str, String)>,
}

/// All of them.
pub fn kernel_variants() -> Vec<KernelVariant> {
    let plain = |source: KernelSource| KernelVariant {
        source,
        defines: Vec::new(),
    };
    let mut variants = vec![
        plain(rows::SOURCE),
        plain(acceptance::SOURCE),
        plain(draft_tree::SOURCE),
        plain(candidate_ranking::SOURCE),
        plain(sampling::SOURCE),
        plain(kv_cache::SOURCE),
        plain(linear::RANDOM_SOURCE),
        plain(linear::PREFILL_SOURCE),
        KernelVariant {
            source: linear::SOURCE,
            defines: linear::LinearTuning::default().defines().to_vec(),
        },
    ];
    for vocab in [49_152, 151_936, 248_320] {
        variants.extend(
            head_select::definitions(vocab).map(|defines| KernelVariant {
                source: head_select::SOURCE,
                defines: defines.to_vec(),
            }),
        );
    }
    // SmolLM2-135M and its drafter, Qwen3-8B, and a head that is no multiple of 32.
    for (head_dim, group) in [(64, 3), (128, 4), (40, 3)] {
        variants.push(KernelVariant {
            source: attention::SOURCE,
            defines: attention::defines(attention::AttentionShape {
                heads: group,
                kv_heads: 1,
                head_dim,
            })
            .to_vec(),
        });
        variants.push(KernelVariant {
            source: rotary::SOURCE,
            defines: rotary::defines(head_dim).to_vec(),
        });
    }
    variants
}
