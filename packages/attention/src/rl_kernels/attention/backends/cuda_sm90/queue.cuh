// The tiles of persistent thread blocks: their order, and how each block gets its own. Neither changes a bit.
//
//   order      section after section; a section has as many pairs (sequence, KV head) as fit into the L2 cache, and in it
//              the largest tiles come first
//   claim      one warp of the producer claims the next tile (draw_each) when it has issued all copies of a tile: from a
//              counter that all thread blocks share, or in rounds; the other warps read the claimed tile from a queue
#pragma once

#include "attention.cuh"

namespace rlk {

// Number of tiles of the longest sequence, of parts of a tile, and of pairs (sequence, KV head) in a section.
struct Order {
    int tiles, parts, section;
    __device__ int count(const Shape& p) const { return tiles * parts * p.batch * p.kv_heads; }
};

// Decodes a tile's `index`: sequence, KV head, number of tiles before it in this pair, and part of the tile.
struct Lot {
    int b, head, before, part;
    __device__ Lot(const Shape& p, const Order& order, int index) {
        part = index % order.parts, index /= order.parts;
        const int whole = order.section * order.tiles, first = index / whole * order.section;
        const int pairs = min(order.section, p.batch * p.kv_heads - first);
        index %= whole, before = index / pairs;
        const int pair = first + index % pairs;
        b = pair / p.kv_heads, head = pair % p.kv_heads;
    }
};

// T: a tile, made from (Args, Lot), with exists(Args) and its sequence b.
template <class T>
struct Queue {
    static constexpr int DEPTH = 2;
    Barrier *full, *empty;
    T* tiles;

    __device__ Queue() {
        __shared__ Barrier barriers[2 * DEPTH];
        __shared__ alignas(T) char room[DEPTH * sizeof(T)];
        Barrier* first = barriers;
        // Otherwise the compiler recomputes the address at each use.
        asm volatile("" : "+l"(first));
        full = first, empty = first + DEPTH, tiles = reinterpret_cast<T*>(room);
    }
    // By one thread, before other threads use the queue. `readers`: number of warps that call `each`.
    __device__ void init(int readers) const {
        for (int i = 0; i < DEPTH; ++i) full[i].init(1), empty[i].init(readers * WARP);
    }

    // Calls f(tile) for each tile of the thread block; the tile is in shared memory.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        Slot<DEPTH> slot;
#pragma unroll 1
        while (true) {
            full[slot.stage].wait(slot.parity);
            const T& t = tiles[slot.stage];
            if (t.b < 0) return;
            f(t);
            // Each lane: racecheck does not see that one lane's arrival orders the reads of its warp.
            empty[slot.stage].arrive();
            slot.advance();
        }
    }

    // By one warp: claims tiles that exist, and calls f(tile) for each. `counter`: 0 before the kernel, or null for rounds;
    // every second round goes backwards, so that no thread block always has the larger tile.
    template <class Args, class F>
    __device__ __forceinline__ void draw_each(const Args& p, const Order& order, int* counter, F f) const {
        const int wide = static_cast<int>(gridDim.x), mine = static_cast<int>(blockIdx.x);
        const int count = order.count(p);
        const bool leads = threadIdx.x % WARP == 0;
        Slot<DEPTH> slot;
        int index = mine, round = 0;
#pragma unroll 1
        while (true) {
            const bool ends = index >= count;
            T t(p, Lot(p, order, ends ? 0 : index));
            if (ends || t.exists(p)) {
                empty[slot.stage].wait(slot.parity ^ 1);
                if (ends) t.b = -1;
                if (leads) tiles[slot.stage] = t, full[slot.stage].arrive();
                if (ends) return;
                slot.advance();
                f(t);
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
