// From the head's k best per depth to the draft and to everything that the pass over it needs. One block per sequence,
// one thread per row of the sequence.
//
// The tree is that of best-first search over prefix-closed paths (DDTree, arXiv 2604.12989), node by node. Its frontier
// needs no heap: a node has at most one open child, the best that is not in the tree yet, so slot s of the frontier is
// that of node s. Slots live in the registers of one warp, ordered by the bits of the f64 log-probability. A pop gives the
// popped slot its next sibling and the new node its first child; both sums are prepared one pop ahead.

#define THREADS 256
#define ALL 0xFFFFFFFFu
// Keys below this are not open: no node yet, or -inf.
#define LEAST_OPEN 0x00100000u
#define TREE_RECORD_HEADER 4u

struct Tree {
    // What a pop of a slot puts in its place, and what it opens below the new node: log-probabilities.
    double2 after[THREADS];
    double log_probs[THREADS];
    // Of the open child of a node: depth (0 below the root) << 8 | rank among the candidates of that depth.
    u32 places[THREADS];
    // Of a node: parent << 16 | its place.
    u32 steps[THREADS];
    u32 kept_steps[THREADS];
    u32 keep[THREADS / 32];
    u32 nodes;
    u32 repeats;
};

// Candidates in shared memory. Row d of `log_probs` ends with -inf at the first rank that is no candidate; there are two
// ranks and two depths more than candidates, so that looking ahead needs no bounds.
struct Candidates {
    double* log_probs;  // [depths + 2][stride]
    u32* tokens;        // [depths][count]
    u32* repeated;      // [depths][words]: bit r is set when the token of rank r has a better rank too
    u32 depths, count, stride, words;
};

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __int_as_float(0x7F800000); }

// Orders like the value.
__device__ __forceinline__ void order_key(double value, u32& high, u32& low) {
    i32 bits = __double2hiint(value);
    u32 sign = (u32)(bits >> 31);
    high = (u32)bits ^ (sign | 0x80000000u);
    low = (u32)__double2loint(value) ^ sign;
}

__device__ __forceinline__ double key_value(u32 high, u32 low) {
    u32 sign = (high >> 31) != 0 ? 0 : 0xFFFFFFFFu;
    return __hiloint2double((i32)(high ^ (sign | 0x80000000u)), (i32)(low ^ sign));
}

// The ancestor at `depth` of the end of a rank path.
__device__ __forceinline__ u32 lift(const Tree& tree, u32 step, u32 depth) {
    while ((step >> 8 & 255) > depth) step = tree.steps[step >> 16];
    return step;
}

// Whether the open child of `a` has the lexicographically lower rank path; a prefix comes before its extensions.
__device__ __forceinline__ bool precedes(const Tree& tree, u32 a, u32 b) {
    u32 depth_a = tree.places[a] >> 8;
    u32 depth_b = tree.places[b] >> 8;
    u32 shallow = min(depth_a, depth_b);
    u32 above_a = lift(tree, a << 16 | tree.places[a], shallow);
    u32 above_b = lift(tree, b << 16 | tree.places[b], shallow);
    if (above_a == above_b) return depth_a < depth_b;
    while (above_a >> 16 != above_b >> 16) {
        above_a = tree.steps[above_a >> 16];
        above_b = tree.steps[above_b >> 16];
    }
    return (above_a & 255) < (above_b & 255);
}

// The best of several slots that share the upper half of the key.
template <u32 SLOTS>
__device__ __forceinline__ u32 best_of_tied(const Tree& tree, const u32 (&high)[SLOTS], const u32 (&low)[SLOTS], u32 highest) {
    u32 lowest = 0;
#pragma unroll
    for (u32 j = 0; j < SLOTS; j++)
        if (high[j] == highest) lowest = max(lowest, low[j]);
    lowest = __reduce_max_sync(ALL, lowest);
    u32 best = NONE;
#pragma unroll
    for (u32 j = 0; j < SLOTS; j++) {
        u32 tied = __ballot_sync(ALL, high[j] == highest && low[j] == lowest);
        for (; tied != 0; tied &= tied - 1) {
            u32 slot = j * 32 + __ffs(tied) - 1;
            if (best == NONE || precedes(tree, slot, best)) best = slot;
        }
    }
    return best;
}

