// Thread block clusters (sm_90): a barrier of all their blocks, and loads from the shared memory of each.
#pragma once

#include <rl_kernels/mbarrier.cuh>

namespace rlk {

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
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(shared_address(at)), "r"(rank));
    return found;
}
// Loads in the order of sync_cluster and other loads like it; other accesses of memory may pass.
__device__ inline void load_from(u32 at, float (&x)[4]) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(at));
}

}  // namespace rlk
