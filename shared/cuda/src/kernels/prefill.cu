// Around a library's matrix product for the many rows of a prompt: out of the packed layouts, and from its sums to what
// `linear.cu` leaves behind. Kernels wait before they let the next one start: what follows relies on all earlier work,
// and a library's kernel between two of ours keeps no such promise.

// Blocks of 32 of the depth (of a panel, of a tile of 8 rows) that a warp has on the way at once.
#define AT_ONCE 4
// Rows of the matrix and of the batch that a block finishes.
#define FINISH_PANELS 8
#define FINISH_COLUMNS 32

// Packed weights in the order of their panels to bf16 [panels * 16][k32 * 32]. `group` panels alternate in memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_weights(const bf16* packed, bf16* out, u32 panels, u32 k32, u32 group) {
    pdl_wait();
    pdl_launch();
    u32 lane = threadIdx.x % 32, first = blockIdx.x * WARPS * AT_ONCE + threadIdx.x / 32;
    u32 units = (panels + group - 1) / group * group * k32, depth = k32 * 32;
    uint4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
        u32 unit = first + i * WARPS;
        if (unit >= units) continue;
        const uint4* from = (const uint4*)(packed + (u64)unit * 512) + lane;
        low[i] = from[0];
        high[i] = from[32];
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
        u32 unit = first + i * WARPS;
        u32 block = unit / group;
        u32 panel = block / k32 * group + unit % group;
        if (unit >= units || panel >= panels) continue;
        bf16* to = out + (u64)(panel * 16 + lane / 4) * depth + block % k32 * 32 + lane % 4 * 8;
        // The even registers of a fragment belong to row g, the odd ones to row g + 8.
        *(uint4*)to = make_uint4(low[i].x, low[i].z, high[i].x, high[i].z);
        *(uint4*)(to + (u64)8 * depth) = make_uint4(low[i].y, low[i].w, high[i].y, high[i].w);
    }
}

// Packed activations of `rows` rows, a multiple of 64, to bf16 [rows][k32 * 32].
extern "C" __global__ void __launch_bounds__(THREADS) unpack_rows(const bf16* packed, bf16* out, u32 rows, u32 k32) {
    pdl_wait();
    pdl_launch();
    u32 lane = threadIdx.x % 32, first = blockIdx.x * WARPS * AT_ONCE + threadIdx.x / 32;
    u32 units = rows / 8 * k32;
    uint4 values[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
        u32 unit = first + i * WARPS;
        if (unit < units) values[i] = *((const uint4*)(packed + (u64)unit * 256) + lane);
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
        u32 unit = first + i * WARPS;
        if (unit >= units) continue;
        u32 block = unit / 8; // of 64 rows and 32 of the depth
        u32 row = block / k32 * 64 + unit % 8 * 8 + lane / 4;
        *(uint4*)(out + (u64)row * (k32 * 32) + block % k32 * 32 + lane % 4 * 8) = values[i];
    }
}

// Sums of 8 rows of the matrix for a row of the batch, from [column][stride].
struct StoredSums {
    const float* first;
    u32 stride;

    __device__ __forceinline__ void operator()(u32 column, u32 chunk, float (&y)[8]) const {
        const float4* at = (const float4*)(first + (u64)column * stride + chunk * 8);
        spread(y, at[0], at[1]);
    }
};

// `sums` is f32 [batch][stride], where `stride` is rows of whole panels in their order. Grid: x = tiles of the matrix,
// y = of the batch, which is a multiple of 64.
extern "C" __global__ void __launch_bounds__(THREADS)
    finish_sums(const float* sums, u32 stride, u32 rows, const float* square_parts, u32 square_count,
                float inverse_width, float eps, u32 kind, float* out, u32 ld, const float* gain, bf16* packed,
                float* parts, void* extra, u32 extra_k32, u32 extra_offset, u32 part_rows) {
    __shared__ float scale[FINISH_COLUMNS];
    pdl_wait();
    pdl_launch();
    Output o{kind, rows, 8, out, ld, gain, packed, parts, extra, extra_k32, extra_offset};
    Region region{blockIdx.x * (FINISH_PANELS * 16), blockIdx.y * FINISH_COLUMNS, 0, FINISH_COLUMNS};
    StoredSums stored{sums + (u64)region.n0 * stride + region.m0, stride};
    row_scales<FINISH_COLUMNS>(scale, square_parts, square_count, inverse_width, eps, region.n0, threadIdx.x);
    __syncthreads();
    if (kind == STORE) finish_store<FINISH_PANELS * 2>(o, region, scale, stored, threadIdx.x);
    if (kind == SWIGLU) finish_swiglu<FINISH_PANELS>(o, region, scale, stored, threadIdx.x);
    if (kind == RESIDUAL) {
        Residual residual = load_residual<FINISH_PANELS * 2>(o, region, threadIdx.x);
        if (part_rows == 16) finish_residual<FINISH_PANELS * 2, 16>(o, region, residual, scale, stored, threadIdx.x);
        else finish_residual<FINISH_PANELS * 2, 64>(o, region, residual, scale, stored, threadIdx.x);
    }
}
