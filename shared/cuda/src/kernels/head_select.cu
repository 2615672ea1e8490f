// The k best logits of every row and the log-normaliser, from what the head's epilogue left: the logits and, for every
// group of 64 of the vocabulary, the largest logit and sum(exp(logit - largest)). One block per row.
//
// Only the maxima and a few groups are read. The k-th largest of any k maxima of disjoint sets is a bound that at least k
// logits reach, so a bound from the maxima of 512 sets of groups leaves little more than k groups, and of those little
// more than k logits. Where many values are equal more may be left; then a slower search finds the same answer.

#define THREADS 512
#define WARPS (THREADS / 32)
#define GROUP 64
// Groups per thread: THREADS * KEYS groups cover the vocabulary.
#ifndef KEYS
#define KEYS 8
#endif
#define MOST_GROUPS 1024
#define MOST_CANDIDATES 1024
#define ALL 0xFFFFFFFFu
#define NOT_ASKED __uint_as_float(0x7FC00000u)
// Writes what a row has one of; in the last warp, which has least to do.
#define CLERK (THREADS - 1)

// Orders like the value; 0 for NaN and -inf, which never win. The zeros are equal.
__device__ __forceinline__ u32 rank_key(float value) {
    if (!(value > NEG_INF)) return 0;
    u32 bits = __float_as_uint(value + 0.0f);
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(u32 key) {
    if (key == 0) return NEG_INF;
    return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key);
}

// Orders by value, the lower index first among equals. Different for different indices.
__device__ __forceinline__ u64 entry(u32 key, u32 index) { return (u64)key << 32 | (0xFFFFFFFFu - index); }
__device__ __forceinline__ u32 entry_index(u64 entry) { return 0xFFFFFFFFu - (u32)entry; }

struct Shared {
    u32 set_max[THREADS];
    u32 warp_max[WARPS];
    u32 warp_count[WARPS];
    float warp_sum[WARPS];
    u32 bound;
    u32 group_count;
    u32 candidate_count;
    u32 groups[MOST_GROUPS];
    u64 candidates[MOST_CANDIDATES];
};

// Sum over the block. Every thread must call it.
__device__ u32 block_count(Shared& shared, u32 count) {
    count = __reduce_add_sync(ALL, count);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared.warp_count[threadIdx.x / 32] = count;
    __syncthreads();
    u32 sum = 0;
    for (u32 warp = 0; warp < WARPS; warp++) sum += shared.warp_count[warp];
    return sum;
}

// A bound that at least k of the 512 values reach, and few more; 1 when fewer than k are above 0. One warp.
__device__ u32 lower_bound(const Shared& shared, u32 k) {
    u32 lane = threadIdx.x & 31;
    u32 values[WARPS];
    u32 largest = 0;
    u32 smallest = 0xFFFFFFFFu;
    u32 valid = 0;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) {
        values[i] = shared.set_max[i * 32 + lane];
        largest = max(largest, values[i]);
        smallest = min(smallest, values[i] - 1);  // 0 becomes the largest number
        valid += values[i] != 0;
    }
    largest = __reduce_max_sync(ALL, largest);
    smallest = __reduce_min_sync(ALL, smallest);
    if (__reduce_add_sync(ALL, valid) < k) return 1;
    smallest += 1;
    if (smallest == largest) return largest;
    u32 enough = k + k / 8 + 4;
    u32 top = 31 - __clz(smallest ^ largest);
    // The bits that all share; below them a bit is set whenever k values remain.
    u32 bound = (u32)((u64)largest >> (top + 1) << (top + 1));
    for (i32 bit = (i32)top; bit >= 0; bit--) {
        u32 trial = bound | 1u << bit;
        u32 count = 0;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) count += values[i] >= trial;
        count = __reduce_add_sync(ALL, count);
        if (count < k) continue;
        bound = trial;
        if (count <= enough) break;
    }
    return max(bound, 1u);
}

// Logits 4q..4q+3 of a group of a row.
__device__ __forceinline__ float4 group_quad(const float* row_logits, u32 group, u32 quad) {
    return *(const float4*)(row_logits + (u64)group * GROUP + quad * 4);
}

