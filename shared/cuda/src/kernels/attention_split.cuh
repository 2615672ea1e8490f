// Attention of all rows of a batch over the paged cache. Compiled for one HEAD_DIM and one GROUP (query heads per key head).
//
// Positions are cut into absolute tiles of 16 and splits of 64. A warp takes 16 query rows (some nodes times GROUP heads)
// and one split: scores of the whole split in registers, one maximum, weights, their sum, then the weighted values. The
// results of the splits are merged one after the other, first positions first. So neither the other rows of a batch nor the
// number of warps and blocks that share the work can enter the bits of a row; what a row does not see weighs exactly 0.
//
// A row sees a range of its sequence's slots or, when it is the node of a tree, the committed slots and its path. From the
// first tile that is not wholly committed on, the slot of a position then depends on the node: each node of the warp's tile
// has its own list of slots there (the tail), and its own matrix products, of which only its rows are kept. Values land on
// the position that plain decoding would give them, so a node gets the bits of plain decoding.
//
// Reference for the split of a sequence over warps: Flash-Decoding (Dao et al. 2023).

#define WIDTH ((HEAD_DIM + 31) / 32 * 32)   // elements of a key or value in the cache
#define PIECES (WIDTH / 32)                 // 16-byte pieces of a key that one lane holds
#define OCTETS (WIDTH / 64)                 // 16-byte pieces of a value that one lane holds ...
#define REST (WIDTH / 32 % 2)               // ... and whether there is one of 8 bytes
#define VALUE_WORDS (WIDTH / 16)
#define COLUMNS (WIDTH / 8)                 // columns of eight output elements
#define STRIDE (WIDTH + 4)                  // floats between rows in shared memory: fewer bank conflicts
#define SPLIT 64
#define TILES (SPLIT / 16)
#define MAX_PATH 64
#define ONES 0x3F803F80u                    // two bf16 ones
#define TAIL_TILES 5                        // 15 committed slots and a whole path
#define TAIL (TAIL_TILES * 16)
// Tiles whose keys, and whose values, are on their way at a time: as many as the registers hold. Keys need at least two.
#define KEYS_DEEP (WIDTH <= 128 ? 4 : 2)
#define VALUES_DEEP (WIDTH <= 96 ? 4 : WIDTH <= 128 ? 3 : 1)
#define VALUES_AHEAD (WIDTH <= 64 ? 4 : 0)  // values asked for before the first score

#if HEAD_DIM % 8 != 0 || GROUP < 1 || GROUP > 16
#error "HEAD_DIM must be a multiple of 8, GROUP 1 to 16"
#endif

struct Rows {
    const u32* tiles;           // [tile_count][4]: sequence, first row, rows, unused
    u32 tile_count;
    u32 tile_nodes;             // most rows of a tile, at most 16 / GROUP
    const u32* vis_begin;       // [rows]
    const u32* vis_end;         // [rows]
    const u32* path_len;        // [rows], or null: no row has a path
    const u16* path;            // [rows][MAX_PATH]
    const u32* tables;          // [sequences][table_stride]
    u32 table_stride;
    const u32* committed;       // [sequences]
};

// Keys and values of a layer. A row of it is one key or value: ((block * kv_heads) + head) * 16 + slot % 16.
struct Cache {
    const bf16* keys;           // [block][kv_heads][16][WIDTH]
    const bf16* values;
    u32 kv_heads;
    u32 head;
};

// The query rows of a warp. Row i of the matrix is head i % GROUP of node i / GROUP; a lane has rows lane/4 and lane/4 + 8.
struct RowTile {
    u32 sequence, first_row, nodes;
    u32 committed;
    u32 begin[2], length[2];    // what the lane's rows see, in positions
    u32 low, high;              // positions that any row sees lie in [low, high)
    u32 full_low, full_high;    // positions that all rows see
    u32 old_tiles;              // tiles before this one were written before this pass
    u32 shared_tiles;           // from this tile on slots depend on the node
};

// Loads around the first-level cache: they may run before the predecessor's end, when that cache may hold older values.
__device__ __forceinline__ u32 load_fresh(const u32* from) { return __ldcg(from); }

