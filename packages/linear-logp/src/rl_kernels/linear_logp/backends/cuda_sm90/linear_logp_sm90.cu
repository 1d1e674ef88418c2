// linear_logp's forward pass on Hopper: tiles of logits are reduced in registers to softmax states (softmax.cuh), so
// the logits are never stored. Block, tile, turns, stage, and the order within a logit: linear_logp.cuh.
//
// Order of the other sums, which is the contract:
//   block     of 256 columns. Four lanes share a row; lane q of them holds columns 8 j + 2 q + k, k = 0, 1. It adds
//             them, j ascending, to partial sums 2 (j % 2) + k; then (0 + 1) + (2 + 3); then xor shuffles by 1, 2
//   unit      4 blocks: (0 + 1) + (2 + 3)
//   row       lane l of a warp merges units l, l + 32, ... in this order; a tree adds the 32 lanes (over_states)
// No tile, stage, row or batch changes it, nor which other tokens are ignored.
//
// With KEEPS the logits of the columns from first_kept on are also stored, for the backward pass, by TMA (boxes.cuh).
#include "linear_logp.cuh"

using namespace rlk;

struct Args : Inputs {
    float* chosen;  // [rows]: the logit that each row selects, before the temperature
    float* parts;   // [columns / (256 blocks), rounded up, 3, rows]: states
    float* logp;
    Norm* norm;
    // Written only with ENTROPY.
    float* lse;
    float* entropy;
    // Blocks of 256 columns in a part: 1 or 4.
    int blocks;
    // With KEEPS: the first column whose logits are kept, a multiple of 256.
    int first_kept;

    __device__ int width() const { return TILE_N * blocks; }
    __device__ int across() const { return (columns + width() - 1) / width(); }
};

namespace {

constexpr int UNIT = 4;
using Counted = decltype(Args().counted(0));  // of a row
using Boxes = Outgoing<FP32, TILE_N, false>;

__device__ void produce(const Args& p, const Ring& ring, const TensorMap& hidden, const TensorMap& weight) {
    const int stages = Ring::stages_of(p.inner);
    prefetch(hidden);
    prefetch(weight);
    Ring::Slot slot;
    for (Tiles tile(p, 0, p.computed(), p.across()); !tile.done(); tile.advance()) {
        const int begin = tile.unit * p.width(), end = min(begin + p.width(), p.columns);
        for (int column = begin; column < end; column += TILE_N)
            load_stages(ring, slot, hidden, weight, tile.row, column, stages);
    }
}

__device__ float over_lanes(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(ALL, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(ALL, x, 2));
}

// The state of one of a thread's two rows (HALF) over 256 columns, returned in all four lanes that share the row.
template <int HALF, class Counted>
__device__ State state_of(const Sums& d, float c, Counted counted) {
    if constexpr (Counted::COMPARES)
        if (counted.is_every()) return state_of<HALF>(d, c, Every());
    const auto at = [&](int j, int k) { return d[4 * j + 2 * HALF + k]; };
    const auto larger = [](float a, float b) {
        return __uint_as_float(Counted::template larger<FP32>(__float_as_uint(a), __float_as_uint(b)));
    };
    float top = -infinity(), other = -infinity();
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) top = larger(top, at(j, 0)), other = larger(other, at(j, 1));
    top = larger(top, other);
    top = larger(top, __shfl_xor_sync(ALL, top, 1));
    top = larger(top, __shfl_xor_sync(ALL, top, 2));
    const bool none = counted.template none_of<FP32>(__float_as_uint(top));
    if (Counted::COMPARES && __all_sync(ALL, none)) return empty();
    const Exponents exponents(top, c);
    float sum[4] = {}, product[4] = {};
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int lane = j % 2 * 2 + k;
            const float exponent = exponents.at(at(j, k)), power = exp2_fast(exponent);
            counted.template add<ENTROPY>(sum[lane], product[lane], at(j, k), power, fmaxf(exponent, LEAST));
        }
    }
    const State s = {top, over_lanes(pairs(sum)), ENTROPY ? over_lanes(pairs(product)) : 0.0f};
    return none ? empty() : s;
}

