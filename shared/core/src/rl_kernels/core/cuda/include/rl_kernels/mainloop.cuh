// The mainloop of the matrix products (sm_90a): a producer fills a ring of stages with operands, consumer warpgroups
// multiply them. The ring, both sides of it, the order of tiles, and turns with tiles.
//
// A kernel says which tiles there are, what its sums begin with, and what becomes of them (the epilogue). Its constants
// are macros (STAGES, BOXES, TILE_M, ...), so no name here is one of theirs.
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

// Two consumers of one ring take turns with tiles of their own: one multiplies while the other does what comes after. In
// the ring the stages of their tiles follow each other.
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

// Row and column of tile number `index` of down x across, where `group` rows of tiles at a time are gone through column
// by column: what those share stays in the L2 cache.
struct Place {
    int row, column;
};
__device__ inline Place place_of(int index, int down, int across, int group) {
    const int panel = group * across, first = index / panel * group;
    const int height = min(down - first, group), within = index % panel;
    return {first + within % height, within / height};
}

// Starts the copy of 64 terms of K of an operand's tile of ROWS rows: at once, or MN_MAJOR in pieces of 64 rows. ONCE:
// no other tile reads them.
template <Major MAJOR, int ROWS, bool ONCE = false>
__device__ inline void load_tile(char* target, const TensorMap& map, Barrier& full, int row, int k) {
    if constexpr (MAJOR == K_MAJOR) {
        load_box<ONCE>(target, map, row, k, full);
    } else {
#pragma unroll
        for (int i = 0; i * SPAN < ROWS; ++i) load_box<ONCE>(target + i * PIECE, map, k, row + i * SPAN, full);
    }
}

// Bytes of 64 terms of K of so many rows of an operand. Pieces of an MN_MAJOR tile are whole, whatever of the last one
// is needed.
__device__ constexpr int tile_bytes(Major major, int rows) {
    return major == MN_MAJOR ? (rows + SPAN - 1) / SPAN * PIECE : rows * SWIZZLE;
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

// A warp has read a stage, or its products are done: the producer may fill it again when all have said so.
__device__ inline void give_back(Barrier& empty) {
    if (threadIdx.x % WARP == 0) empty.arrive();
}

// The ring of DEPTH stages, with which a block's dynamic shared memory begins. A stage holds BOX_COUNT times 64 terms of K
// of A_ROWS rows of operand a, then those of B_ROWS rows of operand b. T is the type of the numbers; A and B say how each
// operand lies.
template <class T, Major A, Major B, int A_ROWS, int B_ROWS, int BOX_COUNT, int DEPTH>
struct RingOf {
    using Slot = rlk::Slot<DEPTH>;
    // Terms of K in a stage.
    static constexpr int INNER = BOX_COUNT * SPAN;
    // Of a box of 64 terms of K.
    static constexpr int A_BYTES = tile_bytes(A, A_ROWS), B_BYTES = tile_bytes(B, B_ROWS);
    static constexpr int BYTES = BOX_COUNT * (A_BYTES + B_BYTES);
    static_assert(A_BYTES % ATOM == 0 && B_BYTES % ATOM == 0, "what follows begins at a whole pattern of the swizzle");

    char* stages;
    Barrier *full, *empty, *turns;

    __device__ RingOf() {
        extern __shared__ char memory[];
        __shared__ Barrier barriers[2 * DEPTH + 2];
        // The swizzle begins anew at multiples of 1024 bytes.
        stages = memory + (-shared_address(memory) & (ATOM - 1));
        full = barriers, empty = full + DEPTH, turns = empty + DEPTH;
    }
    __device__ char* a(int stage, int box = 0) const { return stages + stage * BYTES + box * A_BYTES; }
    __device__ char* b(int stage, int box = 0) const { return a(stage, BOX_COUNT) + box * B_BYTES; }
    __device__ char* end() const { return a(DEPTH); }

    // By all threads, before their work. A stage is full when so many arrivals of the producer and all bytes have come,
    // and empty when so many consumers have given it back.
    __device__ void open(int arrivals, int consumers) const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < DEPTH; ++i) full[i].init(arrivals), empty[i].init(consumers * WARPS_OF_GROUP);
            Turns::init(turns);
            fence_init();
        }
        __syncthreads();
    }

    __device__ static int stages_of(int inner) { return (inner + INNER - 1) / INNER; }

    // Producer: calls fill(stage, k) for each of a tile's `count` stages, as soon as that stage is empty.
    template <class F>
    __device__ void produce(Slot& slot, int count, F fill) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i, slot.advance()) {
            empty[slot.stage].wait(slot.parity ^ 1);
            fill(slot.stage, i * INNER);
        }
    }

    // Producer, one thread: starts the copies of a stage; of an operand that is not copied, none. ONCE: load_tile.
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

    // Consumer: issues the products of a full stage, ascending in K, as one group; `part` is which 64 rows of a.
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

    // Consumer: the whole chain of a tile of `count` stages, added to what d holds. A stage is given back when its
    // products are done, while those of the next one are under way. TURNS: it is this consumer's turn, which it passes on.
    template <bool TURNS, int COUNT>
    __device__ void mainloop(Slot& slot, int count, int part, const Turns& turns, float (&d)[COUNT]) const {
        int before = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i, slot.advance()) {
            full[slot.stage].wait(slot.parity);
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
