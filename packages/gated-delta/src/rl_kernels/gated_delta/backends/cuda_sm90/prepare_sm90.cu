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
// Products are chains of 16 terms a step, ascending from 0. Rows without a token are zeros; those that a cache holds
// have its keys, sums, and rows of T.
//
// A warp solves T of a head: lane (h, c) holds rows t with bit 1 equal to h, of columns c, c + 16, c + 32 and c + 48.
#include <rl_kernels/warp_mma.cuh>
#include <rl_kernels/warpgroup.cuh>

#include "places.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

constexpr int THREADS = 128, HEADS = 2;
// A as floats: of each s, the rows of both halves of a warp, apart by 4 banks.
constexpr int HALF_ROW = 36, STRIDE = 2 * HALF_ROW, SYSTEM = ROWS * STRIDE * 4;
// Later T and exp(G_63 - G) T by columns, rounded, in the same place.
static_assert(SYSTEM >= 2 * BOX, "two boxes");
struct alignas(16) Numbers {
    float sums[ROWS], fade[ROWS], beta[ROWS];
};

struct Args {
    const char *q, *k;
    const void *g, *beta;
    const char* held_keys;
    const float *held_sums, *held_inverse;
    char *units, *items;
    float* tail;  // [sequences, Hv, 64, 64]: T of the last chunk of each sequence, for a cache; or null
    Places places;
    i64 q_batch, q_token, q_head, k_batch, k_token, k_head;  // in numbers
    int key_heads, heads, normalize, g_dtype, beta_dtype, unused;
};

// A chunk of a call: row t is token `base + t` of the sequence's tokens, or held if that is negative.
struct Where {
    Sequence sequence;
    int slot, base;
    __device__ bool is_token(int t) const { return base + t >= 0 && base + t < sequence.count; }
    __device__ bool is_held(int t) const { return base + t < 0; }
};

// This thread's lane, computed again in each iteration of a loop: what depends on it is not kept in registers for all.
__device__ inline int current_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The address of lane l's row for four matrices of a box: 8 rows by 8 columns from `row` and chunk `chunk`, then 8
// rows down (DOWN_FIRST) or 8 columns to the right, then the other way.
template <bool DOWN_FIRST>
__device__ inline u32 matrices_at(int lane, u32 box, int row, int chunk) {
    const int one = lane / 8 % 2, two = lane / 16;
    return box + chunk_at(row + lane % 8 + 8 * (DOWN_FIRST ? one : two), chunk + (DOWN_FIRST ? two : one));
}

// Reads rows of q and k, normalizes them, and writes them to their boxes and to the cache's place.
__device__ inline void load_units(const Args& a, const Where& w, char* units, int s, int key_head) {
    constexpr int STEPS = ROWS * LANES / THREADS;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const i64 batch = which ? a.k_batch : a.q_batch, apart = which ? a.k_token : a.q_token;
        const char* base = which ? a.k : a.q;
        base += 2 * (w.sequence.batch * batch + key_head * (which ? a.k_head : a.q_head)) + lane * CHUNK;
        Chunk rows[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int t = first + i * (THREADS / LANES);
            rows[i] = Chunk{};
            if (w.is_token(t))
                rows[i] = load_constant(base + 2 * (w.sequence.first + w.base + t) * apart);
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int t = first + i * (THREADS / LANES);
            Chunk row = a.normalize ? unit_row<T>(rows[i]) : rows[i];
            if (which && w.is_held(t))
                row = *reinterpret_cast<const Chunk*>(
                    a.held_keys + ((i64(s) * a.key_heads + key_head) * ROWS + t) * (2 * SIZE) + lane * CHUNK);
            *reinterpret_cast<Chunk*>(units + which * UNIT + lane / 8 * BOX + chunk_at(t, lane % 8)) = row;
        }
    }
}

// By a warp: the sums of g, exp of what is left of them at the chunk's end, and beta, of a value head.
__device__ inline void load_numbers(const Args& a, const Where& w, Numbers& numbers, int s, int head) {
    const int lane = threadIdx.x % WARP;
    const i64 place = (i64(w.sequence.batch) * a.places.tokens + w.sequence.first + w.base) * a.heads + head;
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
    }
}

