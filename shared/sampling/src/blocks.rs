//! Going over a vocabulary in vectors, which the compiler makes of loops over constant numbers of tokens.

/// Tokens that are passed over or looked at together, a whole number of groups and of quads of random words.
pub(crate) const BLOCK: usize = 256;
/// Tokens that share a test.
pub(crate) const GROUP: usize = 16;

/// The largest logit; NaN is none.
#[inline(always)]
pub(crate) fn largest(logits: &[f32]) -> f32 {
    // As many maxima as a vector has lanes: a single one would be a chain through the vocabulary.
    let mut lanes = [f32::NEG_INFINITY; GROUP];
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let groups = logits.chunks_exact(GROUP);
    let rest = groups.remainder();
    for group in groups {
        for (lane, &logit) in lanes.iter_mut().zip(group) {
            *lane = larger(*lane, logit);
        }
    }
    let lanes = lanes.iter().chain(rest).copied();
    lanes.fold(f32::NEG_INFINITY, larger)
}

/// The `count`-th largest logit; `None` when there are fewer.
#[inline(always)]
pub(crate) fn kth_largest(logits: &[f32], count: usize) -> Option<f32> {
    if count > logits.len() {
        return None;
    }
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    // Cutting back to `count` costs as much as there is, so room for as many again makes an insertion cheap.
    let room = count + count.max(GROUP * 4);
    let mut kept = Vec::with_capacity(room + GROUP);
    let mut threshold = f32::NEG_INFINITY;
    for group in logits.chunks(GROUP) {
        // False for NaN.
        if !group.iter().fold(false, |any, &l| any | (l > threshold)) {
            continue;
        }
        kept.extend(group.iter().copied().filter(|&l| l > threshold));
        if kept.len() >= room {
            threshold = *kept.select_nth_unstable_by(count - 1, descending).1;
            kept.truncate(count);
        }
    }
    (kept.len() >= count).then(|| *kept.select_nth_unstable_by(count - 1, descending).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn they_are_what_sorting_finds(
            logits in prop::collection::vec(
                prop_oneof![8 => (-8i8..8).prop_map(f32::from), 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY)],
                0..700,
            ),
            count in 1usize..400,
        ) {
            let mut sorted: Vec<f32> = logits.iter().copied().filter(|&l| l > f32::NEG_INFINITY).collect();
            sorted.sort_by(|a, b| b.total_cmp(a));
            prop_assert_eq!(kth_largest(&logits, count), sorted.get(count - 1).copied());
            prop_assert_eq!(largest(&logits), sorted.first().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
