//! The head pass: logits in vocabulary chunks that stay in the cache, reduced to log-normaliser and top-k at once.

use std::cell::RefCell;
use std::sync::Mutex;

use super::lanes::{LANES, Lanes};
use super::linear::{InputScratch, LinearInput, linear_panels};
use super::linear_output::Output;
use super::packed::PackedLinear;
use super::panel::PANEL;
use super::pool::ThreadPool;
use super::sampling::SampledRows;
use super::{Isa, dispatch};
use crate::batch::HeadRequest;
use crate::head_topk::{HeadRow, TopK, log_normaliser};
use crate::row_sampling::RowSampling;

/// Panels of one vocabulary chunk. Chunks are absolute, so sums over them do not depend on the threads.
const CHUNK_PANELS: usize = 32;
const CHUNK: usize = CHUNK_PANELS * PANEL;
/// Rows of one sweep over the head's weights; more would push the logits of a chunk out of the cache.
const SWEEP_ROWS: usize = 64;

/// One run of a head.
#[derive(Clone, Copy)]
pub(crate) struct HeadPass<'a> {
    /// `[requests.len(), depth]`
    pub(crate) hidden: &'a [f32],
    /// One per row.
    pub(crate) requests: &'a [HeadRequest],
    /// Rows with an entry also choose a token; may be shorter than the requests.
    pub(crate) sampling: &'a [Option<RowSampling<'a>>],
    pub(crate) head: &'a PackedLinear,
}

/// Memory that is reused from pass to pass.
#[derive(Default)]
pub(crate) struct HeadScratch {
    /// All logits of the rows that sample.
    sampled: Vec<f32>,
}

/// Answers one request per row.
pub(crate) fn select(
    pool: &mut ThreadPool,
    isa: Isa,
    input: &mut InputScratch,
    scratch: &mut HeadScratch,
    pass: HeadPass<'_>,
) -> Vec<HeadRow> {
    let HeadPass { requests, head, .. } = pass;
    let mut rows = Vec::with_capacity(requests.len());
    let mut sampling = pass.sampling.chunks(SWEEP_ROWS);
    for (hidden, requests) in pass
        .hidden
        .chunks(SWEEP_ROWS * head.depth())
        .zip(requests.chunks(SWEEP_ROWS))
    {
        let first = rows.len();
        let sampling = sampling.next().unwrap_or_default();
        let sampled = SampledRows::new(sampling, &mut scratch.sampled, head.columns());
        let hidden = input.encode(pool, isa, hidden, requests.len(), head);
        rows.extend(sweep(pool, isa, &hidden, requests, &sampled, head));
        sampled.choose(pool, isa, requests, &mut rows[first..]);
    }
    rows
}

