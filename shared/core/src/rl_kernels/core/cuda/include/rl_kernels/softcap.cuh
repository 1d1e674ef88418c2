// Capped logits: y = softcap tanh(rate x), and dy/dx for the backward pass.
//
// With u = rate x: for |u| < 0.5 tanh(u) is a polynomial, fitted for the least relative error; elsewhere it is (1 - p)
// / (1 + p) with p = e^(-2 |u|), and the sign of u. Both are within 4e-7 relative of the exact value. No library
// function is called: its bits could change with the compiler's version.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

struct Softcap {
    // inverse = 1 / cap; steepest = cap rate, the slope at 0.
    float cap, rate, inverse, steepest;

    __device__ float at(float x) const {
        constexpr float NEAR = 0.5f, TWICE_LOG2E = 2.8853900817779268f;
        const float u = __fmul_rn(x, rate), square = __fmul_rn(u, u);
        float near = __fmaf_rn(square, 0.017241476103663445f, -0.05304548516869545f);
        near = __fmaf_rn(__fmaf_rn(near, square, 0.13325878977775574f), square, -0.333331435918808f);
        near = __fmaf_rn(__fmul_rn(u, square), near, u);
        const float power = exp2_fast(__fmul_rn(fabsf(u), -TWICE_LOG2E));
        const float far = __fmul_rn(__fsub_rn(1.0f, power), inverse_fast(__fadd_rn(1.0f, power)));
        return __fmul_rn(fabsf(u) < NEAR ? near : copysignf(far, u), cap);
    }
    // dy/dx, where y is the result of `at`.
    __device__ float slope(float y) const {
        const float t = __fmul_rn(y, inverse);
        return __fmul_rn(__fmaf_rn(-t, t, 1.0f), steepest);
    }
};

}  // namespace rlk
