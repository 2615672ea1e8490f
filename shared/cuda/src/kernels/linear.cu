// y[n][r] = scale[n] * sum over k of W[r][k] * x[n][k] for a batch of rows n, weights and activations packed in bf16.
//
// The order of a sum is a property of the weight matrix and of nothing else: the blocks of 32 of the depth go to `split`
// ranges, inside a range to WK warps in turn, and partial sums are added with the warps, then the ranges ascending. Tiles
// of any size keep it, so a row's result does not depend on the rows that are computed beside it.
//
// Two kernels. `streamed` is for large matrices: a ring of stages in shared memory that bulk copies
// keep full. `direct` is for small ones, where latency is all: every lane copies its own fragments, all at once.
// Both ask for weights before they wait for the predecessor: weights are constant.

#define PARAMETERS                                                                                                     \
    const bf16 *weights, const bf16 *x, u32 rows, u32 k32, u32 batch, u32 split, u32 stages, const float *square_parts, \
        u32 square_count, float inverse_width, float eps, u32 kind, float *out, u32 ld, const float *gain,             \
        bf16 *packed, float *parts, void *extra, u32 extra_k32, u32 extra_offset
#define ARGUMENTS                                                                                                      \
    weights, x, k32, batch, split, stages, square_parts, square_count, inverse_width, eps,                             \
        Output { kind, rows, (batch < 64 ? batch : 64) / 8, out, ld, gain, packed, parts, extra, extra_k32, extra_offset }
#define INPUTS                                                                                                         \
    const bf16 *weights, const bf16 *x, u32 k32, u32 batch, u32 split, u32 stages, const float *square_parts,          \
        u32 square_count, float inverse_width, float eps, const Output &o

// Before the data in dynamic shared memory: barriers of the ring at 0, the columns' scales at 512.
#define HEADER_BYTES 1024
#define MOST_STAGES 32

extern __shared__ __align__(128) u8 shared_bytes[];

// Panels of a streamed matrix whose blocks of 32 alternate in memory, so that a stage is few and large copies.
#define GROUP_PANELS 4
#define GROUP_BYTES (GROUP_PANELS * 1024)

