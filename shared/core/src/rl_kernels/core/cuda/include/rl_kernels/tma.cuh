// TMA copies (sm_90 and later) of boxes of a matrix that a tensor map describes.
#pragma once

#include <rl_kernels/mbarrier.cuh>

namespace rlk {

// L2 cache policy for data that is read once: evict it first.
__device__ inline u64 evicted_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// A TMA descriptor, encoded by core's tensor_map.py. A kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Prefetches a descriptor before its first use.
__device__ inline void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread starts the copy of the box whose first element is at (row, column) to shared memory. Elements outside the
// matrix are filled with 0, and their bytes count like all others. Targets are aligned to 128 bytes, with the 128-byte
// swizzle to 1024. ONCE: no other copy reads this box, so the L2 cache evicts it first.
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

// The same for a map of four dims, [z, y, row, column].
__device__ inline void load_box(void* target, const TensorMap& map, int z, int y, int row, int column,
                                Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(shared_address(target)),
        "l"(&map), "r"(column), "r"(row), "r"(y), "r"(z), "r"(shared_address(&barrier))
        : "memory");
}

// One thread starts the copy of contiguous bytes to shared memory; addresses and size are multiples of 16.
__device__ inline void load_bytes(void* target, const void* source, int bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

// One thread starts the copy of a box from shared to global memory; elements outside the matrix are not written. Each
// thread that wrote to the box must first call fence_copies, and a barrier must order that before this call.
__device__ inline void store_box(const TensorMap& map, int row, int column, const void* source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(shared_address(source))
                 : "memory");
}

// The same for contiguous bytes; addresses and size are multiples of 16.
__device__ inline void store_bytes(void* target, const void* source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared_address(source)), "r"(bytes)
                 : "memory");
}

// Closes a group of this thread's stores. stores_read waits until TMA has read the boxes of all but the last PENDING
// groups.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// The offset in a box at which the swizzle of TMA and wgmma puts the byte at `offset`. SPAN: swizzle width in bytes,
// which is the length of a row of the box.
template <int SPAN>
__device__ inline u32 swizzled(u32 offset) {
    static_assert(SPAN == 32 || SPAN == 64 || SPAN == 128, "the swizzles that there are");
    return offset ^ (((offset >> 7) & (SPAN / 16 - 1)) << 4);
}

}  // namespace rlk
