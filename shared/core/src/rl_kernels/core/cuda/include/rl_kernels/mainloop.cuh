// The mainloop of matrix products (sm_90a): a producer fills a ring of stages with operand tiles, and consumer
// warpgroups multiply them. Holds the ring, its producer and consumer side, the order of tiles, and ping-pong
// scheduling (Turns).
//
//   stage      64 BOX_COUNT terms of K of a tile's operands in shared memory, swizzled; DEPTH stages in the ring
//   consumer   a warpgroup with 64 rows of a tile in its accumulators; which thread holds what: wgmma.cuh
//
// Order of the sum: stages ascend in K, and so do the steps of 16 terms within a stage. So every element is one
// canonical chain, whatever the tile and the number of stages.
//
// A kernel defines its tiles, the initial accumulators and the epilogue. Its constants are macros (STAGES, BOXES,
// TILE_M, ...), so those names must not be used here.
#pragma once

#include <rl_kernels/tma.cuh>
#include <rl_kernels/warpgroup.cuh>
#include <rl_kernels/wgmma.cuh>

namespace rlk {

constexpr int WARPS_OF_GROUP = WARPGROUP / WARP;

// The stage of the ring that a role has reached, and the parity of its pass over the ring.
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

// Ping-pong: consumers take turns, for example two of one ring, each with tiles of its own: one multiplies while the
// other runs its epilogue, and the stages of their tiles alternate in the ring, tile by tile.
struct Turns {
    Barrier* barriers;
    int group, groups;
    // Consumer 0 has the first turn without an arrival: it first waits for the parity that a new barrier counts as
    // done.
    u32 parity;
    __device__ Turns(Barrier* barriers, int group, int groups = 2)
        : barriers(barriers), group(group), groups(groups), parity(group == 0) {}

    // By one thread, for a barrier of each consumer, before any other thread uses them.
    __device__ static void init(Barrier* barriers, int groups = 2) {
        for (int i = 0; i < groups; ++i) barriers[i].init(WARPS_OF_GROUP);
    }
    // Before the first stage of a tile.
    __device__ void wait() {
        barriers[group].wait(parity);
        parity ^= 1;
    }
    // After the last stage of a tile was full. All earlier phases of the ring are then complete, so the next consumer
    // may wait for its own stages.
    __device__ void pass() const {
        if (threadIdx.x % WARP == 0) barriers[group + 1 == groups ? 0 : group + 1].arrive();
    }
};

// Row and column of tile number `index` in a grid of down x across tiles. Tiles go in panels of `group` rows of tiles,
// each walked column by column, so that the operands that neighboring tiles share stay in the L2 cache.
struct Place {
    int row, column;
};
__device__ inline Place place_of(int index, int down, int across, int group) {
    const int panel = group * across, first = index / panel * group;
    const int height = min(down - first, group), within = index % panel;
    return {first + within % height, within / height};
}

// Starts the copy of 64 terms of K of ROWS operand rows: one box if K_MAJOR, one box per piece of 64 rows if MN_MAJOR.
// ONCE: no other tile reads them.
template <Major MAJOR, int ROWS, bool ONCE = false>
__device__ inline void load_tile(char* target, const TensorMap& map, Barrier& full, int row, int k) {
    if constexpr (MAJOR == K_MAJOR) {
        load_box<ONCE>(target, map, row, k, full);
    } else {
#pragma unroll
        for (int i = 0; i * SPAN < ROWS; ++i) load_box<ONCE>(target + i * PIECE, map, k, row + i * SPAN, full);
    }
}

// Bytes of 64 terms of K of `rows` operand rows. An MN_MAJOR tile is padded to whole pieces.
__device__ constexpr int tile_bytes(Major major, int rows) {
    return major == MN_MAJOR ? (rows + SPAN - 1) / SPAN * PIECE : rows * SWIZZLE;
}

// Row and column of the first of a thread's accumulators, in its warpgroup's 64 rows (wgmma.cuh).
struct Fragment {
    int row, column;
    __device__ Fragment() {
        const int thread = threadIdx.x % WARPGROUP;
        row = thread / WARP * 16 + thread % WARP / 4;
        column = 2 * (thread % 4);
    }
};

// A warp releases a stage that it no longer reads. The producer refills it once all warps of its consumers have
// released it.
__device__ inline void give_back(Barrier& empty) {
    if (threadIdx.x % WARP == 0) empty.arrive();
}

// The ring of DEPTH stages, at the start of a block's dynamic shared memory. A stage holds BOX_COUNT boxes of operand
// a, each with 64 terms of K of A_ROWS rows, then BOX_COUNT boxes of operand b, of B_ROWS rows. T: type of the numbers.
// A, B: layout of each operand.
template <class T, Major A, Major B, int A_ROWS, int B_ROWS, int BOX_COUNT, int DEPTH>
struct RingOf {
    using Slot = rlk::Slot<DEPTH>;
    // Terms of K in a stage.
    static constexpr int INNER = BOX_COUNT * SPAN;
    // Bytes of one box of each operand, and of a stage.
    static constexpr int A_BYTES = tile_bytes(A, A_ROWS), B_BYTES = tile_bytes(B, B_ROWS);
    static constexpr int BYTES = BOX_COUNT * (A_BYTES + B_BYTES);
    static_assert(A_BYTES % ATOM == 0 && B_BYTES % ATOM == 0, "what follows begins at a whole pattern of the swizzle");

