// Copies by the copy engine (sm_90 and later): of bytes, and of boxes of a matrix that a tensor map describes.
#pragma once

#include <rl_kernels/mbarrier.cuh>

namespace rlk {

// For what is read once: the L2 cache gives it up before anything else.
__device__ inline u64 evicted_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// One thread starts a copy from global to shared memory of what is read once; addresses and bytes are multiples of 16,
// bytes is not 0. The barrier counts the bytes. Reads that other threads made of the target must be ordered before, as by
// __syncwarp.
__device__ inline void copy_once(void* target, const void* source, u32 bytes, Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(&barrier)), "l"(evicted_first())
        : "memory");
}

// What core's tensor_map encodes; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Brings a map near before it is used.
__device__ inline void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread starts the copy of the box whose first element is at (row, column) into shared memory. Elements beyond the
// edges come as 0, and count as bytes like all others. Targets are at multiples of 128 bytes, those of the 128-byte
// swizzle at multiples of 1024. ONCE: nothing else reads it.
template <bool ONCE = false>
__device__ inline void load_box(void* target, const TensorMap& map, int row, int column, Barrier& barrier) {
    if constexpr (ONCE) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
            "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(target)),
            "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)), "l"(evicted_first())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                shared_address(target)),
            "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
            : "memory");
    }
}

// One thread starts the copy of a box out of shared memory; elements beyond the edges are not written. What other threads
// wrote there must be fenced (fence_copies) by each of them and ordered before, as by a barrier.
__device__ inline void store_box(const TensorMap& map, int row, int column, const void* source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(shared_address(source))
                 : "memory");
}

// Closes a group of the thread's stores; stores_read waits until all but the last PENDING groups have read their source.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Where the swizzle of TMA and wgmma puts the byte at this offset of a box; SPAN is its bytes, the length of a row.
template <int SPAN>
__device__ inline u32 swizzled(u32 offset) {
    static_assert(SPAN == 32 || SPAN == 64 || SPAN == 128, "the swizzles that there are");
    return offset ^ (((offset >> 7) & (SPAN / 16 - 1)) << 4);
}

}  // namespace rlk