// The states of a row in a part: of blocks 0 and 1 merged, and of blocks 2 and 3 merged.
struct Pairs {
    State low, high;
    __device__ Pairs() : low(empty()), high(empty()) {}
    __device__ void add(int block, State s, float c) {
        if (block < 2)
            low = block ? merged<ENTROPY>(low, s, c) : s;
        else
            high = block == 2 ? s : merged<ENTROPY>(high, s, c);
    }
    __device__ State all(float c) const { return merged<ENTROPY>(low, high, c); }
};

// Sets logits beyond the last column to -inf, and stores the logit that a row selects if this thread holds it: -inf if
// it is below the threshold of the row.
__device__ void finish_logits(const Args& p, const Mine& mine, int row, int column, const int (&target)[2],
                              const Counted (&counted)[2], Sums& d) {
    if (column + TILE_N > p.columns) {
        each(mine, d, [&](float& x, int at) {
            if (column + at >= p.columns) x = -infinity();
        });
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int wanted = target[half] - column;
        if (wanted < 0 || wanted >= TILE_N || wanted / 2 % 4 != mine.column / 2) continue;
#pragma unroll
        for (int i = 2 * half; i < TILE_N / 2; i += i % 2 ? 3 : 1)
            if (mine.column + i / 4 * 8 + i % 2 == wanted)
                p.chosen[row + 8 * half] = counted[half].or_lowest(d[i]);
    }
}

__device__ void store(float* parts, int part, int rows, int row, State s) {
    float* to = parts + static_cast<i64>(part) * 3 * rows + row;
    to[0] = s.top;
    to[rows] = s.total;
    if (ENTROPY) to[2 * static_cast<i64>(rows)] = s.weighted;
}

// `kept`: the map of [rows, columns from first_kept on], with KEEPS.
__device__ void consume(const Args& p, const Ring& ring, const TensorMap* kept) {
    const Mine mine;
    char* boxes = ring.end() + mine.group * Boxes::BYTES;
    const int stages = Ring::stages_of(p.inner);
    Ring::Slot slot;
    Turns turns(ring.turns, mine.group);
    for (Tiles tile(p, 0, p.computed(), p.across()); !tile.done(); tile.advance()) {
        const int row = tile.row + mine.row;
        Pairs pairs[2];
        float c[2];
        int target[2];
        Counted counted[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int safe = min(row + 8 * half, p.rows - 1);
            const i64 id = row + 8 * half < p.rows ? p.ids[safe] : -1;
            c[half] = p.scale(safe);
            target[half] = p.column_of(id);
            counted[half] = p.counted(safe);
        }
        const int begin = tile.unit * p.width(), end = min(begin + p.width(), p.columns);
        int block = 0;
        for (int column = begin; column < end; column += TILE_N, ++block) {
            Sums d;
            form_logits(ring, stages, mine, slot, turns, d);
            add_bias(p, mine, column, d);
            cap(p, d);
#if KEEPS
            if (column >= p.first_kept)
                Boxes::store(boxes, 1 + mine.group, *kept, tile.row + mine.group * MMA_M, column - p.first_kept, d);
#endif
            finish_logits(p, mine, row, column, target, counted, d);
            pairs[0].add(block, state_of<0>(d, c[0], counted[0]), c[0]);
            pairs[1].add(block, state_of<1>(d, c[1], counted[1]), c[1]);
        }
        if (mine.column) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half >= p.rows) continue;
            store(p.parts, tile.unit, p.rows, row + 8 * half, pairs[half].all(c[half]));
        }
    }
}

// The state of a row in a part; of no values beyond the last part.
__device__ State part_of(const Args& p, int part, int row) {
    if (part >= p.across()) return empty();
    const float* from = p.parts + static_cast<i64>(part) * 3 * p.rows + row;
    return {from[0], from[p.rows], ENTROPY ? from[2 * static_cast<i64>(p.rows)] : 0.0f};
}

