// Products of routes on Hopper: out[route, columns] = a[route, K] b[expert, columns, K]^T (+ bias), one FP32 chain per
// element; the first product of experts also forms the activation of its columns.
//
// Routes are sorted by expert; a tile has TILE_M of one expert, of which the last tile of an expert may have fewer.
//
// Order of every sum, which is the contract: that of core's product (gemm_sm90.cu), so a route has the bits of det_gemm
// whatever tile it is in.
//
//   block      a producer warpgroup and two consumer warpgroups with 64 routes each; persistent: it takes tile after
//              tile, columns first, so that neighbors share an expert's weights in the L2 cache
//   stage      64 terms of K of both operands of a tile in shared memory, swizzled; a ring of STAGES
//   gathered   rows of a are tokens: the producer's threads copy their chunks; else TMA copies rows in the order of
//              routes, and rows beyond the expert's last one, which are never stored
//   weights    a tensor map of four dims, [expert, half, row, K] or [expert, half, K, row]: no copy reaches into another
//              expert, and with HALVES one copy has the same columns of gate and of up
//   epilogue   through boxes in shared memory, row by row: only live routes are stored, in order or as ROUTES says
//
// Defines: DTYPE 1 BF16, 2 FP16; OUT: type of out, 0 FP32, 1 BF16, 2 FP16; TILE_N: columns of b; STAGES; B_MAJOR:
// 0 terms of K contiguous, 1 columns contiguous; GATHERED, SCATTERED: rows of a are tokens, rows of out are routes; PAIR:
// 0 none, 1 HALVES: the first half of a tile's columns is gate, the second up; 2 NEIGHBORS: they alternate; ACTIVATION and
// KEEPS (columns of b are stored too) are read only with PAIR.
#include "activation.cuh"
#include "rows.cuh"

using namespace rlk;

struct Args {
    const void *a, *bias;
    // out[routes, columns]; with PAIR columns are those of the activation, and z[routes, 2 columns] has those of b.
    void *out, *z;
    const int *routes, *tiles;
    int experts, size, columns, inner, slots;
};

namespace {

using Number = Numbers<DTYPE>::Type;
using Out = Numbers<OUT>::Type;

enum Pair { ALONE, HALVES, NEIGHBORS };
constexpr Major MAJOR_OF_B = B_MAJOR ? MN_MAJOR : K_MAJOR;
constexpr int CONSUMERS = 2, TILE_M = CONSUMERS * MMA_M, THREADS = (CONSUMERS + 1) * WARPGROUP;
// Halves of b's columns in a tile, and columns of out.
constexpr int PARTS = PAIR == HALVES ? 2 : 1, WIDTH = PAIR ? TILE_N / 2 : TILE_N;
using Ring = RingOf<Number, K_MAJOR, MAJOR_OF_B, TILE_M, TILE_N, 1, STAGES>;
using Sums = float[TILE_N / 2];
// Registers of a thread of each role.
constexpr int OF_PRODUCER = GATHERED ? 56 : 40, OF_CONSUMER = GATHERED ? 224 : 232;
static_assert(TILE_N / PARTS % SPAN == 0, "boxes are whole");

// ---- tiles ----

// A tile: its expert, its first route, the end of the expert's routes, its first column of out.
struct Tile {
    int expert, first, end, column;
};

// The tiles of a block, one after the other; the next one is read ahead.
struct Walk {
    const Args& p;
    int across, index;
    Tile tile, next;
    __device__ explicit Walk(const Args& p) : p(p), across((p.columns + WIDTH - 1) / WIDTH), index(blockIdx.x) {
        tile = read();
    }
    __device__ Tile read() const {
        const int row = index / across;
        if (row >= p.size) return {p.experts, 0, 0, 0};
        return {p.tiles[row], p.tiles[p.size + row], p.tiles[2 * p.size + row], index % across * WIDTH};
    }
    __device__ bool done() const { return tile.expert == p.experts; }
    __device__ void read_ahead() {
        index += gridDim.x;
        next = read();
    }
    __device__ void advance() { tile = next; }
};

// ---- producer ----

__device__ void load_weights(const Ring& ring, int stage, const TensorMap& map, const Tile& tile, int k) {
    if constexpr (MAJOR_OF_B == K_MAJOR) {
        load_box(ring.b(stage), map, tile.expert, 0, tile.column * (PAIR == NEIGHBORS ? 2 : 1), k, ring.full[stage]);
    } else {
#pragma unroll
        for (int i = 0; i < TILE_N / SPAN; ++i) {
            const int half = i / (TILE_N / PARTS / SPAN), within = i % (TILE_N / PARTS / SPAN) * SPAN;
            const int column = tile.column * (PAIR == NEIGHBORS ? 2 : 1) + within;
            load_box(ring.b(stage) + i * PIECE, map, tile.expert, half, k, column, ring.full[stage]);
        }
    }
}

#if GATHERED
// Copies rows of a tile by a warpgroup; rows that are not live are 0.
struct Gather {
    static constexpr int ROWS = TILE_M / Share::APART;
    Share share;
    const char* a;
    int inner;
    // Each the token's number plus 1, or 0.
    u32 row[ROWS];
    __device__ explicit Gather(const Args& p) : a(static_cast<const char*>(p.a)), inner(p.inner) {}
    __device__ void begin(const Args& p, const Tile& tile) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int position = tile.first + share.row + i * Share::APART;
            row[i] = position < tile.end ? p.routes[position] / p.slots + 1 : 0;
        }
    }
    __device__ void copy(char* box, int k) const {
        const int column = k + share.chunk * PER_CHUNK<Number>;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool live = column < inner && row[i];
            const i64 at = live ? static_cast<i64>(row[i] - 1) * inner + column : 0;
            copy_chunk(box + share.at + i * Share::APART * SWIZZLE, a + at * Number::SIZE, !live);
        }
    }
};
#endif