// Which of the four logits from `id` on reach the bound.
__device__ __forceinline__ u32 reaching(float4 logits, u32 id, u32 vocab, u32 bound) {
    u32 mask = 0;
    if (id < vocab && rank_key(logits.x) >= bound) mask |= 1;
    if (id + 1 < vocab && rank_key(logits.y) >= bound) mask |= 2;
    if (id + 2 < vocab && rank_key(logits.z) >= bound) mask |= 4;
    if (id + 3 < vocab && rank_key(logits.w) >= bound) mask |= 8;
    return mask;
}

__device__ __forceinline__ void add_candidates(Shared& shared, float4 logits, u32 id, u32 mask) {
    if (mask == 0) return;
    u32 at = atomicAdd(&shared.candidate_count, __popc(mask));
    float values[4] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if ((mask >> i & 1) == 0) continue;
        if (at < MOST_CANDIDATES) shared.candidates[at] = entry(rank_key(values[i]), id + i);
        at++;
    }
}

// Exactly the k best groups, ties to the lower index: no other group can hold one of the k best logits. All valid groups
// when there are fewer.
__device__ void list_best_groups(Shared& shared, const u32 (&keys)[KEYS], u32 k) {
    u64 bound = 0;
    for (i32 bit = 63; bit >= 0; bit--) {
        u64 trial = bound | 1ull << bit;
        u32 count = 0;
#pragma unroll
        for (u32 i = 0; i < KEYS; i++)
            count += keys[i] != 0 && entry(keys[i], i * THREADS + threadIdx.x) >= trial;
        count = block_count(shared, count);
        if (count < k) continue;
        bound = trial;
        if (count == k) break;
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.group_count = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) {
        u32 group = i * THREADS + threadIdx.x;
        if (keys[i] != 0 && entry(keys[i], group) >= bound) shared.groups[atomicAdd(&shared.group_count, 1)] = group;
    }
    __syncthreads();
}

// Exactly the k best logits of the listed groups, ties to the lower id; all valid ones when there are fewer.
__device__ void list_best_logits(Shared& shared, const float* row_logits, u32 vocab, u32 k) {
    u32 total = shared.group_count * GROUP;
    u64 bound = 0;
    for (i32 bit = 63; bit >= 0; bit--) {
        u64 trial = bound | 1ull << bit;
        u32 count = 0;
        for (u32 i = threadIdx.x; i < total; i += THREADS) {
            u32 id = shared.groups[i / GROUP] * GROUP + i % GROUP;
            u32 key = id < vocab ? rank_key(row_logits[id]) : 0;
            count += key != 0 && entry(key, id) >= trial;
        }
        count = block_count(shared, count);
        if (count < k) continue;
        bound = trial;
        if (count == k) break;
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.candidate_count = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < total; i += THREADS) {
        u32 id = shared.groups[i / GROUP] * GROUP + i % GROUP;
        u32 key = id < vocab ? rank_key(row_logits[id]) : 0;
        if (key != 0 && entry(key, id) >= bound)
            shared.candidates[atomicAdd(&shared.candidate_count, 1)] = entry(key, id);
    }
    __syncthreads();
}

// This thread's part of sum(exp(logit - largest)), its groups in ascending order.
__device__ __forceinline__ float thread_sum(const float (&maxima)[KEYS], const float (&sums)[KEYS], u32 groups, float largest) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEYS; i++)
        if (i * THREADS + threadIdx.x < groups) sum += sums[i] * expf(maxima[i] - largest);
    return sum;
}

// Sum over a warp, in a fixed order, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// ln(sum(exp(logit))) from the sums of the warps.
__device__ __forceinline__ float normaliser(const float (&warp_sums)[WARPS], float largest) {
    if (largest == NEG_INF) return NEG_INF;
    float sum = 0.0f;
    for (u32 warp = 0; warp < WARPS; warp++) sum += warp_sums[warp];
    return largest + logf(sum);
}