// Registers keep what they hold when the load is not wanted.
__device__ __forceinline__ void load16(u32& a, u32& b, u32& c, u32& d, const void* from, bool wanted) {
    asm volatile("{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
                 "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : "l"(from), "r"((u32)wanted));
}

__device__ __forceinline__ void load16_fresh(u32& a, u32& b, u32& c, u32& d, const void* from, bool wanted) {
    asm volatile("{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
                 "@wanted ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : "l"(from), "r"((u32)wanted));
}

__device__ __forceinline__ void load8(u32& low, u32& high, const void* from, bool wanted) {
    asm volatile("{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %3, 0;\n\t"
                 "@wanted ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
                 : "+r"(low), "+r"(high) : "l"(from), "r"((u32)wanted));
}

// 2^x: 1 for 0, 0 for -inf.
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The compiler forgets what it knows: without it, it computes a hundred positions ahead of the loop over the splits and has
// no registers left.
__device__ __forceinline__ u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 cluster_size() { u32 r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }

__device__ __forceinline__ void cluster_barrier() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address of `at` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 in_block(const void* at, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank));
    return address;
}

__device__ __forceinline__ float2 load_cluster2(u32 address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_cluster4(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// First cache row of the block that holds tile `index` of a sequence. A block that is not there is read as block 0: nothing
// was stored to it, so a row that sees it has no meaning, but it must not fault.
__device__ __forceinline__ u32 block_row(const Rows& rows, const Cache& cache, u32 sequence, u32 index) {
    u32 block = load_fresh(rows.tables + (u64)sequence * rows.table_stride + min(index, rows.table_stride - 1));
    return ((block == NONE ? 0 : block) * cache.kv_heads + cache.head) * 16;
}

__device__ __forceinline__ u32 path_length(const Rows& rows, u32 row) {
    return rows.path_len == 0 ? 0 : min(load_fresh(rows.path_len + row), (u32)MAX_PATH);
}

// One warp reads what its rows see.
__device__ __forceinline__ RowTile load_tile(const Rows& rows, u32 index, u32 lane) {
    RowTile tile = {};
    if (index < rows.tile_count) {
        tile.sequence = load_fresh(rows.tiles + index * 4);
        tile.first_row = load_fresh(rows.tiles + index * 4 + 1);
        tile.nodes = min(load_fresh(rows.tiles + index * 4 + 2), rows.tile_nodes);
        if (tile.sequence == NONE) tile.nodes = 0;
    }
    if (tile.nodes == 0) return tile;
    tile.committed = load_fresh(rows.committed + tile.sequence);
    u32 low = NONE, high = 0, full_low = 0, full_high = NONE, paths = 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 node = (lane / 4 + 8 * half) / GROUP;
        if (node >= tile.nodes) continue;
        u32 row = tile.first_row + node;
        u32 path = path_length(rows, row);
        u32 begin = load_fresh(rows.vis_begin + row);
        u32 end = load_fresh(rows.vis_end + row);
        if (path > 0) {
            begin = 0;
            end = tile.committed + path;
            paths = 1;
        }
        // Whatever a row asks for, it sees no more than its table.
        end = min(end, rows.table_stride * 16);
        tile.begin[half] = begin;
        tile.length[half] = end > begin ? end - begin : 0;
        if (end > begin) {
            low = min(low, begin);
            high = max(high, end);
        } else {
            end = 0;
        }
        full_low = max(full_low, begin);
        full_high = min(full_high, end);
    }
    tile.low = __reduce_min_sync(0xFFFFFFFF, low);
    tile.high = __reduce_max_sync(0xFFFFFFFF, high);
    tile.full_low = __reduce_max_sync(0xFFFFFFFF, full_low);
    tile.full_high = __reduce_min_sync(0xFFFFFFFF, full_high);
    tile.old_tiles = tile.committed / 16;
    bool tree = __reduce_max_sync(0xFFFFFFFF, paths) != 0;
    tile.shared_tiles = tree ? tile.committed / 16 : NONE;
    // The tail holds what a path can reach.
    if (tree) tile.high = min(tile.high, tile.shared_tiles * 16 + TAIL);
    return tile;
}

// Cache rows of the tail of every node of the tile, [nodes][TAIL]; NONE where the node sees nothing. `part` of `parts` threads.
__device__ __forceinline__ void list_tail(const Rows& rows, const Cache& cache, const RowTile& tile, u32* tail, u32 part, u32 parts) {
    if (tile.nodes == 0 || tile.shared_tiles == NONE) return;
    for (u32 i = part; i < tile.nodes * TAIL; i += parts) {
        u32 row = tile.first_row + i / TAIL;
        u32 position = tile.shared_tiles * 16 + i % TAIL;
        u32 length = path_length(rows, row);
        bool seen = true;
        u32 slot = position;
        if (length == 0) seen = position < load_fresh(rows.vis_end + row);
        else if (position >= tile.committed) {
            u32 depth = position - tile.committed;
            seen = depth < length;
            slot = tile.committed + __ldcg(rows.path + (u64)row * MAX_PATH + min(depth, (u32)MAX_PATH - 1));
        }
        seen = seen && slot < rows.table_stride * 16;
        tail[i] = seen ? block_row(rows, cache, tile.sequence, slot / 16) + slot % 16 : NONE;
    }
}

// The results of one split for the lane's two rows: maximum and sum of the weights, and weighted values. Column n of
// output n-tile 8h+e is element 64h + 8n + e (in the last 32 elements of an odd WIDTH/32: 4n + e behind the others), so a
// lane's values are whole vectors in memory.
struct Partial {
    float top[2];
    float sum[2];
    float out[COLUMNS][4];
};

// One split of one tile as it is computed.
struct SplitView {
    const char* keys;           // at the lane's first piece of cache row 0
    const char* values;
    u32 lane;
    u32 first_tile;             // of the split
    u32 from, to;               // its tiles that some row sees
};

// Cache rows of the positions of a split as node 0 sees them, [SPLIT]; NONE where nobody sees anything. One warp.
__device__ __forceinline__ void list_split(const Rows& rows, const Cache& cache, const RowTile& tile, const u32* tail,
                                           u32 first_tile, u32 lane, u32* list) {
#pragma unroll
    for (u32 i = lane; i < SPLIT; i += 32) {
        u32 index = first_tile + i / 16;
        u32 position = first_tile * 16 + i;
        u32 row = NONE;
        if (position >= tile.low && position < tile.high)
            row = index < tile.shared_tiles ? block_row(rows, cache, tile.sequence, index) + i % 16
                                            : tail[(index - tile.shared_tiles) * 16 + i % 16];
        list[i] = row;
    }
    __syncwarp();
}

// Keys of the 16 cache rows at `list`: a lane has the pieces 32j + 8 (lane % 4) of keys lane/4 and lane/4 + 8.
template <bool FRESH>
__device__ __forceinline__ void load_keys(u32 (&keys)[2][PIECES][4], const SplitView& view, const u32* list, bool wanted) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = list[view.lane / 4 + 8 * half];
        const char* from = view.keys + (u64)row * (2 * WIDTH);
        bool there = wanted && row != NONE;
#pragma unroll
        for (u32 j = 0; j < PIECES; j++) {
            u32(&k)[4] = keys[half][j];
            if (FRESH) load16_fresh(k[0], k[1], k[2], k[3], from + 64 * j, there);
            else load16(k[0], k[1], k[2], k[3], from + 64 * j, there);
        }
    }
}

