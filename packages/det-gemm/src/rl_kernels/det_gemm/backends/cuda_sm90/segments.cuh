// Segments: a sum over K in 2, 4 or 8 chains from 0 that a balanced tree merges in index order.
//
//   in a block     its segments are multiplied one after the other; the left sums of the tree wait in registers, those of
//                  its upper levels in shared memory
//   in a cluster   each block has a subtree of the segments of one tile; then all write their sums to their own shared
//                  memory, and each merges a part of the tile, which it reads from all of them
//
// Order of every sum: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in FP32.
#pragma once

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

// All threads of the cluster that have not ended wait for each other; shared memory written before is then visible.
__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Address, in the cluster, of what lies at `at` in the shared memory of block `rank`.
__device__ inline u32 address_in(const void* at, int rank) {
    u32 found;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(shared_address(at)), "r"(rank));
    return found;
}
__device__ inline void load_from(u32 at, float (&x)[1]) {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x[0]) : "r"(at) : "memory");
}
__device__ inline void load_from(u32 at, float (&x)[4]) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(at)
                 : "memory");
}

// The tree sum over BLOCKS blocks of the cluster of WIDTH numbers at `at` in the shared memory of each.
template <int BLOCKS, int WIDTH>
__device__ inline void merge_from(const float* at, float (&sum)[WIDTH]) {
    float part[BLOCKS][WIDTH];
#pragma unroll
    for (int rank = 0; rank < BLOCKS; ++rank) load_from(address_in(at, rank), part[rank]);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        float each[BLOCKS];
#pragma unroll
        for (int rank = 0; rank < BLOCKS; ++rank) each[rank] = part[rank][i];
        sum[i] = tree_sum<BLOCKS>(each);
    }
}

}  // namespace rlk
