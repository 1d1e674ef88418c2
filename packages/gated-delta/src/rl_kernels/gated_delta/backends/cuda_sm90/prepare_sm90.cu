// What the pass over chunks needs and what depends on no state, for all chunks at once (sm_90a). A block has a slot and
// up to two value heads of a key head: 4 warps, each with 16 rows t of the chunk.
//
//   q, k     normalized and rounded, in shared memory as swizzled boxes, which are also written out
//   G        sums of g from the first row of the chunk, added row by row
//   A[t, s]  beta_t (exp(G_t - G_s) (k_t . k_s)) for s < t
//   T[t, c]  (beta_t if t == c else 0) - sum of A[t, s] T[s, c]: one fused multiply-add for each s, ascending
//   M        round(P) round(T), P[t, s] = exp(G_t - G_s) (q_t . k_s) for s <= t
//   W[s]     sum over t of round(exp(G_63 - G_t) T[t, s]) k_t
//
// With GRADIENTS the solution is U = (1 + A)^-1, and T[t, c] is U[t, c] beta_c; U, G, and the rows of q and k one after
// the other are written out too.
//
// Products are chains of 16 terms a step, ascending from 0. Rows without a token are zeros; those that a cache holds
// have its keys, sums, and rows of T.
//
// A warp solves T of a head, 16 rows after the other: lane (h, c) holds the rows t whose bit 1 is h, of columns c,
// c + 16, c + 32 and c + 48. Loops are not unrolled where that would only save branches: code that runs once waits for
// itself.
#include <rl_kernels/boxes.cuh>
#include <rl_kernels/warp_mma.cuh>

#include "places.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

constexpr int THREADS = 128, HEADS = 2;
// Row r of a system has A[t, r] of t > r, at the place of t, and T[r, c] of c <= r once it is known; later W is in its
// place. In a row are numbers whose bit 1 is 0, then the others. Those of both halves, and of rows apart by 2, are in
// different banks.
constexpr int HALF_ROW = 36, STRIDE = HALF_ROW + ROWS / 2, SYSTEM = ROWS * STRIDE * 4;
static_assert(SYSTEM >= UNIT, "W");
__device__ inline int place_of(int number) { return number / 2 % 2 * HALF_ROW + number / 4 * 2 + number % 2; }
struct alignas(16) Numbers {
    float sums[ROWS], fade[ROWS], beta[ROWS];
};

// Strides are in numbers. tail: [sequences, Hv, 64, 64], T of the last chunk of each sequence, for a cache; or null.
struct Args : Places {
    const char *q, *k;
    const void *g, *beta;
    const char* held_keys;
    const float *held_sums, *held_inverse;
    char *units, *items;
    float* tail;
    i64 q_batch, q_token, q_head, k_batch, k_token, k_head;
    int key_heads, heads, normalize, g_dtype, beta_dtype, padding;
#if GRADIENTS
    char *unit_q, *unit_k;
    float *sums, *inverses;
#endif
};

// A chunk of a call: row t is token `base + t` of the sequence's tokens, or held if that is negative.
struct Where {
    Sequence sequence;
    int slot, base;
    __device__ bool is_token(int t) const { return base + t >= 0 && base + t < sequence.count; }
    __device__ bool is_held(int t) const { return base + t < 0; }
};

// The offset of lane l's row for four matrices of a box: 8 rows by 8 columns from `row` and chunk `chunk`, then 8 rows
// down (DOWN_FIRST) or 8 columns to the right, then the other way.
template <bool DOWN_FIRST>
__device__ inline u32 matrices_at(int row, int chunk) {
    const int lane = threadIdx.x % WARP, one = lane / 8 % 2, two = lane / 16;
    return chunk_at(row + lane % 8 + 8 * (DOWN_FIRST ? one : two), chunk + (DOWN_FIRST ? two : one));
}

