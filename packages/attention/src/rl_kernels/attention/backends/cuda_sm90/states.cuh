// The softmax states of the forward pass: updated block by block, merged segment by segment, then finished.
//
// A consumer's thread holds parts of two rows (wgmma.cuh). Order of the sums: attention_sm90.cu.
#pragma once

#include "attention.cuh"

namespace rlk {

using Scores = float[BLOCK / 2];
using Sums = float[V_WIDTH / 2];
using Powers = u32[BLOCK / MMA_K][4];

// A block raises the top of a row to its largest score if that exceeds the top by more than SLACK. This is rare, and
// powers are at most 2^SLACK. Each row decides independently of other rows.
constexpr float SLACK = 8.0f;
// The largest finite number.
constexpr float LARGEST = 3.4028235e38f;
// No row is raised while a thread's powers add up to this at most: it is well below 2^SLACK.
constexpr float SMALL = 128.0f;

// A thread's largest score of a row.
__device__ inline float largest(const Scores& d, int half) {
    float most[4];
#pragma unroll
    for (int i = 0; i < BLOCK / 4; ++i) {
        const float x = d[i / 2 * 4 + 2 * half + i % 2];
        most[i % 4] = i < 4 ? x : fmaxf(most[i % 4], x);
    }
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

__device__ inline float finite(float top) { return top == -infinity() ? 0.0f : top; }

// The state of two rows of a consumer: half 0 is `row`, half 1 is `row + 8`.
struct State {
    float top[2], total[2];
    __device__ State() : top{-infinity(), -infinity()}, total{0.0f, 0.0f} {}
};

// Makes the total of a row NaN if it sees a key whose page is missing. Bit i of `missing`: keys n + i box to
// n + (i + 1) box - 1.
__device__ inline void lose(const Seen<BLOCK>& seen, State& state, int n, u32 missing, int box) {
    for (; missing; missing &= missing - 1) {
        const int first = n - seen.column + (__ffs(missing) - 1) * box;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (max(first, seen.from[half]) < min(first + box, seen.to[half])) state.total[half] = not_a_number();
    }
}

// Raises the top of one of a thread's two rows if a block's scores exceed it. Returns the factor of the sums so far: 1 if
// the top stays.
__device__ inline float raise(const Scores& d, int half, State& state, float factor) {
    float& top = state.top[half];
    float most = largest(d, half);
    most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
    const bool exceeds = __fmaf_rn(most, factor, -top) > SLACK;
    // Finite, or inf - inf would follow.
    most = fminf(fmaxf(__fmul_rn(most, factor), -LARGEST), LARGEST);
    const float shrink = exceeds ? exp2_fast(__fsub_rn(top, most)) : 1.0f;
    top = exceeds ? most : top;
    return shrink;
}

// Turns a block's scores of one of a thread's rows into powers, packs them, and returns their sum over this thread's
// columns. `base`: the top.
__device__ inline float weigh(const Scores& d, int half, float base, float factor, Powers& powers) {
    float part[2];
#pragma unroll
    for (int j = 0; j < BLOCK / 8; ++j) {
        float x[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            x[k] = exp2_fast(__fmaf_rn(d[4 * j + 2 * half + k], factor, -base));
            part[k] = j ? __fadd_rn(part[k], x[k]) : x[k];
        }
        powers[j / 2][j % 2 * 2 + half] = Number::pack(x);
    }
    return __fadd_rn(part[0], part[1]);
}

__device__ inline void rescale(Sums& acc, const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < V_WIDTH / 2; ++i) acc[i] = __fmul_rn(acc[i], shrink[i / 2 % 2]);
}

// The total over the four threads that share a row.
__device__ inline void close(State& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float& total = state.total[half];
        total = __fadd_rn(total, __shfl_xor_sync(ALL, total, 1));
        total = __fadd_rn(total, __shfl_xor_sync(ALL, total, 2));
    }
}

// The factors of two states that are merged; `state` becomes the merged state. WIDE: the top is raised as a block raises
// it, so that `a` is nearly always 1.
struct Merge {
    float a, b;
    __device__ Merge(float& top, float& total, float other_top, float other_total) {
        const bool exceeds = __fsub_rn(other_top, top) > SLACK;
        const float above = !WIDE ? fmaxf(top, other_top) : exceeds ? other_top : top, base = finite(above);
        a = exp2_fast(__fsub_rn(top, base)), b = exp2_fast(__fsub_rn(other_top, base));
        top = above, total = __fmaf_rn(total, a, __fmul_rn(other_total, b));
    }
    __device__ float addend(float other) const { return __fmul_rn(other, b); }
    __device__ float operator()(float x, float other) const {
        if constexpr (WIDE) return add_flushed(__fmul_rn(x, a), addend(other));
        return __fmaf_rn(x, a, addend(other));
    }
};

