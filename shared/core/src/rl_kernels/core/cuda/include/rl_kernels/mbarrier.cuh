// Barriers in shared memory on which threads wait for the bytes of asynchronous copies (sm_90 and later).
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

// A barrier completes a phase when its arrivals and all bytes that they announced have come.
struct Barrier {
    u64 bits;

    // One thread does it, before any other touches the barrier; fence_init and a block barrier come after.
    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
    }

    // Arrive, and announce bytes that are still to come in this phase; none is allowed.
    __device__ void arrive_expecting(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                     : "memory");
    }

    // Arrive without bytes. What the thread has read and written before is done when the phase completes.
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Wait until the phase of this parity is complete: 0 is the first. What the copies wrote is then visible.
    __device__ void wait(u32 parity) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}" ::"r"(shared_address(this)),
            "r"(parity)
            : "memory");
    }
};

// Makes initialised barriers visible to asynchronous copies.
__device__ inline void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders what this thread read and wrote in shared memory before what copies and wgmma do there that are started later,
// behind a barrier. An arrival alone does not: it may overtake reads that were issued before it.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace rlk
