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

// Which values of a row count: all of them.
//   larger       the maximum of two words of numbers T, by which `none_of` says whether none of the numbers counts
//   is_below     whether x does not count
//   or_lowest    x, or -inf if x does not count
//   add          adds a power of x to a sum, and its product with an exponent to another; nothing if x does not count
//   fma          a b + c for x, or c
struct Every {
    static constexpr bool COMPARES = false;
    template <class T>
    __device__ static u32 larger(u32 a, u32 b) {
        return T::larger(a, b);
    }
    template <class T>
    __device__ bool none_of(u32) const {
        return false;
    }
    __device__ bool is_below(float) const { return false; }
    __device__ float or_lowest(float x) const { return x; }
    template <bool HasProduct>
    __device__ void add(float& sum, float& product, float, float power, float exponent) const {
        sum = __fadd_rn(sum, power);
        if (HasProduct) product = __fmaf_rn(power, exponent, product);
    }
    __device__ float fma(float, float a, float b, float c) const { return __fmaf_rn(a, b, c); }
};

// Those that are not below `least`; a NaN counts.
struct NotBelow {
    static constexpr bool COMPARES = true;
    float least;
    // Whether `Every` does for all rows of a warp.
    __device__ bool is_every() const { return __all_sync(ALL, least == -infinity()); }
    template <class T>
    __device__ static u32 larger(u32 a, u32 b) {
        return T::larger_or_nan(a, b);
    }
    template <class T>
    __device__ bool none_of(u32 largest) const {
        float x[2];
        T::unpack(largest, x);
        return x[0] < least && (T::SIZE == 4 || x[1] < least);
    }
    __device__ bool is_below(float x) const { return x < least; }
    __device__ float or_lowest(float x) const { return x < least ? -infinity() : x; }
    // One comparison, and no selection.
    template <bool HasProduct>
    __device__ void add(float& sum, float& product, float x, float power, float exponent) const {
        if (HasProduct)
            asm("{\n.reg .pred kept;\nsetp.geu.f32 kept, %2, %3;\n@kept add.rn.f32 %0, %0, %4;\n"
                "@kept fma.rn.f32 %1, %4, %5, %1;\n}"
                : "+f"(sum), "+f"(product)
                : "f"(x), "f"(least), "f"(power), "f"(exponent));
        else
            asm("{\n.reg .pred kept;\nsetp.geu.f32 kept, %1, %2;\n@kept add.rn.f32 %0, %0, %3;\n}"
                : "+f"(sum)
                : "f"(x), "f"(least), "f"(power));
    }
    __device__ float fma(float x, float a, float b, float c) const {
        asm("{\n.reg .pred kept;\nsetp.geu.f32 kept, %1, %2;\n@kept fma.rn.f32 %0, %3, %4, %0;\n}"
            : "+f"(c)
            : "f"(x), "f"(least), "f"(a), "f"(b));
        return c;
    }
};

}  // namespace rlk