    char* stages;
    Barrier *full, *empty, *turns;

    __device__ RingOf() {
        extern __shared__ char memory[];
        __shared__ Barrier barriers[2 * DEPTH + 2];
        // The swizzle repeats every 1024 bytes, so the stages are aligned to that.
        stages = memory + (-shared_address(memory) & (ATOM - 1));
        full = barriers, empty = full + DEPTH, turns = empty + DEPTH;
    }
    __device__ char* a(int stage, int box = 0) const { return stages + stage * BYTES + box * A_BYTES; }
    __device__ char* b(int stage, int box = 0) const { return a(stage, BOX_COUNT) + box * B_BYTES; }
    __device__ char* end() const { return a(DEPTH); }

    // By all threads of the block, before anything else. A stage is full after `arrivals` arrivals of the producer and
    // all bytes that they announced. It is empty after all warps of `consumers` consumers have released it.
    __device__ void open(int arrivals, int consumers) const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < DEPTH; ++i) full[i].init(arrivals), empty[i].init(consumers * WARPS_OF_GROUP);
            Turns::init(turns);
            fence_init();
        }
        __syncthreads();
    }

    __device__ static int stages_of(int inner) { return (inner + INNER - 1) / INNER; }

    // Producer: calls fill(stage, k) for each of a tile's `count` stages, once that stage of the ring is empty.
    template <class F>
    __device__ void produce(Slot& slot, int count, F fill) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i, slot.advance()) {
            empty[slot.stage].wait(slot.parity ^ 1);
            fill(slot.stage, i * INNER);
        }
    }

    // Producer, one thread: starts the copies of a stage, for the operands with COPY_A and COPY_B. ONCE: no other tile
    // reads these rows of a.
    template <bool COPY_A = true, bool COPY_B = true, bool ONCE = false>
    __device__ void copy(int stage, int k, const TensorMap& map_a, int row, const TensorMap& map_b, int column) const {
        full[stage].arrive_expecting(BOX_COUNT * ((COPY_A ? A_BYTES : 0) + (COPY_B ? B_BYTES : 0)));
#pragma unroll
        for (int box = 0; box < BOX_COUNT; ++box) {
            const int at = k + box * SPAN;
            if constexpr (COPY_A) load_tile<A, A_ROWS, ONCE>(a(stage, box), map_a, full[stage], row, at);
            if constexpr (COPY_B) load_tile<B, B_ROWS>(b(stage, box), map_b, full[stage], column, at);
        }
    }

    // Consumer: issues the products of a full stage as one group, ascending in K. `part`: which 64 rows of a.
    template <int COUNT>
    __device__ void multiply(int stage, int part, float (&d)[COUNT]) const {
        const u64 left = operand_at<A>(a(stage) + part * PIECE), right = operand_at<B>(b(stage));
        hold(d);
        fence_products();
#pragma unroll
        for (int box = 0; box < BOX_COUNT; ++box)
#pragma unroll
            for (int step = 0; step < SPAN / MMA_K; ++step)
                Products<2 * COUNT>::template add<T, A, B>(d, advanced<A>(moved(left, box * A_BYTES), step),
                                                           advanced<B>(moved(right, box * B_BYTES), step));
        commit_products();
        hold(d);
    }

    // Consumer: adds the first `count` steps of 16 terms of one stage to d, and releases it.
    template <int COUNT>
    __device__ void steps(Slot& slot, int count, int part, float (&d)[COUNT]) const {
        full[slot.stage].wait(slot.parity);
        const u64 left = operand_at<A>(a(slot.stage) + part * PIECE), right = operand_at<B>(b(slot.stage));
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int box = i / (SPAN / MMA_K), step = i % (SPAN / MMA_K);
            hold(d);
            fence_products();
            Products<2 * COUNT>::template add<T, A, B>(d, advanced<A>(moved(left, box * A_BYTES), step),
                                                       advanced<B>(moved(right, box * B_BYTES), step));
            commit_products();
            products_done<0>();
            hold(d);
        }
        give_back(empty[slot.stage]);
        slot.advance();
    }

    // Consumer: releases a tile's `count` stages unread.
    __device__ void leave(Slot& slot, int count) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i, slot.advance()) {
            full[slot.stage].wait(slot.parity);
            give_back(empty[slot.stage]);
        }
    }

    // Consumer: adds the chain of a tile's `count` stages to d. A stage is released when its products are done, while
    // those of the next stage are in flight. TURNS: called in this consumer's turn, which it passes on. FENCED: threads
    // have copied into the stages, not TMA alone.
    template <bool TURNS, bool FENCED = false, int COUNT>
    __device__ void mainloop(Slot& slot, int count, int part, const Turns& turns, float (&d)[COUNT]) const {
        int before = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i, slot.advance()) {
            full[slot.stage].wait(slot.parity);
            if constexpr (FENCED) fence_copies();
            multiply(slot.stage, part, d);
            products_done<1>();
            if (i) give_back(empty[before]);
            before = slot.stage;
        }
        if constexpr (TURNS) turns.pass();
        products_done<0>();
        hold(d);
        if (count) give_back(empty[before]);
    }
};

}  // namespace rlk