// d[j] = rows of this warp of x times columns 8 j .. 8 j + 7 of k^T.
__device__ inline void multiply_keys(int lane, float (&d)[8][4], u32 x, u32 keys, int row) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[j][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < SIZE / 16; ++step) {
        const int box = step / 4 * BOX, chunk = step % 4 * 2;
        u32 left[4];
        load_matrices(left, matrices_at<true>(lane, x + box, row, chunk));
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 right[4];
            load_matrices(right, matrices_at<false>(lane, keys + box, 8 * j, chunk));
            add_product<T>(d[j], left, right[0], right[1]);
            add_product<T>(d[j + 1], left, right[2], right[3]);
        }
    }
}

// Writes A to shared memory from the products of this warp's rows.
__device__ inline void put_system(int lane, const Where& w, const Numbers& numbers, float* system, const float (&kk)[8][4],
                                  int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = row + lane / 4 + 8 * half;
        const float sum = numbers.sums[t], beta = numbers.beta[t];
        const bool is_held = w.is_held(t);
        float* place = system + t / 2 % 2 * HALF_ROW + t / 4 * 2 + t % 2;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int s = 8 * j + lane % 4 * 2 + e;
                const float between = exp_fast(sum - numbers.sums[s]);
                place[s * STRIDE] = s < t && !is_held ? beta * (between * kk[j][2 * half + e]) : 0.0f;
            }
    }
}

// P of this warp's rows as a left operand.
__device__ inline void put_scores(int lane, const Numbers& numbers, const float (&qk)[8][4], int row, u32 (&words)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = row + lane / 4 + 8 * half;
        const float sum = numbers.sums[t];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float p[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int s = 8 * j + lane % 4 * 2 + e;
                p[e] = s <= t ? exp_fast(sum - numbers.sums[s]) * qk[j][2 * half + e] : 0.0f;
            }
            words[j / 2][j % 2 * 2 + half] = T::pack(p);
        }
    }
}

// By a warp: solves for T, and writes it to `tail` if that is not null, and over A as columns, with and without fade.
__device__ inline void solve(const Where& w, const Numbers& numbers, char* place, const float* held, float* tail) {
    const float* system = reinterpret_cast<const float*>(place);
    const int lane = threadIdx.x % WARP, h = lane / 16, c = lane % 16;
    // Position p of a lane is row t = 4 (p / 2) + 2 h + p % 2.
    float x[4][ROWS / 2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int column = c + 16 * j;
        const float beta = numbers.beta[column];
#pragma unroll
        for (int p = 0; p < ROWS / 2; ++p) {
            const int t = p / 2 * 4 + h * 2 + p % 2;
            x[j][p] = p / 8 == j && t == column ? beta : 0.0f;
        }
    }
    if (held != nullptr)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int p = 8 * j; p < ROWS / 2; ++p) {
                const int t = p / 2 * 4 + h * 2 + p % 2, column = c + 16 * j;
                if (w.is_held(t)) x[j][p] = column <= t ? held[t * ROWS + column] : 0.0f;
            }
#pragma unroll
    for (int s = 0; s < ROWS - 1; ++s) {
        const int owner = s / 2 % 2, at = s / 4 * 2 + s % 2;
        float solved[4];
#pragma unroll
        for (int j = 0; j <= s / 16; ++j) solved[j] = __shfl_sync(ALL, x[j][at], owner * 16 + c);
        const float* factors = system + s * STRIDE + h * HALF_ROW;
        // Positions from s / 4 * 2 on have the rows that are left, and up to three that are not: their factors are 0.
#pragma unroll
        for (int p = s / 8 * 4; p < ROWS / 2; p += 4) {
            const float4 four = *reinterpret_cast<const float4*>(factors + p);
            const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (p + i >= s / 4 * 2)
#pragma unroll
                    for (int j = 0; j <= s / 16; ++j) x[j][p + i] = fmaf(-factor[i], solved[j], x[j][p + i]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int column = c + 16 * j;
#pragma unroll
        for (int p = 0; p < ROWS / 2; p += 2) {
            const int t = p / 2 * 4 + h * 2;
            const float2 fade = *reinterpret_cast<const float2*>(numbers.fade + t);
            const float faded[2] = {fade.x * x[j][p], fade.y * x[j][p + 1]};
            char* word = place + chunk_at(column, t / 8) + t % 8 * 2;
            *reinterpret_cast<u32*>(word) = T::pack(x[j] + p);
            *reinterpret_cast<u32*>(word + BOX) = T::pack(faded);
            if (tail != nullptr && p >= 8 * j) {
                tail[t * ROWS + column] = x[j][p];
                tail[(t + 1) * ROWS + column] = x[j][p + 1];
            }
        }
    }
}

// Writes a fragment's row of 8 columns, two a lane, to a swizzled box in global memory.
__device__ inline void put(int lane, char* box, int row, int chunk, const float (&d)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        *reinterpret_cast<u32*>(box + chunk_at(row + lane / 4 + 8 * half, chunk) + lane % 4 * 4) = T::pack(d + 2 * half);
}

// M of this warp's rows.
__device__ inline void mix(int lane, char* out, const u32 (&words)[4][4], u32 columns, int row) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 right[4];
            load_matrices(right, matrices_at<false>(lane, columns, 8 * j, 2 * step));
            add_product<T>(d[0], words[step], right[0], right[1]);
            add_product<T>(d[1], words[step], right[2], right[3]);
        }
        put(lane, out, row, j, d[0]);
        put(lane, out, row, j + 1, d[1]);
    }
}

