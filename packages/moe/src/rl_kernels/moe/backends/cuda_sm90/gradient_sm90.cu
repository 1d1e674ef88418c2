// Gradients of experts' weights on Hopper: out[expert, N, K] = left[routes, N]^T right[routes, K], over the routes of each
// expert, or continued in an FP32 out of any strides.
//
// Order of every sum, which is the contract: one chain over the routes of an expert in their order, 16 a step from its
// first one on, zeros after the last one, as in core's product.
//
//   block      a producer warpgroup and two consumer warpgroups with 64 rows of out each; persistent, experts ascending
//   tile       128 x TILE_N of out
//   stage      64 routes of both operands; a ring of STAGES
//   operands   rows of one are tokens, which the producer's threads copy; rows of the other are in the order of routes: TMA
//              copies them but for an expert's last ones, behind which the threads write zeros
//
// Defines: DTYPE 1 BF16, 2 FP16; TILE_N; STAGES; LEFT: rows of left are tokens, else those of right; CONTINUES.
#include "rows.cuh"

using namespace rlk;

struct Args {
    const void *left, *right;
    void* out;
    // Strides of out in numbers; read only with CONTINUES.
    i64 out_expert, out_row, out_column;
    const int *routes, *bounds;
    int experts, n, k, slots;
};

namespace {

using Number = Numbers<DTYPE>::Type;
constexpr int CONSUMERS = 2, TILE_M = CONSUMERS * MMA_M, THREADS = (CONSUMERS + 1) * WARPGROUP;
using Ring = RingOf<Number, MN_MAJOR, MN_MAJOR, TILE_M, TILE_N, 1, STAGES>;
using Sums = float[TILE_N / 2];

// A tile: its expert, the expert's routes, and its first row and column of out.
struct Tile {
    int expert, first, end, row, column;
    __device__ int stages() const { return Ring::stages_of(end - first); }
};

// The tiles of a block, one after the other; the next one is read ahead.
struct Walk {
    const Args& p;
    int down, across, index;
    Tile tile, next;
    __device__ explicit Walk(const Args& p) : p(p), index(blockIdx.x) {
        down = (p.n + TILE_M - 1) / TILE_M, across = (p.k + TILE_N - 1) / TILE_N;
        tile = read();
    }
    __device__ Tile read() const {
        const int expert = index / (down * across), within = index % (down * across);
        if (expert >= p.experts) return {p.experts, 0, 0, 0, 0};
        return {expert, p.bounds[expert], p.bounds[expert + 1], within % down * TILE_M, within / down * TILE_N};
    }
    __device__ bool done() const { return tile.expert == p.experts; }
    __device__ void read_ahead() {
        index += gridDim.x;
        next = read();
    }
    __device__ void advance() { tile = next; }
};

// ---- producer ----

// The tokens of a tile's routes, in batches of WARPGROUP routes; the producer's threads read the next batch ahead.
struct Tokens {
    static constexpr int STAGES_OF_BATCH = WARPGROUP / SPAN;
    const Args& p;
    int *shared, *batch;
    int first, mine;
    __device__ Tokens(const Args& p, int* shared) : p(p), shared(shared), batch(shared), first(-1) {}
    __device__ void read(int from, int end) {
        first = from < end ? from : -1;
        const int at = from + static_cast<int>(threadIdx.x);
        mine = at < end ? p.routes[at] : 0;
    }
    // At each stage of a tile, in order: returns the tokens of its routes. `next`: the tile after this one.
    __device__ const int* of(int stage, const Tile& tile, const Tile& next) {
        if (stage % STAGES_OF_BATCH == 0) {
            const int from = tile.first + stage * SPAN, after = from + WARPGROUP;
            if (first != from) read(from, tile.end);
            // Two batches take turns: after this, all have read what the batch after this one replaces.
            batch = batch == shared ? shared + WARPGROUP : shared;
            batch[threadIdx.x] = mine / p.slots;
            sync_threads(CONSUMERS + 1, WARPGROUP);
            if (after < tile.end)
                read(after, tile.end);
            else
                read(next.first, next.end);
        }
        return batch + stage % STAGES_OF_BATCH * SPAN;
    }
};

// Copies PIECES boxes of 64 rows and 64 columns from `column` on: rows `first` to `end` - 1, or those of TOKENS; then zeros.
template <int PIECES, bool BY_TOKEN>
__device__ void copy_rows(char* box, const void* from, const Share& share, const int* tokens, int first, int end, int column,
                          int columns) {
    constexpr int COUNT = SPAN / Share::APART;
    const char* row[COUNT];
    bool live[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int within = share.row + i * Share::APART, at = BY_TOKEN ? tokens[within] : first + within;
        live[i] = first + within < end;
        row[i] = static_cast<const char*>(from) + static_cast<i64>(live[i] ? at : 0) * columns * Number::SIZE;
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int at = column + piece * SPAN + share.chunk * PER_CHUNK<Number>;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool is_read = at < columns && live[i];
            copy_chunk(box + piece * PIECE + share.at + i * Share::APART * SWIZZLE,
                       row[i] + (is_read ? at : 0) * Number::SIZE, !is_read);
        }
    }
}