// Grows the tree to at most `most` nodes, the root included, and returns how many there are. One warp. SLOTS * 32 nodes
// can have children. With REPEATS a token that a depth lists twice is skipped the second time.
template <u32 SLOTS, bool REPEATS>
__device__ __forceinline__ u32 grow(Tree& tree, const Candidates& from, u32 most) {
    u32 lane = threadIdx.x & 31;
    u32 high[SLOTS], low[SLOTS];
#pragma unroll
    for (u32 j = 0; j < SLOTS; j++) high[j] = low[j] = 0;
    const double* log_probs = from.log_probs;
    u32 stride = from.stride;
    // The slot that this lane looks ahead for: even lanes for the popped one, odd lanes for that of the new node.
    u32 mine = 0;
    u32 my_place = 0;
    bool write = lane == 0;
    double mine_is = 0.0 + log_probs[0];
    double own = log_probs[0];
    double sibling = log_probs[1];
    double child = log_probs[stride];
    if (lane == 0) {
        order_key(mine_is, high[0], low[0]);
        tree.steps[0] = 0;
        tree.log_probs[0] = 0.0;
    }
    u32 nodes = 1;
    while (nodes < most) {
        u32 highest = high[0];
#pragma unroll
        for (u32 j = 1; j < SLOTS; j++) highest = max(highest, high[j]);
        highest = __reduce_max_sync(ALL, highest);
        u32 holders = 0;
        u32 first = 0;
        bool tied = false;
#pragma unroll
        for (u32 j = 0; j < SLOTS; j++) {
            u32 here = __ballot_sync(ALL, high[j] == highest);
            tied |= (here & (here - 1)) != 0 || (here != 0 && holders != 0);
            if (here != 0) {
                holders = here;
                first = j * 32;
            }
        }
        u32 slot = first + 31 - __clz(holders);
        // The look-ahead of the last pop, added left to right like the reference. There always are holders: that the
        // condition needs them makes the compiler wait for the maximum first and for the candidates second.
        if (write && holders != 0) {
            tree.after[mine] = make_double2(mine_is - own + sibling, mine_is + child);
            tree.places[mine] = my_place;
        }
        __syncwarp();
        double2 after = tree.after[slot];
        u32 place = tree.places[slot];
        if (tied) {
            if (highest < LEAST_OPEN) break;
            slot = best_of_tied<SLOTS>(tree, high, low, highest);
            after = tree.after[slot];
            place = tree.places[slot];
        }
        if (highest < LEAST_OPEN) break;
        u32 depth = place >> 8;
        u32 rank = place & 255;
        bool repeated = REPEATS && (from.repeated[depth * from.words + rank / 32] >> (rank & 31) & 1) != 0;
        u32 node = nodes;
        u32 sibling_high, sibling_low, child_high, child_low;
        order_key(after.x, sibling_high, sibling_low);
        order_key(after.y, child_high, child_low);
#pragma unroll
        for (u32 j = 0; j < SLOTS; j++) {
            if (slot == j * 32 + lane) {
                if (!repeated) {
                    tree.log_probs[node] = key_value(high[j], low[j]);
                    tree.steps[node] = slot << 16 | place;
                }
                high[j] = sibling_high;
                low[j] = sibling_low;
            }
            if (node == j * 32 + lane && !repeated) {
                high[j] = child_high;
                low[j] = child_low;
            }
        }
        bool odd = (lane & 1) != 0;
        mine = odd ? node : slot;
        mine_is = odd ? after.y : after.x;
        depth += odd ? 1 : 0;
        rank = odd ? 0 : rank + 1;
        my_place = depth << 8 | rank;
        write = lane == 0 || (lane == 1 && !repeated);
        own = log_probs[depth * stride + rank];
        sibling = log_probs[depth * stride + rank + 1];
        child = log_probs[(depth + 1) * stride];
        if (!repeated) nodes++;
        // Every lane has read what the next look-ahead overwrites.
        __syncwarp();
    }
    return nodes;
}

