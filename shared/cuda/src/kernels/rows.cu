// Rows in and out of the packed layout: embedding, gathering, normalising, and the rows of a drafter's block.

#define ROW_THREADS 128

// Sum over the block in a fixed order: each thread's own sum first, then pairs of threads. Every thread gets it.
__device__ __forceinline__ float block_sum(float value, float* shared) {
    u32 thread = threadIdx.x;
    shared[thread] = value;
    __syncthreads();
    for (u32 step = ROW_THREADS / 2; step > 0; step >>= 1) {
        if (thread < step) shared[thread] += shared[thread + step];
        __syncthreads();
    }
    float sum = shared[0];
    __syncthreads();
    return sum;
}

// The residual stream's first value: x[row] = table[token], the next norm's input, and its sum of squares as the only
// part. `table` is bf16 [vocab][hidden], hidden a multiple of 8.
extern "C" __global__ void embed_rows(const u32* tokens, const bf16* table, float* x, const float* next_weight, bf16* next,
                                      float* parts, u32 hidden, u32 k32, u32 nt) {
    __shared__ float sums[ROW_THREADS];
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    const bf16* source = table + (u64)tokens[row] * hidden;
    float square = 0.0f;
    for (u32 k = threadIdx.x * 8; k < k32 * 32; k += ROW_THREADS * 8) {
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (k < hidden) {
            uint4 values = *(const uint4*)(source + k);
            u32 pairs[4] = {values.x, values.y, values.z, values.w};
            u32 out[4];
            for (u32 i = 0; i < 4; i++) {
                float low = bf16_low(pairs[i]);
                float high = bf16_high(pairs[i]);
                square += low * low;
                square += high * high;
                x[(u64)row * hidden + k + 2 * i] = low;
                x[(u64)row * hidden + k + 2 * i + 1] = high;
                out[i] = pack_bf16(low * next_weight[k + 2 * i], high * next_weight[k + 2 * i + 1]);
            }
            packed = make_uint4(out[0], out[1], out[2], out[3]);
        }
        *(uint4*)(next + xp_offset(row, k, k32, nt)) = packed;
    }
    float sum = block_sum(square, sums);
    if (threadIdx.x == 0) parts[row] = sum;
}

// Packed rows `rows[i]` of `source` become rows i of `out`; NONE gives a row of zeros. `parts` may be null.
extern "C" __global__ void gather_rows(const u32* rows, const bf16* source, bf16* out, u32 k32, u32 source_nt, u32 out_nt,
                                       const float* parts, float* out_parts, u32 part_count) {
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    u32 from = rows[row];
    for (u32 k = threadIdx.x * 8; k < k32 * 32; k += ROW_THREADS * 8) {
        uint4 values = make_uint4(0, 0, 0, 0);
        if (from != NONE) values = *(const uint4*)(source + xp_offset(from, k, k32, source_nt));
        *(uint4*)(out + xp_offset(row, k, k32, out_nt)) = values;
    }
    if (parts == 0) return;
    for (u32 part = threadIdx.x; part < part_count; part += ROW_THREADS)
        out_parts[row * part_count + part] = from == NONE ? 0.0f : parts[(u64)from * part_count + part];
}

// Row-major f32 [rows][width] to the packed layout, rounded to bf16. Rows from `count` on are zeros.
extern "C" __global__ void pack_rows(const float* source, bf16* out, u32 count, u32 width, u32 k32, u32 nt) {
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    for (u32 k = threadIdx.x * 2; k < k32 * 32; k += ROW_THREADS * 2) {
        const float* from = source + (u64)row * width + k;
        float low = row < count && k < width ? from[0] : 0.0f;
        float high = row < count && k + 1 < width ? from[1] : 0.0f;
        *(u32*)(out + xp_offset(row, k, k32, nt)) = pack_bf16(low, high);
    }
}

// RMS norm of whole rows: `out_rows` (f32 [rows][width], may be host memory, may be null) and `out` (packed, may be null).
extern "C" __global__ void norm_rows(const float* source, const float* weight, float eps, float* out_rows, bf16* out, u32 width,
                                     u32 k32, u32 nt) {
    __shared__ float sums[ROW_THREADS];
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    const float* from = source + (u64)row * width;
    float square = 0.0f;
    for (u32 k = threadIdx.x; k < width; k += ROW_THREADS) square += from[k] * from[k];
    float scale = rsqrtf(block_sum(square, sums) / (float)width + eps);
    for (u32 k = threadIdx.x * 2; k < k32 * 32; k += ROW_THREADS * 2) {
        float low = k < width ? from[k] * scale * weight[k] : 0.0f;
        float high = k + 1 < width ? from[k + 1] * scale * weight[k + 1] : 0.0f;
        if (out_rows != 0) {
            if (k < width) out_rows[(u64)row * width + k] = low;
            if (k + 1 < width) out_rows[(u64)row * width + k + 1] = high;
        }
        if (out != 0) *(u32*)(out + xp_offset(row, k, k32, nt)) = pack_bf16(low, high);
    }
}

// Words from host memory that the device reaches into device memory, or back. The last block sees all of them copied.
extern "C" __global__ void copy_words(const u32* source, u32* target, u32 count) {
    pdl_launch();
    pdl_wait();
    u32 vectors = count / 4;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 stride = gridDim.x * blockDim.x;
    for (u32 i = index; i < vectors; i += stride) ((uint4*)target)[i] = ((const uint4*)source)[i];
    for (u32 i = vectors * 4 + index; i < count; i += stride) target[i] = source[i];
}

