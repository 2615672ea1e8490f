// Moves the keys and values of the accepted rows to the slots that plain decoding would have given them: row path[i] of a
// sequence (ascending, counted from its committed rows) goes to slot committed + i, in all layers.

#define COMPACTION_THREADS 128
#define MOVES 64                // rows whose addresses are worked out at a time
#define BATCH 8                 // rows on their way at a time

// Blocks (columns, sequences). A thread owns 16 bytes of the head dimension of one head, of keys or values of one layer. It
// moves rows in ascending order, and a row never moves up, so it overwrites only rows that it has read before.
extern "C" __global__ void __launch_bounds__(COMPACTION_THREADS)
compact_kv(bf16* cache, u32 blocks, u32 layers, u32 kv_heads, u32 width, const u32* path, u32 path_stride, const u32* counts,
           const u32* committed, const u32* tables, u32 table_stride) {
    __shared__ u32 from[MOVES];
    __shared__ u32 to[MOVES];
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.y;
    u32 column = blockIdx.x * COMPACTION_THREADS + threadIdx.x;
    u32 pieces = width / 8;
    u32 piece = column % pieces;
    u32 head = column / pieces % kv_heads;
    u64 plane = column / pieces / kv_heads;
    bool owner = plane < 2 * layers;
    bf16* base = cache + (plane * blocks * kv_heads + head) * 16 * width + piece * 8;
    u32 count = min(counts[sequence], path_stride);
    for (u32 first = 0; first < count; first += MOVES) {
        __syncthreads();
        u32 index = first + threadIdx.x;
        if (threadIdx.x < MOVES) {
            u32 row = index < count ? path[(u64)sequence * path_stride + index] : index;
            u32 source = committed[sequence] + row;
            u32 target = committed[sequence] + index;
            const u32* table = tables + (u64)sequence * table_stride;
            // A row that stays needs no copy; one without a block, which no caller asks for, gets none.
            u32 blocks_of[2] = {NONE, NONE};
            if (row > index && source / 16 < table_stride) {
                blocks_of[0] = table[source / 16];
                blocks_of[1] = table[target / 16];
            }
            bool moves = blocks_of[0] != NONE && blocks_of[1] != NONE;
            from[threadIdx.x] = moves ? blocks_of[0] * 16 + source % 16 : NONE;
            to[threadIdx.x] = moves ? blocks_of[1] * 16 + target % 16 : NONE;
        }
        __syncthreads();
        if (!owner) continue;
        for (u32 batch = 0; batch < MOVES && first + batch < count; batch += BATCH) {
            uint4 moved[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                u32 slot = from[batch + i];
                if (slot != NONE) moved[i] = *(const uint4*)(base + ((u64)(slot / 16) * kv_heads * 16 + slot % 16) * width);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                u32 slot = to[batch + i];
                if (slot != NONE) *(uint4*)(base + ((u64)(slot / 16) * kv_heads * 16 + slot % 16) * width) = moved[i];
            }
        }
    }
}
