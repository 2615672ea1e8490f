// Rotary embedding of queries and keys with the optional norm per head in front of it (Qwen3), and the store of keys and
// values into the cache. Compiled for one HEAD_DIM. Dimension i is paired with i + HEAD_DIM / 2. One warp per head of a row.

#define WIDTH ((HEAD_DIM + 31) / 32 * 32)   // elements of a query, key or value in the cache: padded with zeros
#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)            // pairs of one lane
#define ROTARY_WARPS 4

#if HEAD_DIM % 8 != 0
#error "HEAD_DIM must be a multiple of 8"
#endif

// What a lane needs besides the row: constant weights, so they are loaded ahead of the wait.
struct HeadWeights {
    float frequency[PAIRS];
    float low[PAIRS], high[PAIRS];
    bool norm;
};

__device__ __forceinline__ HeadWeights load_weights(const float* frequencies, const float* norm, u32 lane) {
    HeadWeights weights = {};
    weights.norm = norm != 0;
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        u32 i = lane + 32 * p;
        if (i >= HALF) continue;
        weights.frequency[p] = frequencies[i];
        if (norm == 0) continue;
        weights.low[p] = norm[i];
        weights.high[p] = norm[i + HALF];
    }
    return weights;
}

// Loads a head of `HEAD_DIM` values, normalises and rotates it.
__device__ __forceinline__ void rotate_head(const float* head, const HeadWeights& weights, float eps, u32 position, float scale,
                                            u32 lane, float (&low)[PAIRS], float (&high)[PAIRS]) {
    float square = 0.0f;
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        u32 i = lane + 32 * p;
        low[p] = i < HALF ? head[i] : 0.0f;
        high[p] = i < HALF ? head[i + HALF] : 0.0f;
        square = __fmaf_rn(low[p], low[p], square);
        square = __fmaf_rn(high[p], high[p], square);
    }
    float unit = 1.0f;
    if (weights.norm) {
#pragma unroll
        for (u32 step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(0xFFFFFFFF, square, step);
        unit = 1.0f / sqrtf(square / (float)HEAD_DIM + eps);
    }
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        float x = weights.norm ? low[p] * unit * weights.low[p] : low[p];
        float y = weights.norm ? high[p] * unit * weights.high[p] : high[p];
        float sine, cosine;
        sincosf((float)position * weights.frequency[p], &sine, &cosine);
        low[p] = (x * cosine - y * sine) * scale;
        high[p] = (y * cosine + x * sine) * scale;
    }
}

// Stores a rotated key and copies its value, `HEAD_DIM` values at `value`, to a row of the cache.
//
// Attention multiplies the values of slots that a row does not see by zero, so a cache may hold finite values only. A value
// that is not is stored as zero and its key as NaN: whoever sees the slot still gets NaN, and nobody else does.
__device__ __forceinline__ void store_row(const float (&low)[PAIRS], const float (&high)[PAIRS], const float* value, bf16* keys,
                                          bf16* values, u64 row, u32 lane) {
    bool broken = false;
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        u32 i = lane + 32 * p;
        if (i >= HALF) continue;
        u32 pair = pack_bf16(value[i], value[i + HALF]);
        bool finite = (pair & 0x7F80) != 0x7F80 && (pair & 0x7F800000) != 0x7F800000;
        broken = broken || !finite;
        values[row * WIDTH + i] = finite ? (bf16)pair : 0;
        values[row * WIDTH + i + HALF] = finite ? (bf16)(pair >> 16) : 0;
    }
    broken = __any_sync(0xFFFFFFFF, broken);
#pragma unroll
    for (u32 p = 0; p < PAIRS; p++) {
        u32 i = lane + 32 * p;
        if (i >= HALF) continue;
        keys[row * WIDTH + i] = broken ? 0x7FFF : f32_to_bf16(low[p]);
        keys[row * WIDTH + i + HALF] = broken ? 0x7FFF : f32_to_bf16(high[p]);
    }
}

