// Epilogue store (sm_90a): a warpgroup's 64 x COLUMNS accumulators go through boxes in shared memory to global memory.
//
//   box        a TMA box: at most 64 rows of at most 128 bytes, swizzled; TMA writes it to global memory
//   two boxes  of each warpgroup: one is filled while TMA still reads the other
//   threads    each writes the accumulators that it holds (wgmma.cuh), by stmatrix if the output has 16 bits
//
// There are no sums here: each accumulator is converted to the output's type once.
#pragma once

#include <rl_kernels/mainloop.cuh>

namespace rlk {

// stmatrix: stores four 8 x 8 matrices of 16-bit numbers to shared memory. Lane l gives the address of one row, number
// l % 8, of matrix l / 8; if TRANSPOSED, of a column, which is stored as a row.
template <bool TRANSPOSED>
__device__ inline void store_matrices(void* at, const u32 (&word)[4]) {
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
}

// The largest swizzle width that divides BYTES.
template <int BYTES>
constexpr int WIDEST = BYTES % 128 == 0 ? 128 : BYTES % 64 == 0 ? 64 : 32;

// Stores a tile of 64 x COLUMNS accumulators to an output of type T; if TRANSPOSED, to an output that is held as its
// transpose.
template <class T, int COLUMNS, bool TRANSPOSED>
struct Outgoing {
    static_assert(COLUMNS % 16 == 0, "two 8 x 8 matrices side by side");
    static_assert(!TRANSPOSED || T::SIZE == 2, "64 rows of the tile make a row of a transposed box");
    // WIDTH: columns of the tile in a box; divides COLUMNS. ROW: bytes of a box's row. BOX: room for a box, in bytes.
    static constexpr int WIDTH = TRANSPOSED ? WIDEST<2 * COLUMNS> / 2 : WIDEST<COLUMNS * T::SIZE> / T::SIZE;
    static constexpr int ROW = TRANSPOSED ? SWIZZLE : WIDTH * T::SIZE;
    static constexpr int BOX = MMA_M * SWIZZLE, BYTES = 2 * BOX;
    using Sums = float[COLUMNS / 2];

    // Writes the tile's columns first .. first + WIDTH - 1 to a box.
    __device__ static void fill(char* box, int first, const Sums& d) {
        if constexpr (T::SIZE == 2) {
            const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP, i = lane % 8;
            const int r = thread / WARP * 16 + lane / 8 % 2 * 8, c = lane / 16 * 8;
#pragma unroll
            for (int j = 0; j < WIDTH; j += 16) {
                u32 word[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) word[n] = T::pack(d + (first + j) / 2 + 2 * n);
                const int y = TRANSPOSED ? c + j + i : r + i, x = TRANSPOSED ? r : c + j;
                store_matrices<TRANSPOSED>(box + swizzled<ROW>(y * ROW + x * T::SIZE), word);
            }
        } else {
            const Fragment mine;
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i += 2) {
                const int y = mine.row + i / 2 % 2 * 8, x = mine.column + i / 4 * 8;
                *reinterpret_cast<float2*>(box + swizzled<ROW>(y * ROW + x * T::SIZE)) =
                    make_float2(d[first / 2 + i], d[first / 2 + i + 1]);
            }
        }
    }

    // Reads the tile's columns first .. first + WIDTH - 1 from a box of FP32 numbers.
    __device__ static void read(const char* box, int first, Sums& d) {
        static_assert(T::SIZE == 4, "sums");
        const Fragment mine;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i += 2) {
            const int y = mine.row + i / 2 % 2 * 8, x = mine.column + i / 4 * 8;
            const float2 two = *reinterpret_cast<const float2*>(box + swizzled<ROW>(y * ROW + x * T::SIZE));
            d[first / 2 + i] = two.x, d[first / 2 + i + 1] = two.y;
        }
    }

    // Stores the whole tile, its first element at (row, column) of the output. `boxes`: two boxes of this warpgroup's
    // own. `id`: its named barrier (sync_threads). At the end of the kernel thread 0 of the warpgroup must wait for its
    // stores (stores_read).
    __device__ static void store(char* boxes, int id, const TensorMap& map, int row, int column, const Sums& d) {
        const bool leads = threadIdx.x % WARPGROUP == 0;
#pragma unroll
        for (int first = 0; first < COLUMNS; first += WIDTH) {
            char* box = boxes + first / WIDTH % 2 * BOX;
            // With an odd number of boxes the first box of a tile reuses the last box of the tile before.
            if (leads) first == 0 && COLUMNS / WIDTH % 2 ? stores_read<0>() : stores_read<1>();
            sync_threads(id, WARPGROUP);
            fill(box, first, d);
            fence_copies();
            sync_threads(id, WARPGROUP);
            if (leads) {
                TRANSPOSED ? store_box(map, column + first, row, box) : store_box(map, row, column + first, box);
                commit_stores();
            }
        }
    }
};

}  // namespace rlk
