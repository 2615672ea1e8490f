// Random weights for benchmarks of shapes without a checkpoint: uniform with standard deviation `scale`, in any packing.

__device__ __forceinline__ u64 mixed(u64 z) {
    // SplitMix64, Steele et al. 2014.
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// `vectors` groups of 8 values.
extern "C" __global__ void random_weights(bf16* out, u64 vectors, u64 seed, float scale) {
    pdl_launch();
    pdl_wait();
    float step = scale * 1.7320508f / 32768.0f;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += (u64)gridDim.x * blockDim.x) {
        u32 pairs[4];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u64 bits = mixed(seed + i * 2 + half);
#pragma unroll
            for (u32 j = 0; j < 2; j++, bits >>= 32) {
                float low = ((float)(u32)(bits & 0xFFFF) - 32767.5f) * step;
                float high = ((float)(u32)(bits >> 16 & 0xFFFF) - 32767.5f) * step;
                pairs[half * 2 + j] = pack_bf16(low, high);
            }
        }
        ((uint4*)out)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
