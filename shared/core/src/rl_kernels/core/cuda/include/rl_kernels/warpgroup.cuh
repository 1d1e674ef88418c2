// Warps and warpgroups that have roles of their own in a block: which one this is, registers, barriers (sm_90a).
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

constexpr int WARPGROUP = 128;

// Which warp of its block this is. The compiler sees that all of a warp agree: in a branch by it, operands of wgmma and
// arguments of copies are worked out once for a warp, and not gathered from registers of a thread before each.
__device__ inline int warp_index() { return __shfl_sync(ALL, static_cast<int>(threadIdx.x) / WARP, 0); }

// True in one thread of a warp, all of which ask. The compiler sees that it is one, and starts a copy in one instruction.
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

// All threads of a warpgroup give registers back, or wait until they have that many: a multiple of 8. Only in a kernel
// with __launch_bounds__(threads, 1), each role in one branch of it.
template <int COUNT>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits for `threads` threads, whole warps, that come to barrier `id`, 1 to 15; 0 is that of __syncthreads.
__device__ inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace rlk
