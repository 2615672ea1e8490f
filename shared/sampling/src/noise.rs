//! Gumbel noise that is a function of seed, position and token: no state, no order of draws.

use crate::arithmetic::{ln, ln_of_parts};

/// Noise stays below this: the largest of the 2^32 values is `-ln(2^-33)`, 22.9.
pub const NOISE_LIMIT: f32 = 23.0;

/// And above this, `-ln(ln(2^33))`.
pub const NOISE_FLOOR: f32 = -3.2;

/// Third word of the counter. Other uses of a request's seed must take another value: shared draws bias a choice.
const TOKEN_CHOICE: u32 = 0;
/// Of the seeds of a request's further answers.
const ANSWER_SEED: u32 = 1;

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key[0] = key[0].wrapping_add(0x9E37_79B9);
        key[1] = key[1].wrapping_add(0xBB67_AE85);
    }
    counter
}

/// The random words of the tokens `4 * quad` to `4 * quad + 3` at a position.
#[inline(always)]
pub fn random_words(seed: u64, position: u32, quad: u32) -> [u32; 4] {
    philox(
        [quad, position, TOKEN_CHOICE, 0],
        [seed as u32, (seed >> 32) as u32],
    )
}

/// The seed of one of several answers to a request: the request's own for answer 0.
pub fn answer_seed(seed: u64, answer: u32) -> u64 {
    if answer == 0 {
        return seed;
    }
    let key = [seed as u32, (seed >> 32) as u32];
    let [low, high, ..] = philox([answer, 0, ANSWER_SEED, 0], key);
    u64::from(low) | u64::from(high) << 32
}

/// Standard Gumbel noise `-ln(-ln u)` of a token at an absolute position, from 32 random bits.
pub fn gumbel(seed: u64, position: u32, token: u32) -> f32 {
    gumbel_of_word(random_words(seed, position, token / 4)[token as usize % 4])
}

/// `-ln(-ln u)` with `u = (word + 1/2) / 2^32`.
///
/// u in f32 would round to 1 for the largest words, where the noise matters most, so that half is computed from
/// `1 - u`, which is exact where it is small.
pub fn gumbel_of_word(word: u32) -> f32 {
    const UNIT: f32 = 1.0 / 4_294_967_296.0;
    let upper = word >> 31 != 0;
    let t = ((if upper { !word } else { word }) as f32 + 0.5) * UNIT;
    let ln_u = match upper {
        // Down to sqrt(1/2), 1 - t needs no reduction and loses no bits of t.
        true if t < 0.29 => ln_of_parts(-t, 0.0),
        true => ln(1.0 - t),
        false => ln(t),
    };
    -ln(-ln_u)
}

/// An upper bound of the noise of a word, little above it but for the 256 largest words. It takes no logarithm
/// and nothing that a vector of words cannot do.
///
/// `-ln(-ln u) <= -ln(1 - u)`, and the bits of a positive f32, read as an integer, are a lower bound of its binary
/// logarithm.
#[inline(always)]
pub(crate) fn noise_bound(word: u32) -> f32 {
    // Exact in f32, and positive as an i32: only that conversion is an instruction everywhere.
    let complement = (!word >> 8) as i32 as f32;
    let logarithm = complement.to_bits() as i32 as f32 / 8_388_608.0 - 127.0 + 8.0;
    (32.0 - logarithm) * 0.693_148 + 0.001
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The published vectors of the Random123 library.
    #[test]
    fn philox_is_philox() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]
        );
        assert_eq!(
            philox(
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0]
            ),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn answers_have_seeds_of_their_own() {
        let seeds: Vec<u64> = (0..64).map(|answer| answer_seed(7, answer)).collect();
        assert_eq!(seeds[0], 7);
        for (at, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..at].contains(seed));
            assert_ne!(*seed, answer_seed(8, at as u32));
        }
    }

    /// A change of these bits changes every sampled text.
    #[test]
    fn the_noise_is_pinned() {
        let bits = [
            0,
            1,
            1 << 30,
            (1 << 31) - 1,
            1 << 31,
            u32::MAX - 1,
            u32::MAX,
        ]
        .map(|word| gumbel_of_word(word).to_bits());
        let pinned = [
            3_225_965_013,
            3_225_758_566,
            3_198_631_067,
            1_052_485_525,
            1_052_485_525,
            1_101_935_539,
            1_102_511_529,
        ];
        assert_eq!(bits, pinned);
    }

    #[test]
    fn the_extremes_are_within_the_limits() {
        assert!(gumbel_of_word(u32::MAX) < NOISE_LIMIT);
        assert!(gumbel_of_word(0) > NOISE_FLOOR);
        for word in (0..=u32::MAX - 4_096)
            .step_by(4_093)
            .chain(u32::MAX - 4_096..=u32::MAX)
        {
            let above = noise_bound(word) - gumbel_of_word(word);
            assert!(above > 0.0, "{word:x}");
            // The bound is of `-ln(1 - u)`, which is near to the noise for large words only; of the largest it drops bits.
            let near = (0xF800_0000..u32::MAX - 65_536).contains(&word);
            assert!(above < 0.1 || !near, "{word:x}: {above}");
        }
    }

    proptest! {
        #[test]
        fn the_noise_is_a_gumbel_quantile(word: u32) {
            let u = (f64::from(word) + 0.5) / 4_294_967_296.0;
            // 1 - u is exact, u next to 1 is not.
            let exact = -(-(-(1.0 - u)).ln_1p()).ln();
            let got = f64::from(gumbel_of_word(word));
            prop_assert!((got - exact).abs() < 4e-7 * exact.abs().max(1.0), "{word:x}: {got} {exact}");
            prop_assert!(got < f64::from(noise_bound(word)));
        }

        #[test]
        fn tokens_positions_and_seeds_have_noise_of_their_own(seed: u64, position in 0u32..1 << 20, token in 0u32..1 << 18) {
            let noise = gumbel(seed, position, token);
            prop_assert_eq!(noise.to_bits(), gumbel(seed, position, token).to_bits());
            prop_assert_ne!(noise, gumbel(seed, position, token + 1));
            prop_assert_ne!(noise, gumbel(seed, position + 1, token));
            prop_assert_ne!(noise, gumbel(seed ^ 1, position, token));
            prop_assert_ne!(noise, gumbel(seed ^ (1 << 40), position, token));
        }
    }
}