// W of rows s of this warp.
__device__ inline void weigh_keys(int lane, char* out, u32 faded, u32 keys, int row) {
    u32 left[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) load_matrices(left[step], matrices_at<true>(lane, faded, row, 2 * step));
#pragma unroll 2
    for (int j = 0; j < SIZE / 8; j += 2) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 right[4];
            load_transposed(right, matrices_at<true>(lane, keys + j / 8 * BOX, 16 * step, j % 8));
            add_product<T>(d[0], left[step], right[0], right[1]);
            add_product<T>(d[1], left[step], right[2], right[3]);
        }
        put(lane, out + j / 8 * BOX, row, j % 8, d[0]);
        put(lane, out + j / 8 * BOX, row, j % 8 + 1, d[1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) prepare(const Args a) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ Numbers numbers[HEADS];
    char *units = shared, *systems = shared + UNITS;
    const int group = a.heads / a.key_heads, pairs = (group + HEADS - 1) / HEADS;
    const int slot = blockIdx.x, key_head = blockIdx.y / pairs, pair = blockIdx.y % pairs * HEADS;
    const int count = min(group - pair, HEADS), head = key_head * group + pair;
    const int warp = warp_index(), row = 16 * warp;
    const int s = sequence_of(a.places, slot);
    const Sequence sequence = sequence_at(a.places, s);
    const int index = slot - sequence.slot;
    if (index < 0 || index >= sequence.chunks()) return;
    const Where w{sequence, slot, index * ROWS - sequence.opened};

    load_units(a, w, units, s, key_head);
    if (warp < count) load_numbers(a, w, numbers[warp], s, head + warp);
    __syncthreads();
    if (pair == 0) {
        Chunk* out = reinterpret_cast<Chunk*>(a.units + (i64(slot) * a.key_heads + key_head) * UNITS);
#pragma unroll
        for (int i = 0; i < UNITS / CHUNK / THREADS; ++i)
            out[i * THREADS + threadIdx.x] = reinterpret_cast<const Chunk*>(units)[i * THREADS + threadIdx.x];
    }
    const u32 queries = shared_address(units), keys = queries + UNIT;
    float products[8][4];
    multiply_keys(current_lane(), products, keys, keys, row);
    for (int i = 0; i < count; ++i)
        put_system(current_lane(), w, numbers[i], reinterpret_cast<float*>(systems + i * SYSTEM), products, row);
    __syncthreads();
    if (warp < count) {
        const i64 place = (i64(s) * a.heads + head + warp) * (ROWS * ROWS);
        const float* held = a.held_inverse != nullptr && w.base < 0 ? a.held_inverse + place : nullptr;
        float* tail = a.tail != nullptr && index + 1 == sequence.chunks() ? a.tail + place : nullptr;
        solve(w, numbers[warp], systems + warp * SYSTEM, held, tail);
    }
    __syncthreads();
    multiply_keys(current_lane(), products, queries, keys, row);
    for (int i = 0; i < count; ++i) {
        const int lane = current_lane();
        u32 words[4][4];
        put_scores(lane, numbers[i], products, row, words);
        char* out = a.items + (i64(slot) * a.heads + head + i) * ITEM;
        const u32 columns = shared_address(systems + i * SYSTEM);
        mix(lane, out, words, columns, row);
        weigh_keys(lane, out + AT_W, columns + BOX, keys, row);
    }
}
