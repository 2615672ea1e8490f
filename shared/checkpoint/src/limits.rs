//! Upper bounds for sizes read from configuration files.
//!
//! They are far above any released model and low enough that no product of a few of them overflows 64 bits, so that a
//! damaged file is refused by name instead of leading to an absurd allocation.

use std::ops::RangeInclusive;

pub(crate) const VOCABULARY: RangeInclusive<usize> = 2..=1 << 24;
pub(crate) const WIDTH: RangeInclusive<usize> = 1..=1 << 20;
pub(crate) const LAYERS: RangeInclusive<usize> = 1..=1 << 12;
pub(crate) const HEADS: RangeInclusive<usize> = 1..=1 << 12;
pub(crate) const HEAD_DIM: RangeInclusive<usize> = 2..=1 << 12;
pub(crate) const CONTEXT: RangeInclusive<usize> = 1..=1 << 30;
pub(crate) const BLOCK: RangeInclusive<usize> = 2..=1 << 10;
pub(crate) const TOKEN_ID: RangeInclusive<usize> = 0..=(1 << 24) - 1;
pub(crate) const LAYER_ID: RangeInclusive<usize> = 0..=(1 << 12) - 1;
