// The activations of experts on a thread's sums, with the instructions that Triton emits for triton_lib/rows.py, so
// that both backends have the same bits.
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

enum Activation { SILU, GELU_TANH, CLAMPED_SWIGLU };

// LIMIT and SLOPE of clamped_swiglu; CUBIC and TWICE of the tanh form of GELU.
constexpr float LIMIT = 7.0f, SLOPE = 1.702f, CUBIC = 0.044715f, TWICE = 1.5957691216057308f;
constexpr float LOG2E = 1.4426950408889634f;

// The product, rounded once; a zero is positive.
__device__ inline float product(float x, float y) { return __fmaf_rn(x, y, 0.0f); }

// 1 / (1 + e^-x).
__device__ inline float sigmoid(float x) {
    return divide_full(1.0f, exp2_full(-x * LOG2E) + 1.0f);
}

// x, rounded to a 16-bit type.
template <class T>
__device__ inline float rounded(float x) {
    const float pair[2] = {x, 0.0f};
    float result[2];
    T::unpack(T::pack(pair), result);
    return result[0];
}

// The activation of gate and up, which are rounded to T, as are the steps.
template <class T, Activation KIND>
__device__ inline float activated(float gate, float up) {
    if constexpr (KIND == CLAMPED_SWIGLU) {
        gate = fminf(gate, LIMIT), up = copysignf(fminf(fabsf(up), LIMIT), up);
        const float inner = rounded<T>(sigmoid(rounded<T>(gate * SLOPE)));
        return product(rounded<T>(up + 1.0f), rounded<T>(product(gate, inner)));
    } else {
        const float a = KIND == SILU ? gate : TWICE * __fmaf_rn(gate * gate * gate, CUBIC, gate);
        return product(rounded<T>(product(gate, sigmoid(a))), up);
    }
}

}  // namespace rlk
