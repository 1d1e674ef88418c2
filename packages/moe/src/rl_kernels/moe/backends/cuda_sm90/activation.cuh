// The activations of experts on a thread's sums, with the bits of triton_lib/rows.py.
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

enum Activation { SILU, GELU_TANH, CLAMPED_SWIGLU };

// LIMIT and SLOPE of clamped_swiglu; CUBIC and TWICE of the tanh form of GELU.
constexpr float LIMIT = 7.0f, SLOPE = 1.702f, CUBIC = 0.044715f, TWICE = 1.5957691216057308f;
constexpr float LOG2E = 1.4426950408889634f;

// The product, rounded once; a zero is positive.
__device__ inline float product(float x, float y) { return __fmaf_rn(x, y, 0.0f); }

// 1 / (1 + e^-x), with the bits of Triton's division. That divides by 4 what is above 2^126; here all is divided by 4,
// which changes no bit: results that need it would be flushed to 0. A subnormal power is lost in 1 + power.
__device__ inline float sigmoid(float x) {
    const float power = exp2_fast(-x * LOG2E);
    return 0.25f * inverse_fast(__fmaf_rn(power, 0.25f, 0.25f));
}

// Rounds two numbers to a 16-bit type.
template <class T>
__device__ inline void round_both(float (&x)[2]) {
    T::unpack(T::pack(x), x);
}

// Sets h to the activation of two gates and ups, all of which are rounded to T first, as are the steps; h is not.
template <class T, Activation KIND>
__device__ inline void activate(float (&gate)[2], float (&up)[2], float (&h)[2]) {
    round_both<T>(gate), round_both<T>(up);
    float inner[2];
    if constexpr (KIND == CLAMPED_SWIGLU) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gate[i] = fminf(gate[i], LIMIT), up[i] = copysignf(fminf(fabsf(up[i]), LIMIT), up[i]) + 1.0f;
            inner[i] = gate[i] * SLOPE;
        }
        round_both<T>(inner), round_both<T>(up);
#pragma unroll
        for (int i = 0; i < 2; ++i) inner[i] = sigmoid(inner[i]);
        round_both<T>(inner);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = gate[i];
            inner[i] = sigmoid(KIND == SILU ? x : TWICE * __fmaf_rn(x * x * x, CUBIC, x));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) inner[i] = product(gate[i], inner[i]);
    round_both<T>(inner);
#pragma unroll
    for (int i = 0; i < 2; ++i) h[i] = product(inner[i], up[i]);
}

}  // namespace rlk
