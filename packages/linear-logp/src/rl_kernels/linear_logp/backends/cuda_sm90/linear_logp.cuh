// What linear_logp's kernels on Hopper share: how tiles of logits come to be in the registers of WGMMA, and in which order.
//
// A logit is a canonical chain over D, as det_gemm's; + bias in FP32. No tile, stage, row or batch changes it, and the
// forward and the backward pass form it by the same code.
//
//   block      a producer warp, and GROUPS consumer warpgroups, 1 or 2; it stays, and takes unit after unit
//   tile       64 GROUPS rows x 256 columns; consumer g has the rows from 64 g in its registers (wgmma.cuh)
//   turns      of two consumers one multiplies while the other does what is to be done with its logits: the columns come
//              once for each, the second time from the L2 cache, which costs less than tensor cores that wait
//   stage      64 terms of D of 64 rows and of the columns in shared memory, swizzled; STAGES of them go round
//
// Defines: DTYPE 1 BF16, 2 FP16; ENTROPY and CAPPED 0 or 1; GROUPS, STAGES, STAGE_BYTES.
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/mainloop.cuh>
#include <rl_kernels/softcap.cuh>
#include <rl_kernels/softmax.cuh>

namespace rlk {

#if DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

constexpr int TILE_M = MMA_M * GROUPS, TILE_N = 256;
constexpr bool TURNS = GROUPS == 2;
using Ring = RingOf<Number, K_MAJOR, K_MAJOR, MMA_M, TILE_N, 1, STAGES>;
static_assert(STAGE_BYTES == Ring::BYTES, "what the host made room for");
constexpr int THREADS = (GROUPS + 1) * WARPGROUP;

using Sums = float[TILE_N / 2];

// Null pointers are not read: temperatures falls back to the number.
struct Inputs {
    const void* bias;
    const float* temperatures;
    const i64* ids;
    // How many tiles of rows have a token that is not ignored, then all tiles, those first; null: every tile is computed.
    const int* order;
    i64 ignore_index;
    int rows, columns, inner;
    // Rows of tiles that are worked on together: what they share stays in the L2 cache.
    int group;
    float temperature;
    int has_ignored;
#if CAPPED
    // Of Softcap.
    float cap, rate, inverse_cap, steepest;
#endif

    __device__ int tiles() const { return (rows + TILE_M - 1) / TILE_M; }
    __device__ int computed() const { return order ? order[0] : tiles(); }
    __device__ bool ignored(int row) const { return has_ignored && ids[row] == ignore_index; }
    __device__ float inverse(int row) const { return __frcp_rn(temperatures ? temperatures[row] : temperature); }
    __device__ float scale(int row) const { return __fmul_rn(inverse(row), LOG2E); }
#if CAPPED
    __device__ Softcap softcap() const { return {cap, rate, inverse_cap, steepest}; }
#endif
};

// The units of a block, one after the other: `across` units of columns for each of the tiles of rows that stand from `from`
// to `to` in the order.
struct Tiles {
    const Inputs& p;
    int from, down, across, index, row, unit;
    __device__ Tiles(const Inputs& p, int from, int to, int across)
        : p(p), from(from), down(to - from), across(across), index(static_cast<int>(blockIdx.x)) {
        place();
    }
    __device__ bool done() const { return index >= down * across; }
    __device__ void advance() {
        index += static_cast<int>(gridDim.x);
        place();
    }
    __device__ void place() {
        if (done()) return;
        const Place place = place_of(index, down, across, p.group);
        const int at = from + place.row;
        row = TILE_M * (p.order ? p.order[1 + at] : at);
        unit = place.column;
    }
};

// By an elected thread: brings the stages of the tile at (row, column), those of one consumer after those of the other.
__device__ inline void load_stages(const Ring& ring, Ring::Slot& slot, const TensorMap& hidden, const TensorMap& weight,
                                   int row, int column, int stages) {
    for (int group = 0; group < GROUPS; ++group)
        ring.produce(slot, stages, [&](int stage, int k) {
            ring.copy(stage, k, hidden, row + group * MMA_M, weight, column);
        });
}

// What one thread of a consumer has of a tile: rows and columns of its first number (wgmma.cuh).
struct Mine {
    int group, row, column;
    __device__ Mine() {
        const Fragment fragment;
        group = warp_index() / WARPS_OF_GROUP - 1;
        row = group * MMA_M + fragment.row;
        column = fragment.column;
    }
};

// The logits of a tile: of its stages in the ring, those of this consumer.
__device__ inline void form_logits(const Ring& ring, int stages, const Mine& mine, Ring::Slot& slot, Turns& turns,
                                   Sums& d) {
    slot.skip(stages * mine.group);
    if constexpr (TURNS) turns.wait();
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    ring.mainloop<TURNS>(slot, stages, 0, turns, d);
    slot.skip(stages * (GROUPS - 1 - mine.group));
}

// Calls f(sum, column) for each of a thread's sums, with its column from the tile's first one on.
template <class F>
__device__ inline void each(const Mine& mine, Sums& d, F f) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) f(d[i], mine.column + i / 4 * 8 + i % 2);
}

__device__ inline void add_bias(const Inputs& p, const Mine& mine, int column, Sums& d) {
    if (!p.bias) return;
    const auto* bias = static_cast<const char*>(p.bias) + static_cast<i64>(column) * Number::SIZE;
    each(mine, d, [&](float& x, int at) {
        if (column + at < p.columns) x = __fadd_rn(x, Number::read(bias + at * Number::SIZE));
    });
}

// Logits capped, where they are: the last thing that is done to them before the temperature.
__device__ inline void cap(const Inputs& p, Sums& d) {
#if CAPPED
    const Softcap softcap = p.softcap();
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = softcap.at(d[i]);
#endif
}

}  // namespace rlk
