// In scope of every kernel file: the Rust side puts it in front before it compiles. No headers are included, so that a
// machine needs the NVRTC library and nothing else.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// bfloat16 by its bits.
typedef u16 bf16;

#define NONE 0xFFFFFFFFu
#define NEG_INF (-__int_as_float(0x7F800000))

__device__ __forceinline__ float bf16_to_f32(bf16 bits) { return __uint_as_float((u32)bits << 16); }

// The low and high half of two packed values.
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Rounds both to nearest even; `low` goes to the lower address.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ bf16 f32_to_bf16(float value) { return (bf16)pack_bf16(value, 0.0f); }

// Programmatic dependent launch. A kernel may start while its predecessor still runs; only after the wait is the
// predecessor's work visible. Every thread waits once, also when it has nothing to do: later kernels rely on it.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Index of element (row n, depth k) of packed activations with `k32` blocks of 32 and `nt` tiles of 8 rows per block of
// rows. Eight consecutive k are 16 contiguous bytes.
__device__ __forceinline__ u64 xp_offset(u32 n, u32 k, u32 k32, u32 nt) {
    u32 lane = (n & 7) * 4 + ((k & 31) >> 3);
    return ((u64)((n >> 6) * k32 + (k >> 5)) * nt + ((n & 63) >> 3)) * 256 + lane * 8 + (k & 7);
}

// D += A * B of one warp: A 16x16 row-major, B 16x8 column-major in bf16, D in f32.
__device__ __forceinline__ void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