__device__ void produce(const Args& p, const Ring& ring, const TensorMap& map) {
    const bool leads = threadIdx.x == 0;
    if (leads) prefetch(map);
    const Share share;
    __shared__ int batches[2 * WARPGROUP];
    Tokens tokens(p, batches);
    Ring::Slot slot;
    for (Walk walk(p); !walk.done(); walk.advance()) {
        const Tile tile = walk.tile;
        walk.read_ahead();
        ring.produce(slot, tile.stages(), [&](int stage, int step) {
            const int first = tile.first + step;
            const bool whole = first + SPAN <= tile.end;
            const int* token = tokens.of(step / SPAN, tile, walk.next);
            Barrier& full = ring.full[stage];
            if (leads) {
                full.arrive_expecting(whole ? (LEFT ? Ring::B_BYTES : Ring::A_BYTES) : 0);
                if (whole) {
                    if constexpr (LEFT)
                        load_tile<MN_MAJOR, TILE_N>(ring.b(stage), map, full, tile.column, first);
                    else
                        load_tile<MN_MAJOR, TILE_M>(ring.a(stage), map, full, tile.row, first);
                }
            }
            if (LEFT || !whole)
                copy_rows<TILE_M / SPAN, LEFT>(ring.a(stage), p.left, share, token, first, tile.end, tile.row, p.n);
            if (!LEFT || !whole)
                copy_rows<TILE_N / SPAN, !LEFT>(ring.b(stage), p.right, share, token, first, tile.end, tile.column, p.k);
            full.arrive_after_copies();
        });
    }
}

// ---- consumers ----

// Calls f(sum, address) for a thread's sums of a tile that lie inside an FP32 out.
template <class F>
__device__ void each_inside(const Args& p, const Tile& tile, int group, Sums& d, F f) {
    i64 down = p.out_row, right = p.out_column;
    const Fragment mine;
    const int row = tile.row + group * MMA_M + mine.row, column = tile.column + mine.column;
    i64 begin = tile.expert * p.out_expert + row * down + column * right;
    // Hides the numbers from the compiler. Otherwise it keeps addresses during the products, and runs out of registers.
    asm volatile("" : "+l"(down), "+l"(right), "+l"(begin));
    float* at = static_cast<float*>(p.out) + begin;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int y = i / 2 % 2 * 8, x = i / 4 * 8 + i % 2;
        if (row + y < p.n && column + x < p.k) f(d[i], at + y * down + x * right);
    }
}

__device__ void consume(const Args& p, const Ring& ring) {
    const int group = warp_index() / WARPS_OF_GROUP - 1;
    Stores stores(ring.end() + group * 2 * PIECE, 1 + group);
    Ring::Slot slot;
    for (Walk walk(p); !walk.done(); walk.advance()) {
        const Tile tile = walk.tile;
        walk.read_ahead();
        if (CONTINUES && tile.first == tile.end) continue;
        Sums d;
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
        if constexpr (CONTINUES) each_inside(p, tile, group, d, [](float& sum, const float* at) { sum = *at; });
        ring.mainloop<false, true>(slot, tile.stages(), group, Turns(ring.turns, group), d);
        if constexpr (CONTINUES) {
            each_inside(p, tile, group, d, [](float& sum, float* at) { *at = sum; });
        } else {
            using Boxes = Outgoing<Number, TILE_N, false>;
            const int first = tile.row + group * MMA_M + stores.share.row;
            char* out = static_cast<char*>(p.out) + static_cast<i64>(tile.expert) * p.n * p.k * Number::SIZE;
#pragma unroll
            for (int column = 0; column < TILE_N; column += Boxes::WIDTH)
                stores.store<Number>(
                    tile.column + column, p.k, [&](char* box) { Boxes::fill(box, column, d); },
                    [&](int i) -> char* {
                        const int row = first + i * Share::APART;
                        return row < p.n ? out + static_cast<i64>(row) * p.k * Number::SIZE : nullptr;
                    });
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradient(const __grid_constant__ TensorMap map, const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(1 + WARPGROUP, CONSUMERS);
    wait_for_prerequisites();
    launch_dependents();
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<56>();
        produce(p, ring, map);
    } else {
        take_registers<224>();
        consume(p, ring);
    }
}