thread_local! {
    /// Logits of one vocabulary chunk.
    static CHUNK_LOGITS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// What one thread has found so far: a collector per row, and per chunk the normaliser parts of all rows.
struct Partial {
    top: Vec<TopK>,
    normaliser: Vec<(usize, Vec<(f32, f32)>)>,
    gathered: Vec<Option<f32>>,
}

fn sweep(
    pool: &mut ThreadPool,
    isa: Isa,
    hidden: &LinearInput<'_>,
    requests: &[HeadRequest],
    sampled: &SampledRows<'_>,
    head: &PackedLinear,
) -> Vec<HeadRow> {
    let chunks = head.panels().div_ceil(CHUNK_PANELS);
    let partials: Mutex<Vec<Partial>> = Mutex::new(Vec::new());
    let next = std::sync::atomic::AtomicUsize::new(0);
    pool.run(&|_| {
        let mut partial = Partial::new(requests);
        let mut logits = CHUNK_LOGITS.take();
        logits.resize(requests.len() * CHUNK, 0.0);
        loop {
            let chunk = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if chunk >= chunks {
                break;
            }
            let (first_token, width) = chunk_tokens(chunk, head);
            let logits = &mut logits[..requests.len() * width];
            partial.add_chunk(isa, hidden, requests, head, chunk, logits);
            // SAFETY: every chunk is taken by one thread.
            unsafe { sampled.keep(logits, first_token, width) };
        }
        CHUNK_LOGITS.set(logits);
        partials
            .lock()
            .expect("no thread panics while it holds the partial results")
            .push(partial);
    });
    let partials = partials
        .into_inner()
        .expect("no thread panics while it holds the partial results");
    combine(requests, partials)
}

/// First token and number of tokens of a chunk.
fn chunk_tokens(chunk: usize, head: &PackedLinear) -> (usize, usize) {
    let first = chunk * CHUNK;
    (first, CHUNK.min(head.columns() - first))
}

impl Partial {
    fn new(requests: &[HeadRequest]) -> Self {
        Self {
            top: requests.iter().map(|r| TopK::new(r.top_k)).collect(),
            normaliser: Vec::new(),
            gathered: vec![None; requests.len()],
        }
    }

    fn add_chunk(
        &mut self,
        isa: Isa,
        hidden: &LinearInput<'_>,
        requests: &[HeadRequest],
        head: &PackedLinear,
        chunk: usize,
        logits: &mut [f32],
    ) {
        let first_panel = chunk * CHUNK_PANELS;
        let last_panel = head.panels().min(first_panel + CHUNK_PANELS);
        let (first_token, width) = chunk_tokens(chunk, head);
        let out = Output::store(logits, width, first_token);
        linear_panels(isa, hidden, head, first_panel, last_panel, &out);
        let mut sums = Vec::new();
        for (row, (request, logits)) in requests.iter().zip(logits.chunks(width)).enumerate() {
            if request.normaliser {
                sums.resize(row, (f32::NEG_INFINITY, 0.0));
                sums.push(max_and_sum(isa, logits));
            }
            collect(isa, logits, first_token as u32, &mut self.top[row]);
            if let Some(token) = request.gather {
                let local = (token as usize).wrapping_sub(first_token);
                if let Some(&logit) = logits.get(local) {
                    self.gathered[row] = Some(logit);
                }
            }
        }
        self.normaliser.push((chunk, sums));
    }
}

fn combine(requests: &[HeadRequest], mut partials: Vec<Partial>) -> Vec<HeadRow> {
    let mut chunks: Vec<(usize, Vec<(f32, f32)>)> = partials
        .iter_mut()
        .flat_map(|p| std::mem::take(&mut p.normaliser))
        .collect();
    chunks.sort_unstable_by_key(|(chunk, _)| *chunk);
    requests
        .iter()
        .enumerate()
        .map(|(row, request)| {
            let sums: Vec<(f32, f32)> = if request.normaliser {
                chunks.iter().map(|(_, sums)| sums[row]).collect()
            } else {
                Vec::new()
            };
            let tops = partials
                .iter_mut()
                .map(|p| std::mem::replace(&mut p.top[row], TopK::new(0)));
            let top = TopK::merge(request.top_k, tops);
            HeadRow {
                log_normaliser: if request.normaliser {
                    log_normaliser(&sums)
                } else {
                    f32::NAN
                },
                top,
                gathered: partials.iter().find_map(|p| p.gathered[row]),
                chosen: None,
                rank: None,
            }
        })
        .collect()
}

fn max_and_sum(isa: Isa, logits: &[f32]) -> (f32, f32) {
    dispatch!(isa, max_and_sum_lanes(logits: &[f32]) -> (f32, f32))
}

/// Largest logit and the sum of `exp(logit - largest)`, in lanes of the chunk's absolute positions.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn max_and_sum_lanes<L: Lanes>(logits: &[f32]) -> (f32, f32) {
    let whole = logits.chunks_exact(LANES);
    let mut tail = [f32::NEG_INFINITY; LANES];
    let rest = whole.remainder();
    tail[..rest.len()].copy_from_slice(rest);
    // SAFETY: every chunk and the tail hold sixteen elements.
    unsafe {
        let mut max = L::load(tail.as_ptr());
        for chunk in whole.clone() {
            max = max.max(L::load(chunk.as_ptr()));
        }
        let max = max.largest();
        let shift = L::splat(-max);
        let mut sum = L::splat(0.0);
        for chunk in whole {
            sum = sum.add(L::load(chunk.as_ptr()).add(shift).exp());
        }
        // `exp` clamps, so the padding of the tail must be left out by hand.
        let mut last = L::load(tail.as_ptr()).add(shift).exp().to_array();
        last[rest.len()..].fill(0.0);
        (max, sum.add(L::load(last.as_ptr())).sum())
    }
}