__device__ __forceinline__ u64 cache_row(u32 slot, u32 kv_heads, u32 head) {
    return ((u64)(slot / 16) * kv_heads + head) * 16 + slot % 16;
}

// qkv: f32 [rows][(heads + 2 kv_heads) * HEAD_DIM], queries, keys, values. Writes queries bf16 [rows][heads][WIDTH] and the
// rows' keys and values to their cache slots (none for NONE). The norms may both be null.
extern "C" __global__ void __launch_bounds__(32 * ROTARY_WARPS)
rotate_rows(const float* qkv, const u32* positions, const u32* kv_slot, const float* frequencies, const float* query_norm,
            const float* key_norm, float eps, float query_scale, bf16* queries, bf16* keys, bf16* values, u32 rows, u32 heads,
            u32 kv_heads) {
    u32 lane = threadIdx.x % 32;
    u32 units = heads + kv_heads;
    u32 item = blockIdx.x * ROTARY_WARPS + threadIdx.x / 32;
    u32 row = item / units;
    u32 unit = item % units;
    HeadWeights weights = load_weights(frequencies, unit < heads ? query_norm : key_norm, lane);
    pdl_wait();
    // Only now, against the rule: the attention behind this kernel may then read whatever is older than this kernel's
    // predecessor before its own wait, which is the row metadata and all committed keys.
    pdl_launch();
    if (row >= rows) return;
    const float* source = qkv + (u64)row * (heads + 2 * kv_heads) * HEAD_DIM;
    float low[PAIRS], high[PAIRS];
    rotate_head(source + unit * HEAD_DIM, weights, eps, positions[row], unit < heads ? query_scale : 1.0f, lane, low, high);
    if (unit < heads) {
        bf16* to = queries + ((u64)row * heads + unit) * WIDTH;
#pragma unroll
        for (u32 p = 0; p < PAIRS; p++) {
            u32 i = lane + 32 * p;
            if (i >= HALF) continue;
            to[i] = f32_to_bf16(low[p]);
            to[i + HALF] = f32_to_bf16(high[p]);
        }
        if (HEAD_DIM + lane < WIDTH) to[HEAD_DIM + lane] = 0;
        return;
    }
    u32 slot = kv_slot[row];
    if (slot == NONE) return;
    u32 head = unit - heads;
    store_row(low, high, source + (unit + kv_heads) * HEAD_DIM, keys, values, cache_row(slot, kv_heads, head), lane);
}

// Keys and values of context rows for all layers of a drafter: kv f32 [rows][layers][2 kv_heads * HEAD_DIM], keys first;
// key_norms f32 [layers][HEAD_DIM], or null. The cache holds `blocks` blocks per layer, keys then values, layer after layer.
extern "C" __global__ void __launch_bounds__(32 * ROTARY_WARPS)
rotate_context(const float* kv, const u32* positions, const u32* kv_slot, const float* frequencies, const float* key_norms,
               float eps, bf16* cache, u32 blocks, u32 rows, u32 layers, u32 kv_heads) {
    u32 lane = threadIdx.x % 32;
    u32 item = blockIdx.x * ROTARY_WARPS + threadIdx.x / 32;
    u32 head = item % kv_heads;
    u32 layer = item / kv_heads % layers;
    u32 row = item / kv_heads / layers;
    HeadWeights weights = load_weights(frequencies, key_norms == 0 ? key_norms : key_norms + layer * HEAD_DIM, lane);
    pdl_wait();
    pdl_launch();
    if (row >= rows) return;
    u32 slot = kv_slot[row];
    if (slot == NONE) return;
    const float* source = kv + ((u64)row * layers + layer) * 2 * kv_heads * HEAD_DIM;
    float low[PAIRS], high[PAIRS];
    rotate_head(source + head * HEAD_DIM, weights, eps, positions[row], 1.0f, lane, low, high);
    u64 plane = (u64)blocks * kv_heads * 16 * WIDTH;
    bf16* keys = cache + 2 * layer * plane;
    store_row(low, high, source + (kv_heads + head) * HEAD_DIM, keys, keys + plane, cache_row(slot, kv_heads, head), lane);
}
