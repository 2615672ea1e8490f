// Ranks the candidates of drafts with the noise that the target's tokens are drawn with (coupling.rs of the crate
// treespec-engine defines it). Between the head's selection and the builder of drafts, in place.

#define THREADS 256
// Rankings besides the number of a fit.
#define BY_PROBABILITY NONE
#define UNFITTED 0xFFFFFFFEu

// A fit of the profile. `tau` and `log_probs` [depth][rank][gap] are indices into the values of all fits.
struct __align__(16) Fit {
    u32 depths;
    u32 ranks;
    u32 tau;
    u32 log_probs;
};

// Orders like the value, NaN before all.
__device__ __forceinline__ u32 order_bits(float value) {
    if (value != value) return 0;
    u32 bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// How far this thread's entry is from the front of a descending order; of equal ones the first comes first.
template <typename T>
__device__ __forceinline__ u32 place_among(const T* values, u32 count, T own) {
    u32 place = 0;
#pragma unroll 4
    for (u32 j = 0; j < count; j++) place += values[j] > own || (values[j] == own && j < threadIdx.x) ? 1 : 0;
    return place;
}

// Candidates of depth d of sequence s are the first `count` of row s * head_rows + d of ids and logits [row][k_stride], NONE
// where there are fewer; normaliser[row] is theirs. The best `kept` come back, best first, with log-probabilities in logits
// and a normaliser of 0. `rankings` {seed, its upper half, bits of the temperature, ranking} per sequence; committed[s] is the
// position of its root. Grid (depths, sequences), `count` threads or more.
extern "C" __global__ void __launch_bounds__(THREADS)
    rank_candidates(u32* ids, float* logits, float* normaliser, u32 head_rows, u32 k_stride, u32 count, u32 kept,
                    const u32* committed, const uint4* rankings, const float* gaps, u32 gap_count, const Fit* fits,
                    const float* values) {
    __shared__ u64 keys[THREADS];
    __shared__ u32 tokens[THREADS];
    __shared__ float scores[THREADS];
    __shared__ float weights[THREADS];
    pdl_launch();
    pdl_wait();
    u32 depth = blockIdx.x;
    u32 sequence = blockIdx.y;
    u32 thread = threadIdx.x;
    u32 row = sequence * head_rows + depth;
    u64 first = (u64)row * k_stride;
    bool there = thread < count;
    u32 token = there ? ids[first + thread] : NONE;
    float log_q = there ? __fsub_rn(logits[first + thread], normaliser[row]) : NEG_INF;
    uint4 ranking = rankings[sequence];
    // Everybody has read what is overwritten below.
    __syncthreads();
    if (thread == 0) normaliser[row] = 0.0f;
    if (ranking.w == BY_PROBABILITY) {
        if (there) logits[first + thread] = log_q;
        return;
    }

    float temperature = __uint_as_float(ranking.z);
    bool fitted = false;
    float tau = temperature;
    Fit fit = {0, 0, 0, 0};
    if (ranking.w != UNFITTED) {
        fit = fits[ranking.w];
        fitted = depth < fit.depths;
        tau = fitted ? __fmul_rn(values[fit.tau + depth], temperature) : 0.0f;
    }
    float score = log_q;
    if (tau > 0.0f && token != NONE) {
        u32 random[4];
        random_words(ranking.x, ranking.y, committed[sequence] + depth + 1, token >> 2, random);
        u32 j = token & 3;
        u32 word = j == 0 ? random[0] : j == 1 ? random[1] : j == 2 ? random[2] : random[3];
        score = __fadd_rn(__fdiv_rn(log_q, tau), gumbel_of_word(word));
    }
    // The lower id first among equals; what is no candidate comes last.
    keys[thread] = token == NONE ? 0 : (u64)order_bits(score) << 32 | (u32)~token;
    __syncthreads();
    if (there) {
        u32 rank = place_among(keys, count, keys[thread]);
        tokens[rank] = token;
        scores[rank] = token == NONE ? NEG_INF : score;
    }
    __syncthreads();

    token = there ? tokens[thread] : NONE;
    score = there ? scores[thread] : NEG_INF;
    float best = scores[0];
    float log_prob = NEG_INF;
    weights[thread] = expf(score - best);
    __syncthreads();
    float mass = 0.0f;
    for (u32 j = 0; j < count; j++) mass += weights[j];
    float gap = (best + ln(mass)) - score;
    if (!fitted) {
        log_prob = -gap;
    } else if (token != NONE) {
        u32 cell = 0;
        for (u32 j = 0; j < gap_count; j++) cell += gaps[j] <= gap ? 1 : 0;
        log_prob = values[fit.log_probs + (depth * fit.ranks + min(thread, fit.ranks - 1)) * (gap_count + 1) + cell];
    }
    if (token == NONE) log_prob = NEG_INF;
    u32 place = thread;
    if (fitted) {
        __syncthreads();
        weights[thread] = log_prob;
        __syncthreads();
        if (there) place = place_among(weights, count, log_prob);
    }
    if (there && place < kept) {
        ids[first + place] = token;
        logits[first + place] = log_prob;
    }
}
