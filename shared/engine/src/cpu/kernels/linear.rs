//! `y = x W^T`: which kernel multiplies which part of the weights, and what becomes of its outputs.

use std::cell::RefCell;
use std::ops::Range;

use treespec_checkpoint::MatrixFormat;

use super::activations::{Encoding, encode};
use super::even_tiles::EvenTiles;
use super::float::{Bf16Panel, F32Panel, panel_rows};
use super::integer::{BlockTiles, MAX_INTEGER_ROWS, TileKernel, TileValues, correction};
use super::lanes::{IntegerLanes, Lanes};
use super::linear_output::{Output, PanelPlace, Rows};
use super::packed::{Arithmetic, PackedLinear, Part};
use super::panel::{PANEL, Q4_0, Q4_1, Q4K, Q6K, Q8_0};
use super::pool::ThreadPool;
use super::{Epilogue, Isa, dispatch, dispatch_bf16, dispatch_integer};

/// The inputs of a linear pass in every form that its weights multiply.
pub(crate) struct LinearInput<'a> {
    rows: Rows<'a>,
    encoded: &'a [EncodedRows],
}

/// Rows in one encoding.
#[derive(Default)]
struct EncodedRows {
    encoding: Option<Encoding>,
    words: Vec<i32>,
}

/// Encoded inputs, kept between calls.
#[derive(Default)]
pub(crate) struct InputScratch {
    encoded: Vec<EncodedRows>,
}

impl InputScratch {
    /// Encodes `x`, `[rows, depth]`, for `weights`.
    pub(crate) fn encode<'a>(
        &'a mut self,
        pool: &mut ThreadPool,
        isa: Isa,
        x: &'a [f32],
        rows: usize,
        weights: &PackedLinear,
    ) -> LinearInput<'a> {
        assert_eq!(x.len(), rows * weights.depth(), "linear input");
        let mut used = 0;
        for part in weights.parts() {
            let Some(encoding) = part.encoding() else {
                continue;
            };
            let done = self.encoded[..used]
                .iter()
                .any(|e| e.encoding == Some(encoding));
            if done || rows == 0 {
                continue;
            }
            if used == self.encoded.len() {
                self.encoded.push(EncodedRows::default());
            }
            let target = &mut self.encoded[used];
            target.encoding = Some(encoding);
            encode(pool, isa, x, rows, encoding, &mut target.words);
            used += 1;
        }
        LinearInput {
            rows: Rows {
                inputs: x,
                count: rows,
            },
            encoded: &self.encoded[..used],
        }
    }
}

impl LinearInput<'_> {
    /// Rows of the input.
    pub(super) fn rows(&self) -> usize {
        self.rows.count
    }

    fn words(&self, encoding: Encoding) -> &[i32] {
        self.encoded
            .iter()
            .find(|rows| rows.encoding == Some(encoding))
            .map(|rows| rows.words.as_slice())
            .expect("the input was encoded for these weights")
    }
}

impl Part {
    /// How its inputs are encoded; `None` for f32.
    fn encoding(&self) -> Option<Encoding> {
        let correction = match (self.arithmetic, self.format) {
            (Arithmetic::F32, _) | (_, MatrixFormat::F32) => return None,
            (Arithmetic::Bf16, _) | (_, MatrixFormat::Bf16) => return Some(Encoding::Bf16),
            (Arithmetic::Integer, MatrixFormat::Q4_0) => correction::<Q4_0>(),
            (Arithmetic::Integer, MatrixFormat::Q4_1) => correction::<Q4_1>(),
            (Arithmetic::Integer, MatrixFormat::Q8_0) => correction::<Q8_0>(),
            (Arithmetic::Integer, MatrixFormat::Q4_K) => correction::<Q4K>(),
            (Arithmetic::Integer, MatrixFormat::Q6_K) => correction::<Q6K>(),
        };
        Some(Encoding::Integer(correction))
    }
}