// Two warps have the rows of q, the other two those of k: a lane has 16 bytes of every fourth row. Starts their copies
// to the boxes; held keys come from the cache.
constexpr int APART = THREADS / 2 / LANES;

__device__ inline void load_rows(const Args& a, const Where& w, char* boxes, int s, int key_head, bool is_key) {
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES % APART;
    const i64 batch = is_key ? a.k_batch : a.q_batch, apart = is_key ? a.k_token : a.q_token;
    const char* rows = (is_key ? a.k : a.q) + lane * CHUNK +
                       2 * (w.sequence.batch * batch + key_head * (is_key ? a.k_head : a.q_head));
    const char* held = a.held_keys + (i64(s) * a.key_heads + key_head) * UNIT + lane * CHUNK;
#pragma unroll 4
    for (int t = first; t < ROWS; t += APART) {
        const bool is_held = is_key && w.is_held(t);
        const char* row = is_held ? held + t * (2 * SIZE) : rows + 2 * (w.sequence.first + w.base + t) * apart;
        copy_chunk(boxes + lane / 8 * BOX + chunk_at(t, lane % 8), row, !is_held && !w.is_token(t));
    }
    commit_copies();
}

// Normalizes the rows that this thread has copied.
__device__ inline void normalize_rows(const Where& w, char* boxes, bool is_key) {
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES % APART;
#pragma unroll 4
    for (int t = first; t < ROWS; t += APART) {
        Chunk& row = *reinterpret_cast<Chunk*>(boxes + lane / 8 * BOX + chunk_at(t, lane % 8));
        const Chunk unit = unit_row<T>(row);
        if (!is_key || !w.is_held(t)) row = unit;
    }
}

#if GRADIENTS
// Writes the rows that this thread has normalized to tensors [slots, Hk, 64, 128].
__device__ inline void store_rows(const Args& a, const char* boxes, i64 item, bool is_key) {
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES % APART;
    char* out = (is_key ? a.unit_k : a.unit_q) + item * UNIT + lane * CHUNK;
#pragma unroll 4
    for (int t = first; t < ROWS; t += APART)
        *reinterpret_cast<Chunk*>(out + t * (2 * SIZE)) =
            *reinterpret_cast<const Chunk*>(boxes + lane / 8 * BOX + chunk_at(t, lane % 8));
}
#endif

// By a warp: the sums of g, exp of what is left of them at the chunk's end, and beta, of a value head.
__device__ inline void load_numbers(const Args& a, const Where& w, Numbers& numbers, int s, int head) {
    const int lane = threadIdx.x % WARP;
    const i64 place = (i64(w.sequence.batch) * a.tokens + w.sequence.first + w.base) * a.heads + head;
    const i64 item = i64(s) * a.heads + head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = lane + i * WARP;
        const bool is_token = w.is_token(t);
        const i64 at = place + i64(t) * a.heads;
        // A held row's sum, else its g.
        numbers.sums[t] = is_token       ? read_number(a.g, at, a.g_dtype)
                          : w.is_held(t) ? a.held_sums[item * ROWS + t]
                                         : 0.0f;
        numbers.beta[t] = is_token ? read_number(a.beta, at, a.beta_dtype) : 0.0f;
    }
    __syncwarp();
    if (lane == 0) {
        float total = 0.0f;
#pragma unroll 1
        for (int t = 0; t < ROWS; t += 4) {
            float4& four = *reinterpret_cast<float4*>(numbers.sums + t);
            float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) g[i] = total = w.is_held(t + i) ? g[i] : total + g[i];
            four = make_float4(g[0], g[1], g[2], g[3]);
        }
    }
    __syncwarp();
    float* out = reinterpret_cast<float*>(a.items + (i64(w.slot) * a.heads + head) * ITEM + AT_DECAY);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = lane + i * WARP;
        const float sum = numbers.sums[t];
        numbers.fade[t] = exp_fast(numbers.sums[ROWS - 1] - sum);
        out[t] = exp_fast(sum);
        out[ROWS + t] = sum;
