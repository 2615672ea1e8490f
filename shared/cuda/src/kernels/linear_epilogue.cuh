// From the partial sums of a tile to what a linear layer leaves behind.

// What becomes of the sums; see `Epilogue` in linear.rs.
#define STORE 0
#define RESIDUAL 1
#define SWIGLU 2
#define HEAD 3

#define WARPS 8
#define THREADS (WARPS * 32)
// Rows of the vocabulary that share a maximum and a sum of exponentials.
#define GROUP_ROWS 64
#define MOST_SPLIT 8
#define ALL_LANES 0xFFFFFFFFu

// ---- sums ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void spread(float (&y)[8], const float4& low, const float4& high) {
    y[0] = low.x; y[1] = low.y; y[2] = low.z; y[3] = low.w;
    y[4] = high.x; y[5] = high.y; y[6] = high.z; y[7] = high.w;
}

__device__ __forceinline__ void add_to(float4& sum, const float4& v) {
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
}

// Sums of 8 rows of a column over COUNT warps; `partial` is [column][STRIDE] for each, `warp_stride` floats apart.
template <u32 STRIDE, u32 COUNT>
struct WarpSums {
    const float* partial;
    u32 warp_stride;

    __device__ __forceinline__ void operator()(u32 column, u32 chunk, float (&y)[8]) const {
        const float* at = partial + column * STRIDE + chunk * 8;
        float4 low = *(const float4*)at, high = *(const float4*)(at + 4);
#pragma unroll
        for (u32 warp = 1; warp < COUNT; warp++) {
            at += warp_stride;
            add_to(low, *(const float4*)at);
            add_to(high, *(const float4*)(at + 4));
        }
        spread(y, low, high);
    }
};

// Writes the accumulators of a warp to [column][STRIDE]. With 4 more than a multiple of 16 as the stride no two lanes meet
// in a bank.
template <u32 PANELS, u32 TILES, u32 STRIDE>
__device__ __forceinline__ void write_sums(float* target, const float (&sum)[PANELS][TILES][4], u32 lane) {
    static_assert(STRIDE % 16 == 4, "no bank conflicts");
    target += lane % 4 * 2 * STRIDE + lane / 4;
#pragma unroll
    for (u32 t = 0; t < TILES; t++)
#pragma unroll
        for (u32 p = 0; p < PANELS; p++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) target[(t * 8 + i % 2) * STRIDE + p * 16 + i / 2 * 8] = sum[p][t][i];
}

// Adds the sums of COUNT warps in place of the first. `vectors` per warp.
template <u32 COUNT>
__device__ __forceinline__ void add_warps(float4* sums, u32 vectors, u32 thread) {
    for (u32 i = thread; i < vectors; i += THREADS) {
        float4 total = sums[i];
#pragma unroll
        for (u32 warp = 1; warp < COUNT; warp++) add_to(total, sums[warp * vectors + i]);
        sums[i] = total;
    }
}

// Adds the sums of all blocks of the cluster, vectors `begin` to `end`, in place of our own.
__device__ __forceinline__ void add_ranks(float4* sums, u32 begin, u32 end, u32 split, u32 thread) {
    for (u32 i = begin + thread; i < end; i += THREADS) {
        u32 at = shared_address(sums + i);
        float4 v[MOST_SPLIT];
#pragma unroll
        for (u32 rank = 0; rank < MOST_SPLIT; rank++)
            if (rank < split) v[rank] = load_remote(address_in_rank(at, rank));
#pragma unroll
        for (u32 rank = 1; rank < MOST_SPLIT; rank++)
            if (rank < split) add_to(v[0], v[rank]);
        sums[i] = v[0];
    }
}

// scale[c] of the tile's columns: 1 / RMS of the row from the parts of its sum of squares, or 1. Four lanes a column.
template <u32 COLUMNS>
__device__ __forceinline__ void row_scales(
    float* scale, const float* square_parts, u32 count, float inverse_width, float eps, u32 n0, u32 thread) {
    constexpr u32 AT_ONCE = 16; // loads in flight: the sum of a norm's parts is on the way of a small layer
#pragma unroll
    for (u32 first = 0; first < COLUMNS; first += THREADS / 4) {
        u32 column = first + thread / 4, lane = thread % 4;
        if (column >= COLUMNS) break; // whole warps, since COLUMNS is a multiple of 8
        float value = 1.0f;
        if (square_parts) {
            const float* parts = square_parts + (u64)(n0 + column) * count;
            float sum = 0.0f;
#pragma unroll 1
            for (u32 first_part = lane; first_part < count; first_part += 4 * AT_ONCE) {
                float part[AT_ONCE];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; i++) part[i] = first_part + 4 * i < count ? parts[first_part + 4 * i] : 0.0f;
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; i++) sum += part[i];
            }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            value = rsqrtf(__fmaf_rn(sum, inverse_width, eps));
        }
        if (lane == 0) scale[column] = value;
    }
}

