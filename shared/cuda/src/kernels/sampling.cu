// From logits to tokens, with the outcome of the crate treespec-sampling for the same logits (sampler.rs there defines it).
//
// A row is the work of one cluster of CLUSTER blocks, each with a range of the vocabulary. Everything that is added up is an
// integer and everything else is a maximum, so neither the order of threads nor other rows can change a choice.

// How a sequence is sampled; `sequence_words` on the Rust side.
struct __align__(16) Sampling {
    u32 seed_low;
    u32 seed_high;
    float temperature;  // 0: the best
    u32 top_k;          // tokens; 0: off
    u32 top_p;          // units of 2^-32; 0: off
    u32 min_p;          // largest distance that is kept
    float repetition;
    float presence;
    float frequency;
    u32 bias_count;
    u32 seen_count;
    u32 flags;
    u32 path_start;   // entries of a row's path that the list of seen tokens has already
    u32 early_until;  // positions below it take the early mask
    u32 unused[2];
};
#define HAS_ALLOWED 1u
#define HAS_PENALTIES 2u
#define HAS_EARLY 4u

struct Search {
    Scale scale;
    float bound_scale;  // a little less than 1 / temperature
    float bound;        // a score that is reached for sure
    u32 limit;          // largest distance that the filters keep
    u32 seed_low;
    u32 seed_high;
    u32 position;
    const u32* grammar;  // words of the row's mask, or null
    u64 key;             // best so far
};

// ---- bias, bans, penalties -----------------------------------------------------------------------------------------

struct EditLists {
    const u32* bias_tokens;
    const float* bias_values;
    const u32* seen_tokens;
    const u32* seen_counts;
    const u32* allowed;  // words of the mask for the row's position, or null
};

__device__ __forceinline__ float penalised(float logit, u32 generated, const Sampling& sampling) {
    float repeated = logit > 0.0f ? __fdiv_rn(logit, sampling.repetition) : __fmul_rn(logit, sampling.repetition);
    if (generated == 0) return repeated;
    return __fsub_rn(__fsub_rn(repeated, __fmul_rn(sampling.frequency, __uint2float_rn(generated))), sampling.presence);
}

// Writes the block's processed logits to `out`. `path_count` tokens are in shared.path_tokens, visible to the block.
__device__ void process_chunk(const Chunk& chunk, float* out, const Sampling& sampling, const EditLists& lists, u32 path_count,
                              Shared& shared) {
    u32 thread = threadIdx.x;
    for (u32 base = chunk.begin + thread * 4; base < chunk.end; base += STEP) {
        float4 quad = load_quad(chunk, base);
        if (lists.allowed != 0) {
            // A quad lies within one word.
            u32 bits = lists.allowed[base >> 5] >> (base & 31);
            if (!(bits & 1)) quad.x = NEG_INF;
            if (!(bits & 2)) quad.y = NEG_INF;
            if (!(bits & 4)) quad.z = NEG_INF;
            if (!(bits & 8)) quad.w = NEG_INF;
        }
        *(float4*)(out + base) = quad;
    }
    __syncthreads();
    for (u32 i = thread; i < sampling.bias_count; i += THREADS) {
        u32 token = lists.bias_tokens[i];
        if (token >= chunk.begin && token < chunk.end) out[token] = __fadd_rn(out[token], lists.bias_values[i]);
    }
    __syncthreads();
    if (!(sampling.flags & HAS_PENALTIES)) return;
    for (u32 i = thread; i < sampling.seen_count; i += THREADS) {
        u32 token = lists.seen_tokens[i];
        if (token < chunk.begin || token >= chunk.end) continue;
        u32 generated = lists.seen_counts[i];
        for (u32 j = 0; j < path_count; j++) {
            if (shared.path_tokens[j] != token) continue;
            generated++;
            shared.path_seen[j] = 1;
        }
        out[token] = penalised(out[token], generated, sampling);
    }
    __syncthreads();
    if (thread < path_count && shared.path_seen[thread] == 0) {
        u32 token = shared.path_tokens[thread];
        bool first = true;
        u32 generated = 0;
        for (u32 j = 0; j < path_count; j++) {
            if (shared.path_tokens[j] != token) continue;
            generated++;
            if (j < thread) first = false;
        }
        if (first && token >= chunk.begin && token < chunk.end) out[token] = penalised(out[token], generated, sampling);
    }
    __syncthreads();
}