// Marks tokens that a depth lists before. Done by `workers` threads; `worker` is this one's number.
__device__ void find_repeats(Tree& tree, const Candidates& from, u32 worker, u32 workers) {
    for (u32 index = worker; index < from.depths * from.count; index += workers) {
        u32 depth = index / from.count;
        u32 rank = index % from.count;
        const u32* tokens = from.tokens + depth * from.count;
        u32 token = tokens[rank];
        bool repeated = false;
#pragma unroll 8
        for (u32 earlier = 0; earlier < rank; earlier++) repeated |= tokens[earlier] == token;
        if (!repeated || from.log_probs[depth * from.stride + rank] == (double)NEG_INF) continue;
        atomicOr(&from.repeated[depth * from.words + rank / 32], 1u << (rank & 31));
        tree.repeats = 1;
    }
}

// Rows first_row.. of the head's result of this sequence, one per depth.
__device__ void load_candidates(const Candidates& to, const u32* top_ids, const float* top_logits, const float* lse,
                                u32 first_row, u32 k_stride) {
    u32 lane = threadIdx.x & 31;
    u32 warps = THREADS / 32;
    u32 pairs = to.depths * to.words;
    for (u32 base = threadIdx.x / 32; base < pairs; base += warps * 4) {
        float logits[4], norms[4];
        u32 ids[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 pair = base + i * warps;
            u32 row = first_row + pair / to.words;
            u32 rank = pair % to.words * 32 + lane;
            bool there = pair < pairs && rank < to.count;
            logits[i] = there ? top_logits[(u64)row * k_stride + rank] : 0.0f;
            ids[i] = there ? top_ids[(u64)row * k_stride + rank] : 0;
            norms[i] = there ? lse[row] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 pair = base + i * warps;
            u32 depth = pair / to.words;
            u32 rank = pair % to.words * 32 + lane;
            if (pair >= pairs || rank >= to.count) continue;
            float log_prob = logits[i] - norms[i];
            to.log_probs[depth * to.stride + rank] = (double)(is_finite(log_prob) ? log_prob : NEG_INF);
            to.tokens[depth * to.count + rank] = ids[i];
        }
    }
    for (u32 depth = threadIdx.x; depth < to.depths + 2; depth += THREADS) {
        u32 end = depth < to.depths ? to.count : 0;
        to.log_probs[depth * to.stride + end] = (double)NEG_INF;
        to.log_probs[depth * to.stride + end + 1] = (double)NEG_INF;
    }
    for (u32 word = threadIdx.x; word < pairs; word += THREADS) to.repeated[word] = 0;
}

// Physical slot of logical slot `logical`, NONE outside the table.
__device__ __forceinline__ u32 physical_slot(const u32* table, u32 table_stride, u32 logical) {
    u32 block = logical / 16 < table_stride ? table[logical / 16] : NONE;
    return block == NONE ? NONE : block * 16 + logical % 16;
}

// Tile t of a sequence holds up to `tile_rows` of its rows: {sequence, first row, rows, 0}; without rows the sequence is
// NONE.
__device__ __forceinline__ void write_tiles(u32* tiles, u32 tile_rows, u32 rows_per_seq, u32 nodes) {
    if (tiles == 0) return;
    u32 sequence = blockIdx.x;
    u32 count = (rows_per_seq + tile_rows - 1) / tile_rows;
    for (u32 tile = threadIdx.x; tile < count; tile += THREADS) {
        u32 first = tile * tile_rows;
        u32 rows = nodes > first ? min(nodes - first, tile_rows) : 0;
        ((uint4*)tiles)[sequence * count + tile] =
            make_uint4(rows != 0 ? sequence : NONE, sequence * rows_per_seq + first, rows, 0);
    }
}