// Run by a warpgroup if rows are gathered, else by one elected thread.
__device__ void produce(const Args& p, const Ring& ring, const TensorMap& map_a, const TensorMap& map_b) {
    const bool leads = !GATHERED || threadIdx.x == 0;
    if (leads) prefetch(map_b);
#if GATHERED
    Gather gather(p);
#else
    prefetch(map_a);
#endif
    Ring::Slot slot;
    for (Walk walk(p); !walk.done(); walk.advance()) {
        const Tile tile = walk.tile;
        walk.read_ahead();
#if GATHERED
        gather.begin(p, tile);
#endif
        ring.produce(slot, Ring::stages_of(p.inner), [&](int stage, int k) {
            Barrier& full = ring.full[stage];
            if (leads) {
                full.arrive_expecting((GATHERED ? 0 : Ring::A_BYTES) + Ring::B_BYTES);
                load_weights(ring, stage, map_b, tile, k);
            }
#if GATHERED
            gather.copy(ring.a(stage), k);
            full.arrive_after_copies();
#else
            load_box(ring.a(stage), map_a, tile.first, k, full);
#endif
        });
    }
}

// ---- consumers ----

// A consumer's routes of a tile.
struct Mine {
    int group, column, first, end, row[Stores::ROWS];
    Stores stores;
    __device__ explicit Mine(const Ring& ring)
        : group(warp_index() / WARPS_OF_GROUP - 1), column(Fragment().column),
          stores(ring.end() + group * 2 * PIECE, 1 + group) {}
    __device__ bool idles(const Tile& tile) const { return tile.first + group * MMA_M >= tile.end; }
    // Sets the first of this thread's rows and the end of the live ones, and if rows of out are routes reads these.
    __device__ void begin(const Args& p, const Tile& tile) {
        first = tile.first + group * MMA_M + stores.share.row, end = tile.end;
        if constexpr (SCATTERED) {
#pragma unroll
            for (int i = 0; i < Stores::ROWS; ++i)
                row[i] = first + i * Share::APART < end ? p.routes[first + i * Share::APART] : 0;
        }
    }
    // Stores a box of rows of `columns` numbers.
    template <class T, class F>
    __device__ void store(void* out, int columns, int column, int edge, F fill) {
        stores.store<T>(column, edge, fill, [&](int i) -> char* {
            const int position = first + i * Share::APART;
            if (position >= end) return nullptr;
            return static_cast<char*>(out) + static_cast<i64>(SCATTERED ? row[i] : position) * columns * T::SIZE;
        });
    }
};

// The column of b of a thread's sum, from the first column of its half.
__device__ constexpr int beyond(int i) { return i % (TILE_N / PARTS / 2) / 4 * 8 + i % 2; }