// ---- filters -------------------------------------------------------------------------------------------------------

// Adds a count of 1, and a mass, to a range of distance. Masses have 45 bits: three parts that cannot overflow 32 bits
// however many of 2^17 tokens meet, because shared memory adds only 32 bits at a time.
__device__ __forceinline__ void add_to_range(u32 (&ranges)[4][256], u32 range, bool by_mass, float x) {
    atomicAdd(&ranges[0][range], 1u);
    if (!by_mass) return;
    u64 m = mass(x);
    u32 low = (u32)m & 0x7FFFu;
    u32 middle = (u32)(m >> 15) & 0x7FFFu;
    u32 high = (u32)(m >> 30);
    if (low != 0) atomicAdd(&ranges[1][range], low);
    if (middle != 0) atomicAdd(&ranges[2][range], middle);
    if (high != 0) atomicAdd(&ranges[3][range], high);
}

// Inclusive sums over the 256 threads; the total of all goes to shared.total, visible after the next barrier.
__device__ __forceinline__ u64 running_sum(u64 weight, Shared& shared) {
    u32 lane = threadIdx.x & 31;
    u32 warp = threadIdx.x >> 5;
#pragma unroll
    for (u32 step = 1; step < 32; step <<= 1) {
        u64 before = __shfl_up_sync(0xFFFFFFFFu, weight, step);
        if (lane >= step) weight += before;
    }
    if (lane == 31) shared.warp_keys[warp] = weight;
    __syncthreads();
    for (u32 w = 0; w < warp; w++) weight += shared.warp_keys[w];
    if (threadIdx.x == THREADS - 1) shared.total = weight;
    __syncthreads();
    return weight;
}

// The largest distance whose nearer tokens (of those up to `within`) weigh less than the target. By count: `share` tokens. By
// mass: `share` of 2^32 parts of the mass. Radix selection, 8 bits at a time from the top; ends early when one token is left.
__device__ u32 select_limit(const Chunk& chunk, const Scale& scale, u32 within, bool by_mass, u32 share, u32& turn, Shared& shared) {
    u32 thread = threadIdx.x;
    u64 before_all = 0;
    u64 target = share;
    u32 prefix = 0;
    for (u32 shift = 24;; shift -= 8) {
        u32(&ranges)[4][256] = shared.ranges[turn];
        turn ^= 1;
        for (u32 part = 0; part < 4; part++) ranges[part][thread] = 0;
        __syncthreads();
        for (u32 base = chunk.begin + thread * 4; base < chunk.end; base += STEP) {
            float4 quad = load_quad(chunk, base);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                float logit = pick(quad, j);
                if (!possible(logit)) continue;
                float x = scaled(logit, scale);
                u32 far = distance(x);
                // A shift by 32 is not defined, and at first there is no prefix.
                if (far > within || (shift < 24 && (far >> (shift + 8)) != prefix)) continue;
                add_to_range(ranges, (far >> shift) & 255, by_mass, x);
            }
        }
        // Nobody clears these ranges again before another such barrier, so the reads below need none after them.
        cluster_barrier();
        u32 count = 0;
        u64 weight = 0;
        for (u32 rank = 0; rank < CLUSTER; rank++) {
            count += remote_u32(&ranges[0][thread], rank);
            if (!by_mass) continue;
            weight += (u64)remote_u32(&ranges[1][thread], rank);
            weight += (u64)remote_u32(&ranges[2][thread], rank) << 15;
            weight += (u64)remote_u32(&ranges[3][thread], rank) << 30;
        }
        if (!by_mass) weight = count;
        u64 before = before_all + running_sum(weight, shared) - weight;
        if (by_mass && shift == 24) {
            // total * share / 2^32, rounded up.
            u64 high = __umul64hi(shared.total, (u64)share);
            u64 low = shared.total * (u64)share;
            target = (high << 32) + (low >> 32) + ((low & 0xFFFFFFFFull) != 0 ? 1 : 0);
        }
        // Nothing is before the first range, so there is at least one.
        u32 range = (u32)__syncthreads_count(before < target) - 1;
        if (thread == range) {
            shared.border_before = before;
            shared.border_count = count;
        }
        __syncthreads();
        before_all = shared.border_before;
        prefix = (prefix << 8) | range;
        if (shift == 0) return prefix;
        // The whole range: its only token passes, as nothing before it reaches the target.
        if (shared.border_count <= 1) return (prefix << shift) | ((1u << shift) - 1);
    }
}