// A block computes PANELS * 16 rows of the matrix for TILES * 8 rows of the batch over one of `split` ranges of the depth.
// Grid: x = split ranges (one cluster) of each row block, y = row tiles of the matrix: blocks that share weights run
// together. WM x WK x WN warps multiply: rows, depth, columns. A stage holds KC blocks of 32 of the depth.
template <u32 PANELS, u32 TILES, u32 WM, u32 WK, u32 KC>
__device__ __forceinline__ void streamed(INPUTS) {
    constexpr u32 WN = WARPS / (WM * WK);
    constexpr u32 WARP_PANELS = PANELS / WM, WARP_TILES = TILES / WN;
    constexpr u32 EMPTY = MOST_STAGES * 8; // from a stage's barrier of full to that of empty
    constexpr u32 COLUMNS = TILES * 8, STRIDE = PANELS * 16 + 4;
    constexpr u32 BLOCK_TILES = TILES < 8 ? TILES : 8, BLOCKS = TILES / BLOCK_TILES; // of the packed batch
    constexpr u32 WEIGHT_BYTES = PANELS * KC * 1024, STAGE_BYTES = WEIGHT_BYTES + TILES * KC * 512;
    static_assert(WM * WK * WN == WARPS && KC % WK == 0 && PANELS % WM == 0 && TILES % WN == 0, "whole warps");

    pdl_launch();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 header = shared_address(shared_bytes), ring = header + HEADER_BYTES;
    u32 full = header;
    float* scale = (float*)(shared_bytes + 512);
    u32 rank = split > 1 ? rank_in_cluster() : 0, row_block = blockIdx.x / split;
    u32 n0 = row_block * COLUMNS, panel0 = blockIdx.y * PANELS;
    u32 first = rank * k32 / split, count = (rank + 1) * k32 / split - first;
    u64 policy = weight_policy(gridDim.x == split);

    // The blocks of 32 from `begin` of our range into `stage`.
    // One lane each, for there are few copies.
    auto request_weights = [&](u32 begin, u32 stage) {
        u32 depth = min(KC, count - begin), barrier = full + stage * 8;
        barrier_expect(barrier, depth * (PANELS * 1024 + TILES * 512));
#pragma unroll
        for (u32 group = 0; group < PANELS / GROUP_PANELS; group++) {
            u32 block = (panel0 / GROUP_PANELS + group) * k32 + first + begin;
            u32 target = ring + stage * STAGE_BYTES + group * KC * GROUP_BYTES;
            bulk_copy(target, (const u8*)weights + (u64)block * GROUP_BYTES, depth * GROUP_BYTES, barrier, policy);
        }
    };
    auto request_rows = [&](u32 begin, u32 stage) {
        u32 depth = min(KC, count - begin), barrier = full + stage * 8;
#pragma unroll
        for (u32 i = 0; i < BLOCKS; i++) {
            u32 block = (row_block * BLOCKS + i) * k32 + first + begin;
            u32 target = ring + stage * STAGE_BYTES + WEIGHT_BYTES + i * (KC * BLOCK_TILES * 512);
            bulk_copy(target, (const u8*)x + (u64)block * (BLOCK_TILES * 512), depth * (BLOCK_TILES * 512), barrier);
        }
    };

    if (threadIdx.x == 0) {
#pragma unroll 1
        for (u32 stage = 0; stage < stages; stage++) {
            barrier_init(full + stage * 8, 1);
            barrier_init(full + EMPTY + stage * 8, WARPS);
        }
        barrier_init_fence();
#pragma unroll 1
        for (u32 stage = 0; stage < stages && stage * KC < count; stage++) request_weights(stage * KC, stage);
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (u32 stage = 0; stage < stages && stage * KC < count; stage++) request_rows(stage * KC, stage);
    }
    row_scales<COLUMNS>(scale, square_parts, square_count, inverse_width, eps, n0, threadIdx.x);

    u32 wm = warp % WM, wk = warp / WM % WK, wn = warp / (WM * WK);
    float sum[WARP_PANELS][WARP_TILES][4] = {};
    // This warp's first fragments in a stage. A warp's columns lie in one block of the packed batch.
    static_assert(WN == BLOCKS || WN == 1, "the columns of a warp are one block");
    static_assert(GROUP_PANELS % WARP_PANELS == 0, "the panels of a warp are of one group");
    u32 panel = wm * WARP_PANELS, group = panel / GROUP_PANELS;
    u32 a_first = ring + (group * KC + wk) * GROUP_BYTES + panel % GROUP_PANELS * 1024 + lane * 16;
    u32 b_first = ring + WEIGHT_BYTES + (wn * KC + wk) * (BLOCK_TILES * 512) + lane * 16;
    u32 stage = 0, parity = 0;
    for (u32 begin = 0; begin < count; begin += KC) {
        barrier_wait(full + stage * 8, parity);
        // The stage before is refilled once all warps have read it; the warps do so in turn.
        u32 refill = begin + (stages - 1) * KC;
        if (begin > 0 && refill < count && begin / KC % WARPS == warp) {
            u32 last = stage > 0 ? stage - 1 : stages - 1;
            barrier_wait(full + EMPTY + last * 8, stage > 0 ? parity : parity ^ 1);
            if (lane == 0) {
                request_weights(refill, last);
                request_rows(refill, last);
            }
            __syncwarp();
        }
        u32 a_from = a_first + stage * STAGE_BYTES, b_from = b_first + stage * STAGE_BYTES;
#pragma unroll
        for (u32 k = 0; k < KC; k += WK) {
            if (begin + k + wk >= count) break;
            uint4 a[WARP_PANELS][2];
#pragma unroll
            for (u32 p = 0; p < WARP_PANELS; p++)
#pragma unroll
                for (u32 s = 0; s < 2; s++)
                    a[p][s] = load_fragment(a_from + k * GROUP_BYTES + p * 1024 + s * 512);
#pragma unroll
            for (u32 t = 0; t < WARP_TILES; t++) {
                uint4 b = load_fragment(b_from + (k * BLOCK_TILES + t) * 512);
#pragma unroll
                for (u32 p = 0; p < WARP_PANELS; p++)
                    mma_bf16(sum[p][t], a[p][0].x, a[p][0].y, a[p][0].z, a[p][0].w, b.x, b.y);
#pragma unroll
                for (u32 p = 0; p < WARP_PANELS; p++)
                    mma_bf16(sum[p][t], a[p][1].x, a[p][1].y, a[p][1].z, a[p][1].w, b.z, b.w);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(full + EMPTY + stage * 8);
        if (++stage == stages) stage = 0, parity ^= 1;
    }

    // All copies have landed and were read: the ring becomes the partial sums, [warp of the depth][column][row].
    __syncthreads();
    float* partial = (float*)(shared_bytes + HEADER_BYTES);
    write_sums<WARP_PANELS, WARP_TILES, STRIDE>(
        partial + (wk * COLUMNS + wn * WARP_TILES * 8) * STRIDE + wm * WARP_PANELS * 16, sum, lane);
    // Each block of a cluster finishes some columns, over all rows of the tile.
    rank = split > 1 ? rank_in_cluster() : 0; // read again: in the loop it would cost a register
    u32 column = rank * COLUMNS / split;
    Region region{panel0 * 16, n0, column, (rank + 1) * COLUMNS / split - column};
    Residual residual;
    if (split == 1) residual = load_residual<PANELS * 2>(o, region, threadIdx.x);
    __syncthreads();
    if (WK > 1) {
        add_warps<WK>((float4*)partial, COLUMNS * STRIDE / 4, threadIdx.x);
        if (split == 1) __syncthreads();
    }
    if (split > 1) {
        cluster_arrive();
        residual = load_residual<PANELS * 2>(o, region, threadIdx.x);
        cluster_wait();
        // Nobody else reads our own columns here, so the totals may take their place.
        u32 begin = column * STRIDE / 4;
        add_ranks((float4*)partial, begin, begin + region.columns * STRIDE / 4, split, threadIdx.x);
        __syncthreads();
        cluster_pass();
    }
    WarpSums<STRIDE, 1> sums{partial, 0};
    finish<PANELS, GROUP_ROWS>(o, region, residual, scale, sums, threadIdx.x);
    // The shared memory of a block must stay until its peers have read it.
    __syncwarp();
    if (split > 1) cluster_wait();
}

// A block computes PANELS * 16 rows of the matrix for TILES * 8 rows of the batch over the whole depth; warp w takes the
// blocks w, w + 8, .. of 32. Every lane copies the fragments that it multiplies itself to shared memory and waits for
// nobody else. `stages` blocks of a warp fit there at a time, which is all of them unless the depth is unusual.
// Grid: x = column tiles, y = row tiles of the matrix.
template <u32 PANELS, u32 TILES>
__device__ __forceinline__ void direct(INPUTS) {
    constexpr u32 COLUMNS = TILES * 8, STRIDE = PANELS * 16 + 4;
    constexpr u32 UNIT_BYTES = PANELS * 1024 + TILES * 512;
    constexpr u32 PARTIAL_BYTES = COLUMNS * STRIDE * 4;
    constexpr bool IN_STEPS = PANELS * TILES >= 4; // enough to multiply while the rest is on its way
    constexpr bool LATE = PANELS * TILES >= 8;     // no registers for the residual beside the sums

    pdl_launch();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* scale = (float*)(shared_bytes + 512);
    u32 warp_bytes = max(stages * UNIT_BYTES, PARTIAL_BYTES);
    u32 place = HEADER_BYTES + warp * warp_bytes;
    u32 mine = shared_address(shared_bytes) + place + lane * 16;
    u32 groups = o.tiles / TILES, n0 = blockIdx.x * COLUMNS, panel0 = blockIdx.y * PANELS;
    const u8* w_from = (const u8*)weights + (u64)panel0 * k32 * 1024 + lane * 16;
    const u8* x_from =
        (const u8*)x + ((u64)(blockIdx.x / groups) * k32 * o.tiles + blockIdx.x % groups * TILES) * 512 + lane * 16;
    u32 blocks = (k32 + WARPS - 1 - warp) / WARPS; // of this warp

    auto request_weights = [&](u32 begin, u32 end) {
        for (u32 i = begin; i < end; i++)
#pragma unroll
            for (u32 p = 0; p < PANELS; p++)
#pragma unroll
                for (u32 s = 0; s < 2; s++)
                    lane_copy(
                        mine + (i - begin) * UNIT_BYTES + p * 1024 + s * 512,
                        w_from + ((u64)p * k32 + warp + i * WARPS) * 1024 + s * 512);
    };
    request_weights(0, min(blocks, stages));
    pdl_wait();

    float sum[PANELS][TILES][4] = {};
    Region region{panel0 * 16, n0, 0, COLUMNS};
    Residual residual;
    u32 begin = 0;
    do {
        u32 end = min(blocks, begin + stages);
        if (begin > 0) request_weights(begin, end);
        for (u32 i = begin; i < end; i++) {
#pragma unroll
            for (u32 t = 0; t < TILES; t++)
                lane_copy(
                    mine + (i - begin) * UNIT_BYTES + PANELS * 1024 + t * 512,
                    x_from + ((u64)(warp + i * WARPS) * o.tiles + t) * 512);
            if (IN_STEPS) lane_copies_commit();
        }
        if (begin == 0) {
            row_scales<COLUMNS>(scale, square_parts, square_count, inverse_width, eps, n0, threadIdx.x);
            if (!LATE) residual = load_residual<PANELS * 2>(o, region, threadIdx.x);
        }
        if (!IN_STEPS) lane_copies_wait();
#pragma unroll IN_STEPS ? 1 : 2
        for (u32 left = end - begin, data = mine; left > 0; data += UNIT_BYTES) {
            left--;
            if (IN_STEPS) lane_copies_wait(left);
            uint4 a[PANELS][2];
#pragma unroll
            for (u32 p = 0; p < PANELS; p++)
#pragma unroll
                for (u32 s = 0; s < 2; s++) a[p][s] = load_fragment(data + p * 1024 + s * 512);
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                uint4 b = load_fragment(data + PANELS * 1024 + t * 512);
#pragma unroll
                for (u32 p = 0; p < PANELS; p++)
                    mma_bf16(sum[p][t], a[p][0].x, a[p][0].y, a[p][0].z, a[p][0].w, b.x, b.y);
#pragma unroll
                for (u32 p = 0; p < PANELS; p++)
                    mma_bf16(sum[p][t], a[p][1].x, a[p][1].y, a[p][1].z, a[p][1].w, b.z, b.w);
            }
        }
        begin = end;
    } while (begin < blocks);

    // This warp has read its fragments: its partial sums take their place, [column][row].
    __syncwarp();
    write_sums<PANELS, TILES, STRIDE>((float*)(shared_bytes + place), sum, lane);
    if (LATE) residual = load_residual<PANELS * 2>(o, region, threadIdx.x);
    __syncthreads();
    WarpSums<STRIDE, WARPS> sums{(const float*)(shared_bytes + HEADER_BYTES), warp_bytes / 4};
    finish<PANELS, 16>(o, region, residual, scale, sums, threadIdx.x);
}

// Where a multiprocessor has shared memory for one block only, that may have all of its registers too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define SHARED_SM 1
#else
#define SHARED_SM 2
#endif

// KC_4, KC_8, KC_16: blocks of 32 of the depth per stage for 4, 8 and 16 panels; KC_DEEP: with four warps over the depth.
#define STREAMED(NAME, BLOCKS_PER_SM, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) NAME(PARAMETERS) {                            \
        streamed<__VA_ARGS__>(ARGUMENTS);                                                                              \
    }