// The tree for the host, 4 + 4 * rows words per sequence: node count, 3 unused, tokens[rows], parents[rows] (NONE for the
// root), log_probs[rows] in f64.
struct TreeRecord {
    u32* words;
    u32 rows;
    __device__ TreeRecord(u32* records, u32 rows_per_seq) : words(records), rows(rows_per_seq) {
        if (records != 0) words += (u64)blockIdx.x * (TREE_RECORD_HEADER + 4 * rows);
    }
    __device__ void count(u32 nodes) const {
        if (words != 0) words[0] = nodes;
    }
    __device__ void node(u32 row, u32 token, u32 parent, double log_prob) const {
        if (words == 0) return;
        words[TREE_RECORD_HEADER + row] = token;
        words[TREE_RECORD_HEADER + rows + row] = parent;
        ((double*)(words + TREE_RECORD_HEADER + 2 * rows))[row] = log_prob;
    }
};

// 32-bit words of a path of up to depths + 1 nodes: odd, so that rows begin in different banks, and at most a row's 32.
__device__ __forceinline__ u32 path_words(u32 depths) { return min(((depths + 2) / 2) | 1, 32u); }

// Candidates of depth d of sequence s: row s * head_rows + d of top_ids and top_logits [row][k_stride], the first `count`,
// and lse[row]. roots NONE: a sequence without work, all its rows are padding. Nodes deeper than max_depths[s] are cut from
// the finished tree (null: none). Row s * rows_per_seq + n becomes node n; rows without a node get token 0, position
// committed, no slot and no path. paths are u16 [row][64]. vis_begin and vis_end become empty ranges, for paths say what a
// row sees. They, seq_rows, tiles and records may be null.
// depths is at most 63, count and rows_per_seq - 1 at most 255.
// Dynamic shared memory: max(8 * (depths + 2) * (count + 2), 4 * rows_per_seq * path_words(depths)) bytes, then from
// `shared_tokens` on 4 * depths * count and 4 * depths * ceil(count / 32).
template <u32 SLOTS>
__device__ __forceinline__ void draft_tree(const u32* top_ids, const float* top_logits, const float* lse, u32 head_rows,
                                           u32 k_stride, u32 depths, u32 count, u32 budget, const u32* roots,
                                           const u32* committed, const u32* max_depths, const u32* tables, u32 table_stride,
                                           u32 rows_per_seq, u32* tokens, u32* positions, u32* kv_slot, u32* path_len,
                                           u16* paths, u32* vis_begin, u32* vis_end, u32* parents, u32* seq_rows, u32* tiles,
                                           u32 tile_rows, u32* records, u32 shared_tokens) {
    extern __shared__ double dynamic_shared[];
    __shared__ Tree tree;
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.x;
    u32 thread = threadIdx.x;
    u32 warp = thread / 32;
    u32 first_row = sequence * rows_per_seq;
    u32 root = roots[sequence];
    u32 base = committed[sequence];
    u32 limit = max_depths != 0 ? max_depths[sequence] : NONE;
    bool working = root != NONE;
    // Asked for now, used after the tree has grown.
    u32 slot = NONE;
    if (working && thread < rows_per_seq)
        slot = physical_slot(tables + (u64)sequence * table_stride, table_stride, base + thread);

    Candidates from;
    from.depths = depths;
    from.count = count;
    from.stride = count + 2;
    from.words = (count + 31) / 32;
    from.log_probs = dynamic_shared;
    from.tokens = (u32*)((u8*)dynamic_shared + shared_tokens);
    from.repeated = from.tokens + depths * count;
    if (thread == 0) {
        tree.nodes = 0;
        tree.repeats = 0;
    }
    if (working) load_candidates(from, top_ids, top_logits, lse, sequence * head_rows, k_stride);
    __syncthreads();
    if (working) {
        u32 most = min(budget + 1, rows_per_seq);
        // Warps 0 and 4 share a scheduler with nobody else, so the search for repeats costs no time.
        if (warp == 0) {
            u32 nodes = grow<SLOTS, false>(tree, from, most);
            if (thread == 0) tree.nodes = nodes;
        } else if (warp % 4 != 0) {
            u32 worker = (warp < 4 ? warp - 1 : warp - 2) * 32 + thread % 32;
            find_repeats(tree, from, worker, THREADS / 4 * 3);
        }
        __syncthreads();
        if (tree.repeats != 0 && warp == 0) {
            u32 nodes = grow<SLOTS, true>(tree, from, most);
            if (thread == 0) tree.nodes = nodes;
        }
    }
    __syncthreads();

    // Nodes within the depth limit move together; they keep their order.
    u32 grown = tree.nodes;
    u32 step = thread < grown ? tree.steps[thread] : 0;
    u32 depth = thread == 0 ? 0 : (step >> 8 & 255) + 1;
    bool kept = thread < grown && depth <= limit;
    u32 ballot = __ballot_sync(ALL, kept);
    if (thread % 32 == 0) tree.keep[warp] = ballot;
    __syncthreads();
    u32 nodes = 0;
    u32 node = 0;
    u32 parent = step >> 16;
    u32 parent_node = 0;
    for (u32 w = 0; w < THREADS / 32; w++) {
        u32 bits = tree.keep[w];
        nodes += __popc(bits);
        if (w < warp) node += __popc(bits);
        if (w == warp) node += __popc(bits & ((1u << (thread & 31)) - 1));
        if (w < parent / 32) parent_node += __popc(bits);
        if (w == parent / 32) parent_node += __popc(bits & ((1u << (parent & 31)) - 1));
    }
    TreeRecord record(records, rows_per_seq);
    if (kept) {
        u32 token = thread == 0 ? root : from.tokens[(depth - 1) * count + (step & 255)];
        tree.kept_steps[node] = parent_node << 16 | depth;
        tokens[first_row + node] = token;
        positions[first_row + node] = base + depth;
        path_len[first_row + node] = depth + 1;
        parents[first_row + node] = thread == 0 ? NONE : parent_node;
        record.node(node, token, thread == 0 ? NONE : parent_node, tree.log_probs[thread]);
    }
    if (thread < rows_per_seq) {
        kv_slot[first_row + thread] = thread < nodes ? slot : NONE;
        if (vis_begin != 0) vis_begin[first_row + thread] = 0;
        if (vis_end != 0) vis_end[first_row + thread] = 0;
        if (thread >= nodes) {
            tokens[first_row + thread] = 0;
            positions[first_row + thread] = working ? base : 0;
            path_len[first_row + thread] = 0;
            parents[first_row + thread] = NONE;
        }
    }
    if (thread == 0) {
        record.count(nodes);
        if (seq_rows != 0) seq_rows[sequence] = nodes;
    }
    write_tiles(tiles, tile_rows, rows_per_seq, nodes);
    __syncthreads();

    // Paths are climbed in shared memory, where the candidates were, and written out in whole words.
    u32 words = path_words(depths);
    u16* staged = (u16*)dynamic_shared;
    if (thread < nodes) {
        u32 own_depth = tree.kept_steps[thread] & 0xFFFF;
        u32 at = thread;
        for (u32 i = own_depth + 1; i < 2 * words; i++) staged[thread * 2 * words + i] = 0;
        for (i32 i = (i32)own_depth; i >= 0; i--) {
            staged[thread * 2 * words + i] = (u16)at;
            at = tree.kept_steps[at] >> 16;
        }
    }
    __syncthreads();
    for (u32 index = thread; index < nodes * words; index += THREADS) {
        u32 row = index / words;
        ((u32*)paths)[(u64)(first_row + row) * 32 + index % words] = ((const u32*)staged)[index];
    }
}