// The state of a row in a unit, whose parts are blocks.
__device__ State unit_of(const Args& p, int unit, int row, float c) {
    const State low = merged<ENTROPY>(part_of(p, UNIT * unit, row), part_of(p, UNIT * unit + 1, row), c);
    const State high = merged<ENTROPY>(part_of(p, UNIT * unit + 2, row), part_of(p, UNIT * unit + 3, row), c);
    return merged<ENTROPY>(low, high, c);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    states(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
#if KEEPS
           const __grid_constant__ TensorMap kept,
#endif
           const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(1, 1);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0 && elected()) produce(p, ring, hidden, weight);
    } else {
        take_registers<232>();
#if KEEPS
        consume(p, ring, &kept);
        if (threadIdx.x % WARPGROUP == 0) stores_read<0>();
#else
        consume(p, ring, nullptr);
#endif
    }
}

// One warp per row: merges its parts and writes its statistics; 0 if its token is ignored, NaN if its id is not a
// column.
extern "C" __global__ void __launch_bounds__(256) finish(Args p) {
    const int row = static_cast<int>((static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP);
    if (row >= p.rows) return;
    const auto write = [&](Statistics found) {
        if (threadIdx.x % WARP) return;
        p.logp[row] = found.logp;
        p.norm[row] = found.norm;
        if (!ENTROPY) return;
        p.lse[row] = found.lse;
        p.entropy[row] = found.entropy;
    };
    // The states of an ignored row may never have been formed.
    if (p.ignored(row)) return write({});
    const int parts = p.across();
    const float c = p.scale(row);
    const int units = p.blocks == 1 ? (parts + UNIT - 1) / UNIT : parts;
    const State s = over_states<ENTROPY>(
        units, c, [&](int unit) { return p.blocks == 1 ? unit_of(p, unit, row, c) : part_of(p, unit, row); });
    const i64 id = p.ids[row];
    const float x = p.valid(id) ? p.chosen[row] : not_a_number();
    write(finished<ENTROPY>(s, x, p.inverse(row), c));
}

// Writes units [units, 3, rows] from parts that are blocks. One thread per row; blockIdx.y is the unit.
extern "C" __global__ void __launch_bounds__(256) merge_blocks(Args p, float* units) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), unit = static_cast<int>(blockIdx.y);
    // The states of an ignored row may never have been formed.
    if (row >= p.rows || p.ignored(row)) return;
    store(units, unit, p.rows, row, unit_of(p, unit, row, p.scale(row)));
}

