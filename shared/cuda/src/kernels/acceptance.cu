// From the target's choice at every node to what a step commits. One warp per sequence.

#define ALL 0xFFFFFFFFu
#define MOST_ROWS 256
// Nodes of an accepted path. A walk that is longer ends here: the next step goes on from there with the same tokens.
#define MOST_PATH 64
// Records per sequence, used in turn: step n is at n % RECORDS, so that the host may read one while the next step runs.
#define RECORDS 2
// Words of an outcome record: step, path nodes, bonus token, the node at fault or NONE, rows committed before, 3 unused, then
// MOST_PATH each of node, token, bits of the best logit, bits of the normaliser.
#define RECORD_HEADER 8
#define RECORD_WORDS (RECORD_HEADER + 4 * MOST_PATH)

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __int_as_float(0x7F800000); }

__device__ __forceinline__ u32 physical_slot(const u32* table, u32 table_stride, u32 logical) {
    u32 block = logical / 16 < table_stride ? table[logical / 16] : NONE;
    return block == NONE ? NONE : block * 16 + logical % 16;
}

__device__ __forceinline__ u32* record_of(u32* records, u32 sequence, u32 step) {
    return records + ((u64)sequence * RECORDS + step % RECORDS) * RECORD_WORDS;
}

// Tells the host: a record's step number is written after all the rest of it. One warp; every lane has written its part.
__device__ __forceinline__ void publish(u32* record, u32 step) {
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x != 0) return;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(record), "r"(step) : "memory");
}

// Walks from the root of every sequence as long as the target's choice after a node is one of its children (DDTree
// `follow_verified_tree`, liranringel/ddtree). Rows s * rows_per_seq + n are the nodes of sequence s: tokens, parents (local
// nodes; NONE for the root and for rows without a node), choices[row * choice_stride] (NONE: the logits hold no number).
// top_logits[row * logit_stride] and lse[row] may be null and are copied into the record; a path logit that is not finite
// is a fault like a choice NONE.
// Writes paths[s][64] (local nodes, the root first), counts[s], committed_before[s] = committed[s], then committed[s] +=
// count, roots[s] = the target's token after the path, steps[s] += 1 and the record of that step. After a fault count is 0
// and neither committed[s] nor roots[s] changes. A sequence whose root is NONE has no rows: count 0 and no record.
extern "C" __global__ void __launch_bounds__(32)
    accept_tree(const u32* choices, u32 choice_stride, const float* top_logits, u32 logit_stride, const float* lse,
                const u32* tokens, const u32* parents, u32 rows_per_seq, u32* paths, u32* counts, u32* committed,
                u32* committed_before, u32* roots, u32* steps, u32* records) {
    __shared__ u32 choice_at[MOST_ROWS];
    __shared__ u32 next[MOST_ROWS];
    __shared__ u32 path[MOST_PATH];
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.x;
    u32 lane = threadIdx.x;
    u32 first_row = sequence * rows_per_seq;
    u32 root = roots[sequence];
    u32 base = committed[sequence];
    u32 step = steps[sequence] + 1;
    if (root == NONE) {
        if (lane == 0) {
            counts[sequence] = 0;
            committed_before[sequence] = base;
        }
        return;
    }
    // Every lane has read what the first one changes.
    __syncwarp();
    u32 own_token[MOST_ROWS / 32], own_parent[MOST_ROWS / 32];
#pragma unroll
    for (u32 j = 0; j < MOST_ROWS / 32; j++) {
        u32 node = j * 32 + lane;
        bool there = node < rows_per_seq;
        own_token[j] = there ? tokens[first_row + node] : NONE;
        own_parent[j] = there && node != 0 ? parents[first_row + node] : NONE;
        choice_at[node] = there ? choices[(u64)(first_row + node) * choice_stride] : NONE;
        next[node] = NONE;
    }
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < MOST_ROWS / 32; j++) {
        u32 node = j * 32 + lane;
        u32 parent = own_parent[j];
        // Siblings differ, so at most one matches; the first does in any case.
        if (parent < node && choice_at[parent] == own_token[j]) atomicMin(&next[parent], node);
    }
    __syncwarp();
    u32 count = 0;
    u32 node = 0;
    while (true) {
        if (lane == 0) path[count] = node;
        count++;
        u32 child = next[node];
        if (child == NONE || count == MOST_PATH) break;
        node = child;
    }
    __syncwarp();
    u32 bonus = choice_at[node];
    u32 fault = NONE;
    u32* record = record_of(records, sequence, step);
