// The arguments and constants of gemm_sm90.cu, the tiles of a block, and a consumer thread's part of a tile.
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/mainloop.cuh>

#include "segments.cuh"

using namespace rlk;

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
using Number = Numbers<DTYPE>::Type;
using Out = Numbers<OUT>::Type;

struct Args {
    void* out;
    const void *bias, *a, *b;
    // Room for sums that wait; read only with FAR.
    char* scratch;
    // Strides in elements; those of a and b are read only with A_MAJOR and B_MAJOR 2.
    i64 out_row, out_column, a_row, a_inner, b_row, b_inner;
    int rows, columns, inner;
    // Rows of tiles per panel (place_of): what they share stays in the L2 cache.
    int group;
    // 0: no bias; 1: one number per row; 2: one number per column.
    int bias_along;
    // Terms of a segment, a multiple of 16; read only with segments.
    int length;
};

namespace {

constexpr int PLAIN = 2;
constexpr bool A_PLAIN = A_MAJOR == PLAIN, B_PLAIN = B_MAJOR == PLAIN, ANY_PLAIN = A_PLAIN || B_PLAIN;
constexpr Major MAJOR_OF_A = A_MAJOR == MN_MAJOR ? MN_MAJOR : K_MAJOR;
constexpr Major MAJOR_OF_B = B_MAJOR == MN_MAJOR ? MN_MAJOR : K_MAJOR;
// Consumers that share a tile. TURNS: two consumers have tiles of their own (ping-pong).
constexpr int SHARERS = TILE_M > MMA_M ? TILE_M / MMA_M : 1;
constexpr bool TURNS = CONSUMERS > SHARERS;
using Ring = RingOf<Number, MAJOR_OF_A, MAJOR_OF_B, TILE_M, TILE_N, BOXES, STAGES>;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr bool SEGMENTED = SEGMENTS * CLUSTER > 1;
constexpr bool MOVES_REGISTERS = CONSUMERS == 2 && (TILE_N > 128 || SEGMENTS > 1) && !ANY_PLAIN;
static_assert(!SEGMENTED || !(TURNS || ANY_PLAIN || CONTINUES), "one chain only");
static_assert(CLUSTER == 1 || (STORED == 0 && TILE_M >= MMA_M), "what blocks have merged is stored by strides");
static_assert(!ANY_PLAIN || BOXES == 1, "only copies reach other boxes");
static_assert(TILE_M % MMA_M == 0 || (TILE_M % 8 == 0 && MAJOR_OF_A == K_MAJOR), "pieces are whole");
static_assert(TILE_M >= MMA_M || STORED == 0, "a box has 64 rows");
static_assert(CONSUMERS == SHARERS || (CONSUMERS == 2 && SHARERS == 1), "two take turns");

// The tiles of a block, one after the other, in the order of place_of.
struct Tiles {
    const Args& p;
    int down, across, index, row, column;
    __device__ explicit Tiles(const Args& p) : p(p), index(static_cast<int>(blockIdx.x) / CLUSTER) {
        down = (p.rows + TILE_M - 1) / TILE_M;
        across = (p.columns + TILE_N - 1) / TILE_N;
        place();
    }
    __device__ bool done() const { return index >= down * across; }
    __device__ void advance(int tiles = 1) {
        index += tiles * static_cast<int>(gridDim.x) / CLUSTER;
        place();
    }
    __device__ void place() {
        if (done()) return;
        const Place place = place_of(index, down, across, p.group);
        row = place.row * TILE_M;
        column = place.column * TILE_N;
    }
};

// The part of K of a block's segment `index`; all of K if there are no segments.
__device__ Span span_of(const Args& p, int index) {
    if constexpr (!SEGMENTED) return {0, Ring::stages_of(p.inner), 0};
    const int before = CLUSTER > 1 ? cluster_rank() * SEGMENTS : 0;
    return rlk::span_of<Ring::INNER>(before + index, p.length, p.inner);
}

using Sums = float[TILE_N / 2];

// Continued sums come in boxes of the output. PER_STAGE of them fit into a stage, FIRST_STAGES hold those of a tile: box
// `block * SHARERS + part` has 64 rows of a consumer, and columns from block * WIDTH on.
#define BRINGS (CONTINUES && STORED == 1 && A_MAJOR != 2 && B_MAJOR != 2)
#if BRINGS
using OutBoxes = Outgoing<Out, TILE_N, false>;
constexpr int PER_STAGE = Ring::BYTES / OutBoxes::BOX / SHARERS * SHARERS;
constexpr int BOXES_OF_TILE = TILE_N / OutBoxes::WIDTH * SHARERS;
constexpr int FIRST_STAGES = (BOXES_OF_TILE + PER_STAGE - 1) / PER_STAGE;
static_assert(Out::SIZE == 4 && PER_STAGE > 0, "sums are FP32, and fit");
#else
constexpr int FIRST_STAGES = 0;
#endif

// A consumer thread's part of a tile: row and column of the first of its accumulators (wgmma.cuh). part: which 64 rows.
struct Mine {
    int group, part, thread, row, column;
    __device__ Mine() {
        group = warp_index() / WARPS_OF_GROUP - 1;
        part = SHARERS == 1 ? 0 : group;
        thread = threadIdx.x % WARPGROUP;
        const Fragment fragment;
        row = part * MMA_M + fragment.row;
        column = fragment.column;
    }
    __device__ bool leads() const { return thread == 0; }
};

// Calls f(sum, address) for those of a thread's accumulators that lie inside out.
template <class F>
__device__ void each_inside(const Args& p, const Mine& mine, const Tiles& tile, Sums& d, F f) {
    i64 down = p.out_row, right = p.out_column;
    // Hides the strides from the compiler. Otherwise it computes all their multiples once for all tiles, and runs out
    // of registers.
    asm volatile("" : "+l"(down), "+l"(right));
    const int row = tile.row + mine.row, column = tile.column + mine.column;
    const int end = TILE_M < MMA_M ? min(p.rows, tile.row + TILE_M) : p.rows;
    char* at = static_cast<char*>(p.out) + (row * down + column * right) * Out::SIZE;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int y = i / 2 % 2 * 8, x = i / 4 * 8 + i % 2;
        if (row + y < end && column + x < p.columns) f(d[i], at + (y * down + x * right) * Out::SIZE);
    }
}

// Bytes of a consumer's sums, and of what it has behind the stages: boxes, or sums that wait; never both at a time.
constexpr int SUMS_BYTES = WARPGROUP * sizeof(Sums), BOXES_BYTES = STORED ? 2 * PIECE : 0;
[[maybe_unused]] constexpr int BEHIND_BYTES = NEAR * SUMS_BYTES > BOXES_BYTES ? NEAR * SUMS_BYTES : BOXES_BYTES;

}  // namespace