__device__ __forceinline__ void load_groups(const float* group_max, const float* group_sum, u32 groups, float (&maxima)[KEYS],
                                            float (&sums)[KEYS]) {
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) {
        u32 group = i * THREADS + threadIdx.x;
        maxima[i] = group < groups ? group_max[group] : NEG_INF;
        sums[i] = group < groups && group_sum != 0 ? group_sum[group] : 0.0f;
    }
}

// Row r of the grid reads logits[r][ld], group_max[r][group_stride], group_sum[r][group_stride] and writes
// top_ids[r][0..k], top_logits[r][0..k] (rows of k_stride), best first, NONE and -inf where there are fewer than k, and
// lse[r]. `group_sum` may be null: lse is NaN then. With `gather` (a token per row or NONE) also gathered[r], NaN without
// a token. k is at most 256; groups = ceil(vocab / 64) is at most KEYS * 512.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_select(const float* logits, const float* group_max, const float* group_sum, const u32* gather, u32 vocab, u32 ld,
                u32 group_stride, u32 k, u32 k_stride, u32* top_ids, float* top_logits, float* lse, float* gathered) {
    __shared__ Shared shared;
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    u32 thread = threadIdx.x;
    u32 lane = thread & 31;
    u32 warp = thread / 32;
    u32 groups = (vocab + GROUP - 1) / GROUP;
    const float* row_logits = logits + (u64)row * ld;
    const float* row_sums = group_sum == 0 ? group_sum : group_sum + (u64)row * group_stride;
    float maxima[KEYS], sums[KEYS];
    load_groups(group_max + (u64)row * group_stride, row_sums, groups, maxima, sums);
    u32 token = gather != 0 && thread == CLERK ? gather[row] : NONE;
    if (thread == 0) shared.group_count = shared.candidate_count = 0;

    u32 keys[KEYS];
    u32 best = 0;
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) {
        keys[i] = rank_key(maxima[i]);
        best = max(best, keys[i]);
    }
    shared.set_max[thread] = best;
    best = __reduce_max_sync(ALL, best);
    if (lane == 0) shared.warp_max[warp] = best;
    __syncthreads();

    float wanted = token < vocab ? row_logits[token] : NOT_ASKED;
    // The first warp looks for the bound while the others sum.
    if (warp == 0) {
        u32 bound = lower_bound(shared, k);
        if (lane == 0) shared.bound = bound;
    }
    float largest = key_value(__reduce_max_sync(ALL, shared.warp_max[lane % WARPS]));
    if (group_sum != 0) {
        float sum = warp_sum(thread_sum(maxima, sums, groups, largest));
        if (lane == 0) shared.warp_sum[warp] = sum;
    }
    __syncthreads();

    u32 bound = shared.bound;
    if (thread == CLERK) {
        lse[row] = group_sum != 0 ? normaliser(shared.warp_sum, largest) : NOT_ASKED;
        if (gather != 0) gathered[row] = wanted;
    }
    u32 mine = 0;
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) mine += keys[i] >= bound;
    if (mine != 0) {
        u32 at = atomicAdd(&shared.group_count, mine);
#pragma unroll
        for (u32 i = 0; i < KEYS; i++) {
            if (keys[i] < bound) continue;
            if (at < MOST_GROUPS) shared.groups[at] = i * THREADS + thread;
            at++;
        }
    }
    __syncthreads();

    u32 listed = shared.group_count;
    bool fits = listed <= MOST_GROUPS;
    if (fits) {
        // Half a warp takes a group; four rounds are requested before the first is used.
        u32 quad = lane % 16;
        for (u32 base = warp * 2 + lane / 16; base < listed; base += WARPS * 8) {
            float4 loaded[4];
            u32 ids[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 at = base + i * WARPS * 2;
                u32 group = at < listed ? shared.groups[at] : 0;
                ids[i] = at < listed ? group * GROUP + quad * 4 : vocab;
                loaded[i] = group_quad(row_logits, group, quad);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                add_candidates(shared, loaded[i], ids[i], reaching(loaded[i], ids[i], vocab, bound));
        }
        __syncthreads();
        fits = shared.candidate_count <= MOST_CANDIDATES;
    }
    if (!fits) {
        list_best_groups(shared, keys, k);
        list_best_logits(shared, row_logits, vocab, k);
    }

    // Every candidate's rank is the number of better ones: 2^n lanes count together.
    u32 count = shared.candidate_count;
    u32 lanes = 32;
    while (lanes > 1 && lanes * count > THREADS) lanes /= 2;
    u32 part = thread % lanes;
    for (u32 base = 0; base < count; base += THREADS / lanes) {
        u32 at = base + thread / lanes;
        u64 own = at < count ? shared.candidates[at] : ~0ull;
        u32 better = 0;
        for (u32 other = part; other < count; other += lanes) better += shared.candidates[other] > own;
        for (u32 step = lanes / 2; step > 0; step /= 2) better += __shfl_xor_sync(ALL, better, step);
        if (part == 0 && at < count && better < k) {
            top_ids[row * k_stride + better] = entry_index(own);
            top_logits[row * k_stride + better] = key_value((u32)(own >> 32));
        }
    }
    for (u32 rank = count + thread; rank < k; rank += THREADS) {
        top_ids[row * k_stride + rank] = NONE;
        top_logits[row * k_stride + rank] = NEG_INF;
    }
}