#if GRADIENTS
        a.sums[(i64(w.slot) * a.heads + head) * ROWS + t] = sum;
#endif
    }
}

// This warp's rows t of k and q times rows s of k: writes A of each head to shared memory, and P to `words` as a left
// operand. Tiles above the diagonal are left out.
__device__ inline void multiply_keys(const Where& w, const Numbers* numbers, u32 units, char* systems, int warp,
                                     int count, u32 (&words)[HEADS][4][4]) {
    const int row = 16 * warp, lane = threadIdx.x % WARP;
    u32 queries[SIZE / 16][4], keys[SIZE / 16][4];
#pragma unroll
    for (int step = 0; step < SIZE / 16; ++step) {
        const u32 at = units + step / 4 * BOX + matrices_at<true>(row, step % 4 * 2);
        load_matrices(queries[step], at);
        load_matrices(keys[step], at + UNIT);
    }
#pragma unroll 1
    for (int j = 0; j <= warp; ++j) {
        float kk[2][4] = {}, qk[2][4] = {};
#pragma unroll
        for (int step = 0; step < SIZE / 16; ++step) {
            u32 right[4];
            load_matrices(right, units + UNIT + step / 4 * BOX + matrices_at<false>(16 * j, step % 4 * 2));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                add_product<T>(kk[n], keys[step], right[2 * n], right[2 * n + 1]);
                add_product<T>(qk[n], queries[step], right[2 * n], right[2 * n + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < HEADS; ++i)
            if (i < count)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int t = row + lane / 4 + 8 * half;
                    const float sum = numbers[i].sums[t], beta = numbers[i].beta[t];
                    float* place = reinterpret_cast<float*>(systems + i * SYSTEM) + place_of(t);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        float p[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int s = 16 * j + 8 * n + lane % 4 * 2 + e;
                            const float between = exp_fast(sum - numbers[i].sums[s]);
                            place[s * STRIDE] =
                                s < t && !w.is_held(t) ? beta * (between * kk[n][2 * half + e]) : 0.0f;
                            p[e] = s <= t ? between * qk[n][2 * half + e] : 0.0f;
                        }
                        const u32 word = T::pack(p);
                        // Registers have no index.
#pragma unroll
                        for (int at = 0; at < 4; ++at)
                            if (at == j) words[i][at][2 * n + half] = word;
                    }
                }
    }
}

// By a warp: solves for T, or for U, whose first `held_rows` rows are those of `held`.
__device__ inline void solve(const Numbers& numbers, float* system, const float* held, int held_rows) {
    const int lane = threadIdx.x % WARP, h = lane / 16, c = lane % 16;
    float* columns = system + place_of(c);
#pragma unroll 1
    for (int block = 0; block < ROWS; block += 16) {
        // x[j][i] is row t = block + row_of(i) of column c + 16 j.
        const auto row_of = [=](int i) { return i / 2 * 4 + h * 2 + i % 2; };
        const float beta = GRADIENTS ? 1.0f : numbers.beta[block + c];
        float x[4][8];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[j][i] = 16 * j == block && row_of(i) == c ? beta : 0.0f;
        if (block < held_rows)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int t = block + row_of(i), column = c + 16 * j;
                    if (t < held_rows && column <= t) x[j][i] = held[t * ROWS + column];
                }
        const float* factors = system + h * HALF_ROW + block / 2;
        const auto subtract = [&](int s, int first, int groups, const float (&solved)[4]) {
            float4 four[2];
#pragma unroll
            for (int i = first / 4; i < 2; ++i)
                four[i] = *reinterpret_cast<const float4*>(factors + s * STRIDE + 4 * i);
            const float factor[8] = {four[0].x, four[0].y, four[0].z, four[0].w,
                                     four[1].x, four[1].y, four[1].z, four[1].w};
#pragma unroll
            for (int i = first; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < groups; ++j) x[j][i] = fmaf(-factor[i], solved[j], x[j][i]);
        };
        // Rows of the blocks before.
#pragma unroll 2
        for (int s = 0; s < block; ++s) {
            float solved[4];
#pragma unroll
            for (int j = 0; j < 3; ++j) solved[j] = c + 16 * j <= s ? columns[s * STRIDE + 8 * j] : 0.0f;
            subtract(s, 0, 3, solved);
        }
        // Rows of this block. Of the first rows of four, some are not below s: their factors are 0.
#pragma unroll
        for (int s = 0; s < 15; ++s) {
            float solved[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) solved[j] = __shfl_sync(ALL, x[j][s / 4 * 2 + s % 2], s / 2 % 2 * 16 + c);
            subtract(block + s, s / 4 * 2, 4, solved);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int t = block + row_of(i);
                if (c + 16 * j <= t) columns[t * STRIDE + 8 * j] = x[j][i];
            }
        __syncwarp();
    }
}

