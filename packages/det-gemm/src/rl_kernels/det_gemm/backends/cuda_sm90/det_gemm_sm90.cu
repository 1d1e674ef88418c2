// det_gemm on Hopper: out[rows, columns] = a[rows, inner] b[columns, inner]^T (+ bias), one FP32 chain per element.
//
// Order of every sum, which is the contract: acc = 0, or with CONTINUES what out holds; for k = 0, 16, 32, ...
// ascending acc = wgmma(acc, a[:, k:k+16], b[:, k:k+16]), with zeros beyond the edges; + bias in FP32; rounded once. No
// tile, stage or operand layout changes it. With segments each is such a chain from 0, and a tree merges them
// (segments.cuh).
//
//   block      a producer warpgroup and CONSUMERS consumer warpgroups; persistent: it takes tile after tile
//   tile       TILE_M rows x TILE_N columns in the registers of its consumers, 64 rows each, as wgmma.cuh says. With
//              TILE_M < 64 wgmma still computes 64 rows; the surplus ones read whatever follows in shared memory, and
//              are discarded. Used for few columns: small tiles spread a's rows over all multiprocessors, and each
//              chain waits for fewer rows
//   turns      ping-pong of two consumers, each with tiles of at most 64 rows: one multiplies while the other stores
//              its tile, or loads the accumulators that it continues
//   stage      64 BOXES terms of K of both operands of a tile in shared memory, swizzled; a ring of STAGES
//   epilogue   a consumer's tile goes through two boxes in shared memory (boxes.cuh), or is stored by strides
//
// Defines: DTYPE 1 BF16, 2 FP16; TILE_M, TILE_N, CONSUMERS, BOXES, STAGES; A_MAJOR and B_MAJOR: 0 terms of K
// contiguous, 1 rows contiguous, 2 any strides and addresses: the producer gathers the operand number by number; OUT:
// type of out, 0 FP32, 1 BF16, 2 FP16; STORED: 0 by strides, 1 by TMA, 2 by TMA to out's transpose; CONTINUES: 0, 1;
// A_ONCE: a tile has all columns, so no other tile reads its rows of a. SEGMENTS: of K that a block multiplies one after
// the other; CLUSTER: blocks that share a tile, with SEGMENTS segments each; WAITING: levels of the tree whose left sums
// wait in shared memory. 1, 1 and 0: one chain.
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
static_assert(CLUSTER == 1 || STORED == 0, "what blocks have merged is stored by strides");
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

// ---- producer ----

// By a warpgroup: gathers ROWS x 64 numbers of an operand of any strides into a K_MAJOR tile.
template <int ROWS>
__device__ void gather(char* tile, const void* source, i64 row_step, i64 inner_step, int row, int k, int rows, int inner) {
    const auto* numbers = static_cast<const unsigned short*>(source);
    const bool along_rows = row_step < inner_step;
    for (int i = threadIdx.x; i < ROWS * (SWIZZLE / CHUNK); i += WARPGROUP) {
        const int r = along_rows ? i % ROWS : i / (SWIZZLE / CHUNK);
        const int c = along_rows ? i / ROWS : i % (SWIZZLE / CHUNK);
        const int first = k + c * PER_CHUNK<Number>;
        const auto* from = numbers + (row + r) * row_step + first * inner_step;
        Chunk chunk = {};
#pragma unroll
        for (int n = 0; n < PER_CHUNK<Number>; ++n) {
            const bool inside = row + r < rows && first + n < inner;
            const u32 number = inside ? from[n * inner_step] : 0;
            chunk.word[n / 2] |= number << 16 * (n % 2);
        }
        *reinterpret_cast<Chunk*>(tile + swizzled<SWIZZLE>(r * SWIZZLE + c * CHUNK)) = chunk;
    }
}

// Run by one elected thread if TMA loads both operands, else by the whole warpgroup.
__device__ void produce(const Args& p, const Ring& ring, const TensorMap& map_a, const TensorMap& map_b) {
    const bool leads = !ANY_PLAIN || threadIdx.x == 0;
    if (leads && !A_PLAIN) prefetch(map_a);
    if (leads && !B_PLAIN) prefetch(map_b);
    Ring::Slot slot;
    for (Tiles tile(p); !tile.done(); tile.advance())
        for (int index = 0; index < SEGMENTS; ++index) {
        const Span span = span_of(p, index);
        ring.produce(slot, span.stages + (span.rest > 0), [&](int stage, int step) {
            const int k = span.first + step;
            if (leads) ring.copy<!A_PLAIN, !B_PLAIN, A_ONCE>(stage, k, map_a, tile.row, map_b, tile.column);
            if constexpr (A_PLAIN) gather<TILE_M>(ring.a(stage), p.a, p.a_row, p.a_inner, tile.row, k, p.rows, p.inner);
            if constexpr (B_PLAIN)
                gather<TILE_N>(ring.b(stage), p.b, p.b_row, p.b_inner, tile.column, k, p.columns, p.inner);
            if constexpr (ANY_PLAIN) {
                fence_copies();
                ring.full[stage].arrive();
            }
        });
    }
}

