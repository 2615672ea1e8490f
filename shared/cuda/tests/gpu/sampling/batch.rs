//! Random batches for the sampler, and what the CPU makes of them.

use std::sync::Arc;

use rand::RngExt;
use rand::rngs::StdRng;
use treespec_cuda::{
    Device, DeviceBuffer, DevicePtr, HeadLogits, SampledRows, Sampler, SamplerRoom,
};
use treespec_sampling::{
    EarlyBans, LogitBias, Processors, SamplingParams, TokenCounts, TokenMask, TokenRules, sample,
};

/// How one sequence is sampled.
pub(super) struct Request {
    pub(super) rules: TokenRules,
    pub(super) counted_path: usize,
}

impl Request {
    pub(super) fn plain(params: SamplingParams) -> Self {
        Self {
            rules: TokenRules::new(params),
            counted_path: 0,
        }
    }

    pub(super) fn processors(&self) -> Processors<'_> {
        self.rules.processors()
    }

    /// A step of the sequence: some tokens more.
    pub(super) fn go_on(&mut self, tokens: &[u32]) {
        let counts = &mut self.rules.counts;
        tokens.iter().for_each(|&token| counts.push(token));
    }
}

fn one_of<T: Copy>(rng: &mut StdRng, values: &[T]) -> T {
    values[rng.random_range(0..values.len())]
}

pub(super) fn tokens_of(rng: &mut StdRng, vocabulary: usize, count: usize) -> Vec<u32> {
    // A few ids outside the vocabulary: they must do nothing.
    let any = |_| rng.random_range(0..vocabulary as u32 + 3);
    (0..count).map(any).collect()
}

pub(super) fn random_request(rng: &mut StdRng, vocabulary: usize) -> Request {
    let often = |rng: &mut StdRng| rng.random_bool(0.6);
    let tiny = f32::from_bits(1);
    let temperatures = [0.0, 1.0, 1.0, 0.3, 0.7, 1.7, 1e-30, 1e30, tiny];
    let top_ks = [1, 2, 20, 50, 1000, 60_000];
    let mut params = SamplingParams {
        temperature: one_of(rng, &temperatures),
        seed: Some(rng.random()),
        ..SamplingParams::default()
    };
    if often(rng) {
        params.top_p = rng.random_range(0.01..1.0);
    }
    if often(rng) {
        params.top_k = Some(one_of(rng, &top_ks));
    }
    if !often(rng) {
        params.min_p = rng.random_range(0.0..0.9);
    }
    if !often(rng) {
        params.repetition_penalty = rng.random_range(0.5..2.0);
        params.presence_penalty = rng.random_range(-2.0..2.0);
        params.frequency_penalty = rng.random_range(-2.0..2.0);
    }
    let mut request = Request::plain(params);
    if !often(rng) {
        let tokens = tokens_of(rng, vocabulary, 30);
        let bias = tokens
            .into_iter()
            .map(|token| (token, rng.random_range(-5.0..5.0)));
        request.rules.bias = LogitBias::new(bias.collect::<Vec<_>>()).unwrap();
    }
    if rng.random_bool(0.2) {
        let tokens = tokens_of(rng, vocabulary, 200);
        request.rules.allowed = Some(TokenMask::from_tokens(vocabulary, tokens));
    }
    if !often(rng) {
        request.rules.banned = tokens_of(rng, vocabulary, 40);
    }
    if !often(rng) {
        // Rows of one sequence are on both sides of the border.
        request.rules.early = EarlyBans {
            tokens: tokens_of(rng, vocabulary, 60),
            until: one_of(rng, &[1 << 19, 1 << 19, 0, u32::MAX]),
        };
    }
    request.rules.counts = TokenCounts::from_prompt(&tokens_of(rng, vocabulary, 100));
    for token in tokens_of(rng, vocabulary, 100) {
        request.rules.counts.push(token);
    }
    request.counted_path = rng.random_range(0..3);
    request
}

