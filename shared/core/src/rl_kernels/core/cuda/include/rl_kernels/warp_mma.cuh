// Products of a warp (sm_80 and later): mma.sync of 16 x 16 by 16 x 8 numbers of 16 bits, and loads of its operands from
// shared memory.
//
//   a          16 rows of 16 terms of K: four 8 x 8 matrices; rows 0-7, rows 8-15, then the same of the next 8 terms
//   b          8 columns of 16 terms of K: two matrices of 8 columns and 8 terms
//   d          of lane l: row l / 4, columns 2 (l % 4) and the next one; then row 8 + l / 4
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

// Loads four 8 x 8 matrices, or two: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(u32 (&word)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(at));
}
__device__ inline void load_matrices(u32 (&word)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(at));
}

// Loads four 8 x 8 matrices, each transposed; addresses as above.
__device__ inline void load_transposed(u32 (&word)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(at));
}

// Adds the product a b of 16 terms to d in FP32. T: BF16 or FP16.
template <class T>
__device__ inline void add_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T::LEAST == BF16::LEAST)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace rlk
