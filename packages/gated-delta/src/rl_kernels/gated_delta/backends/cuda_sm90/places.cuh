// The places of sequences and chunks. A slot is the place of a chunk in the tensors that `prepare` writes; a chunk of a
// packed sequence has a slot of its own even if a cache adds a part of a chunk, so slots may be empty.
#pragma once

#include "order.cuh"

namespace rlk {

// tokens: T; chunks: slots of a sequence of a batch; bounds, starts: int64 if wide, else int32. Pointers may be null.
struct Places {
    const void* bounds;
    const void* starts;
    const int* lengths;
    int bounds_wide, starts_wide, tokens, chunks, sequences, filler;
};

// batch, first: the first token; count: tokens; opened: rows of the cache before them; slot: that of the first chunk.
struct Sequence {
    int batch, first, count, opened, slot;
    __device__ int chunks() const { return count > 0 ? (opened + count + ROWS - 1) / ROWS : 0; }
};

// An integer of bounds or starts, clamped to 0 .. most.
__device__ inline int clamped(const void* numbers, int wide, int index, int most) {
    const i64 value = wide ? static_cast<const i64*>(numbers)[index] : static_cast<const int*>(numbers)[index];
    return static_cast<int>(min(max(value, i64(0)), i64(most)));
}

__device__ inline Sequence sequence_at(const Places& p, int s) {
    const int opened = p.lengths ? static_cast<int>(static_cast<u32>(p.lengths[s]) % ROWS) : 0;
    if (p.bounds) {
        const int first = clamped(p.bounds, p.bounds_wide, s, p.tokens);
        const int end = clamped(p.bounds, p.bounds_wide, s + 1, p.tokens);
        return {0, first, max(end - first, 0), opened, first / ROWS + 2 * s};
    }
    const int first = p.starts ? clamped(p.starts, p.starts_wide, s, p.tokens) : 0;
    return {s, first, p.tokens - first, opened, s * p.chunks};
}

// The sequence whose chunk has this slot.
__device__ inline int sequence_of(const Places& p, int slot) {
    if (!p.bounds) return slot / p.chunks;
    int low = 0, high = p.sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (clamped(p.bounds, p.bounds_wide, middle, p.tokens) / ROWS + 2 * middle <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// What `prepare` writes, and TMA copies as a whole. Tiles of 16-bit numbers are swizzled boxes of 64 rows of 128 bytes.
// Of a slot and key head: q, then k, two boxes each, for columns 0-63 and 64-127.
constexpr int BOX = 64 * 128, UNIT = 2 * BOX, UNITS = 2 * UNIT;
// Of a slot and value head: M, W (two boxes), exp(G), G.
constexpr int AT_W = BOX, AT_DECAY = AT_W + UNIT, AT_SUMS = AT_DECAY + 4 * ROWS, ITEM = AT_SUMS + 4 * ROWS;

// The offset of 16-byte chunk `chunk` (0-7) of a row in a swizzled box.
__device__ inline u32 chunk_at(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }

}  // namespace rlk