// A thread's sums of earlier segments: in shared memory, or, WIDE, in global memory, where only this thread reads and
// writes them.
struct Earlier {
    float4* at;
    __device__ Earlier(void* kept) : at(static_cast<float4*>(kept) + threadIdx.x % WARPGROUP) {}
    __device__ void put(const Sums& acc) const {
#pragma unroll
        for (int i = 0; i < V_WIDTH / 8; ++i)
            at[i * WARPGROUP] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    }
    // acc becomes the sums of the earlier segments and the one that it holds.
    __device__ void join(State& before, const State& state, Sums& acc) const {
        const Merge low(before.top[0], before.total[0], state.top[0], state.total[0]);
        const Merge high(before.top[1], before.total[1], state.top[1], state.total[1]);
#pragma unroll
        for (int i = 0; i < V_WIDTH / 8; ++i) {
            const float4 x = at[i * WARPGROUP];
            acc[4 * i] = low(x.x, acc[4 * i]), acc[4 * i + 1] = low(x.y, acc[4 * i + 1]);
            acc[4 * i + 2] = high(x.z, acc[4 * i + 2]), acc[4 * i + 3] = high(x.w, acc[4 * i + 3]);
        }
    }
    // WIDE: merges acc into the sums where they are. Unless a top is raised, nothing is read.
    __device__ void add(const Merge& low, const Merge& high, const Sums& acc) const {
        if (low.a != 1.0f || high.a != 1.0f) {
#pragma unroll 2
            for (int i = 0; i < V_WIDTH / 8; ++i) {
                float4 x = load_written(at + i * WARPGROUP);
                x.x = __fmul_rn(x.x, low.a), x.y = __fmul_rn(x.y, low.a);
                x.z = __fmul_rn(x.z, high.a), x.w = __fmul_rn(x.w, high.a);
                at[i * WARPGROUP] = x;
            }
        }
#pragma unroll
        for (int i = 0; i < V_WIDTH / 8; ++i)
            add_to(at + i * WARPGROUP, make_float4(low.addend(acc[4 * i]), low.addend(acc[4 * i + 1]),
                                                   high.addend(acc[4 * i + 2]), high.addend(acc[4 * i + 3])));
    }
    __device__ void get(Sums& acc) const {
#pragma unroll
        for (int i = 0; i < V_WIDTH / 8; ++i) {
            const float4 x = load_written(at + i * WARPGROUP);
            acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
        }
    }
};

// A finished row: adds its sink to the state; has the factors that turn sums into the output.
struct Finished {
    float scale, inverse, lse;

    // `sinks`: logits of all heads, or null.
    __device__ Finished(const Shape& p, const void* sinks, float top, float sum, int head) {
        float total = sum, shrink = 1.0f;
        if (sinks) {
            const void* at = static_cast<const char*>(sinks) + static_cast<i64>(head) * p.sink_size;
            const float sink = __fmul_rn(p.sink_size == 4 ? FP32::read(at) : Number::read(at), LOG2E);
            const float above = fmaxf(top, sink), base = finite(above);
            shrink = exp2_fast(__fsub_rn(top, base));
            total = __fmaf_rn(total, shrink, exp2_fast(__fsub_rn(sink, base)));
            top = above;
        }
        // A power of two, so that the inverse of a total far below or above 1 is neither infinite nor 0.
        const u32 exponent = min(max(__float_as_uint(total) >> 23, 1u), 253u);
        const float power = __uint_as_float((254u - exponent) << 23);
        scale = __fmul_rn(shrink, power), inverse = total == 0.0f ? 0.0f : __frcp_rn(__fmul_rn(total, power));
        const float log = __fmul_rn(__fadd_rn(top, log2f(total > 0.0f ? total : 1.0f)), LN2);
        lse = total == 0.0f ? -infinity() : total != total ? total : log;
    }
    // Never -0.
    __device__ float of(float acc) const {
        // As a merge flushes: one with a state of nothing must not change a bit.
        const float sum = WIDE ? add_flushed(acc, 0.0f) : acc;
        return __fmaf_rn(__fmul_rn(sum, scale), inverse, 0.0f);
    }
};

}  // namespace rlk