// One block: writes Inputs::order, which lists first the tiles of rows that have a token that is not ignored.
extern "C" __global__ void __launch_bounds__(1024) sort_tiles(Inputs p, int* order) {
    __shared__ int computed[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, tiles = p.tiles();
    int before = 0;
    for (int first = 0; first < tiles; first += WARP) {
        const int tile = first + warp;
        bool any = false;
        for (int i = lane; i < TILE_M; i += WARP) {
            const int row = tile * TILE_M + i;
            any = any || (row < p.rows && !p.ignored(row));
        }
        any = __any_sync(ALL, any);
        if (lane == 0) computed[warp] = any;
        __syncthreads();
        const u32 all = __ballot_sync(ALL, computed[lane]), lower = all & ((1u << warp) - 1);
        // The others fill the list backwards from its end.
        const int others = first - before + warp - __popc(lower);
        if (lane == 0 && tile < tiles) order[any ? 1 + before + __popc(lower) : tiles - others] = tile;
        before += __popc(all);
        __syncthreads();
    }
    if (threadIdx.x == 0) order[0] = before;
}

#if !ENTROPY

// Given logits: their log-probabilities have the bits of `states` and `finish`, because the order of the sums is the
// same. Each row has two, over all logits and over those from `smallest` on.
struct Given {
    const float* logits;  // [rows, columns]; an address, and rows `stride` apart, that are multiples of two numbers
    const float* temperatures;
    const float* smallest;
    const i64* ids;
    float* parts;  // [2, units, 3, rows]
    float* logp;   // [2, rows]
    i64 stride;
    int rows, columns;

    __device__ int units() const { return (columns + UNIT * TILE_N - 1) / (UNIT * TILE_N); }
    __device__ float* states(int set) const { return parts + static_cast<i64>(set) * units() * 3 * rows; }
};

constexpr int GIVEN_ROWS = 8, GIVEN_WARPS = 4;

// The state of a row in a unit from those of its blocks, which lanes 4 apart hold; returned in all of them.
__device__ State over_blocks(State s, float c) {
#pragma unroll
    for (int apart = 4; apart < 16; apart *= 2) {
        const State other = {__shfl_xor_sync(ALL, s.top, apart), __shfl_xor_sync(ALL, s.total, apart), 0.0f};
        s = threadIdx.x & apart ? merged<false>(other, s, c) : merged<false>(s, other, c);
    }
    return s;
}

// Four lanes share a block of a row, as in a tile; a warp has 2 rows and one unit. blockIdx: 8 rows, unit.
extern "C" __global__ void __launch_bounds__(GIVEN_WARPS* WARP) given_states(Given p) {
    wait_for_prerequisites();
    launch_dependents();
    const int lane = threadIdx.x % WARP, first = blockIdx.x * GIVEN_ROWS + threadIdx.x / WARP * 2;
    if (first >= p.rows) return;
    const int row = first + lane / 16, safe = min(row, p.rows - 1), unit = static_cast<int>(blockIdx.y);
    const float c = __fmul_rn(__frcp_rn(p.temperatures[safe]), LOG2E), smallest = p.smallest[safe];
    const int column = (unit * UNIT + lane / 4 % UNIT) * TILE_N, left = p.columns - column;
    const float* from = p.logits + safe * p.stride + column + lane % 4 * 2;
    // The sums of the second of two rows that a thread has in a tile; state_of<0> does not read them.
    Sums d = {};
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
        const int at = 8 * j + lane % 4 * 2;
        float2 two = {-infinity(), -infinity()};
        if (at + 1 < left)
            two = *reinterpret_cast<const float2*>(from + 8 * j);
        else if (at < left)
            two.x = from[8 * j];
        d[4 * j] = two.x, d[4 * j + 1] = two.y;
    }
    const State all = state_of<0>(d, c, Every());
    State kept = empty();
    if (__any_sync(ALL, all.top >= smallest)) {
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) {
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (!(d[4 * j + k] >= smallest)) d[4 * j + k] = -infinity();
        }
        kept = state_of<0>(d, c, Every());
    }
    const State of_all = over_blocks(all, c), of_kept = over_blocks(kept, c);
    if (lane % 16 || row >= p.rows) return;
    store(p.states(0), unit, p.rows, row, of_all);
    store(p.states(1), unit, p.rows, row, of_kept);
}

// A warp for each of a row's two.
extern "C" __global__ void __launch_bounds__(256) given_logp(Given p) {
    wait_for_prerequisites();
    const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const int row = static_cast<int>(warp / 2), set = static_cast<int>(warp % 2);
    if (row >= p.rows) return;
    const float inverse = __frcp_rn(p.temperatures[row]), c = __fmul_rn(inverse, LOG2E);
    const float x = p.logits[row * p.stride + p.ids[row]];
    const State s = over_states<false>(p.units(), c, [&](int unit) -> State {
        const float* from = p.states(set) + static_cast<i64>(unit) * 3 * p.rows + row;
        return {from[0], from[p.rows], 0.0f};
    });
    const float logp = finished<false>(s, x, inverse, c).logp;
    if (threadIdx.x % WARP == 0) p.logp[static_cast<i64>(set) * p.rows + row] = logp;
}

#endif