#define DRAFT_TREE(NAME, SLOTS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                   \
        NAME(const u32* top_ids, const float* top_logits, const float* lse, u32 head_rows, u32 k_stride, u32 depths,        \
             u32 count, u32 budget, const u32* roots, const u32* committed, const u32* max_depths, const u32* tables,       \
             u32 table_stride, u32 rows_per_seq, u32* tokens, u32* positions, u32* kv_slot, u32* path_len, u16* paths,      \
             u32* vis_begin, u32* vis_end, u32* parents, u32* seq_rows, u32* tiles, u32 tile_rows, u32* records,            \
             u32 shared_tokens) {                                                                                           \
        draft_tree<SLOTS>(top_ids, top_logits, lse, head_rows, k_stride, depths, count, budget, roots, committed,           \
                          max_depths, tables, table_stride, rows_per_seq, tokens, positions, kv_slot, path_len, paths,      \
                          vis_begin, vis_end, parents, seq_rows, tiles, tile_rows, records, shared_tokens);                 \
    }

// For budgets up to 32, 64, 128 and 256.
DRAFT_TREE(draft_tree_32, 1)
DRAFT_TREE(draft_tree_64, 2)
DRAFT_TREE(draft_tree_128, 4)
DRAFT_TREE(draft_tree_256, 8)

