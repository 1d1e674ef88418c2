// Products of a warpgroup that a kernel orders itself (sm_90a), where one product needs the result of another: each
// call issues one group, which products_done (wgmma.cuh) waits for.
//
// Order of the sum: 16 terms a step, ascending.
#pragma once

#include <rl_kernels/wgmma.cuh>

namespace rlk {

// The operand, formed here and not later.
__device__ inline u64 formed(u64 operand) {
    asm volatile("" : "+l"(operand));
    return operand;
}

// Issues d[64 x N] = a b^T over INNER terms. Both are K_MAJOR tiles, 64 terms a box: a is 64 rows of boxes with A_ROWS
// rows, b all N rows of its boxes. They are given as descriptors (operand_at), or as addresses.
template <class T, int N, int INNER, int A_ROWS>
__device__ inline void issue_rows(u64 left, u64 right, float (&d)[N / 2]) {
    hold(d);
    fence_products();
#pragma unroll
    for (int step = 0; step < INNER / MMA_K; ++step) {
        const int box = step * MMA_K / SPAN, within = step % (SPAN / MMA_K);
        const u64 x = advanced<K_MAJOR>(moved(left, box * A_ROWS * SWIZZLE), within);
        const u64 y = advanced<K_MAJOR>(moved(right, box * N * SWIZZLE), within);
        if (step == 0)
            Products<N>::template add<T, K_MAJOR, K_MAJOR, false>(d, x, y);
        else
            Products<N>::template add<T, K_MAJOR, K_MAJOR>(d, x, y);
    }
    commit_products();
    hold(d);
}

template <class T, int N, int INNER, int A_ROWS>
__device__ inline void issue_rows(const char* a, const char* b, float (&d)[N / 2]) {
    issue_rows<T, N, INNER, A_ROWS>(operand_at<K_MAJOR>(a), operand_at<K_MAJOR>(b), d);
}

// Issues d[64 x N] += a b over 16 STEPS terms: a in registers, b an MN_MAJOR tile, whose boxes of 64 columns have 16
// STEPS rows. a must be kept (`keep`) until the product is done.
template <class T, int N, int STEPS>
__device__ inline void issue_words(const u32 (&a)[STEPS][4], const char* b, float (&d)[N / 2]) {
    const u64 right = operand_at<MN_MAJOR, STEPS * MMA_K * SWIZZLE>(b);
    hold(d);
    fence_products();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        Products<N>::template add<T, MN_MAJOR>(d, a[step], advanced<MN_MAJOR>(right, step));
    commit_products();
    hold(d);
}

// Issues d[64 x N] = a b^T over 16 STEPS terms, or d += a b^T if ADDS: a in registers, b a K_MAJOR tile of N rows, 64
// terms a box. a must be kept (`keep`) until the product is done.
template <class T, int N, bool ADDS, int STEPS>
__device__ inline void issue_words_rows(const u32 (&a)[STEPS][4], const char* b, float (&d)[N / 2]) {
    const u64 right = operand_at<K_MAJOR>(b);
    hold(d);
    fence_products();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int box = step * MMA_K / SPAN, within = step % (SPAN / MMA_K);
        const u64 at = advanced<K_MAJOR>(moved(right, box * N * SWIZZLE), within);
        if (step == 0 && !ADDS)
            Products<N>::template add<T, K_MAJOR, false>(d, a[step], at);
        else
            Products<N>::template add<T, K_MAJOR>(d, a[step], at);
    }
    commit_products();
    hold(d);
}

// After products_done: until here the words were read.
template <int STEPS>
__device__ inline void keep(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) hold(a[step]);
}

}  // namespace rlk