/// Mostly none.
pub(super) fn random_mask(rng: &mut StdRng, vocabulary: usize) -> Option<TokenMask> {
    let count = one_of(rng, &[0, 1, 30, 2000, 20_000]);
    let tokens = tokens_of(rng, vocabulary, count);
    rng.random_bool(0.3)
        .then(|| TokenMask::from_tokens(vocabulary, tokens))
}

/// Rows of two per sequence, each with a path through its sequence's rows.
pub(super) struct Batch {
    pub(super) vocabulary: usize,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) logits: Vec<f32>,
    pub(super) group_max: Option<Vec<f32>>,
    pub(super) requests: Vec<Request>,
    pub(super) sequences: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    pub(super) path: Vec<u16>,
    pub(super) path_len: Vec<u32>,
    /// The path of a row are the rows of its sequence up to it, not what `path` says.
    as_chain: bool,
    pub(super) grammar: Vec<Option<TokenMask>>,
}

pub(super) const PATH: usize = 64;
pub(super) const GROUP: usize = 64;

impl Batch {
    pub(super) fn random(rng: &mut StdRng, vocabulary: usize, rows: usize, groups: bool) -> Self {
        let stride = vocabulary.next_multiple_of(GROUP);
        let mut logits = vec![f32::NAN; rows * stride];
        for row in 0..rows {
            // Some rows have ties, some are flat, some hold what can never be chosen.
            let spread = one_of(rng, &[0.0f32, 0.5, 3.0, 8.0]);
            let kind = rng.random_range(0..5);
            for logit in &mut logits[row * stride..row * stride + vocabulary] {
                let normal: f32 = (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0;
                *logit = match (kind, rng.random_range(0..10)) {
                    (0, _) => (normal * spread).round(),
                    (1, 0) => f32::NAN,
                    (1, 1) => f32::NEG_INFINITY,
                    _ => normal * spread,
                };
            }
        }
        let max = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let group_max = groups.then(|| {
            logits
                .chunks(stride)
                .flat_map(|row| row[..vocabulary].chunks(GROUP).map(max))
                .collect()
        });
        let sequences: Vec<u32> = (0..rows).map(|row| row as u32 / 2).collect();
        Self {
            vocabulary,
            stride,
            rows,
            group_max,
            requests: (0..rows.div_ceil(2))
                .map(|_| random_request(rng, vocabulary))
                .collect(),
            positions: (0..rows).map(|_| rng.random_range(0..1 << 20)).collect(),
            tokens: (0..rows).map(|_| rng.random_range(0..20)).collect(),
            path: (0..rows * PATH).map(|_| rng.random_range(0..2)).collect(),
            path_len: (0..rows).map(|_| rng.random_range(1..=64)).collect(),
            as_chain: rng.random(),
            grammar: (0..rows).map(|_| random_mask(rng, vocabulary)).collect(),
            sequences,
            logits,
        }
    }

    /// Token and logit by the CPU.
    pub(super) fn expected(&self) -> Vec<(u32, u32)> {
        let choose = |row: usize| {
            let request = &self.requests[self.sequences[row] as usize];
            let first = self.sequences[row] as usize * 2;
            let chain: Vec<u16> = (0..=(row - first) as u16).collect();
            let nodes = match self.as_chain {
                true => &chain[..],
                false => &self.path[row * PATH..][..(self.path_len[row] as usize).min(PATH)],
            };
            // With an odd number of rows the last sequence has one.
            let path: Vec<u32> = nodes
                .iter()
                .skip(request.counted_path)
                .filter_map(|&node| self.tokens.get(first + node as usize).copied())
                .collect();
            let processors = Processors {
                path: &path,
                grammar: self.grammar[row].as_ref(),
                ..request.processors()
            };
            let mut logits = self.logits[row * self.stride..][..self.vocabulary].to_vec();
            let choice = sample(&mut logits, &processors, self.positions[row] + 1);
            choice.map_or((u32::MAX, f32::NEG_INFINITY.to_bits()), |choice| {
                (choice.token, choice.logit.to_bits())
            })
        };
        (0..self.rows).map(choose).collect()
    }

    /// What the sampler is told of the sequences.
    pub(super) fn processors(&self) -> Vec<(Processors<'_>, usize)> {
        let requests = self.requests.iter();
        requests
            .map(|request| (request.processors(), request.counted_path))
            .collect()
    }

    pub(super) fn sampler(&self, device: &Arc<Device>) -> Sampler {
        let room = SamplerRoom {
            vocabulary: self.vocabulary,
            rows: self.rows,
            logits_stride: self.stride,
            sequences: self.requests.len(),
            biases: 32,
            seen: 512,
        };
        let mut sampler = Sampler::load(device, room).unwrap();
        sampler.set_sequences(&self.processors()).unwrap();
        for (row, mask) in self.grammar.iter().enumerate() {
            sampler.set_grammar(row, mask.as_ref()).unwrap();
        }
        sampler.upload().unwrap();
        sampler
    }
}

/// The batch on the device.
pub(super) struct Uploaded {
    pub(super) floats: [DeviceBuffer<f32>; 2],
    _words: [DeviceBuffer<u32>; 5],
    _path: DeviceBuffer<u16>,
    pub(super) choices: DeviceBuffer<u32>,
    choice_logits: DeviceBuffer<f32>,
    pub(super) rows: SampledRows,
}

/// Entries behind the output that must stay as they are.
const GUARD: usize = 16;
pub(super) const POISON: u32 = 0xDEAD_BEEF;

impl Uploaded {
    pub(super) fn new(device: &Arc<Device>, batch: &Batch) -> Self {
        let words = |values: &[u32]| DeviceBuffer::from_slice(device, values).unwrap();
        let floats = |values: &[f32]| DeviceBuffer::from_slice(device, values).unwrap();
        let groups = batch.group_max.as_deref();
        let first_row: Vec<u32> = (0..batch.requests.len()).map(|s| s as u32 * 2).collect();
        let floats = [floats(&batch.logits), floats(groups.unwrap_or(&[]))];
        let words = [
            words(&batch.positions),
            words(&batch.sequences),
            words(&batch.tokens),
            words(&batch.path_len),
            words(&first_row),
        ];
        let path = DeviceBuffer::from_slice(device, &batch.path).unwrap();
        let poison = vec![POISON; batch.rows + GUARD];
        let choices = DeviceBuffer::from_slice(device, &poison).unwrap();
        let poison = vec![f32::from_bits(POISON); batch.rows + GUARD];
        let choice_logits = DeviceBuffer::from_slice(device, &poison).unwrap();
        let rows = SampledRows {
            rows: batch.rows,
            head: HeadLogits {
                logits: floats[0].ptr(),
                stride: batch.stride,
                group_max: groups.map_or(DevicePtr::NULL, |_| floats[1].ptr()),
                group_sum: DevicePtr::NULL,
                group_stride: batch.vocabulary.div_ceil(GROUP),
            },
            batch_row: DevicePtr::NULL,
            batch: batch.rows,
            positions: words[0].ptr(),
            sequences: words[1].ptr(),
            tokens: words[2].ptr(),
            path: match batch.as_chain {
                true => DevicePtr::NULL,
                false => path.ptr(),
            },
            path_len: words[3].ptr(),
            first_row: words[4].ptr(),
            choices: choices.ptr(),
            choice_logits: choice_logits.ptr(),
        };
        Self {
            floats,
            _words: words,
            _path: path,
            choices,
            choice_logits,
            rows,
        }
    }

    /// Token and logit by the device, after a look at what must not have changed.
    pub(super) fn chosen(&self, batch: &Batch) -> Vec<(u32, u32)> {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
        let after = self.floats[0].read().unwrap();
        assert!(bits(&after) == bits(&batch.logits), "the logits changed");
        let choices = self.choices.read().unwrap();
        let logits = bits(&self.choice_logits.read().unwrap());
        for tail in [&choices[batch.rows..], &logits[batch.rows..]] {
            assert_eq!(tail, [POISON; GUARD], "written behind the output");
        }
        choices.into_iter().zip(logits).take(batch.rows).collect()
    }
}
