// What prefill and decode share, so that their bits agree: sizes, decays, and the norm of a row.
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

// Rows of a chunk, numbers of a row of q, k or v, and value columns of a part.
constexpr int ROWS = 64, SIZE = 128;
// Lanes that hold a row, each 16 bytes of it.
constexpr int LANES = 16;
constexpr float LOG2_E = 1.4426950408889634f, EPS = 1e-6f;

// e^x; the product is rounded first.
__device__ inline float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// A row of 128 numbers divided by its norm, and rounded: lane l % 16 holds numbers 8 (l % 16) to 8 (l % 16) + 7 as a
// chunk. Sums of squares: neighbors in a lane, their pairs, both halves, then the lanes 8, 4, 2 and 1 apart.
template <class T>
__device__ inline Chunk unit_row(Chunk chunk) {
    float x[8], square[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) T::unpack(chunk.word[i], x + 2 * i);
#pragma unroll
    for (int i = 0; i < 8; ++i) square[i] = x[i] * x[i];
    const float pair[4] = {square[0] + square[1], square[2] + square[3], square[4] + square[5], square[6] + square[7]};
    float sum = (pair[0] + pair[1]) + (pair[2] + pair[3]);
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) sum += __shfl_xor_sync(ALL, sum, apart);
    const float factor = inverse_root(sum + EPS);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = T::pack(x + 2 * i);
    return chunk;
}

// The number at `index` of g or beta, whose dtype is 0 (FP32), 1 (BF16) or 2 (FP16).
__device__ inline float read_number(const void* numbers, i64 index, int dtype) {
    const char* at = static_cast<const char*>(numbers) + index * (dtype ? 2 : 4);
    return dtype == 0 ? FP32::read(at) : dtype == 1 ? BF16::read(at) : FP16::read(at);
}

}  // namespace rlk
