// The two ways to share attention among warps and blocks; attention_split.cuh in front of this file computes the parts.

// Merges the next split into what came before. One rounding each, written out so that every caller gets the same bits.
struct Running {
    float top, sum;
};

// Factors of the old and of the new part.
__device__ __forceinline__ float2 merge(Running& running, float top, float sum) {
    float highest = fmaxf(running.top, top);
    float2 factors = make_float2(exp2_of(running.top - highest), exp2_of(top - highest));
    running.top = highest;
    running.sum = __fmaf_rn(sum, factors.y, __fmul_rn(running.sum, factors.x));
    return factors;
}

__device__ __forceinline__ float merge_value(float old, float value, float2 factors) {
    return __fmaf_rn(value, factors.y, __fmul_rn(old, factors.x));
}

__device__ __forceinline__ float reciprocal(float sum) { return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum); }

// Zeros behind the last head, up to a whole block of the packed layout.
__device__ __forceinline__ void clear_padding(const RowTile& tile, bf16* out, u32 heads, u32 k32, u32 nt, u32 part, u32 parts) {
    u32 used = heads * HEAD_DIM;
    u32 pieces = (k32 * 32 - used) / 8;
    for (u32 i = part; i < tile.nodes * pieces; i += parts)
        *(uint4*)(out + xp_offset(tile.first_row + i / pieces, used + i % pieces * 8, k32, nt)) = make_uint4(0, 0, 0, 0);
}

// The arguments that both kernels take.
#define ATTENTION_ARGUMENTS                                                                                              \
    const bf16 *queries, const bf16 *keys, const bf16 *values, u32 kv_heads, const u32 *tiles, u32 tile_count,           \
        u32 tile_nodes, const u32 *vis_begin, const u32 *vis_end, const u32 *path_len, const u16 *path,                  \
        const u32 *tables, u32 table_stride, const u32 *committed, bf16 *out, u32 k32, u32 nt, u32 early