// ---- consumers ----

using Sums = float[TILE_N / 2];

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

__device__ void begin(const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    if constexpr (CONTINUES)
        each_inside(p, mine, tile, d, [](float& sum, const char* at) { sum = *reinterpret_cast<const float*>(at); });
}

// Adds a bias with one number per row (BY_ROW) or per column.
template <bool BY_ROW>
__device__ void add_bias(const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
    const int first = BY_ROW ? tile.row + mine.row : tile.column + mine.column, end = BY_ROW ? p.rows : p.columns;
    const auto* bias = static_cast<const unsigned short*>(p.bias) + first;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int beyond = BY_ROW ? i / 2 % 2 * 8 : i / 4 * 8 + i % 2;
        if (first + beyond < end) d[i] = __fadd_rn(d[i], Number::read(bias + beyond));
    }
}

// Bytes of a consumer's sums, and of what it has behind the stages: boxes, or sums that wait; never both at a time.
constexpr int SUMS_BYTES = WARPGROUP * sizeof(Sums), BOXES_BYTES = STORED ? 2 * PIECE : 0;
constexpr int BEHIND_BYTES = WAITING * SUMS_BYTES > BOXES_BYTES ? WAITING * SUMS_BYTES : BOXES_BYTES;

#if STORED
using Boxes = Outgoing<Out, TILE_N, STORED == 2>;

__device__ void store(const Ring& ring, const Args&, const Mine& mine, const Tiles& tile, const TensorMap& map, Sums& d) {
    char* boxes = ring.end() + mine.group * BEHIND_BYTES;
    Boxes::store(boxes, 1 + mine.group, map, tile.row + mine.part * MMA_M, tile.column, d);
}
#elif CLUSTER == 1
// By strides: any address and any edge.
__device__ void store(const Ring&, const Args& p, const Mine& mine, const Tiles& tile, const TensorMap&, Sums& d) {
    each_inside(p, mine, tile, d, [](float& sum, char* at) { Out::write(at, sum); });
}
#endif

// Adds a chain from 0 of one segment.
__device__ void add_segment(const Args& p, const Ring& ring, Ring::Slot& slot, const Mine& mine, int index, Sums& d) {
    const Span span = span_of(p, index);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    ring.mainloop<false>(slot, span.stages, mine.part, Turns(ring.turns, mine.group), d);
    if (span.rest) ring.steps(slot, span.rest, mine.part, d);
}

// Sets d to the tree sum of COUNT segments of this block from `first` on.
template <int COUNT>
__device__ void add_segments(const Args& p, const Ring& ring, Ring::Slot& slot, const Mine& mine, int first, Sums& d) {
    constexpr int WAITS = levels_of(COUNT) - (levels_of(SEGMENTS) - WAITING);
    if constexpr (COUNT == 1) {
        add_segment(p, ring, slot, mine, first, d);
    } else if constexpr (WAITS > 0) {
        add_segments<COUNT / 2>(p, ring, slot, mine, first, d);
        auto* left = reinterpret_cast<float4*>(ring.end() + mine.group * BEHIND_BYTES + (WAITS - 1) * SUMS_BYTES) + mine.thread;
        // TMA may still read the boxes of the tile before.
        if (mine.leads()) stores_read<0>();
        sync_threads(1 + mine.group, WARPGROUP);
#pragma unroll
        for (int i = 0; i < TILE_N / 8; ++i)
            left[i * WARPGROUP] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
        add_segments<COUNT / 2>(p, ring, slot, mine, first + COUNT / 2, d);
#pragma unroll
        for (int i = 0; i < TILE_N / 8; ++i) {
            const float4 four = left[i * WARPGROUP];
            d[4 * i] = __fadd_rn(four.x, d[4 * i]), d[4 * i + 1] = __fadd_rn(four.y, d[4 * i + 1]);
            d[4 * i + 2] = __fadd_rn(four.z, d[4 * i + 2]), d[4 * i + 3] = __fadd_rn(four.w, d[4 * i + 3]);
        }
    } else {
        Sums left;
        add_segments<COUNT / 2>(p, ring, slot, mine, first, left);
        add_segments<COUNT / 2>(p, ring, slot, mine, first + COUNT / 2, d);
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) d[i] = __fadd_rn(left[i], d[i]);
    }
}

