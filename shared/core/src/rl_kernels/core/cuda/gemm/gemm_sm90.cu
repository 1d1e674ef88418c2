// A matrix product on Hopper: out[rows, columns] = a[rows, inner] b[columns, inner]^T (+ bias), one FP32 chain per element.
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
//   continued  the sums that a tile continues come through the ring too, in its first stages, if the output is stored in
//              boxes and TMA loads both operands; else its consumers read them by strides
//   epilogue   a consumer's tile goes through two boxes in shared memory (boxes.cuh), or is stored by strides
//
// Defines: DTYPE 1 BF16, 2 FP16; TILE_M, TILE_N, CONSUMERS, BOXES, STAGES; A_MAJOR and B_MAJOR: 0 terms of K
// contiguous, 1 rows contiguous, 2 any strides and addresses: the producer gathers the operand number by number; OUT:
// type of out, 0 FP32, 1 BF16, 2 FP16; STORED: 0 by strides, 1 by TMA, 2 by TMA to out's transpose; CONTINUES: 0, 1;
// A_ONCE: a tile has all columns, so no other tile reads its rows of a. SEGMENTS: of K that a block multiplies one after
// the other; CLUSTER: blocks that share a tile, with SEGMENTS segments each; NEAR, FAR: levels of the tree whose left sums
// wait in shared and in global memory. 1, 1, 0 and 0: one chain.
#include "segmented.cuh"

namespace {

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

#if BRINGS
// Starts the copies of the output's boxes that are in stage `index` of a tile: the sums that its chains continue.
__device__ void bring(const Ring& ring, int stage, int index, const TensorMap& map_out, const Tiles& tile) {
    const int first = index * PER_STAGE, count = min(PER_STAGE, BOXES_OF_TILE - first);
    ring.full[stage].arrive_expecting(count * OutBoxes::BOX);
    for (int i = 0; i < count; ++i) {
        const int box = first + i, row = tile.row + box % SHARERS * MMA_M;
        load_box<true>(ring.a(stage) + i * OutBoxes::BOX, map_out, row, tile.column + box / SHARERS * OutBoxes::WIDTH,
                       ring.full[stage]);
    }
}
#endif

// Run by one elected thread if TMA loads both operands, else by the whole warpgroup.
__device__ void produce(const Args& p, const Ring& ring, const TensorMap& map_a, const TensorMap& map_b,
                        [[maybe_unused]] const TensorMap& map_out) {
    const bool leads = !ANY_PLAIN || threadIdx.x == 0;
    if (leads && !A_PLAIN) prefetch(map_a);
    if (leads && !B_PLAIN) prefetch(map_b);
    Ring::Slot slot;
    for (Tiles tile(p); !tile.done(); tile.advance()) {
#if BRINGS
        ring.produce(slot, FIRST_STAGES, [&](int stage, int step) { bring(ring, stage, step / Ring::INNER, map_out, tile); });
#endif
        for (int index = 0; index < SEGMENTS; ++index) {
            const Span span = span_of(p, index);
            ring.produce(slot, span.stages + (span.rest > 0), [&](int stage, int step) {
                const int k = span.first + step;
                if (leads) ring.copy<!A_PLAIN, !B_PLAIN, A_ONCE>(stage, k, map_a, tile.row, map_b, tile.column);
                if constexpr (A_PLAIN)
                    gather<TILE_M>(ring.a(stage), p.a, p.a_row, p.a_inner, tile.row, k, p.rows, p.inner);
                if constexpr (B_PLAIN)
                    gather<TILE_N>(ring.b(stage), p.b, p.b_row, p.b_inner, tile.column, k, p.columns, p.inner);
                if constexpr (ANY_PLAIN) {
                    fence_copies();
                    ring.full[stage].arrive();
                }
            });
        }
    }
}

// ---- consumers ----

#if BRINGS
// The sums that a tile's chains continue, from the first stages of the tile.
__device__ void begin(const Args&, const Ring& ring, Ring::Slot& slot, const Mine& mine, const Tiles&, Sums& d) {
#pragma unroll
    for (int index = 0; index < FIRST_STAGES; ++index) {
        ring.full[slot.stage].wait(slot.parity);
#pragma unroll
        for (int i = 0; i < PER_STAGE; i += SHARERS) {
            const int first = (index * PER_STAGE + i) / SHARERS * OutBoxes::WIDTH;
            if (first < TILE_N) OutBoxes::read(ring.a(slot.stage) + (i + mine.part) * OutBoxes::BOX, first, d);
        }
        // The next copy must overtake no thread's reads.
        fence_copies();
        __syncwarp();
        give_back(ring.empty[slot.stage]);
        slot.advance();
    }
}
#else
__device__ void begin(const Args& p, const Ring&, Ring::Slot&, const Mine& mine, const Tiles& tile, Sums& d) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    if constexpr (CONTINUES)
        each_inside(p, mine, tile, d, [](float& sum, const char* at) { sum = *reinterpret_cast<const float*>(at); });
}
#endif

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

__device__ void consume(const Args& p, const Ring& ring, const TensorMap& map_out) {
    const Mine mine;
    const int stages = Ring::stages_of(p.inner), of_tile = FIRST_STAGES + stages;
    Ring::Slot slot;
    Tiles tile(p);
    Turns turns(ring.turns, mine.group);
    if (TURNS && mine.group == 1) tile.advance(), slot.skip(of_tile);
    for (; !tile.done(); tile.advance(TURNS ? 2 : 1)) {
        Sums d;
        if constexpr (SEGMENTED) {
            add_segments<SEGMENTS>(p, ring, slot, mine, 0, d);
        } else {
            if constexpr (TURNS && FIRST_STAGES) turns.wait();
            begin(p, ring, slot, mine, tile, d);
            if constexpr (TURNS && !FIRST_STAGES) turns.wait();
            ring.mainloop<TURNS>(slot, stages, mine.part, turns, d);
        }
#if CLUSTER > 1
        merge_blocks(ring, p, mine, tile, d);
#else
        if constexpr (TURNS) slot.skip(of_tile);
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
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_out, const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(ANY_PLAIN ? 1 + WARPGROUP : 1, SHARERS);
    wait_for_prerequisites();
    launch_dependents();
    if (warp_index() < WARPS_OF_GROUP) {
        if constexpr (MOVES_REGISTERS) give_registers<40>();
        if (ANY_PLAIN || (warp_index() == 0 && elected())) produce(p, ring, map_a, map_b, map_out);
    } else {
        if constexpr (MOVES_REGISTERS) take_registers<232>();
        consume(p, ring, map_out);
    }
}