// head_select for k = 1: the best group, then the best of its 64.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_argmax(const float* logits, const float* group_max, const float* group_sum, const u32* gather, u32 vocab, u32 ld,
                u32 group_stride, u32 k_stride, u32* top_ids, float* top_logits, float* lse, float* gathered) {
    __shared__ u32 warp_max[WARPS];
    __shared__ u32 warp_group[WARPS];
    __shared__ float warp_sums[WARPS];
    pdl_launch();
    pdl_wait();
    u32 row = blockIdx.x;
    u32 thread = threadIdx.x;
    u32 lane = thread & 31;
    u32 warp = thread / 32;
    u32 groups = (vocab + GROUP - 1) / GROUP;
    const float* row_logits = logits + (u64)row * ld;
    const float* row_sums = group_sum == 0 ? group_sum : group_sum + (u64)row * group_stride;
    float maxima[KEYS], sums[KEYS];
    load_groups(group_max + (u64)row * group_stride, row_sums, groups, maxima, sums);
    u32 token = gather != 0 && thread == CLERK ? gather[row] : NONE;

    u32 best = 0;
    u32 group = NONE;
#pragma unroll
    for (u32 i = 0; i < KEYS; i++) {
        u32 key = rank_key(maxima[i]);
        if (key <= best) continue;
        best = key;
        group = i * THREADS + thread;
    }
    u32 highest = __reduce_max_sync(ALL, best);
    u32 first = __reduce_min_sync(ALL, best == highest ? group : NONE);
    if (lane == 0) {
        warp_max[warp] = highest;
        warp_group[warp] = first;
    }
    __syncthreads();
    float wanted = token < vocab ? row_logits[token] : NOT_ASKED;
    u32 key = warp_max[lane % WARPS];
    highest = __reduce_max_sync(ALL, key);
    float largest = key_value(highest);
    if (warp == 0) {
        group = __reduce_min_sync(ALL, key == highest ? warp_group[lane % WARPS] : NONE);
        u32 found = NONE;
        if (highest != 0) {
            float2 pair = *(const float2*)(row_logits + (u64)group * GROUP + lane * 2);
            u32 id = group * GROUP + lane * 2;
            if (id + 1 < vocab && rank_key(pair.y) == highest) found = id + 1;
            if (id < vocab && rank_key(pair.x) == highest) found = id;
        }
        found = __reduce_min_sync(ALL, found);
        if (lane == 0) {
            top_ids[row * k_stride] = found;
            top_logits[row * k_stride] = found == NONE ? NEG_INF : largest;
        }
    }
    if (group_sum != 0) {
        float sum = warp_sum(thread_sum(maxima, sums, groups, largest));
        if (lane == 0) warp_sums[warp] = sum;
        __syncthreads();
    }
    if (thread == CLERK) {
        lse[row] = group_sum != 0 ? normaliser(warp_sums, largest) : NOT_ASKED;
        if (gather != 0) gathered[row] = wanted;
    }
}