#if CLUSTER > 1
// Bias of one element.
__device__ float biased(const Args& p, int row, int column, float sum) {
    if (!p.bias_along) return sum;
    const auto* bias = static_cast<const unsigned short*>(p.bias);
    return __fadd_rn(sum, Number::read(bias + (p.bias_along == 1 ? row : column)));
}

// Merges the sums of the blocks of a cluster, adds the bias and stores: each block a part of the tile.
__device__ void merge_blocks(const Ring& ring, const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
    // Numbers of a thread side by side: in a row, or if A_ONCE single ones, because then columns of out are contiguous.
    constexpr int WIDTH = A_ONCE ? 1 : 4, PITCH = TILE_N + (A_ONCE ? 1 : 8), ALL_THREADS = CONSUMERS * WARPGROUP;
    auto* sums = reinterpret_cast<float*>(ring.a(0));
    // The other consumer's products may still read the stages.
    sync_threads(1, ALL_THREADS);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int y = mine.row + i / 2 % 2 * 8, x = mine.column + i / 4 * 8 + i % 2;
        if (TILE_M >= MMA_M || y < TILE_M) sums[y * PITCH + x] = d[i];
    }
    sync_cluster();
    const int first = cluster_rank() * ALL_THREADS + mine.group * WARPGROUP + mine.thread;
    for (int i = first; i < TILE_M * TILE_N / WIDTH; i += CLUSTER * ALL_THREADS) {
        const int y = A_ONCE ? i % TILE_M : i / (TILE_N / WIDTH), x = A_ONCE ? i / TILE_M : i % (TILE_N / WIDTH) * WIDTH;
        const int row = tile.row + y, column = tile.column + x;
        if (row >= p.rows || column >= p.columns) continue;
        float sum[WIDTH];
        merge_from<CLUSTER>(sums + y * PITCH + x, sum);
        char* at = static_cast<char*>(p.out) + (row * p.out_row + column * p.out_column) * Out::SIZE;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            if (column + j < p.columns) Out::write(at + j * p.out_column * Out::SIZE, biased(p, row, column + j, sum[j]));
    }
    // No block ends while others read its sums.
    sync_cluster();
}
#endif

__device__ void consume(const Args& p, const Ring& ring, const TensorMap& map_out) {
    const Mine mine;
    const int stages = Ring::stages_of(p.inner);
    Ring::Slot slot;
    Tiles tile(p);
    Turns turns(ring.turns, mine.group);
    if (TURNS && mine.group == 1) tile.advance(), slot.skip(stages);
    for (; !tile.done(); tile.advance(TURNS ? 2 : 1)) {
        Sums d;
        if constexpr (SEGMENTED) {
            add_segments<SEGMENTS>(p, ring, slot, mine, 0, d);
        } else {
            begin(p, mine, tile, d);
            if constexpr (TURNS) turns.wait();
            ring.mainloop<TURNS>(slot, stages, mine.part, turns, d);
        }
#if CLUSTER > 1
        merge_blocks(ring, p, mine, tile, d);
#else
        if constexpr (TURNS) slot.skip(stages);
        if (p.bias_along == 1) add_bias<true>(p, mine, tile, d);
        if (p.bias_along == 2) add_bias<false>(p, mine, tile, d);
        store(ring, p, mine, tile, map_out, d);
#endif
    }
    if (mine.leads()) stores_read<0>();
}

}  // namespace

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    det_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_out, const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(ANY_PLAIN ? 1 + WARPGROUP : 1, SHARERS);
    wait_for_prerequisites();
    launch_dependents();
    if (warp_index() < WARPS_OF_GROUP) {
        if constexpr (MOVES_REGISTERS) give_registers<40>();
        if (ANY_PLAIN || (warp_index() == 0 && elected())) produce(p, ring, map_a, map_b);
    } else {
        if constexpr (MOVES_REGISTERS) take_registers<232>();
        consume(p, ring, map_out);
    }
}
