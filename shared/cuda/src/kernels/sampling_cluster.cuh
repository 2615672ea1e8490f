// What the blocks of a row's cluster share: its logits, and maxima over all of them.

#define CLUSTER 8
#define THREADS 256
// Logits that a block reads at a time: four per thread.
#define STEP (THREADS * 4)
#define GROUP 64
#define MAX_PATH 64
#define KEEP_ALL 0xFFFFFFFFu

struct Shared {
    // Mass by range of distance: counts, and three times 15 bits of the masses. Two, used in turn.
    u32 ranges[2][4][256];
    u64 warp_keys[THREADS / 32];
    u64 cluster_keys[3];
    u64 total;
    u64 border_before;
    u32 border_count;
    u32 path_tokens[MAX_PATH];
    u32 path_seen[MAX_PATH];
};

// What a block works on.
struct Chunk {
    const float* values;  // the row's logits, processed where they are
    u32 begin;
    u32 end;
    u32 vocabulary;
};

// Logits relative to the best and divided by the temperature.
struct Scale {
    float best;
    float temperature;
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of the cluster; what they wrote to shared memory is visible after it.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address of `local` in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 address_in(const void* local, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"((u32)__cvta_generic_to_shared(local)), "r"(rank));
    return remote;
}

__device__ __forceinline__ u32 remote_u32(const u32* local, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in(local, rank)) : "memory");
    return value;
}

__device__ __forceinline__ u64 remote_u64(const u64* local, u32 rank) {
    u64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address_in(local, rank)) : "memory");
    return value;
}

// Greater for the better score, and for the lower id among equals. 0 is no token. Not for NaN.
__device__ __forceinline__ u64 choice_key(float score, u32 id) {
    u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 is 0
    bits ^= (bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u;
    return ((u64)bits << 32) | (u32)~id;
}

__device__ __forceinline__ float key_score(u64 key) {
    u32 bits = (u32)(key >> 32);
    if (key == 0) return NEG_INF;
    return __uint_as_float((bits >> 31) != 0 ? bits ^ 0x80000000u : ~bits);
}

__device__ __forceinline__ u32 key_id(u64 key) { return key == 0 ? NONE : ~(u32)key; }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 block_max(u64 key, Shared& shared) {
#pragma unroll
    for (u32 step = 16; step > 0; step >>= 1) key = larger(key, __shfl_xor_sync(0xFFFFFFFFu, key, step));
    if ((threadIdx.x & 31) == 0) shared.warp_keys[threadIdx.x >> 5] = key;
    __syncthreads();
    key = 0;
#pragma unroll
    for (u32 warp = 0; warp < THREADS / 32; warp++) key = larger(key, shared.warp_keys[warp]);
    __syncthreads();
    return key;
}

// Over the cluster; every thread gets it. A slot is used once per launch.
__device__ __forceinline__ u64 cluster_max(u64 key, u32 slot, Shared& shared) {
    key = block_max(key, shared);
    if (threadIdx.x == 0) shared.cluster_keys[slot] = key;
    cluster_barrier();
    key = remote_u64(&shared.cluster_keys[slot], threadIdx.x & (CLUSTER - 1));
#pragma unroll
    for (u32 step = CLUSTER / 2; step > 0; step >>= 1) key = larger(key, __shfl_xor_sync(0xFFFFFFFFu, key, step));
    return key;
}

// Four logits from `base`, a multiple of 4. Padding behind the vocabulary can never be chosen.
__device__ __forceinline__ float4 load_quad(const Chunk& chunk, u32 base) {
    float4 quad = *(const float4*)(chunk.values + base);
    if (base + 3 >= chunk.vocabulary) {
        if (base + 1 >= chunk.vocabulary) quad.y = NEG_INF;
        if (base + 2 >= chunk.vocabulary) quad.z = NEG_INF;
        quad.w = NEG_INF;
    }
    return quad;
}

__device__ __forceinline__ float pick(const float4& quad, u32 j) {
    return j == 0 ? quad.x : j == 1 ? quad.y : j == 2 ? quad.z : quad.w;
}

// NaN is left out unless all are.
__device__ __forceinline__ float quad_max(const float4& quad) { return fmaxf(fmaxf(quad.x, quad.y), fmaxf(quad.z, quad.w)); }

__device__ __forceinline__ bool possible(float logit) { return logit > NEG_INF; }

// Of a possible logit. Not `best - best`, which is NaN when the best is infinite.
__device__ __forceinline__ float scaled(float logit, const Scale& scale) {
    if (logit == scale.best) return 0.0f;
    return __fdiv_rn(__fsub_rn(logit, scale.best), scale.temperature);
}

// How far below the best, in units of 2^-27.
__device__ __forceinline__ u32 distance(float x) { return __float2uint_rz(fminf(__fmul_rn(-x, 134217728.0f), 4294967040.0f)); }

__device__ __forceinline__ bool in_mask(const u32* words, u32 token) { return ((words[token >> 5] >> (token & 31)) & 1) != 0; }