// Values of the 16 cache rows at `list`: a lane has elements 64h + 8 (lane/4) of keys c, c+1, c+8, c+9, c = 2 (lane % 4).
__device__ __forceinline__ void load_values(u32 (&values)[4][VALUE_WORDS], const SplitView& view, const u32* list) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = list[view.lane % 4 * 2 + (i & 1) + (i >> 1) * 8];
        const char* from = view.values + (u64)row * (2 * WIDTH);
        bool there = row != NONE;
#pragma unroll
        for (u32 w = 0; w < VALUE_WORDS; w++) values[i][w] = 0;
#pragma unroll
        for (u32 h = 0; h != OCTETS; h++)
            load16(values[i][4 * h], values[i][4 * h + 1], values[i][4 * h + 2], values[i][4 * h + 3], from + 128 * h, there);
        if (REST) load8(values[i][VALUE_WORDS - 2], values[i][VALUE_WORDS - 1], from + 128 * OCTETS - view.lane / 4 * (OCTETS ? 8 : 0), there);
    }
}

// Registers that are set on one path only count as used on every path to it, so none may be left open.
template <u32 N>
__device__ __forceinline__ void set_all(float (&values)[N][4], float value) {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) values[n][i] = value;
}

// Query rows times the keys of a tile. The queries come from shared memory as the product takes them.
__device__ __forceinline__ void score(float (&scores)[2][4], const uint4* q, const u32 (&keys)[2][PIECES][4]) {
    set_all(scores, 0.0f);
#pragma unroll
    for (u32 j = 0; j < PIECES; j++)
#pragma unroll
        for (u32 s = 0; s < 2; s++)
#pragma unroll
            for (u32 n = 0; n < 2; n++)
                mma_bf16(scores[n], q[(2 * j + s) * 32].x, q[(2 * j + s) * 32].y, q[(2 * j + s) * 32].z, q[(2 * j + s) * 32].w,
                         keys[n][j][2 * s], keys[n][j][2 * s + 1]);
}

