// Segments: a sum over K in 2, 4 or 8 chains from 0 that a balanced tree merges in index order.
//
//   in a block     its segments are multiplied one after the other; the left sums of the tree wait in registers, those of
//                  its upper levels in shared memory
//   in a cluster   each block has a subtree of the segments of one tile; then all write their sums to their own shared
//                  memory, and each merges a part of the tile, which it reads from all of them
//
// Order of every sum: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in FP32.
#pragma once

#include <rl_kernels/cluster.cuh>
#include <rl_kernels/mainloop.cuh>

namespace rlk {

// A segment's part of K: its first term, the number of whole stages, and steps of 16 terms of one more stage.
struct Span {
    int first, stages, rest;
};

// The span of segment `index`, each `length` terms, of a sum over `inner` terms. Beyond the end of K operands are 0, so
// there a stage is whole.
template <int INNER>
__device__ inline Span span_of(int index, int length, int inner) {
    const int first = min(index * length, inner), end = min(first + length, inner), size = end - first;
    if (end == inner) return {first, (size + INNER - 1) / INNER, 0};
    return {first, size / INNER, size % INNER / MMA_K};
}

// The sum of COUNT numbers, a power of two, by a balanced tree.
template <int COUNT>
__device__ inline float tree_sum(const float* x) {
    if constexpr (COUNT == 1)
        return x[0];
    else
        return __fadd_rn(tree_sum<COUNT / 2>(x), tree_sum<COUNT / 2>(x + COUNT / 2));
}

// Number of levels of a tree of `count` leaves.
__device__ constexpr int levels_of(int count) { return count > 1 ? 1 + levels_of(count / 2) : 0; }

// ---- clusters ----

// Calls finish(i, sum) for i = first, first + STEP, ... < COUNT, with the tree sum over the BLOCKS blocks of the cluster
// of the WIDTH numbers at offset_of(i) floats from `at` in the shared memory of each.
template <int BLOCKS, int WIDTH, int COUNT, int STEP, class Offset, class Finish>
__device__ inline void merge_from(const float* at, int first, Offset offset_of, Finish finish) {
    // Loads that are in flight together hide their latency.
    constexpr int ROUNDS = (COUNT + STEP - 1) / STEP, MOST = 32 / (BLOCKS * WIDTH);
    constexpr int BATCH = ROUNDS < MOST ? ROUNDS : MOST < 8 ? MOST : 8;
    u32 base[BLOCKS];
#pragma unroll
    for (int rank = 0; rank < BLOCKS; ++rank) base[rank] = address_in(at, rank);
    for (int begin = first; begin < COUNT; begin += BATCH * STEP) {
        float part[BATCH][BLOCKS][WIDTH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (begin + b * STEP < COUNT)
#pragma unroll
                for (int rank = 0; rank < BLOCKS; ++rank)
                    load_from(base[rank] + 4 * offset_of(begin + b * STEP), part[b][rank]);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (begin + b * STEP >= COUNT) break;
            float sum[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                float each[BLOCKS];
#pragma unroll
                for (int rank = 0; rank < BLOCKS; ++rank) each[rank] = part[b][rank][i];
                sum[i] = tree_sum<BLOCKS>(each);
            }
            finish(begin + b * STEP, sum);
        }
    }
}

}  // namespace rlk