// The rows of a drafter's blocks: slot 0 is the root, the others are masks. Slot j of sequence s sits at position
// position[s] + j and cache slot context_rows[s] + j. `visible` holds [variants][2][rows]: begin and end per kind of layer;
// kind v is causal when bit v of `causal` is set and sees the last windows[v] positions (0: all).
extern "C" __global__ void block_rows(const u32* roots, const u32* positions_of, const u32* context_rows, const u32* tables,
                                      u32 table_stride, u32 block_size, u32 mask_token, u32 sequences, u32 rows, u32 variants,
                                      u32 causal, u32 window0, u32 window1, u32* tokens, u32* positions, u32* kv_slot,
                                      u32* seq_of_row, u32* visible) {
    pdl_launch();
    pdl_wait();
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 sequence = row / block_size;
        u32 slot = row % block_size;
        bool real = sequence < sequences && roots[sequence] != NONE;
        if (!real) {
            tokens[row] = 0;
            positions[row] = 0;
            kv_slot[row] = NONE;
            seq_of_row[row] = 0;
            for (u32 v = 0; v < variants; v++) visible[v * 2 * rows + row] = visible[(v * 2 + 1) * rows + row] = 0;
            continue;
        }
        u32 at = context_rows[sequence] + slot;
        tokens[row] = slot == 0 ? roots[sequence] : mask_token;
        positions[row] = positions_of[sequence] + slot;
        kv_slot[row] = tables[sequence * table_stride + at / 16] * 16 + at % 16;
        seq_of_row[row] = sequence;
        for (u32 v = 0; v < variants; v++) {
            u32 window = v == 0 ? window0 : window1;
            bool limited = window != 0 && at + 1 > window;
            visible[v * 2 * rows + row] = limited ? at + 1 - window : 0;
            visible[(v * 2 + 1) * rows + row] = (causal >> v) & 1 ? at + 1 : context_rows[sequence] + block_size;
        }
    }
}

// Where the features of the accepted rows go: entry i of sequence s (of `stride` entries) takes row
// first_row[s] + path[s][i] of the verified rows, to position committed[s] + i and cache slot context_rows[s] + i.
extern "C" __global__ void accepted_rows(const u32* path, u32 path_stride, const u32* counts, const u32* first_row,
                                         const u32* committed, const u32* context_rows, const u32* tables, u32 table_stride,
                                         u32 sequences, u32 stride, u32 rows, u32* source_rows, u32* positions, u32* kv_slot) {
    pdl_launch();
    pdl_wait();
    for (u32 entry = threadIdx.x; entry < rows; entry += blockDim.x) {
        u32 sequence = entry / stride;
        u32 index = entry % stride;
        bool real = sequence < sequences && index < counts[sequence];
        source_rows[entry] = real ? first_row[sequence] + path[sequence * path_stride + index] : NONE;
        positions[entry] = real ? committed[sequence] + index : 0;
        if (context_rows == 0) continue;
        u32 at = real ? context_rows[sequence] + index : 0;
        kv_slot[entry] = real ? tables[sequence * table_stride + at / 16] * 16 + at % 16 : NONE;
    }
}

// The rows of trees that came from the host: row s * stride + n is node n of sequence s, tokens NONE where there is none,
// parents below their children. One block per sequence, a thread per node. Writes what a tree built on the device has.
extern "C" __global__ void tree_rows(const u32* host_tokens, const u32* host_parents, const u32* roots, const u32* committed,
                                     const u32* tables, u32 table_stride, u32 stride, u32 tile_rows, u32* tokens, u32* parents,
                                     u32* positions, u32* kv_slot, u32* path_len, u16* paths, u32* tiles) {
    extern __shared__ u32 up[];
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.x;
    u32 node = threadIdx.x;
    u32 row = sequence * stride + node;
    bool inside = node < stride;
    bool real = inside && roots[sequence] != NONE && host_tokens[row] != NONE;
    if (inside) up[node] = real ? host_parents[row] : NONE;
    u32 nodes = __syncthreads_count(real);
    if (inside) {
        u32 depth = 0;
        if (real)
            for (u32 at = up[node]; at != NONE; at = up[at]) depth++;
        u32 base = committed[sequence];
        u32 slot = base + node;
        tokens[row] = real ? host_tokens[row] : 0;
        parents[row] = up[node];
        positions[row] = real ? base + depth : 0;
        kv_slot[row] = real ? tables[sequence * table_stride + slot / 16] * 16 + slot % 16 : NONE;
        path_len[row] = real ? depth + 1 : 0;
        if (real) {
            u32 at = node;
            for (u32 level = depth + 1; level > 0; level--) {
                paths[(u64)row * 64 + level - 1] = (u16)at;
                at = up[at];
            }
        }
    }
    u32 tile_count = (stride + tile_rows - 1) / tile_rows;
    if (node < tile_count) {
        u32 first = node * tile_rows;
        u32* tile = tiles + (sequence * tile_count + node) * 4;
        tile[0] = first < nodes ? sequence : NONE;
        tile[1] = sequence * stride + first;
        tile[2] = first < nodes ? min(tile_rows, nodes - first) : 0;
        tile[3] = 0;
    }
}

// Nanoseconds of the device's clock, once everything before is done.
extern "C" __global__ void mark_time(u64* at) {
    pdl_launch();
    pdl_wait();
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *at = now;
}
