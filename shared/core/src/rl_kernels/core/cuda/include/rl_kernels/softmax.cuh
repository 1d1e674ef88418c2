// Softmax statistics of a row in base 2: formed by lanes, merged over a warp and over segments, in a fixed order.
//
// A state (top, total, weighted) stands for some raw values x of a row, whose logits are z = x * inv:
//   top        the largest x
//   total      the sum of 2^t, where t = x c - r, c = inv log2(e), and r is top c rounded to FP32
//   weighted   the sum of 2^t t
// Where |r| >= 2^31, t is formed differently (Exponents). Every rounding is explicit, and the compiler's fmad is off,
// so equal values give equal bits in every kernel.
//
// Order of the sums:
//   add           number i of a lane's words goes to partial sum i % 4; then (0 + 1) + (2 + 3); then the lane's state
//   over_warp     all lanes are rescaled to the largest top, then added by xor shuffles at distances 16, 8, 4, 2, 1
//   over_states   lane l merges states l, l + 32, l + 64, ... in this order; then over_warp
#pragma once

#include <rl_kernels/min_logit.cuh>
#include <rl_kernels/number.cuh>

namespace rlk {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
// Replaces an exponent of -inf where it is multiplied by its power, which is 0: -inf * 0 would be NaN.
constexpr float LEAST = -1.0e30f;
// From this magnitude on, a reference is too coarse for exponents, or infinite.
constexpr float FAR = 2147483648.0f;
// Lower bound of the shift of a state's exponents: 2^-256 is 0 in FP32, and a product with it is finite.
constexpr float LEAST_SHIFT = -256.0f;

struct State {
    float top, total, weighted;
};

// The state of no values.
__device__ inline State empty() { return {-infinity(), 0.0f, 0.0f}; }

// The exponent of x is x * factor - reference, normally x * c - r. Where |r| >= FAR, neighboring FP32 values of x are
// so far apart that only those equal to the largest count. factor is then a power of two, so its products are exact:
// the exponent is 0 where x is the largest value, and too small to count elsewhere.
struct Exponents {
    float factor, reference;

    __device__ Exponents(float top, float c) : factor(c), reference(__fmul_rn(top, c)) {
        if (fabsf(reference) >= FAR) {
            // Scales the largest value to a magnitude of 2^30 .. 2^31.
            factor = __uint_as_float((284u << 23) - (__float_as_uint(top) & 0x7f800000u));
            // If all values are -inf, all powers are 0.
            reference = top == -infinity() ? 0.0f : __fmul_rn(top, factor);
        }
    }
    __device__ float at(float x) const { return __fmaf_rn(x, factor, -reference); }
};

// How far a state's exponents shift when the largest value becomes `to`. With infinite numbers the difference may be
// NaN; fmaxf then returns the bound, and the state is too small to count.
__device__ inline float shift_to(float to, float top, float c) {
    return top == to ? 0.0f : fmaxf(__fsub_rn(__fmul_rn(top, c), __fmul_rn(to, c)), LEAST_SHIFT);
}

__device__ inline float pairs(const float (&x)[4]) { return __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])); }

// Adds N words of numbers to a lane's state, in four partial sums. The words stay packed during the search for the
// largest number, which halves the registers of BF16 and FP16. What does not count (min_logit.cuh) is not added, but
// may be the largest number. Words of which nothing counts are passed over.
template <bool HasEntropy, class T, int N, class Counted>
__device__ inline void add(State& s, const u32 (&words)[N], float c, Counted counted) {
    static_assert(N % 4 == 0, "two words, and so at least two numbers, to each of two maxima");
    constexpr int PER = PER_WORD<T>;
    u32 most[2] = {words[0], words[1]};
#pragma unroll
    for (int i = 2; i < N; ++i) most[i % 2] = Counted::template larger<T>(most[i % 2], words[i]);
    const u32 of_all = Counted::template larger<T>(most[0], most[1]);
    if (counted.template none_of<T>(of_all)) return;
    float top = s.top, largest[PER];
    T::unpack(of_all, largest);
#pragma unroll
    for (int k = 0; k < PER; ++k) top = fmaxf(top, largest[k]);
    const Exponents exponents(top, c);
    float sum[4] = {}, product[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float x[PER];
        T::unpack(words[i], x);
#pragma unroll
        for (int k = 0; k < PER; ++k) {
            const int lane = (i * PER + k) % 4;
            const float exponent = exponents.at(x[k]);
            counted.template add<HasEntropy>(sum[lane], product[lane], x[k], exp2_fast(exponent), exponent);
        }
    }
    const float shift = shift_to(top, s.top, c), scale = exp2_fast(shift);
    if (HasEntropy) {
        float block = pairs(product);
        // An x of -inf gives NaN here, since its exponent times its power is -inf * 0. That is rare, so the sum is
        // formed again with bounded exponents.
        if (isnan(block)) {
            float again[4] = {};
            // A zero that the compiler cannot predict. Otherwise it would keep all exponents up to here, and run out of
            // registers.
            const u32 zero = __float_as_uint(fmaxf(block, 0.0f));
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float x[PER];
                T::unpack(words[i] ^ zero, x);
#pragma unroll
                for (int k = 0; k < PER; ++k) {
                    const float exponent = exponents.at(x[k]);
                    float& lane = again[(i * PER + k) % 4];
                    if (!counted.is_below(x[k])) lane = __fmaf_rn(exp2_fast(exponent), fmaxf(exponent, LEAST), lane);
                }
            }
            block = pairs(again);
        }
        s.weighted = __fmaf_rn(__fmaf_rn(shift, s.total, s.weighted), scale, block);
    }
    s.total = __fmaf_rn(s.total, scale, pairs(sum));
    s.top = top;
}

