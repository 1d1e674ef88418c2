// What kernels share in which a producer brings stages of operands and consumer warpgroups multiply them (sm_90a): the ring
// of stages, the order of tiles, turns with tiles, and the chain of a tile.
#pragma once

#include <rl_kernels/tma.cuh>
#include <rl_kernels/warpgroup.cuh>
#include <rl_kernels/wgmma.cuh>

namespace rlk {

constexpr int WARPS_OF_GROUP = WARPGROUP / WARP;

// Where in a ring of DEPTH stages a role is, and the parity of the phase that it waits for.
template <int DEPTH>
struct Slot {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == DEPTH) stage = 0, parity ^= 1;
    }
    __device__ void skip(int stages) {
        const int end = stage + stages;
        stage = end % DEPTH, parity ^= end / DEPTH & 1;
    }
};

// Two consumers of one ring take turns with tiles of their own: one multiplies while the other does what comes after. In the
// ring the stages of their tiles follow each other.
struct Turns {
    Barrier* barriers;
    int group;
    // The first turn is that of consumer 0, for which nobody has to arrive.
    u32 parity;
    __device__ Turns(Barrier* barriers, int group) : barriers(barriers), group(group), parity(group == 0) {}

    // One thread does it for two barriers, before any other touches them.
    __device__ static void init(Barrier* barriers) {
        for (int i = 0; i < 2; ++i) barriers[i].init(WARPS_OF_GROUP);
    }
    // Before the first stage of a tile.
    __device__ void wait() {
        barriers[group].wait(parity);
        parity ^= 1;
    }
    // After the last one has come: all phases of the ring before the other's are complete, so it may wait for its own.
    __device__ void pass() const {
        if (threadIdx.x % WARP == 0) barriers[1 - group].arrive();
    }
};

// Row and column of tile number `index` of down x across, where `group` rows of tiles at a time are gone through column by
// column: what those share stays in the L2 cache.
struct Place {
    int row, column;
};
__device__ inline Place place_of(int index, int down, int across, int group) {
    const int panel = group * across, first = index / panel * group;
    const int height = min(down - first, group), within = index % panel;
    return {first + within % height, within / height};
}

// Starts the copy of 64 terms of K of an operand's tile of ROWS rows: at once, or MN_MAJOR in pieces of 64 rows. ONCE: no
// other tile reads them.
template <Major MAJOR, int ROWS, bool ONCE = false>
__device__ inline void load_tile(char* target, const TensorMap& map, Barrier& full, int row, int k) {
    if constexpr (MAJOR == K_MAJOR) {
        load_box<ONCE>(target, map, row, k, full);
    } else {
#pragma unroll
        for (int i = 0; i * SPAN < ROWS; ++i) load_box<ONCE>(target + i * PIECE, map, k, row + i * SPAN, full);
    }
}

// Where the first number is that a thread holds of 64 rows of d (wgmma.cuh).
struct Fragment {
    int row, column;
    __device__ Fragment() {
        const int thread = threadIdx.x % WARPGROUP;
        row = thread / WARP * 16 + thread % WARP / 4;
        column = 2 * (thread % 4);
    }
};

// Issues the products of a stage that has come, of BOX_COUNT times 64 terms of K: ascending, as one group. `a` and `b` are where
// its boxes begin, A_BOX and B_BOX bytes apart.
template <class T, Major A, Major B, int BOX_COUNT, int A_BOX, int B_BOX, int COUNT>
__device__ inline void add_stage(float (&d)[COUNT], const void* a, const void* b) {
    const u64 left = operand_at<A>(a), right = operand_at<B>(b);
    hold(d);
    fence_products();
#pragma unroll
    for (int i = 0; i < BOX_COUNT; ++i)
#pragma unroll
        for (int step = 0; step < SPAN / MMA_K; ++step)
            Products<2 * COUNT>::template add<T, A, B>(d, advanced<A>(moved(left, i * A_BOX), step),
                                                       advanced<B>(moved(right, i * B_BOX), step));
    commit_products();
    hold(d);
}

// A warp has read a stage, or its products are done: the producer may fill it again when all have said so.
__device__ inline void give_back(Barrier& empty) {
    if (threadIdx.x % WARP == 0) empty.arrive();
}

}  // namespace rlk