#pragma unroll
    for (u32 j = 0; j < MOST_PATH / 32; j++) {
        u32 index = j * 32 + lane;
        bool there = index < count;
        u32 at = there ? path[index] : 0;
        u32 row = first_row + at;
        float logit = there && top_logits != 0 ? top_logits[(u64)row * logit_stride] : 0.0f;
        u32 broken = __ballot_sync(ALL, there && (choice_at[at] == NONE || !is_finite(logit)));
        if (fault == NONE && broken != 0) fault = path[j * 32 + __ffs(broken) - 1];
        if (!there) continue;
        u32* entry = record + RECORD_HEADER + index;
        entry[0] = at;
        entry[MOST_PATH] = index == 0 ? root : choice_at[path[index - 1]];
        entry[2 * MOST_PATH] = __float_as_uint(logit);
        entry[3 * MOST_PATH] = lse != 0 ? __float_as_uint(lse[row]) : 0x7FC00000u;
        paths[sequence * MOST_PATH + index] = at;
    }
    if (fault != NONE) count = 0;
    if (lane == 0) {
        counts[sequence] = count;
        committed_before[sequence] = base;
        if (fault == NONE) {
            committed[sequence] = base + count;
            roots[sequence] = bonus;
        }
        record[1] = count;
        record[2] = bonus;
        record[3] = fault;
        record[4] = base;
        steps[sequence] = step;
    }
    publish(record, step);
}

// Plain decoding: row s is the root of sequence s, the only one. With `choices` it commits the root and takes the target's
// choice as the next one, as accept_tree does. In any case it then writes the row for the next pass from the state: token,
// position, slot, visible slots [0, committed + 1); a sequence without a root gets padding.
extern "C" __global__ void __launch_bounds__(32)
    advance_root(const u32* choices, u32 choice_stride, const float* top_logits, u32 logit_stride, const float* lse,
                 u32* paths, u32* counts, u32* committed, u32* committed_before, u32* roots, u32* steps, u32* records,
                 const u32* tables, u32 table_stride, u32* tokens, u32* positions, u32* kv_slot, u32* vis_begin,
                 u32* vis_end) {
    pdl_launch();
    pdl_wait();
    u32 sequence = blockIdx.x;
    u32 root = roots[sequence];
    u32 base = committed[sequence];
    u32 step = choices != 0 ? steps[sequence] + 1 : 0;
    u32* record = record_of(records, sequence, step);
    bool working = root != NONE;
    // Every lane has read what the first one changes.
    __syncwarp();
    if (choices != 0 && threadIdx.x == 0) {
        u32 count = 0;
        if (working) {
            u32 choice = choices[(u64)sequence * choice_stride];
            float logit = top_logits != 0 ? top_logits[(u64)sequence * logit_stride] : 0.0f;
            bool fault = choice == NONE || !is_finite(logit);
            record[1] = fault ? 0 : 1;
            record[2] = choice;
            record[3] = fault ? 0 : NONE;
            record[4] = base;
            steps[sequence] = step;
            u32* entry = record + RECORD_HEADER;
            entry[0] = 0;
            entry[MOST_PATH] = root;
            entry[2 * MOST_PATH] = __float_as_uint(logit);
            entry[3 * MOST_PATH] = lse != 0 ? __float_as_uint(lse[sequence]) : 0x7FC00000u;
            paths[sequence * MOST_PATH] = 0;
            if (!fault) {
                count = 1;
                root = choice;
            }
        }
        counts[sequence] = count;
        committed_before[sequence] = base;
        base += count;
        committed[sequence] = base;
        roots[sequence] = root;
    }
    if (threadIdx.x == 0) {
        tokens[sequence] = working ? root : 0;
        positions[sequence] = working ? base : 0;
        kv_slot[sequence] = working ? physical_slot(tables + (u64)sequence * table_stride, table_stride, base) : NONE;
        vis_begin[sequence] = 0;
        vis_end[sequence] = working ? base + 1 : 0;
    }
    if (choices != 0 && working) publish(record, step);
}