// ---- epilogue ------------------------------------------------------------------------------------------------------

struct Output {
    u32 kind;
    u32 rows;           // rows of the weight matrix that exist
    u32 tiles;          // tiles of 8 per block of 64 of the batch, for packed outputs
    float* out;         // STORE: the result. RESIDUAL: the residual stream. HEAD: logits. All [n][ld]
    u32 ld;
    const float* gain;  // RESIDUAL: weight of the next norm or null
    bf16* packed;       // RESIDUAL: the next norm's input or null. SWIGLU: the result
    float* parts;       // RESIDUAL: parts of the sum of squares or null. HEAD: maximum of each group
    void* extra;        // RESIDUAL: bf16 tap or null. HEAD: f32 sum of exponentials of each group
    u32 extra_k32, extra_offset; // RESIDUAL: depth of the tap in blocks of 32, and where our columns begin in it
};

// The part of a tile that a block finishes: `columns` columns from `column`; the tile begins at row m0 and batch row n0.
struct Region {
    u32 m0, n0, column, columns;
};

__device__ __forceinline__ void store8(float* target, const float (&v)[8]) {
    ((float4*)target)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)target)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ void pack8(bf16* target, const float (&v)[8]) {
    *(uint4*)target =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// Fills row n of packed activations up to whole blocks of 32: what is there may belong to another row bucket.
__device__ __forceinline__ void zero_rest(bf16* packed, u32 n, u32 depth, u32 k32, u32 tiles) {
    for (u32 k = depth; k < k32 * 32; k += 8) *(uint4*)(packed + xp_offset(n, k, k32, tiles)) = make_uint4(0, 0, 0, 0);
}

// What the residual epilogue reads, fetched long before it is used.
struct Residual {
    float x[8], gain[8];
};

template <u32 CHUNKS>
__device__ __forceinline__ Residual load_residual(const Output& o, const Region& region, u32 item) {
    Residual residual;
#pragma unroll
    for (u32 i = 0; i < 8; i++) residual.x[i] = 0.0f, residual.gain[i] = 1.0f;
    u32 r = region.m0 + item % CHUNKS * 8, n = region.n0 + region.column + item / CHUNKS;
    if (o.kind == RESIDUAL && item < region.columns * CHUNKS && r < o.rows) {
        const float4* x = (const float4*)(o.out + (u64)n * o.ld + r);
        spread(residual.x, x[0], x[1]);
        if (o.gain) spread(residual.gain, ((const float4*)(o.gain + r))[0], ((const float4*)(o.gain + r))[1]);
    }
    return residual;
}

// Thread `item` of the tile has rows 8 * (item % CHUNKS) .. of column item / CHUNKS; loops are uniform in a warp.
template <u32 CHUNKS, u32 PART_ROWS, class Sums>
__device__ __forceinline__ void finish_residual(
    const Output& o, const Region& region, Residual residual, const float* scale, const Sums& sums, u32 thread) {
    u32 items = region.columns * CHUNKS;
    u32 next_k32 = (o.rows + 31) / 32, part_count = (o.rows + PART_ROWS - 1) / PART_ROWS;
    u32 tap_end = o.extra_offset + o.rows;
    for (u32 base = 0; base < items; base += THREADS) {
        u32 item = base + thread;
        if (base > 0) residual = load_residual<CHUNKS>(o, region, item);
        u32 chunk = item % CHUNKS, column = region.column + item / CHUNKS;
        u32 r = region.m0 + chunk * 8, n = region.n0 + column;
        float square = 0.0f;
        if (item < items && r < o.rows) {
            float y[8], v[8];
            sums(column, chunk, y);
            float s = scale[column];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                v[i] = __fmaf_rn(y[i], s, residual.x[i]);
                square = __fmaf_rn(v[i], v[i], square);
            }
            store8(o.out + (u64)n * o.ld + r, v);
            if (o.extra) pack8((bf16*)o.extra + xp_offset(n, o.extra_offset + r, o.extra_k32, o.tiles), v);
#pragma unroll
            for (u32 i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], residual.gain[i]);
            if (o.packed) pack8(o.packed + xp_offset(n, r, next_k32, o.tiles), v);
            if (r + 8 == o.rows) {
                if (o.packed) zero_rest(o.packed, n, o.rows, next_k32, o.tiles);
                // Behind the last tap, that is.
                if (o.extra && o.extra_k32 * 32 - tap_end < 32)
                    zero_rest((bf16*)o.extra, n, tap_end, o.extra_k32, o.tiles);
            }
        }
#pragma unroll
        for (u32 distance = 1; distance < PART_ROWS / 8; distance *= 2)
            square += __shfl_xor_sync(ALL_LANES, square, distance);
        if (o.parts && item < items && r < o.rows && chunk % (PART_ROWS / 8) == 0)
            o.parts[(u64)n * part_count + r / PART_ROWS] = square;
    }
}