// T[row, column] and T[row + 1, column], zeros above the diagonal.
__device__ inline float2 solved_at(const Numbers& numbers, const float* system, int row, int column) {
    const float* at = system + row * STRIDE + place_of(column);
    const float beta = GRADIENTS ? numbers.beta[column] : 1.0f;
    return make_float2(column > row ? 0.0f : at[0] * beta, column > row + 1 ? 0.0f : at[STRIDE] * beta);
}

// Writes 16 columns of this warp's rows to a box.
__device__ inline void put(char* box, int row, int chunk, const float (&d)[2][4]) {
    const u32 words[4] = {T::pack(d[0]), T::pack(d[0] + 2), T::pack(d[1]), T::pack(d[1] + 2)};
    store_matrices<false>(box + matrices_at<true>(row, chunk), words);
}

// M of this warp's rows: P[t, s] T[s, c] is 0 but for c <= s <= t.
__device__ inline void mix(const Numbers& numbers, char* box, const u32 (&words)[4][4], const float* system,
                           int warp) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step)
            if (step >= j && step <= warp) {
                u32 right[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int s = 16 * step + n % 2 * 8 + lane % 4 * 2, column = 16 * j + n / 2 * 8 + lane / 4;
                    const float2 two = solved_at(numbers, system, s, column);
                    const float pair[2] = {two.x, two.y};
                    right[n] = T::pack(pair);
                }
                add_product<T>(d[0], words[step], right[0], right[1]);
                add_product<T>(d[1], words[step], right[2], right[3]);
            }
        put(box, 16 * warp, 2 * j, d);
    }
}

// The left operand of W: exp(G_63 - G_t) T[t, s] of this warp's rows s.
__device__ inline void fade(const Numbers& numbers, const float* system, int warp, u32 (&left)[4][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int t = 16 * step + n / 2 * 8 + lane % 4 * 2, s = 16 * warp + n % 2 * 8 + lane / 4;
            const float2 two = solved_at(numbers, system, t, s);
            const float2 factor = *reinterpret_cast<const float2*>(numbers.fade + t);
            const float pair[2] = {factor.x * two.x, factor.y * two.y};
            left[step][n] = T::pack(pair);
        }
}

// Writes the rows of what was solved for a chunk.
__device__ inline void store_inverse(const float* system, float* out) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * ROWS; i += THREADS) {
        const int row = i / ROWS, column = i % ROWS;
        out[i] = column <= row ? system[row * STRIDE + place_of(column)] : 0.0f;
    }
}