// out += weights * values of one tile.
__device__ __forceinline__ void weigh(float (&out)[COLUMNS][4], const u32 (&w)[4], const u32 (&values)[4][VALUE_WORDS]) {
#pragma unroll
    for (u32 i = 0; i < VALUE_WORDS; i++) {
        mma_bf16(out[2 * i], w[0], w[1], w[2], w[3], __byte_perm(values[0][i], values[1][i], 0x5410),
                 __byte_perm(values[2][i], values[3][i], 0x5410));
        mma_bf16(out[2 * i + 1], w[0], w[1], w[2], w[3], __byte_perm(values[0][i], values[1][i], 0x7632),
                 __byte_perm(values[2][i], values[3][i], 0x7632));
    }
}

// Shared memory of one warp.
struct WarpMemory {
    uint4 queries[PIECES * 2][32];
    u32 list[SPLIT];
};

// Computes one split. All threads of the warp come here together; `first` says that nothing waited yet and that `queries`
// ([row][heads][WIDTH], scaled by log2(e)/sqrt(HEAD_DIM)) are to be loaded.
__device__ __forceinline__ void attend_split(const bf16* queries, const Rows& rows, const Cache& cache, const RowTile& tile,
                                             const u32* tail, WarpMemory& memory, u32 split, bool first, Partial& result) {
    u32 lane = opaque(threadIdx.x % 32);
    u32* list = memory.list;
    uint4* q = &memory.queries[0][lane];
    SplitView view = {(const char*)cache.keys + lane % 4 * 16, (const char*)cache.values + lane / 4 * (OCTETS ? 16 : 8), lane,
                      split * TILES, 0, 0};
    if (tile.nodes > 0 && tile.high > split * SPLIT && tile.low < (split + 1) * SPLIT) {
        view.from = tile.low > split * SPLIT ? (tile.low - split * SPLIT) / 16 : 0;
        view.to = min((tile.high - split * SPLIT + 15) / 16, (u32)TILES);
        list_split(rows, cache, tile, tail, view.first_tile, lane, list);
    }
    bool active = view.to > view.from;
    u32 old = tile.old_tiles > view.first_tile ? tile.old_tiles - view.first_tile : 0;
    u32 tail_from = tile.shared_tiles > view.first_tile ? tile.shared_tiles - view.first_tile : 0;
    u32 tail_skip = tile.shared_tiles < view.first_tile ? view.first_tile - tile.shared_tiles : 0;
    u32 keys[KEYS_DEEP][2][PIECES][4] = {};
    u32 values[VALUES_DEEP][4][VALUE_WORDS];
    float scores[TILES][2][4];
    if (first) {
        // Keys from before this pass need not wait for the kernel that stores the new ones.
        if (active) {
#pragma unroll
            for (u32 t = 0; t < KEYS_DEEP; t++) load_keys<true>(keys[t], view, list + 16 * t, t < old);
        }
        pdl_wait();
        u32 heads = cache.kv_heads * GROUP;
        u32 loaded[2][PIECES][4] = {};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = lane / 4 + 8 * half;
            const bf16* from = queries + ((u64)(tile.first_row + row / GROUP) * heads + cache.head * GROUP + row % GROUP) * WIDTH;
#pragma unroll
            for (u32 j = 0; j < PIECES; j++) {
                u32(&l)[4] = loaded[half][j];
                load16(l[0], l[1], l[2], l[3], from + 32 * j + lane % 4 * 8, row / GROUP < tile.nodes);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2 * PIECES; i++) {
            u32(&low)[4] = loaded[0][i / 2];
            u32(&high)[4] = loaded[1][i / 2];
            q[i * 32] = make_uint4(low[i % 2 * 2], high[i % 2 * 2], low[i % 2 * 2 + 1], high[i % 2 * 2 + 1]);
        }
    }
    result.top[0] = result.top[1] = NEG_INF;
    result.sum[0] = result.sum[1] = 0.0f;
    set_all(result.out, 0.0f);
    if (!active) return;
    u32 place[2] = {view.first_tile * 16 + lane % 4 * 2 - tile.begin[0], view.first_tile * 16 + lane % 4 * 2 - tile.begin[1]};
#pragma unroll
    for (u32 t = 0; t < KEYS_DEEP; t++) load_keys<false>(keys[t], view, list + 16 * t, !first || t >= old);
#pragma unroll
    for (u32 t = 0; t != VALUES_AHEAD; t++) load_values(values[t], view, list + 16 * t);

#pragma unroll
    for (u32 pair = 0; pair < TILES; pair += 2) {
        if (pair < view.to && pair + 2 > view.from) {
            score(scores[pair], q, keys[pair % KEYS_DEEP]);
            score(scores[pair + 1], q, keys[(pair + 1) % KEYS_DEEP]);
        } else {
            set_all(scores[pair], NEG_INF);
            set_all(scores[pair + 1], NEG_INF);
        }
#pragma unroll
        for (u32 t = pair; t < pair + 2; t++) {
            if (t >= tail_from && t < view.to) {
                for (u32 node = 1; node < tile.nodes; node++) {
                    float part[2][4];
                    load_keys<false>(keys[t % KEYS_DEEP], view, tail + node * TAIL + (t - tail_from + tail_skip) * 16, true);
                    score(part, q, keys[t % KEYS_DEEP]);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        bool kept = (lane / 4 + 8 * (i >> 1)) / GROUP == node;
                        scores[t][0][i] = kept ? part[0][i] : scores[t][0][i];
                        scores[t][1][i] = kept ? part[1][i] : scores[t][1][i];
                    }
                }
            }
            u32 start = (view.first_tile + t) * 16;
            if (start < tile.full_low || start + 16 > tile.full_high) {
#pragma unroll
                for (u32 n = 0; n < 2; n++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        bool visible = place[i >> 1] + (16 * t + 8 * n + (i & 1)) < tile.length[i >> 1];
                        scores[t][n][i] = visible ? scores[t][n][i] : NEG_INF;
                    }
            }
            // The registers of these keys are free: the next keys, then the first values.
            u32 next = t + KEYS_DEEP;
            if (next < TILES) load_keys<false>(keys[t % KEYS_DEEP], view, list + 16 * next, true);
            else if (next - TILES + 1 > VALUES_AHEAD && next - TILES < VALUES_DEEP)
                load_values(values[(next - TILES) % VALUES_DEEP], view, list + 16 * (next - TILES));
        }
    }

