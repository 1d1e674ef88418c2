// Logits z = x / t, rounded to FP32, that are below a number m of their row count as -inf. Kernels compare raw values x:
// division is monotonic, so x / t < m holds exactly below some x, which each row finds once.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

// The smallest x whose quotient x / t rounds to at least m; infinity if m is NaN, so that nothing counts. Without a
// branch: what a row reads next need not wait for it.
__device__ inline float least_kept(float m, float t) {
    // Between m and the number before it a quotient rounds to the nearer one, from the middle to the even one. In FP64
    // the middle is exact, and so is its product with t. To infinity a quotient rounds as to 2^128.
    constexpr double BEYOND = 0x1p128;
    constexpr u32 SIGN = 1u << 31;
    const u32 bits = __float_as_uint(m);
    const float before = __uint_as_float(m > 0.0f ? bits - 1 : (bits | SIGN) + 1);
    const double low = before == -infinity() ? -BEYOND : before, high = m == infinity() ? BEYOND : m;
    const double middle = __dmul_rn(__dmul_rn(__dadd_rn(low, high), 0.5), t);
    const float least = __double2float_ru(middle);
    const u32 of_least = __float_as_uint(least);
    const float after = __uint_as_float(least < 0.0f ? of_least - 1 : (of_least & ~SIGN) + 1);
    const float found = (bits & 1) && least == middle ? after : least;
    return isnan(m) ? infinity() : m == -infinity() ? m : found;
}

// Which values of a row count: all of them. If x does not count, `or_lowest` returns -inf for x, and `or_0` returns 0
// for what belongs to x. `none_of` says whether none of the numbers T in some words counts.
struct Every {
    template <class T, int N>
    __device__ bool none_of(const u32 (&)[N]) const {
        return false;
    }
    __device__ float or_lowest(float x) const { return x; }
    __device__ float or_0(float, float of_x) const { return of_x; }
};

// Those that are not below `least`; a NaN counts.
struct NotBelow {
    float least;
    template <class T, int N>
    __device__ bool none_of(const u32 (&words)[N]) const {
        u32 most = words[0];
#pragma unroll
        for (int i = 1; i < N; ++i) most = T::larger_or_nan(most, words[i]);
        float x[2];
        T::unpack(most, x);
        bool is_below = x[0] < least;
        if (T::SIZE == 2) is_below = is_below && x[1] < least;
        return is_below;
    }
    __device__ float or_lowest(float x) const { return x < least ? -infinity() : x; }
    __device__ float or_0(float x, float of_x) const { return x < least ? 0.0f : of_x; }
};

}  // namespace rlk