#define DIRECT(NAME, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(PARAMETERS) { direct<__VA_ARGS__>(ARGUMENTS); }

// Names say rows of the matrix by rows of the batch.
DIRECT(linear_16x8, 1, 1)
DIRECT(linear_16x16, 1, 2)
DIRECT(linear_16x32, 1, 4)
DIRECT(linear_16x64, 1, 8)
DIRECT(linear_32x8, 2, 1)
DIRECT(linear_32x16, 2, 2)
DIRECT(linear_32x32, 2, 4)
DIRECT(linear_32x64, 2, 8)
DIRECT(linear_64x8_direct, 4, 1)
DIRECT(linear_64x16_direct, 4, 2)
DIRECT(linear_64x32_direct, 4, 4)

STREAMED(linear_64x8, SHARED_SM, 4, 1, 4, 2, KC_4)
STREAMED(linear_64x16, SHARED_SM, 4, 2, 4, 2, KC_4)
STREAMED(linear_64x32, SHARED_SM, 4, 4, 4, 2, KC_4)
STREAMED(linear_64x64, SHARED_SM, 4, 8, 4, 2, KC_4)

STREAMED(linear_128x8, SHARED_SM, 8, 1, 4, 2, KC_8)
STREAMED(linear_128x16, SHARED_SM, 8, 2, 4, 2, KC_8)
STREAMED(linear_128x32, SHARED_SM, 8, 4, 4, 2, KC_8)
STREAMED(linear_128x64, SHARED_SM, 8, 8, 4, 2, KC_8)
STREAMED(linear_128x128, 1, 8, 16, 2, 2, KC_8)

// Four warps over the depth: two over the rows read every activation twice from shared memory, not four times.
STREAMED(linear_64x8_deep, SHARED_SM, 4, 1, 2, 4, KC_DEEP)
STREAMED(linear_64x16_deep, SHARED_SM, 4, 2, 2, 4, KC_DEEP)
STREAMED(linear_64x32_deep, SHARED_SM, 4, 4, 2, 4, KC_DEEP)
STREAMED(linear_64x64_deep, SHARED_SM, 4, 8, 2, 4, KC_DEEP)
STREAMED(linear_128x32_deep, SHARED_SM, 8, 4, 2, 4, KC_DEEP)
STREAMED(linear_128x64_deep, 1, 8, 8, 2, 4, KC_DEEP)

STREAMED(linear_256x8, SHARED_SM, 16, 1, 8, 1, KC_16)
STREAMED(linear_256x16, SHARED_SM, 16, 2, 8, 1, KC_16)
STREAMED(linear_256x32, SHARED_SM, 16, 4, 8, 1, KC_16)
STREAMED(linear_256x64, SHARED_SM, 16, 8, 8, 1, KC_16)
STREAMED(linear_256x128, 1, 16, 16, 4, 1, KC_16)