fn collect(isa: Isa, logits: &[f32], first_token: u32, top: &mut TopK) {
    dispatch!(isa, collect_lanes(logits: &[f32], first_token: u32, top: &mut TopK));
}

/// Offers every logit above the collector's threshold to it.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn collect_lanes<L: Lanes>(logits: &[f32], first_token: u32, top: &mut TopK) {
    let mut token = first_token;
    let whole = logits.chunks_exact(LANES);
    let rest = whole.remainder();
    for chunk in whole {
        // SAFETY: the chunk holds sixteen elements.
        if unsafe { L::load(chunk.as_ptr()).any_greater(L::splat(top.threshold())) } {
            for (lane, &logit) in chunk.iter().enumerate() {
                top.push(token + lane as u32, logit);
            }
        }
        token += LANES as u32;
    }
    for (lane, &logit) in rest.iter().enumerate() {
        top.push(token + lane as u32, logit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::cpu::kernels::Packer;

    fn run(
        threads: usize,
        isa: Isa,
        hidden: &[f32],
        requests: &[HeadRequest],
        head: &PackedLinear,
    ) -> Vec<HeadRow> {
        let pass = HeadPass {
            hidden,
            requests,
            sampling: &[],
            head,
        };
        let mut pool = ThreadPool::new(threads).unwrap();
        let (mut input, mut scratch) = Default::default();
        select(&mut pool, isa, &mut input, &mut scratch, pass)
    }

    fn head(vocab: usize, depth: usize) -> PackedLinear {
        let weights: Vec<f32> = (0..vocab * depth)
            .map(|i| ((i * 7_919) % 211) as f32 / 100.0 - 1.0)
            .collect();
        let matrix = treespec_checkpoint::StoredMatrix::from_f32(&weights, depth);
        Packer::new(Precision::F32, Isa::Portable)
            .pack(matrix)
            .unwrap()
    }

    #[test]
    fn threads_and_neighbours_do_not_change_a_row() {
        let (vocab, depth) = (3_001, 24);
        let head = head(vocab, depth);
        let hidden: Vec<f32> = (0..70 * depth).map(|i| (i as f32 * 0.37).sin()).collect();
        let request = |row: usize| HeadRequest {
            top_k: 1 + row % 9,
            normaliser: !row.is_multiple_of(3),
            gather: Some((row * 40) as u32),
            ..HeadRequest::ARGMAX
        };
        let requests: Vec<_> = (0..70).map(request).collect();
        let isa = Isa::detect();
        let all = run(3, isa, &hidden, &requests, &head);
        for row in [0, 1, 63, 64, 69] {
            let own = &hidden[row * depth..(row + 1) * depth];
            let alone = run(1, isa, own, &requests[row..=row], &head);
            assert_eq!(alone[0].top, all[row].top);
            assert_eq!(alone[0].gathered, all[row].gathered);
            assert_eq!(
                alone[0].log_normaliser.to_bits(),
                all[row].log_normaliser.to_bits()
            );
        }
    }

    #[test]
    fn agrees_with_a_dense_softmax() {
        let (vocab, depth) = (1_500, 8);
        let head = head(vocab, depth);
        let hidden: Vec<f32> = (0..depth).map(|i| (i as f32).cos()).collect();
        let mut row = vec![0.0; depth];
        let dense: Vec<f64> = (0..vocab)
            .map(|v| {
                head.copy_row(v, &mut row);
                row.iter().zip(&hidden).map(|(a, b)| f64::from(a * b)).sum()
            })
            .collect();
        let expected = dense.iter().map(|l| l.exp()).sum::<f64>().ln();
        let request = HeadRequest {
            top_k: 3,
            normaliser: true,
            gather: Some(1_499),
            ..HeadRequest::ARGMAX
        };
        for isa in [Isa::Portable, Isa::detect()] {
            let rows = run(2, isa, &hidden, &[request], &head);
            assert!((f64::from(rows[0].log_normaliser) - expected).abs() < 1e-4);
            assert!((f64::from(rows[0].gathered.unwrap()) - dense[1_499]).abs() < 1e-4);
            let best = dense.iter().copied().fold(f64::MIN, f64::max);
            assert!((f64::from(rows[0].top[0].score) - best).abs() < 1e-4);
        }
    }
}