template <u32 CHUNKS, class Sums>
__device__ __forceinline__ void finish_store(
    const Output& o, const Region& region, const float* scale, const Sums& sums, u32 thread) {
    bool vectors = o.ld % 4 == 0;
    for (u32 item = thread; item < region.columns * CHUNKS; item += THREADS) {
        u32 chunk = item % CHUNKS, column = region.column + item / CHUNKS;
        u32 r = region.m0 + chunk * 8, n = region.n0 + column;
        if (r >= o.rows) continue;
        float y[8];
        sums(column, chunk, y);
        float s = scale[column];
#pragma unroll
        for (u32 i = 0; i < 8; i++) y[i] = __fmul_rn(y[i], s);
        float* target = o.out + (u64)n * o.ld + r;
        if (vectors && r + 8 <= o.rows) {
            store8(target, y);
        } else {
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (r + i < o.rows) target[i] = y[i];
        }
    }
}

// Panel p holds rows 8p.. of the gate and, below them, rows 8p.. of the up projection.
template <u32 PANELS, class Sums>
__device__ __forceinline__ void finish_swiglu(
    const Output& o, const Region& region, const float* scale, const Sums& sums, u32 thread) {
    u32 width = o.rows / 2, k32 = (width + 31) / 32;
    for (u32 item = thread; item < region.columns * PANELS; item += THREADS) {
        u32 panel = item % PANELS, column = region.column + item / PANELS;
        u32 j = region.m0 / 2 + panel * 8, n = region.n0 + column;
        if (j >= width) continue;
        float gate[8], up[8];
        sums(column, 2 * panel, gate);
        sums(column, 2 * panel + 1, up);
        float s = scale[column];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float g = __fmul_rn(gate[i], s);
            float silu = __fdiv_rn(g, __fadd_rn(1.0f, expf(-g)));
            up[i] = __fmul_rn(silu, __fmul_rn(up[i], s));
        }
        pack8(o.packed + xp_offset(n, j, k32, o.tiles), up);
        if (j + 8 == width) zero_rest(o.packed, n, width, k32, o.tiles);
    }
}

template <u32 CHUNKS, class Sums>
__device__ __forceinline__ void finish_head(
    const Output& o, const Region& region, const float* scale, const Sums& sums, u32 thread) {
    static_assert(CHUNKS >= GROUP_ROWS / 8, "a group lies in one tile");
    u32 items = region.columns * CHUNKS, groups = (o.rows + GROUP_ROWS - 1) / GROUP_ROWS;
    for (u32 base = 0; base < items; base += THREADS) {
        u32 item = base + thread;
        u32 chunk = item % CHUNKS, column = region.column + item / CHUNKS;
        u32 r = region.m0 + chunk * 8, n = region.n0 + column;
        bool active = item < items && r < groups * GROUP_ROWS;
        float y[8];
        float largest = NEG_INF;
        if (active) {
            sums(column, chunk, y);
            float s = scale[column];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                y[i] = r + i < o.rows ? __fmul_rn(y[i], s) : NEG_INF;
                largest = fmaxf(largest, y[i]);
            }
            store8(o.out + (u64)n * o.ld + r, y);
        }
#pragma unroll
        for (u32 distance = 1; distance < GROUP_ROWS / 8; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
        float sum = 0.0f;
        if (active) {
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (r + i < o.rows) sum = __fadd_rn(sum, expf(__fsub_rn(y[i], largest)));
        }
#pragma unroll
        for (u32 distance = 1; distance < GROUP_ROWS / 8; distance *= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
        if (active && chunk % (GROUP_ROWS / 8) == 0) {
            u64 at = (u64)n * groups + r / GROUP_ROWS;
            o.parts[at] = largest;
            // Nothing finite in the group: exp(-inf - -inf) is no number.
            ((float*)o.extra)[at] = largest == NEG_INF ? 0.0f : sum;
        }
    }
}

template <u32 PANELS, u32 PART_ROWS, class Sums>
__device__ __forceinline__ void finish(
    const Output& o, const Region& region, const Residual& residual, const float* scale, const Sums& sums, u32 thread) {
    if (o.kind == STORE) finish_store<PANELS * 2>(o, region, scale, sums, thread);
    if (o.kind == RESIDUAL) finish_residual<PANELS * 2, PART_ROWS>(o, region, residual, scale, sums, thread);
    if (o.kind == SWIGLU) finish_swiglu<PANELS>(o, region, scale, sums, thread);
    if constexpr (PANELS * 16 >= GROUP_ROWS)
        if (o.kind == HEAD) finish_head<PANELS * 2>(o, region, scale, sums, thread);
}