// ---- choice --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void try_token(Search& search, float logit, u32 word, u32 token) {
    if (!possible(logit)) return;
    float x = scaled(logit, search.scale);
    if (distance(x) > search.limit) return;
    if (search.grammar != 0 && !in_mask(search.grammar, token)) return;
    float score = __fadd_rn(x, gumbel_of_word(word));
    if (!possible(score)) return;
    search.key = larger(search.key, choice_key(score, token));
    search.bound = fmaxf(search.bound, score);
}

// Bounds first, exact values for what they leave. The bounds are above the exact values by more than all roundings, and a
// NaN (an infinite best, a tiny temperature) fails no comparison.
__device__ __forceinline__ void try_quad(Search& search, const float4& quad, u32 base) {
    float reach = (quad_max(quad) - search.scale.best) * search.bound_scale;
    if (reach + NOISE_LIMIT < search.bound) return;
    u32 words[4];
    random_words(search.seed_low, search.seed_high, search.position, base >> 2, words);
    u32 most = max(max(words[0], words[1]), max(words[2], words[3]));
    if (reach + noise_bound(most) < search.bound) return;
    u32 alive = 0;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float bound = (pick(quad, j) - search.scale.best) * search.bound_scale + noise_bound(words[j]);
        if (!(bound < search.bound)) alive |= 1u << j;
    }
    while (alive != 0) {
        u32 j = (u32)__ffs((int)alive) - 1;
        alive &= alive - 1;
        u32 word = j == 0 ? words[0] : j == 1 ? words[1] : j == 2 ? words[2] : words[3];
        try_token(search, pick(quad, j), word, base + j);
    }
}

// `group_max` (of the logits as they are, or null) spares whole groups.
__device__ __forceinline__ void try_chunk(Search& search, const Chunk& chunk, const float* group_max) {
    for (u32 base = chunk.begin + threadIdx.x * 4; base < chunk.end; base += 2 * STEP) {
        u32 next = base + STEP;
        bool first = true;
        bool second = next < chunk.end;
        if (group_max != 0) {
            first = !((group_max[base / GROUP] - search.scale.best) * search.bound_scale + NOISE_LIMIT < search.bound);
            if (second) second = !((group_max[next / GROUP] - search.scale.best) * search.bound_scale + NOISE_LIMIT < search.bound);
        }
        float4 none = make_float4(NEG_INF, NEG_INF, NEG_INF, NEG_INF);
        float4 quad = first ? load_quad(chunk, base) : none;
        float4 next_quad = second ? load_quad(chunk, next) : none;
        if (first) try_quad(search, quad, base);
        if (second) try_quad(search, next_quad, next);
    }
}

// The best logit that the mask (or null) allows, as a key.
__device__ __forceinline__ u64 best_of_chunk(const Chunk& chunk, const u32* grammar) {
    u64 key = 0;
    for (u32 base = chunk.begin + threadIdx.x * 4; base < chunk.end; base += STEP) {
        float4 quad = load_quad(chunk, base);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float logit = pick(quad, j);
            if (possible(logit) && (grammar == 0 || in_mask(grammar, base + j))) key = larger(key, choice_key(logit, base + j));
        }
    }
    return key;
}

// The best group of the row as a key whose id is the group.
__device__ __forceinline__ u64 best_group(const float* group_max, u32 groups, Shared& shared) {
    u64 key = 0;
#pragma unroll 4
    for (u32 group = threadIdx.x; group < groups; group += THREADS)
        if (possible(group_max[group])) key = larger(key, choice_key(group_max[group], group));
    return block_max(key, shared);
}