// The state of the values of a and b. Not associative in the last bit, so always merge in ascending order.
template <bool HasEntropy>
__device__ inline State merged(State a, State b, float c) {
    const float top = fmaxf(a.top, b.top);
    const float shift = shift_to(top, a.top, c), scale = exp2_fast(shift);
    const float other_shift = shift_to(top, b.top, c), other_scale = exp2_fast(other_shift);
    State s = {top, __fmaf_rn(a.total, scale, __fmul_rn(b.total, other_scale)), 0.0f};
    if (HasEntropy) {
        const float other = __fmul_rn(__fmaf_rn(other_shift, b.total, b.weighted), other_scale);
        s.weighted = __fmaf_rn(__fmaf_rn(shift, a.total, a.weighted), scale, other);
    }
    return s;
}

// The state of all lanes of a warp, returned in each lane.
template <bool HasEntropy>
__device__ inline State over_warp(State s, float c) {
    float top = s.top;
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, apart));
    const float shift = shift_to(top, s.top, c), scale = exp2_fast(shift);
    float total = __fmul_rn(s.total, scale);
    float weighted = HasEntropy ? __fmul_rn(__fmaf_rn(shift, s.total, s.weighted), scale) : 0.0f;
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) {
        total = __fadd_rn(total, __shfl_xor_sync(ALL, total, apart));
        if (HasEntropy) weighted = __fadd_rn(weighted, __shfl_xor_sync(ALL, weighted, apart));
    }
    return {top, total, weighted};
}

// The merged state of the `count` states load(0), load(1), ..., returned in every lane of a warp.
template <bool HasEntropy, class Load>
__device__ inline State over_states(int count, float c, Load load) {
    State s = empty();
    for (int i = threadIdx.x % WARP; i < count; i += WARP) s = merged<HasEntropy>(s, load(i), c);
    return over_warp<HasEntropy>(s, c);
}

// Of a row: top, the largest raw value, and log_total, the log of the sum of e^(z - max z). The logsumexp is
// top * inv + log_total; it is too coarse to subtract where top is large, so both are kept.
struct Norm {
    float top, log_total;

    // How far log_total was rounded below 0, in a row whose largest value is nearly certain; its entropy was too.
    __device__ float below_0() const { return fminf(log_total, 0.0f); }
};

struct Statistics {
    float logp, lse, entropy;
    Norm norm;
};

// The statistics of a whole row whose selected raw value is x; NaN if all values of the row are -inf. No rounding takes
// the log-probability above 0 or the entropy below 0. Comparisons keep NaN, which fminf and fmaxf drop.
template <bool HasEntropy>
__device__ inline Statistics finished(State s, float x, float inv, float c) {
    const Exponents exponents(s.top, c);
    const float top = s.top == -infinity() ? not_a_number() : s.top;
    const float log_sum = log2f(s.total);
    const float log_total = __fmul_rn(LN2, __fsub_rn(log_sum, exponents.at(top)));
    const float logp = __fmaf_rn(__fsub_rn(x, top), inv, -log_total);
    Statistics found = {logp > 0.0f ? 0.0f : logp, __fmaf_rn(top, inv, log_total), 0.0f, {top, log_total}};
    if (HasEntropy) {
        const float rounded = __fmul_rn(LN2, __fsub_rn(log_sum, __fdiv_rn(s.weighted, s.total)));
        const float entropy = __fsub_rn(rounded, found.norm.below_0());
        found.entropy = entropy < 0.0f ? 0.0f : entropy;
    }
    return found;
}

// The gradient with respect to a row's raw values, with logarithms formed in base 2:
// dx_j = (g_logp (1[j is selected] - p_j) + g_lse p_j - g_H p_j (log p_j + H)) / temperature.
// H is rounded as log p is, which keeps their sum exact near 0 (below_0). NaN in the whole row if its id is not a column.
template <bool HasEntropy>
struct Gradient {
    float c, top, log_total, entropy, chosen, slope, curve, rest;

    Gradient() = default;
    __device__ Gradient(float inv, Norm norm, float entropy, float g_logp, float g_lse, float g_entropy, bool valid)
        : c(__fmul_rn(inv, LOG2E)), top(norm.top), log_total(__fmul_rn(norm.log_total, LOG2E)),
          entropy(__fmul_rn(__fadd_rn(entropy, norm.below_0()), LOG2E)), chosen(__fmul_rn(g_logp, inv)),
          slope(__fmul_rn(__fsub_rn(g_lse, g_logp), inv)), curve(__fmul_rn(__fmul_rn(g_entropy, inv), LN2)),
          rest(valid ? 0.0f : not_a_number()) {
        if (!HasEntropy) slope = __fadd_rn(slope, rest);
    }
    // What belongs to an x that does not count is 0, if `chosen` is 0 where the selected one does not.
    template <class Counted = Every>
    __device__ float at(float x, bool selected, Counted counted = {}) const {
        // x - top is exact for the values that count, however large they are.
        const float log_p = __fmaf_rn(__fsub_rn(x, top), c, -log_total), power = exp2_fast(log_p);
        if (!HasEntropy) return counted.fma(x, power, slope, selected ? chosen : 0.0f);
        // Where p is 0 its factor may be infinite, and the product NaN.
        const float target = selected ? chosen : rest;
        if (power == 0.0f || counted.is_below(x)) return target;
        return __fmaf_rn(power, __fmaf_rn(__fadd_rn(log_p, entropy), -curve, slope), target);
    }
};

}  // namespace rlk
