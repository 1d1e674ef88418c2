// Shared by linear_logp's kernels on Hopper: tiles of logits, hidden W^T + bias, in the accumulators of wgmma.
//
// Order of the sum, which is the contract: a logit is one canonical chain over D, like an element of det_gemm; then +
// bias in FP32; then the cap, if there is one. No tile, stage, row or batch changes it. The forward and the backward
// pass form logits by the same code.
//
//   block      a producer warp and GROUPS consumer warpgroups, 1 or 2; persistent: it takes unit after unit
//   tile       64 GROUPS rows x 256 columns; consumer g holds rows 64 g to 64 g + 63 in registers, as wgmma.cuh says
//   turns      ping-pong: of two consumers one multiplies while the other works on its logits. The columns are loaded
//              once for each, the second time from the L2 cache, which costs less than idle tensor cores
//   stage      64 terms of D, of one consumer's 64 rows and of the 256 columns, in shared memory, swizzled; a ring of
//              STAGES
//
// Defines: DTYPE 1 BF16, 2 FP16; ENTROPY, CAPPED, MIN_LOGIT and, in the forward pass, KEEPS 0 or 1; GROUPS, STAGES,
// STAGE_BYTES.
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/mainloop.cuh>
#include <rl_kernels/min_logit.cuh>
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

// Null pointers are not read: without `temperatures` the scalar temperature holds for all rows.
struct Inputs {
    const void* bias;
    const float* temperatures;
    const i64* ids;
    // order[0]: how many tiles of rows have a token that is not ignored. order[1], ...: all tiles of rows, those first.
    // Null: every tile is computed.
    const int* order;
    i64 ignore_index;
    int rows, columns, inner;
    // The columns are those from `start` on, of a vocabulary of `vocab`, from which ids count.
    int start, vocab;
    // Rows of tiles per panel (place_of): what they share stays in the L2 cache.
    int group;
    float temperature;
    int has_ignored;
#if CAPPED
    // Members of Softcap.
    float cap, rate, inverse_cap, steepest;
#endif
#if MIN_LOGIT
    const float* min_logits;
#endif

    __device__ int tiles() const { return (rows + TILE_M - 1) / TILE_M; }
    __device__ int computed() const { return order ? order[0] : tiles(); }
    __device__ bool valid(i64 id) const { return id >= 0 && id < vocab; }
    // The column that an id selects, counted from the first one here; -1 if it is not here.
    __device__ int column_of(i64 id) const {
        return id >= start && id < start + columns ? static_cast<int>(id - start) : -1;
    }
    __device__ bool ignored(int row) const { return has_ignored && ids[row] == ignore_index; }
    __device__ float divisor(int row) const { return temperatures ? temperatures[row] : temperature; }
    __device__ float inverse(int row) const { return __frcp_rn(divisor(row)); }
    __device__ float scale(int row) const { return __fmul_rn(inverse(row), LOG2E); }
#if CAPPED
    __device__ Softcap softcap() const { return {cap, rate, inverse_cap, steepest}; }
#endif
#if MIN_LOGIT
    __device__ NotBelow counted(int row) const { return {least_kept(min_logits[row], divisor(row))}; }
#else
    __device__ Every counted(int) const { return {}; }
#endif
};

// The units of work of a block, one after the other. Over all blocks: `across` units of columns for each tile of rows
// at positions `from` to `to` - 1 of the order.
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

// Producer, one elected thread: loads the stages of the tile at (row, column), consumer 0's before consumer 1's.
__device__ inline void load_stages(const Ring& ring, Ring::Slot& slot, const TensorMap& hidden, const TensorMap& weight,
                                   int row, int column, int stages) {
    for (int group = 0; group < GROUPS; ++group)
        ring.produce(slot, stages, [&](int stage, int k) {
            ring.copy(stage, k, hidden, row + group * MMA_M, weight, column);
        });
}

// A consumer thread's part of a tile: row and column of the first of its accumulators (wgmma.cuh).
struct Mine {
    int group, row, column;
    __device__ Mine() {
        const Fragment fragment;
        group = warp_index() / WARPS_OF_GROUP - 1;
        row = group * MMA_M + fragment.row;
        column = fragment.column;
    }
};

// Forms this consumer's logits of a tile, without bias, from its own stages in the ring; skips the other consumer's.
__device__ inline void form_logits(const Ring& ring, int stages, const Mine& mine, Ring::Slot& slot, Turns& turns,
                                   Sums& d) {
    slot.skip(stages * mine.group);
    if constexpr (TURNS) turns.wait();
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    ring.mainloop<TURNS>(slot, stages, 0, turns, d);
    slot.skip(stages * (GROUPS - 1 - mine.group));
}

// Calls f(sum, column) for each of a thread's accumulators; column is counted from the tile's first.
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

// Caps the logits if CAPPED: the last step before the temperature.
__device__ inline void cap(const Inputs& p, Sums& d) {
#if CAPPED
    const Softcap softcap = p.softcap();
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = softcap.at(d[i]);
#endif
}

}  // namespace rlk