__device__ __forceinline__ void store_choice(u64 key, u32 row, const float* logits, u32* choices, float* choice_logits) {
    if (threadIdx.x != 0) return;
    u32 token = key_id(key);
    choices[row] = token;
    if (choice_logits != 0) choice_logits[row] = token == NONE ? NEG_INF : logits[token];
}

// logits f32 [rows][ld], ld a multiple of 64 and the pointer aligned to 16 bytes. Grid (CLUSTER, rows), cluster CLUSTER.
//
// May be null: group_max f32 [rows][group_stride], the largest logit of each 64, NaN left out; row_of u32 [rows], which row of the
// batch a row of logits is (the arrays from positions to path_len are indexed by it); seq_of_row (then row = sequence);
// path (then the path of a row are the rows of its sequence up to it); first_row (then rows have no path); grammar_rows
// u32 [rows], nonzero where a row has a mask in grammar u32 [rows][words]; choice_logits f32 [rows].
//
// path u16 [batch][64] and path_len as in the tree mode of attention, the first row of a sequence in first_row. Rows of a
// sequence from `sequences` on get NONE. What belongs to a sequence lies at its slot, slots[sequence]: samplings and the lists
// behind it, of which allowed and early u32 [slot][words] are there where the flags say so; early holds for positions below
// early_until. scratch f32 [rows][ld] is written for rows with bias, bans or penalties only.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    sample_rows(const float* logits, u32 ld, u32 vocabulary, const float* group_max, u32 group_stride, const u32* row_of,
                const u32* positions, const u32* seq_of_row, const u32* tokens, const u16* path, const u32* path_len,
                const u32* first_row, u32 batch, u32 sequences, const u32* slots, const Sampling* samplings, const u32* bias_tokens,
                const float* bias_values, u32 bias_stride, const u32* seen_tokens, const u32* seen_counts, u32 seen_stride,
                const u32* allowed, const u32* early, u32 words, const u32* grammar_rows, const u32* grammar, float* scratch,
                u32* choices, float* choice_logits) {
    __shared__ Shared shared;
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.y;
    u32 rank = cluster_rank();
    u32 thread = threadIdx.x;
    const float* row_logits = logits + (u64)row * ld;
    u32 batch_row = row_of != 0 ? row_of[row] : row;
    u32 sequence = seq_of_row != 0 ? seq_of_row[batch_row] : batch_row;
    if (sequence >= sequences) {
        if (rank == 0) store_choice(0, row, row_logits, choices, choice_logits);
        return;
    }
    u32 slot = slots[sequence];
    const Sampling sampling = samplings[slot];
    // Here, because these loads and those of the parameters can then be under way together.
    u64 group = group_max != 0 ? best_group(group_max + (u64)row * group_stride, (vocabulary + GROUP - 1) / GROUP, shared) : 0;
    const u32* mask = grammar_rows != 0 && grammar_rows[row] != 0 ? grammar + (u64)row * words : 0;
    u32 position = positions[batch_row] + 1;
    const u32* allowed_words = 0;
    if ((sampling.flags & HAS_EARLY) && position < sampling.early_until)
        allowed_words = early + (u64)slot * words;
    else if (sampling.flags & HAS_ALLOWED)
        allowed_words = allowed + (u64)slot * words;
    bool edited = sampling.bias_count != 0 || allowed_words != 0 || (sampling.flags & HAS_PENALTIES) != 0;
    const float* row_groups = group_max != 0 && !edited ? group_max + (u64)row * group_stride : 0;
    bool greedy = sampling.temperature == 0.0f;

    if (greedy && mask == 0 && row_groups != 0) {
        if (rank != 0) return;
        u64 key = 0;
        u32 token = key_id(group) * GROUP + thread;
        if (group != 0 && thread < GROUP && token < vocabulary && possible(row_logits[token])) key = choice_key(row_logits[token], token);
        store_choice(block_max(key, shared), row, row_logits, choices, choice_logits);
        return;
    }

    // Whole steps, so that threads have equal work and groups stay whole.
    u32 span = (vocabulary + CLUSTER * STEP - 1) / (CLUSTER * STEP) * STEP;
    Chunk chunk = {row_logits, min(rank * span, vocabulary), min((rank + 1) * span, vocabulary), vocabulary};
    if (edited) {
        u32 path_count = 0;
        if (first_row != 0 && (sampling.flags & HAS_PENALTIES)) {
            u32 first = first_row[sequence];
            u32 length = min(path != 0 ? path_len[batch_row] : batch_row - first + 1, (u32)MAX_PATH);
            path_count = length > sampling.path_start ? length - sampling.path_start : 0;
            if (thread < path_count) {
                u32 index = sampling.path_start + thread;
                u32 at = first + (path != 0 ? path[(u64)batch_row * MAX_PATH + index] : index);
                // A row of padding may have any path.
                shared.path_tokens[thread] = at < batch ? tokens[at] : NONE;
                shared.path_seen[thread] = 0;
            }
        }
        EditLists lists = {bias_tokens + (u64)slot * bias_stride, bias_values + (u64)slot * bias_stride,
                           seen_tokens + (u64)slot * seen_stride, seen_counts + (u64)slot * seen_stride,
                           allowed_words};
        float* processed = scratch + (u64)row * ld;
        process_chunk(chunk, processed, sampling, lists, path_count, shared);
        chunk.values = processed;
    }

    u64 choice;
    if (greedy) {
        choice = cluster_max(best_of_chunk(chunk, mask), 1, shared);
    } else {
        u64 best = row_groups != 0 ? group : cluster_max(best_of_chunk(chunk, 0), 0, shared);
        Search search;
        search.scale.best = key_score(best);
        search.scale.temperature = sampling.temperature;
        search.bound_scale = __fdiv_rn(1.0f - 1.0f / 1048576.0f, sampling.temperature);
        search.limit = KEEP_ALL;
        search.seed_low = sampling.seed_low;
        search.seed_high = sampling.seed_high;
        search.position = position;
        search.grammar = mask;
        search.key = 0;
        u32 turn = 0;
        if (best != 0 && sampling.top_k != 0) search.limit = select_limit(chunk, search.scale, search.limit, false, sampling.top_k, turn, shared);
        if (best != 0 && sampling.top_p != 0)
            search.limit = min(search.limit, select_limit(chunk, search.scale, search.limit, true, sampling.top_p, turn, shared));
        search.limit = min(search.limit, sampling.min_p);
        // The best token passes all filters, so without a grammar its score is reached.
        search.bound = mask == 0 ? NOISE_FLOOR : NEG_INF;
        if (row_groups != 0 && best != 0) {
            // Scores of the best group: a bound that leaves few tokens.
            u32 token = key_id(best) * GROUP + thread;
            if (thread < GROUP && token < vocabulary) {
                u32 random[4];
                random_words(search.seed_low, search.seed_high, search.position, token >> 2, random);
                u32 j = token & 3;
                try_token(search, row_logits[token], j == 0 ? random[0] : j == 1 ? random[1] : j == 2 ? random[2] : random[3], token);
            }
            search.bound = fmaxf(search.bound, key_score(block_max(search.key, shared)));
        }
        if (best != 0) try_chunk(search, chunk, row_groups);
        choice = cluster_max(search.key, 1, shared);
        // The filters left nothing that the grammar allows.
        if (choice == 0 && mask != 0) choice = cluster_max(best_of_chunk(chunk, mask), 2, shared);
    }
    if (rank == 0) store_choice(choice, row, row_logits, choices, choice_logits);
    // No block may leave while others read its shared memory.
    cluster_barrier();
}

// Changes single words: patches u32 [count][2] say where, counted from `words`, and what. No place is named twice.
extern "C" __global__ void __launch_bounds__(THREADS) patch_words(const u32* patches, u32 count, u32* words) {
    pdl_launch();
    pdl_wait();
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        uint2 patch = ((const uint2*)patches)[i];
        words[patch.x] = patch.y;
    }
}
