// Bulk copies by the copy engine (sm_90 and later).
#pragma once

#include <rl_kernels/mbarrier.cuh>

namespace rlk {

// One thread starts a copy from global to shared memory of what is read once; addresses and bytes are multiples of 16,
// bytes is not 0. The barrier counts the bytes. Reads that other threads made of the target must be ordered before, as by
// __syncwarp.
__device__ inline void copy_once(void* target, const void* source, u32 bytes, Barrier& barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
        "}" ::"r"(shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

}  // namespace rlk
