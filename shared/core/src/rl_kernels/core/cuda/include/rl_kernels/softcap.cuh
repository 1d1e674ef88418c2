// Capped logits: softcap tanh(rate x), and what a gradient is multiplied by on its way back through it.
//
// Near 0 tanh is a polynomial, fitted for the least relative error, and elsewhere a quotient of powers of two: within 4e-7
// relative of the exact value. No function of a library: its bits might follow the compiler's version.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

struct Softcap {
    // And what follows from the two: 1 / cap, cap rate.
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
    // The derivative by x, where y is what `at` returned.
    __device__ float slope(float y) const {
        const float t = __fmul_rn(y, inverse);
        return __fmul_rn(__fmaf_rn(-t, t, 1.0f), steepest);
    }
};

}  // namespace rlk