__device__ void add_bias(const Args& p, const Mine& mine, const Tile& tile, Sums& d) {
    const int of_b = PAIR ? 2 * p.columns : p.columns, first = tile.column * (PAIR == NEIGHBORS ? 2 : 1) + mine.column;
    const int end = PAIR == NEIGHBORS ? of_b : p.columns;
    const auto* bias = static_cast<const unsigned short*>(p.bias) + static_cast<i64>(tile.expert) * of_b + first;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int half = i / (TILE_N / PARTS / 2);
        if (first + beyond(i) < end) d[i] = __fadd_rn(d[i], Number::read(bias + half * p.columns + beyond(i)));
    }
}

#if PAIR
// Stores the sums of b's columns, if they are kept.
__device__ void keep_sums(const Args& p, Mine& mine, const Tile& tile, const Sums& d) {
    if constexpr (!KEEPS) return;
    using Boxes = Outgoing<Number, TILE_N, false>;
    const int columns = 2 * p.columns;
#pragma unroll
    for (int first = 0; first < TILE_N; first += Boxes::WIDTH) {
        const bool second = PAIR == HALVES && first >= WIDTH;
        const int within = second ? first - WIDTH : first;
        const int column = PAIR == NEIGHBORS ? 2 * tile.column + within : tile.column + within + (second ? p.columns : 0);
        const int end = PAIR == NEIGHBORS || second ? columns : p.columns;
        mine.store<Number>(p.z, columns, column, end, [&](char* box) { Boxes::fill(box, first, d); });
    }
}

__device__ void store(const Args& p, Mine& mine, const Tile& tile, const Sums& d) {
    keep_sums(p, mine, tile, d);
    constexpr auto KIND = static_cast<Activation>(ACTIVATION);
#if PAIR == 1
    using Boxes = Outgoing<Number, WIDTH, false>;
    float h[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i += 2) {
        float gate[2] = {d[i], d[i + 1]}, up[2] = {d[i + WIDTH / 2], d[i + WIDTH / 2 + 1]}, two[2];
        activate<Number, KIND>(gate, up, two);
        h[i] = two[0], h[i + 1] = two[1];
    }
#pragma unroll
    for (int first = 0; first < WIDTH; first += Boxes::WIDTH)
        mine.store<Number>(p.out, p.columns, tile.column + first, p.columns,
                           [&](char* box) { Boxes::fill(box, first, h); });
#else
    const Fragment fragment;
#pragma unroll
    for (int first = 0; first < WIDTH; first += SPAN)
        mine.store<Number>(p.out, p.columns, tile.column + first, p.columns, [&](char* box) {
#pragma unroll
            for (int i = 0; i < SPAN; i += 4) {
                const float* four = d + first + i;
                float gate[2] = {four[0], four[2]}, up[2] = {four[1], four[3]}, two[2];
                activate<Number, KIND>(gate, up, two);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int y = fragment.row + half * 8, x = fragment.column / 2 + i;
                    Number::write(box + swizzled<SWIZZLE>(y * SWIZZLE + x * Number::SIZE), two[half]);
                }
            }
        });
#endif
}
#else
__device__ void store(const Args& p, Mine& mine, const Tile& tile, const Sums& d) {
    using Boxes = Outgoing<Out, TILE_N, false>;
#pragma unroll
    for (int first = 0; first < TILE_N; first += Boxes::WIDTH)
        mine.store<Out>(p.out, p.columns, tile.column + first, p.columns, [&](char* box) { Boxes::fill(box, first, d); });
}
#endif

__device__ void consume(const Args& p, const Ring& ring) {
    Mine mine(ring);
    const int stages = Ring::stages_of(p.inner);
    Ring::Slot slot;
    for (Walk walk(p); !walk.done(); walk.advance()) {
        const Tile tile = walk.tile;
        walk.read_ahead();
        if (mine.idles(tile)) {
            ring.leave(slot, stages);
            continue;
        }
        mine.begin(p, tile);
        Sums d;
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
        ring.mainloop<false, GATHERED>(slot, stages, mine.group, Turns(ring.turns, mine.group), d);
        if (p.bias) add_bias(p, mine, tile, d);
        store(p, mine, tile, d);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(GATHERED ? 1 + WARPGROUP : 1, CONSUMERS);
    wait_for_prerequisites();
    launch_dependents();
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<OF_PRODUCER>();
        if (GATHERED || (warp_index() == 0 && elected())) produce(p, ring, map_a, map_b);
    } else {
        take_registers<OF_CONSUMER>();
        consume(p, ring);
    }
}
