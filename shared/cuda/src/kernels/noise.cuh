// Random words, Gumbel noise and masses with the bits of the crate treespec-sampling (noise.rs, arithmetic.rs): the same
// single roundings in the same order. The _rn intrinsics are never fused; no function of a math library is used.

// Noise is below NOISE_LIMIT and above NOISE_FLOOR.
#define NOISE_LIMIT 23.0f
#define NOISE_FLOOR (-3.2f)

__device__ __forceinline__ float ln_of_parts(float f, float exponent) {
    float s = __fdiv_rn(f, __fadd_rn(2.0f, f));
    float z = __fmul_rn(s, s);
    float w = __fmul_rn(z, z);
    float even = __fmul_rn(w, __fadd_rn(0.40000972f, __fmul_rn(w, 0.24279079f)));
    float odd = __fmul_rn(z, __fadd_rn(0.6666666f, __fmul_rn(w, 0.28498787f)));
    float half_square = __fmul_rn(__fmul_rn(0.5f, f), f);
    float small = __fadd_rn(__fmul_rn(s, __fadd_rn(half_square, __fadd_rn(odd, even))), __fmul_rn(exponent, 9.058001e-6f));
    return __fadd_rn(__fadd_rn(__fsub_rn(small, half_square), f), __fmul_rn(exponent, 0.6931381f));
}

// Natural logarithm of a positive normal number.
__device__ __forceinline__ float ln(float x) {
    u32 bits = __float_as_uint(x) + (0x3F800000u - 0x3F3504F3u);
    i32 exponent = (i32)(bits >> 23) - 127;
    float mantissa = __uint_as_float((bits & 0x007FFFFFu) + 0x3F3504F3u);
    return ln_of_parts(__fsub_rn(mantissa, 1.0f), __int2float_rn(exponent));
}

// exp(x) for x <= 0 in units of 2^-44, rounded down.
__device__ __forceinline__ u64 mass(float x) {
    if (!(x > -31.0f)) return 0;
    float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.442695f), 12582912.0f), 12582912.0f);
    float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float y = 1.9875691e-4f;
    y = __fadd_rn(__fmul_rn(y, r), 1.3981999e-3f);
    y = __fadd_rn(__fmul_rn(y, r), 8.333452e-3f);
    y = __fadd_rn(__fmul_rn(y, r), 4.1665796e-2f);
    y = __fadd_rn(__fmul_rn(y, r), 0.16666666f);
    y = __fadd_rn(__fmul_rn(y, r), 0.5f);
    y = __fadd_rn(__fadd_rn(__fmul_rn(y, __fmul_rn(r, r)), r), 1.0f);
    float scale = __uint_as_float((u32)(127 + 44 + __float2int_rz(n)) << 23);
    return __float2ull_rz(__fmul_rn(y, scale));
}

// Philox4x32-10: the words of tokens 4 quad .. 4 quad + 3. The third word of the counter is the purpose, 0 for choices.
__device__ __forceinline__ void random_words(u32 seed_low, u32 seed_high, u32 position, u32 quad, u32 (&words)[4]) {
    u32 c0 = quad, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        u64 a = (u64)c0 * 0xD2511F53u;
        u64 b = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(b >> 32) ^ c1 ^ (seed_low + round * 0x9E3779B9u);
        c2 = (u32)(a >> 32) ^ c3 ^ (seed_high + round * 0xBB67AE85u);
        c1 = (u32)b;
        c3 = (u32)a;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// -ln(-ln u) with u = (word + 1/2) / 2^32. The upper half goes through 1 - u, which is exact where it is small.
__device__ __forceinline__ float gumbel_of_word(u32 word) {
    bool upper = (word >> 31) != 0;
    float t = __fmul_rn(__fadd_rn(__uint2float_rn(upper ? ~word : word), 0.5f), 2.3283064365386963e-10f);
    float ln_u;
    if (upper && t < 0.29f)
        ln_u = ln_of_parts(-t, 0.0f);
    else
        ln_u = ln(upper ? __fsub_rn(1.0f, t) : t);
    return -ln(-ln_u);
}

// At least 0.0017 above the noise of the word, and rising with it. Its last bits do not matter.
__device__ __forceinline__ float noise_bound(u32 word) { return (float)__clz(~word) * 0.6932f + 0.6942f; }