// Blocks (cluster, groups of `block_tiles` tiles, key heads). The warps of a block and the blocks of its cluster share the
// splits of the block's tiles: few rows, spread over many multiprocessors. `block_tiles` and the splits per block are powers
// of two. `early`: the predecessor is the rotary kernel, which lets this one start only after all older work has ended, so
// the row metadata and the committed keys may be read before the wait. `items`: results per thread.
extern "C" __global__ void __launch_bounds__(256, 1) attention_splits(ATTENTION_ARGUMENTS, u32 block_tiles, u32 items) {
    extern __shared__ float4 shared[];
    pdl_launch();
    if (!early) pdl_wait();
    Rows rows = {tiles, tile_count, tile_nodes, vis_begin, vis_end, path_len, path, tables, table_stride, committed};
    Cache cache = {keys, values, kv_heads, blockIdx.z};
    u32 lane = threadIdx.x % 32;
    u32 warp = threadIdx.x / 32;
    u32 warps = blockDim.x / 32;
    u32 block_splits = warps / block_tiles;
    u32 rank = cluster_rank();
    u32 ranks = cluster_size();
    u32 span = ranks * block_splits;
    u32 tile_rows = tile_nodes * GROUP;

    float* parts = (float*)shared;                                        // [warps][tile_rows][STRIDE]
    float2* sums = (float2*)(parts + warps * tile_rows * STRIDE);         // [warps][16]: maximum, sum
    float4* state = (float4*)(sums + warps * 16);                         // [items][threads]
    float2* state_sums = (float2*)(state + items * blockDim.x);           // [items][threads]
    u32* tails = (u32*)(state_sums + items * blockDim.x);                 // [block_tiles][tile_nodes][TAIL]
    WarpMemory* memory = (WarpMemory*)(tails + block_tiles * tile_nodes * TAIL);  // [warps]
    uint4* spans = (uint4*)(memory + warps);                              // [block_tiles]: low, high, first row, nodes

    u32 own = warp / block_splits;
    u32* tail = tails + own * tile_nodes * TAIL;
    RowTile tile = load_tile(rows, blockIdx.y * block_tiles + own, lane);
    list_tail(rows, cache, tile, tail, warp % block_splits * 32 + lane, block_splits * 32);
    // Warps that read the same keys share them in the first-level cache, which the early loads go around.
    if (block_tiles > 1) tile.old_tiles = 0;
    if (warp % block_splits == 0 && lane == 0) spans[own] = make_uint4(tile.low, tile.high, tile.first_row, tile.nodes);
    __syncthreads();
    u32 low = NONE;
    u32 high = 0;
    for (u32 i = 0; i < block_tiles; i++) {
        if (spans[i].y > 0) low = min(low, spans[i].x);
        high = max(high, spans[i].y);
    }
    u32 begin = low == NONE ? 0 : low / SPLIT / span;
    u32 end = max((high + SPLIT * span - 1) / (SPLIT * span), begin + 1);

    for (u32 pass = begin; pass < end; pass++) {
        Partial part;
        attend_split(queries, rows, cache, tile, tail, memory[warp],
                     pass * span + rank * block_splits + warp % block_splits, pass == begin, part);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = lane / 4 + 8 * half;
            if (row >= tile.nodes * GROUP) continue;
            if (lane % 4 == 0) sums[warp * 16 + row] = make_float2(part.top[half], part.sum[half]);
            if (part.sum[half] == 0.0f) continue;
            float* to = parts + (warp * tile_rows + row) * STRIDE;
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                u32 i = 2 * half + n;
#pragma unroll
                for (u32 h = 0; h < COLUMNS / 4; h++) {
                    float4 v = make_float4(part.out[4 * h][i], part.out[4 * h + 1][i], part.out[4 * h + 2][i], part.out[4 * h + 3][i]);
                    bool whole = h / 2 != OCTETS;
                    u32 at = whole ? 64 * (h / 2) + 16 * (lane % 4) + 8 * n + 4 * (h % 2) : 64 * OCTETS + 8 * (lane % 4) + 4 * n;
                    *(float4*)(to + at) = v;
                }
            }
        }
        if (ranks > 1) cluster_barrier();
        else __syncthreads();

        // Four elements of one row at a time, by all threads of the cluster.
        u32 count = block_tiles * tile_rows * (HEAD_DIM / 4);
        for (u32 k = 0, item = rank * blockDim.x + threadIdx.x; item < count; k++, item += ranks * blockDim.x) {
            u32 depth = item % (HEAD_DIM / 4) * 4;
            u32 row = item / (HEAD_DIM / 4) % tile_rows;
            u32 of = item / (HEAD_DIM / 4) / tile_rows;
            uint4 seen = spans[of];
            if (row >= seen.w * GROUP) continue;
            u32 start = pass * span * SPLIT;
            u32 splits = seen.y > start ? min((seen.y - start + SPLIT - 1) / SPLIT, span) : 0;
            Running running = {NEG_INF, 0.0f};
            float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (pass > begin) {
                float2 sum = state_sums[k * blockDim.x + threadIdx.x];
                running.top = sum.x;
                running.sum = sum.y;
                value = state[k * blockDim.x + threadIdx.x];
            }
            for (u32 base = 0; base < splits; base += 8) {
                float2 new_sums[8];
                float4 new_values[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    u32 split = min(base + i, splits - 1);
                    u32 from = of * block_splits + split % block_splits;
                    new_sums[i] = load_cluster2(in_block(sums + from * 16 + row, split / block_splits));
                    new_values[i] = load_cluster4(in_block(parts + (from * tile_rows + row) * STRIDE + depth, split / block_splits));
                }
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    if (base + i >= splits || new_sums[i].y == 0.0f) continue;
                    float2 factors = merge(running, new_sums[i].x, new_sums[i].y);
                    value.x = merge_value(value.x, new_values[i].x, factors);
                    value.y = merge_value(value.y, new_values[i].y, factors);
                    value.z = merge_value(value.z, new_values[i].z, factors);
                    value.w = merge_value(value.w, new_values[i].w, factors);
                }
            }
            if (pass + 1 < end) {
                state_sums[k * blockDim.x + threadIdx.x] = make_float2(running.top, running.sum);
                state[k * blockDim.x + threadIdx.x] = value;
                continue;
            }
            float scale = reciprocal(running.sum);
            u32 head = blockIdx.z * GROUP + row % GROUP;
            uint2 packed = make_uint2(pack_bf16(value.x * scale, value.y * scale), pack_bf16(value.z * scale, value.w * scale));
            *(uint2*)(out + xp_offset(seen.z + row / GROUP, head * HEAD_DIM + depth, k32, nt)) = packed;
        }
        // Nobody may overwrite its results, or leave, while others read them.
        if (ranks > 1) cluster_barrier();
        else __syncthreads();
    }
    if (rank == 0 && blockIdx.z == kv_heads - 1 && warp % block_splits == 0)
        clear_padding(tile, out, kv_heads * GROUP, k32, nt, lane, 32);
}

