// What both kernels of experts share: number types, copies of rows by threads, and stores of rows.
#pragma once

#include <rl_kernels/boxes.cuh>

namespace rlk {

// The number type of a DTYPE or OUT: 0 FP32, 1 BF16, 2 FP16.
template <int CODE>
struct Numbers {
    using Type = FP32;
};
template <>
struct Numbers<1> {
    using Type = BF16;
};
template <>
struct Numbers<2> {
    using Type = FP16;
};

// A warpgroup shares boxes of 128-byte rows: thread t has chunk t % 8 of the rows t / 8, t / 8 + 16, ...
struct Share {
    static constexpr int CHUNKS = SWIZZLE / CHUNK, APART = WARPGROUP / CHUNKS;
    int row, chunk;
    // Offset of the thread's chunk of its first row; those of the next rows follow APART rows apart.
    u32 at;
    __device__ Share() {
        const int thread = threadIdx.x % WARPGROUP;
        row = thread / CHUNKS, chunk = thread % CHUNKS;
        at = swizzled<SWIZZLE>(thread * CHUNK);
    }
};

// Stores a consumer's 64 rows, 128 bytes of each at a time, through two boxes of its own.
struct Stores {
    static constexpr int ROWS = MMA_M / Share::APART;
    Share share;
    char* boxes;
    int id, turn;
    // `id`: the consumer's named barrier (sync_threads).
    __device__ Stores(char* boxes, int id) : boxes(boxes), id(id), turn(0) {}

    // Calls fill(box), and stores the box: numbers of type T from `column` on, those before `edge`. row_at(i): the address
    // of column 0 of row share.row + i APART, or null, which is stored nowhere.
    template <class T, class Fill, class At>
    __device__ void store(int column, int edge, Fill fill, At row_at) {
        if (column >= edge) return;
        char* box = boxes + turn * PIECE;
        turn ^= 1;
        fill(box);
        // Two boxes take turns: after this, all have read what the box after this one still holds.
        sync_threads(id, WARPGROUP);
        const int first = column + share.chunk * PER_CHUNK<T>;
        if (first >= edge) return;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (char* row = row_at(i))
                *reinterpret_cast<Chunk*>(row + first * T::SIZE) =
                    *reinterpret_cast<const Chunk*>(box + share.at + i * Share::APART * SWIZZLE);
    }
};

}  // namespace rlk
