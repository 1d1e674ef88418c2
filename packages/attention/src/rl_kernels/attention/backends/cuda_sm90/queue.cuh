// The tiles of persistent thread blocks: their order, and how each block gets its own. Neither changes a bit.
//
//   order      sections of pairs of a sequence and a KV head, as many as the L2 cache holds the operands of; in a section
//              the largest tiles first
//   draw       one warp of the producer draws a tile when it has copied what the one before needs: from a counter that all
//              thread blocks share, or in rounds; all others of the thread block read what it drew
#pragma once

#include "attention.cuh"

namespace rlk {

// A tile, or a part of one: its sequence and KV head, how many tiles of these come before it, and which part. No tile is
// left if b is negative.
struct alignas(16) Lot {
    int b, head, before, part;
    __device__ bool ends() const { return b < 0; }
};

struct Order {
    // Tiles of the longest sequence, parts of a tile, pairs of a section.
    int tiles, parts, section;

    __device__ int count(const Shape& p) const { return tiles * p.batch * p.kv_heads * parts; }
    __device__ Lot at(const Shape& p, int index) const {
        if (index >= count(p)) return {-1, 0, 0, 0};
        const int part = index % parts, tile = index / parts, whole = section * tiles;
        const int first = tile / whole * section, within = tile % whole;
        const int pairs = min(section, p.batch * p.kv_heads - first), pair = first + within % pairs;
        return {pair / p.kv_heads, pair % p.kv_heads, within / pairs, part};
    }
};

struct Queue {
    static constexpr int DEPTH = 2;
    Barrier *full, *empty;
    Lot* lots;

    __device__ Queue() {
        __shared__ Barrier barriers[2 * DEPTH];
        __shared__ Lot room[DEPTH];
        Barrier* first = barriers;
        // Else the compiler forms the address again at each use.
        asm volatile("" : "+l"(first));
        full = first, empty = first + DEPTH, lots = room;
    }
    // By one thread, before any other uses the queue. `readers`: warps that call `each`.
    __device__ void init(int readers) const {
        for (int i = 0; i < DEPTH; ++i) full[i].init(1), empty[i].init(readers);
    }

    // Calls f(lot) for each tile of the thread block; the lot is in shared memory.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        Slot<DEPTH> slot;
#pragma unroll 1
        while (true) {
            full[slot.stage].wait(slot.parity);
            const Lot& lot = lots[slot.stage];
            if (lot.ends()) return;
            f(lot);
            __syncwarp();
            give_back(empty[slot.stage]);
            slot.advance();
        }
    }

    // By one warp: draws tiles for which exists(lot), and calls f(lot) for each. `counter`: 0 before the kernel, or null
    // for rounds; every second round goes backwards, so that no thread block always has the larger tile.
    template <class X, class F>
    __device__ __forceinline__ void draw_each(const Shape& p, const Order& order, int* counter, X exists, F f) const {
        const int wide = static_cast<int>(gridDim.x), mine = static_cast<int>(blockIdx.x);
        const bool leads = threadIdx.x % WARP == 0;
        Slot<DEPTH> slot;
        int index = mine, round = 0;
#pragma unroll 1
        while (true) {
            const Lot lot = order.at(p, index);
            if (lot.ends() || exists(lot)) {
                empty[slot.stage].wait(slot.parity ^ 1);
                if (leads) lots[slot.stage] = lot, full[slot.stage].arrive();
                slot.advance();
                if (lot.ends()) return;
                f(lot);
            }
            if (counter) {
                if (leads) index = wide + atomicAdd(counter, 1);
                index = __shfl_sync(ALL, index, 0);
            } else {
                ++round;
                index = round * wide + (round % 2 ? wide - 1 - mine : mine);
            }
        }
    }
};

}  // namespace rlk