// Blocks (groups of tiles, key heads): every warp takes a tile of its own through all splits, and the warps of a block, which
// mostly belong to one sequence, read the same keys at about the same time. For many rows.
extern "C" __global__ void __launch_bounds__(256, 1) attention_tiles(ATTENTION_ARGUMENTS) {
    extern __shared__ float4 shared[];
    pdl_launch();
    if (!early) pdl_wait();
    Rows rows = {tiles, tile_count, tile_nodes, vis_begin, vis_end, path_len, path, tables, table_stride, committed};
    Cache cache = {keys, values, kv_heads, blockIdx.y};
    u32 lane = threadIdx.x % 32;
    u32 warp = threadIdx.x / 32;
    u32 warps = blockDim.x / 32;
    float4* state = shared + warp * COLUMNS * 32 + lane;                  // [warps][COLUMNS][32]
    u32* tails = (u32*)(shared + warps * COLUMNS * 32);                   // [warps][tile_nodes][TAIL]
    WarpMemory* memory = (WarpMemory*)(tails + warps * tile_nodes * TAIL);  // [warps]
    uint2* spans = (uint2*)(memory + warps);                              // [warps]: low, high

    u32* tail = tails + warp * tile_nodes * TAIL;
    RowTile tile = load_tile(rows, blockIdx.x * warps + warp, lane);
    list_tail(rows, cache, tile, tail, lane, 32);
    // All keys after the wait, through the first-level cache: that is where the warps share them.
    tile.old_tiles = 0;
    if (lane == 0) spans[warp] = make_uint2(tile.low, tile.high);
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++) state[column * 32] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncthreads();
    u32 low = NONE;
    u32 high = 0;
    for (u32 i = 0; i < warps; i++) {
        if (spans[i].y > 0) low = min(low, spans[i].x);
        high = max(high, spans[i].y);
    }
    u32 begin = low == NONE ? 0 : low / SPLIT;
    u32 end = max((high + SPLIT - 1) / SPLIT, begin + 1);

    Running running[2] = {{NEG_INF, 0.0f}, {NEG_INF, 0.0f}};
    for (u32 split = begin; split < end; split++) {
        Partial part;
        attend_split(queries, rows, cache, tile, tail, memory[warp], split, split == begin, part);
        bool some[2] = {part.sum[0] != 0.0f, part.sum[1] != 0.0f};
        if (some[0] || some[1]) {
            float2 factors[2];
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                if (some[half]) factors[half] = merge(running[half], part.top[half], part.sum[half]);
#pragma unroll
            for (u32 column = 0; column < COLUMNS; column++) {
                float4 value = state[column * 32];
                if (some[0]) {
                    value.x = merge_value(value.x, part.out[column][0], factors[0]);
                    value.y = merge_value(value.y, part.out[column][1], factors[0]);
                }
                if (some[1]) {
                    value.z = merge_value(value.z, part.out[column][2], factors[1]);
                    value.w = merge_value(value.w, part.out[column][3], factors[1]);
                }
                state[column * 32] = value;
            }
        }
        // Keeps the warps together, for the sake of the cache.
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = lane / 4 + 8 * half;
        if (row >= tile.nodes * GROUP) continue;
        float scale = reciprocal(running[half].sum);
        u32 head = blockIdx.y * GROUP + row % GROUP;
        u32 node = tile.first_row + row / GROUP;
#pragma unroll
        for (u32 piece = 0; piece < 2 * OCTETS + REST; piece++) {
            bool whole = piece / 2 != OCTETS;
            u32 depth = whole ? 64 * (piece / 2) + 16 * (lane % 4) + 8 * (piece % 2) : 64 * OCTETS + 8 * (lane % 4);
            if (depth >= HEAD_DIM) continue;
            float v[8];
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                u32 column = whole ? 8 * (piece / 2) + e : 8 * OCTETS + e % 4;
                u32 n = whole ? piece % 2 : e / 4;
                float4 value = state[column * 32];
                v[e] = (half == 0 ? (n == 0 ? value.x : value.y) : (n == 0 ? value.z : value.w)) * scale;
            }
            *(uint4*)(out + xp_offset(node, head * HEAD_DIM + depth, k32, nt)) =
                make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
    }
    if (blockIdx.y == kv_heads - 1) clear_padding(tile, out, kv_heads * GROUP, k32, nt, lane, 32);
}