// The chain of each depth's best candidate, see draft_tree. Row i sees its i predecessors and itself: visible slots
// [0, committed + i + 1), none for rows without a node; no row has a path (path_len may be null). `depths` is below 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_chain(const u32* top_ids, const float* top_logits, const float* lse, u32 head_rows, u32 k_stride, u32 depths,
                const u32* roots, const u32* committed, const u32* max_depths, const u32* tables, u32 table_stride,
                u32 rows_per_seq, u32* tokens, u32* positions, u32* kv_slot, u32* path_len, u32* vis_begin, u32* vis_end,
                u32* parents, u32* seq_rows, u32* tiles, u32 tile_rows, u32* records) {
    __shared__ float log_probs[THREADS];
    __shared__ u32 chain;
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.x;
    u32 row = threadIdx.x;
    u32 out = sequence * rows_per_seq + row;
    u32 root = roots[sequence];
    u32 base = committed[sequence];
    u32 limit = max_depths != 0 ? max_depths[sequence] : NONE;
    bool working = root != NONE;
    if (row == 0) chain = min(min(depths, rows_per_seq - 1), limit);
    __syncthreads();
    u32 token = root;
    if (working && row > 0 && row <= depths) {
        u32 from = sequence * head_rows + row - 1;
        token = top_ids[(u64)from * k_stride];
        float log_prob = top_logits[(u64)from * k_stride] - lse[from];
        log_probs[row - 1] = log_prob;
        if (!is_finite(log_prob)) atomicMin(&chain, row - 1);
    }
    __syncthreads();
    u32 nodes = working ? chain + 1 : 0;
    TreeRecord record(records, rows_per_seq);
    if (row < rows_per_seq) {
        bool real = row < nodes;
        u32 logical = base + row;
        tokens[out] = real ? token : 0;
        positions[out] = real ? logical : working ? base : 0;
        kv_slot[out] = real ? physical_slot(tables + (u64)sequence * table_stride, table_stride, logical) : NONE;
        if (path_len != 0) path_len[out] = 0;
        vis_begin[out] = 0;
        vis_end[out] = real ? logical + 1 : 0;
        u32 parent = real && row > 0 ? row - 1 : NONE;
        parents[out] = parent;
        if (real && records != 0) {
            double log_prob = 0.0;
            for (u32 depth = 0; depth < row; depth++) log_prob += (double)log_probs[depth];
            record.node(row, token, parent, log_prob);
        }
    }
    if (row == 0) {
        record.count(nodes);
        if (seq_rows != 0) seq_rows[sequence] = nodes;
    }
    write_tiles(tiles, tile_rows, rows_per_seq, nodes);
}
