// Warp specialization (sm_90a): the index of a warp, one elected thread, registers of a role, named barriers.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

constexpr int WARPGROUP = 128;

// Index of this warp in its block. The shuffle tells the compiler that it is uniform in a warp: in a branch on it,
// wgmma descriptors and arguments of copies are computed once per warp, and not read from a thread's registers before
// each use.
__device__ inline int warp_index() { return __shfl_sync(ALL, static_cast<int>(threadIdx.x) / WARP, 0); }

// True in one thread of a warp; all its threads call it. The compiler knows that it is one thread, and starts a copy
// with one instruction.
__device__ inline bool elected() {
    u32 one;
    asm volatile(
        "{\n"
        ".reg .pred is;\n"
        "elect.sync _|is, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, is;\n"
        "}" : "=r"(one));
    return one;
}

// setmaxnreg: all threads of a warpgroup release registers down to COUNT, or wait until they have COUNT, a multiple of
// 8. Only in a kernel with __launch_bounds__(threads, 1), where each role is one branch.
template <int COUNT>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits at named barrier `id`, 1 to 15, until `threads` threads (whole warps) have arrived; 0 is that of __syncthreads.
__device__ inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace rlk