#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float top = NEG_INF;
#pragma unroll
        for (u32 t = 0; t < TILES; t++)
#pragma unroll
            for (u32 n = 0; n < 2; n++) top = fmaxf(top, fmaxf(scores[t][n][2 * half], scores[t][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
        result.top[half] = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
    }
    // Weights as the matrix product will see them, rounded, and their sum: a product with a column of ones.
    u32 weights[TILES][4];
    float sums[4] = {};
    float shift[2] = {result.top[0] == NEG_INF ? 0.0f : result.top[0], result.top[1] == NEG_INF ? 0.0f : result.top[1]};
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float(&s)[4] = scores[t][i / 2];
            weights[t][i] = pack_bf16(exp2_of(s[i % 2 * 2] - shift[i % 2]), exp2_of(s[i % 2 * 2 + 1] - shift[i % 2]));
        }
        mma_bf16(sums, weights[t][0], weights[t][1], weights[t][2], weights[t][3], ONES, ONES);
    }
    result.sum[0] = sums[0];
    result.sum[1] = sums[2];

    set_all(result.out, 0.0f);
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        if (t >= tail_from && t < view.to) {
            for (u32 node = 0; node < tile.nodes; node++) {
                u32 own[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) own[i] = (lane / 4 + 8 * (i & 1)) / GROUP == node ? weights[t][i] : 0;
                if (node > 0) load_values(values[t % VALUES_DEEP], view, tail + node * TAIL + (t - tail_from + tail_skip) * 16);
                weigh(result.out, own, values[t % VALUES_DEEP]);
            }
        } else if (t >= view.from && t < view.to) {
            weigh(result.out, weights[t], values[t % VALUES_DEEP]);
        }
        if (t + VALUES_DEEP < TILES) load_values(values[t % VALUES_DEEP], view, list + 16 * (t + VALUES_DEEP));
    }
}