/// `out = epilogue(x W^T)`: `x` is `[rows, depth]`, `out` is `[rows, out.len() / rows]`.
///
/// # Panics
/// When the sizes do not match.
pub(crate) fn linear(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &LinearInput<'_>,
    weights: &PackedLinear,
    out: &mut [f32],
    epilogue: Epilogue,
) {
    if x.rows() == 0 {
        return;
    }
    let columns = out.len() / x.rows();
    assert_eq!(out.len(), x.rows() * columns, "linear output");
    assert!(
        columns <= weights.panels() * epilogue.columns_per_panel(),
        "linear output columns"
    );
    let target = Output::new(out, columns, epilogue);
    all_panels(pool, isa, x, weights, 0..weights.panels(), &target);
}

/// The output columns `range` only, which are whole groups of matrices.
///
/// # Panics
/// When the sizes do not match, or no group begins or ends there.
pub(crate) fn linear_columns(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &LinearInput<'_>,
    weights: &PackedLinear,
    range: Range<usize>,
    out: &mut [f32],
) {
    assert_eq!(out.len(), x.rows() * range.len(), "linear output");
    if x.rows() == 0 {
        return;
    }
    let panels = weights.panel_at(range.start)..weights.panel_at(range.end);
    let target = Output::store(out, range.len(), range.start);
    all_panels(pool, isa, x, weights, panels, &target);
}

fn all_panels(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &LinearInput<'_>,
    weights: &PackedLinear,
    panels: Range<usize>,
    out: &Output<'_>,
) {
    let first = panels.start;
    let grain = grain(panels.len(), pool.threads());
    pool.for_ranges(panels.len(), grain, &|range| {
        linear_panels(isa, x, weights, first + range.start, first + range.end, out);
    });
}

/// Panels that a thread takes at a time: a few times for each thread, so that a slow one is helped out, and as often
/// for one as for another.
fn grain(panels: usize, threads: usize) -> usize {
    const MOST_TURNS: usize = 4;
    (1..=MOST_TURNS)
        .rev()
        .map(|turns| panels.div_ceil(threads * turns).max(1))
        .find(|&grain| panels.div_ceil(grain).is_multiple_of(threads))
        .unwrap_or_else(|| panels.div_ceil(threads).max(1))
}

