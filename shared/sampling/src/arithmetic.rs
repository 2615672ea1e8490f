//! Logarithm and exponential in single f32 operations of a fixed order, so that CPU and GPU get the same bits. A math
//! library promises an error bound, not bits.

const LN2_HIGH: f32 = 0.693_138_1;
const LN2_LOW: f32 = 9.058_001e-6;

/// Fraction bits of [`mass`]: 1 is `1 << MASS_BITS`, so the masses of a vocabulary of 2^19 tokens fit in a u64.
pub(crate) const MASS_BITS: u32 = 44;

/// Natural logarithm of a positive normal number; error below 1 ulp. Reduction and polynomial of FreeBSD's `e_logf.c`.
pub(crate) fn ln(x: f32) -> f32 {
    // The bits of sqrt(1/2): the mantissa is taken from [sqrt(1/2), sqrt(2)).
    const HALF_ROOT: u32 = 0x3F35_04F3;
    let bits = x.to_bits().wrapping_add(0x3F80_0000 - HALF_ROOT);
    let exponent = (bits >> 23) as i32 - 127;
    let mantissa = f32::from_bits((bits & 0x007F_FFFF) + HALF_ROOT);
    ln_of_parts(mantissa - 1.0, exponent as f32)
}

/// `ln((1 + f) * 2^exponent)` for f in about [-0.293, 0.415).
pub(crate) fn ln_of_parts(f: f32, exponent: f32) -> f32 {
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (0.400_009_72 + w * 0.242_790_79);
    let odd = z * (0.666_666_6 + w * 0.284_987_87);
    let half_square = 0.5 * f * f;
    let small = s * (half_square + (odd + even)) + exponent * LN2_LOW;
    (small - half_square) + f + exponent * LN2_HIGH
}

/// `exp(x)` of a scaled logit that is 0 for the best token and negative for others, in units of 2^-44, rounded down.
///
/// Integers because their sum does not depend on the order: a kernel may add them however it likes and still cut the
/// nucleus where the CPU does. Anything below `exp(-31)` of the best counts as nothing. Polynomial of Cephes' `expf`.
#[inline(always)]
pub fn mass(x: f32) -> u64 {
    // Adding it rounds to an integer, in the rounding mode that both sides have; the low bits then are that integer.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut y = 1.987_569_1e-4;
    for coefficient in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_66,
        0.5,
    ] {
        y = y * r + coefficient;
    }
    let y = (y * (r * r) + r) + 1.0;
    // `y * 2^(44 + n)` rounded down, by shifts: a conversion from f32 to u64 is an instruction per token on most
    // processors, and this loop runs over the vocabulary.
    let binary_places = ROUND.to_bits().wrapping_sub(rounded.to_bits());
    let shift = (127 + binary_places).wrapping_sub(y.to_bits() >> 23) & 63;
    let significand = u64::from(y.to_bits() & 0x007F_FFFF | 0x0080_0000);
    let units = significand << (MASS_BITS - 23) >> shift;
    // False for NaN too.
    if x > -31.0 { units } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ulps(got: f32, exact: f64) -> f64 {
        let ulp = f64::from(f32::from_bits((exact as f32).abs().to_bits() + 1))
            - f64::from((exact as f32).abs());
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn known_values() {
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(2.0), std::f32::consts::LN_2);
        assert_eq!(mass(0.0), 1 << 44);
        assert_eq!(mass(-31.0), 0);
        assert_eq!(mass(f32::NEG_INFINITY), 0);
        assert_eq!(mass(f32::NAN), 0);
    }

    /// The definition of which [`mass`] is a faster form.
    fn mass_by_conversion(x: f32) -> u64 {
        const ROUND: f32 = 12_582_912.0;
        let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
        let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
        let polynomial = [
            1.398_199_9e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            0.166_666_66,
            0.5,
        ];
        let y = polynomial.iter().fold(1.987_569_1e-4, |y, c| y * r + c);
        let y = (y * (r * r) + r) + 1.0;
        (y * f32::from_bits(((127 + MASS_BITS as i32 + n as i32) as u32) << 23)) as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

        #[test]
        fn a_shift_is_the_conversion(x in prop_oneof![-31.0f32..=0.0, -1.0f32..=0.0, -1e-3f32..=0.0]) {
            prop_assume!(x > -31.0);
            prop_assert_eq!(mass(x), mass_by_conversion(x), "{}", x);
        }
    }

    proptest! {
        #[test]
        fn the_logarithm_is_right_to_one_ulp(bits in 0x0080_0000u32..0x7F80_0000) {
            let x = f32::from_bits(bits);
            let exact = f64::from(x).ln();
            prop_assert!(ulps(ln(x), exact) < 1.0 || (f64::from(ln(x)) - exact).abs() < 1e-12, "{x}");
        }

        #[test]
        fn masses_are_exponentials(x in -31.0f32..0.0) {
            let exact = f64::from(x).exp() * 2f64.powi(44);
            prop_assert!((mass(x) as f64 - exact).abs() <= exact * 2e-7 + 1.0, "{x}");
        }
    }
}
