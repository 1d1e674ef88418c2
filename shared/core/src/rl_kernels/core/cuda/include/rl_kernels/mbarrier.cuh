// mbarrier objects in shared memory: threads wait for arrivals and for the bytes of asynchronous copies (sm_90 and
// later).
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

// A phase completes when all arrivals have been made and all announced bytes have been copied.
struct Barrier {
    u64 bits;

    // By one thread, before any other uses the barrier; then call fence_init and __syncthreads.
    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
    }

    // Arrive, and announce bytes that copies still have to deliver in this phase; may be 0.
    __device__ void arrive_expecting(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                     : "memory");
    }

    // Arrive without announcing bytes. The thread's earlier reads and writes happen before the phase completes; for
    // those that an asynchronous copy must not overtake, call fence_copies first.
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Arrive once all copies of chunks and words (ptx.cuh) that this thread has started are done. It returns at once, and
    // counts as one of the arrivals.
    __device__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Wait until the phase of this parity is complete; the first phase has parity 0. The copied data is then visible.
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

// Makes initialized barriers visible to asynchronous copies.
__device__ inline void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's earlier reads and writes of shared memory before later accesses by copies and wgmma (the async
// proxy) that start behind a barrier. An arrival alone does not: it may overtake reads that were issued before it.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace rlk