// W of this warp's rows s, of all heads: T[t, s] is 0 but for s <= t.
__device__ inline void weigh_keys(char* systems, const u32 (&left)[HEADS][4][4], u32 keys, int warp) {
#pragma unroll 1
    for (int j = 0; j < SIZE / 16; ++j) {
        float d[HEADS][2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step)
            if (step >= warp) {
                u32 right[4];
                load_transposed(right, keys + j / 4 * BOX + matrices_at<true>(16 * step, j % 4 * 2));
#pragma unroll
                for (int i = 0; i < HEADS; ++i)
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        add_product<T>(d[i][n], left[i][step], right[2 * n], right[2 * n + 1]);
            }
#pragma unroll
        for (int i = 0; i < HEADS; ++i) put(systems + i * SYSTEM + j / 4 * BOX, 16 * warp, j % 4 * 2, d[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) prepare(const Args a) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ Numbers numbers[HEADS];
    char *units = shared, *systems = shared + UNITS;
    const int group = a.heads / a.key_heads, pairs = (group + HEADS - 1) / HEADS;
    // Blocks of a slot follow each other: their rows are neighbors in memory.
    const int across = a.key_heads * pairs, slot = blockIdx.x / across, part = blockIdx.x % across;
    const int key_head = part / pairs, pair = part % pairs * HEADS;
    const int count = min(group - pair, HEADS), head = key_head * group + pair;
    const int warp = warp_index();
    const int s = sequence_of(a, slot);
    const Sequence sequence = sequence_at(a, s);
    const int index = slot - sequence.slot;
    if (index < 0 || index >= sequence.chunks()) return;
    const Where w{sequence, slot, index * ROWS - sequence.opened};
    // The head that a warp solves for: blocks take different warps, so that all schedulers have some.
    const int own = warp - slot % 2 * HEADS;
    const bool solves = own >= 0 && own < count, stores = threadIdx.x == 0;

    const bool is_key = warp >= 2;
    char* boxes = units + is_key * UNIT;
    load_rows(a, w, boxes, s, key_head, is_key);
    if (solves) load_numbers(a, w, numbers[own], s, head + own);
    copies_done<0>();
    if (a.normalize) normalize_rows(w, boxes, is_key);
    fence_copies();
    __syncthreads();
    if (stores && pair == 0) {
        store_bytes(a.units + (i64(slot) * a.key_heads + key_head) * UNITS, units, UNITS);
        commit_stores();
    }
#if GRADIENTS
    if (pair == 0) store_rows(a, boxes, i64(slot) * a.key_heads + key_head, is_key);
#endif
    u32 words[HEADS][4][4];
    multiply_keys(w, numbers, shared_address(units), systems, warp, count, words);
    __syncthreads();
    const i64 place = (i64(s) * a.heads + head) * (ROWS * ROWS);
    if (solves) {
        const int held_rows = a.held_inverse != nullptr ? -w.base : 0;
        const float* held = a.held_inverse + place + own * ROWS * ROWS;
        solve(numbers[own], reinterpret_cast<float*>(systems + own * SYSTEM), held, held_rows);
    }
    // M takes the place of q, and W that of T.
    if (stores) stores_read<0>();
    __syncthreads();
    u32 left[HEADS][4][4];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const float* system = reinterpret_cast<const float*>(systems + i * SYSTEM);
        if (i < count) {
            mix(numbers[i], units + i * BOX, words[i], system, warp);
            if (a.tail != nullptr && index + 1 == sequence.chunks())
                store_inverse(system, a.tail + place + i * ROWS * ROWS);
#if GRADIENTS
            store_inverse(system, a.inverses + (i64(slot) * a.heads + head + i) * (ROWS * ROWS));
#endif
        }
        fade(numbers[i], system, warp, left[i]);
    }
    __syncthreads();
    weigh_keys(systems, left, shared_address(units) + UNIT, warp);
    fence_copies();
    __syncthreads();
    if (stores) {
        char* out = a.items + (i64(slot) * a.heads + head) * ITEM;
        for (int i = 0; i < count; ++i) {
            store_bytes(out + i * ITEM, units + i * BOX, BOX);
            store_bytes(out + i * ITEM + AT_W, systems + i * SYSTEM, UNIT);
        }
        commit_stores();
        stores_read<0>();
    }
}