/// Like [`linear`] on one thread and for the panels `from..to` only. Concurrent calls must have disjoint panels.
pub(super) fn linear_panels(
    isa: Isa,
    x: &LinearInput<'_>,
    w: &PackedLinear,
    from: usize,
    to: usize,
    out: &Output<'_>,
) {
    assert!(to <= w.panels() && x.rows.inputs.len() == x.rows.count * w.depth());
    let mut from = from;
    while from < to {
        let part = &w.parts()[w.part_of(from)];
        let end = to.min(part.first_panel + part.panels);
        let pass = PartPass {
            part,
            depth: w.depth(),
            from,
            to: end,
        };
        match part.encoding() {
            None => {
                let rows = x.rows;
                dispatch!(isa, float_panels(pass: PartPass<'_>, rows: Rows<'_>, out: &Output<'_>));
            }
            Some(encoding @ Encoding::Integer(_)) => {
                let words = x.words(encoding);
                let rows = x.rows.count;
                dispatch_integer!(isa, integer_panels(pass: PartPass<'_>, words: &[i32], rows: usize, out: &Output<'_>));
            }
            Some(encoding @ Encoding::Bf16) => {
                let words = x.words(encoding);
                let rows = x.rows.count;
                dispatch_bf16!(isa, bf16_panels(pass: PartPass<'_>, words: &[i32], rows: usize, out: &Output<'_>));
            }
        }
        from = end;
    }
}

/// Panels `from..to` of the whole, all of one part.
#[derive(Clone, Copy)]
struct PartPass<'a> {
    part: &'a Part,
    depth: usize,
    from: usize,
    to: usize,
}

thread_local! {
    /// One widened panel, kept because clearing it anew for every call would cost as much as filling it.
    static UNPACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// `rows` match the part's depth, and nobody else writes the outputs of these panels.
#[inline(always)]
unsafe fn float_panels<L: Lanes>(pass: PartPass<'_>, rows: Rows<'_>, out: &Output<'_>) {
    let PartPass { part, depth, .. } = pass;
    // Taken out rather than borrowed in a closure: a closure would be compiled without the target features.
    let mut unpacked = UNPACKED.take();
    for panel in pass.from..pass.to {
        let place = PanelPlace::new(part, panel, out.epilogue);
        let local = panel - part.first_panel;
        // SAFETY: the caller's contract, and `unpacked` is a whole panel.
        unsafe {
            match part.format {
                MatrixFormat::F32 => {
                    let reader = F32Panel(part.panel(local).as_ptr().cast());
                    panel_rows::<L, _>(rows, reader, depth, place, out);
                }
                MatrixFormat::Bf16 => {
                    let reader = Bf16Panel(part.panel(local).as_ptr());
                    panel_rows::<L, _>(rows, reader, depth, place, out);
                }
                _ => {
                    unpacked.resize(depth * PANEL, 0.0);
                    part.widen::<L>(local, depth, &mut unpacked);
                    let reader = F32Panel(unpacked.as_ptr());
                    panel_rows::<L, _>(rows, reader, depth, place, out);
                }
            }
        }
    }
    UNPACKED.set(unpacked);
}

/// # Safety
/// `words` are `rows` rows encoded for this part, and nobody else writes the outputs of these panels.
#[inline(always)]
unsafe fn integer_panels<L: IntegerLanes>(
    pass: PartPass<'_>,
    words: &[i32],
    rows: usize,
    out: &Output<'_>,
) {
    // SAFETY: the caller's contract; the panels have the part's format.
    unsafe {
        match pass.part.format {
            MatrixFormat::Q4_0 => encoded_panels::<L, BlockTiles<Q4_0>>(pass, words, rows, out),
            MatrixFormat::Q4_1 => encoded_panels::<L, BlockTiles<Q4_1>>(pass, words, rows, out),
            MatrixFormat::Q8_0 => encoded_panels::<L, BlockTiles<Q8_0>>(pass, words, rows, out),
            MatrixFormat::Q4_K => encoded_panels::<L, BlockTiles<Q4K>>(pass, words, rows, out),
            MatrixFormat::Q6_K => encoded_panels::<L, BlockTiles<Q6K>>(pass, words, rows, out),
            MatrixFormat::F32 | MatrixFormat::Bf16 => {
                unreachable!("floating-point weights are not multiplied in integers")
            }
        }
    }
}

/// # Safety
/// As [`integer_panels`], for a bfloat16 part.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
unsafe fn bf16_panels<L: super::lanes::Bf16Lanes + IntegerLanes>(
    pass: PartPass<'_>,
    words: &[i32],
    rows: usize,
    out: &Output<'_>,
) {
    // SAFETY: the caller's contract.
    unsafe { encoded_panels::<L, super::integer::Bf16Tiles>(pass, words, rows, out) }
}

/// # Safety
/// As [`integer_panels`], for panels that the kernel `K` reads.
#[inline(always)]
unsafe fn encoded_panels<L: IntegerLanes, K: TileKernel<L>>(
    pass: PartPass<'_>,
    words: &[i32],
    rows: usize,
    out: &Output<'_>,
) {
    let row_words = words.len() / rows;
    let mut values: TileValues = [[0.0; PANEL]; MAX_INTEGER_ROWS];
    for panel in pass.from..pass.to {
        let place = PanelPlace::new(pass.part, panel, out.epilogue);
        let weights = pass.part.panel(panel - pass.part.first_panel).as_ptr();
        for tile in EvenTiles::new(rows, L::INTEGER_ROWS).iter() {
            let x = words[tile.start * row_words..].as_ptr();
            let first = tile.start == 0;
            // SAFETY: the caller's contract.
            unsafe {
                K::tile_rows(weights, pass.depth, x, tile.len(), first, &mut values);
                for (row, values) in tile.zip(&values) {
                    out.finish::<L>(values, row, place);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
