// linear_logp's forward pass on Hopper: tiles of logits that live in the registers of WGMMA and end there as softmax states.
//
// Order of the sums, which is the contract: a logit is a canonical chain over D, as det_gemm's; + bias in FP32. Of a block
// of 256 columns four lanes share a row: each takes two of every eight columns, j = 0, 1, ... ascending, the even and the
// odd j in sums of their own, and a tree adds the lanes. Four blocks make a unit: (0 + 1) + (2 + 3). Of the units of a row
// every 32nd is merged in ascending order, and a tree adds those 32 states. No tile, stage, row or batch changes it.
//
//   block      a producer warp, and GROUPS consumer warpgroups; it stays, and takes unit after unit
//   tile       64 GROUPS rows x 256 columns; consumer g has the rows from 64 g in its registers (wgmma.cuh)
//   stage      64 terms of D of both operands of a tile in shared memory, swizzled; STAGES of them go round
//
// Defines: DTYPE 1 BF16, 2 FP16; ENTROPY 0 or 1; GROUPS, STAGES.
#include <rl_kernels/chain.cuh>
#include <rl_kernels/softmax.cuh>

using namespace rlk;

#if DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

// Null pointers are not read: temperatures falls back to the number.
struct Args {
    const void* bias;
    const float* temperatures;
    const i64* ids;
    float* chosen;  // [rows]: the logit that each row selects, before the temperature
    float* parts;   // [columns / (256 blocks), 3, rows]: states
    float* logp;
    float* lse;
    float* entropy;
    i64 ignore_index;
    int rows, columns, inner;
    // Rows of tiles that are worked on together: what they share stays in the L2 cache; and blocks of a part, 1 or 4.
    int group, blocks;
    float temperature;
    int has_ignored;

    __device__ float inverse(int row) const { return __frcp_rn(temperatures ? temperatures[row] : temperature); }
    __device__ float scale(int row) const { return __fmul_rn(inverse(row), LOG2E); }
};

namespace {

constexpr int TILE_M = MMA_M * GROUPS, TILE_N = 256, UNIT = 4;
constexpr int INNER = SPAN;
constexpr int A_BYTES = TILE_M * SWIZZLE, STAGE_BYTES = A_BYTES + TILE_N * SWIZZLE;
constexpr int THREADS = (GROUPS + 1) * WARPGROUP;

using Sums = float[TILE_N / 2];

__shared__ Barrier full[STAGES], spare[STAGES];
extern __shared__ char memory[];

// The swizzle begins anew at multiples of 1024 bytes.
__device__ char* stage_at(int stage) { return memory + (-shared_address(memory) & (ATOM - 1)) + stage * STAGE_BYTES; }

__device__ int stages_of(int inner) { return (inner + INNER - 1) / INNER; }

// The parts of a block, one after the other: `group` rows of tiles at a time, column by column.
struct Parts {
    const Args& p;
    int down, across, index, row, number;
    __device__ explicit Parts(const Args& p) : p(p), index(blockIdx.x) {
        down = (p.rows + TILE_M - 1) / TILE_M;
        across = (p.columns + TILE_N * p.blocks - 1) / (TILE_N * p.blocks);
        place();
    }
    __device__ bool done() const { return index >= down * across; }
    __device__ void advance() {
        index += gridDim.x;
        place();
    }
    __device__ void place() {
        if (done()) return;
        const Place place = place_of(index, down, across, p.group);
        row = place.row * TILE_M;
        number = place.column;
    }
    __device__ int begin() const { return number * p.blocks * TILE_N; }
    __device__ int end() const { return min(begin() + p.blocks * TILE_N, p.columns); }
};

// One thread, an elected one.
__device__ void produce(const Args& p, const TensorMap& hidden, const TensorMap& weight) {
    const int stages = stages_of(p.inner);
    prefetch(hidden);
    prefetch(weight);
    Slot<STAGES> slot;
    for (Parts part(p); !part.done(); part.advance()) {
        for (int column = part.begin(); column < part.end(); column += TILE_N) {
#pragma unroll 1
            for (int i = 0; i < stages; ++i, slot.advance()) {
                spare[slot.stage].wait(slot.parity ^ 1);
                full[slot.stage].arrive_expecting(STAGE_BYTES);
                char* stage = stage_at(slot.stage);
                load_tile<K_MAJOR, 1>(stage, hidden, full[slot.stage], part.row, i * INNER);
                load_tile<K_MAJOR, 1>(stage + A_BYTES, weight, full[slot.stage], column, i * INNER);
            }
        }
    }
}

// What one thread of a consumer has of a tile: rows and columns of its first number (wgmma.cuh).
struct Mine {
    int group, row, column;
    __device__ Mine() {
        const Fragment fragment;
        group = warp_index() / WARPS_OF_GROUP - 1;
        row = group * MMA_M + fragment.row;
        column = fragment.column;
    }
};

// The whole chain of a tile.
__device__ void multiply(int stages, const Mine& mine, Slot<STAGES>& slot, Sums& d) {
    int before = 0;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < stages; ++i, slot.advance()) {
        full[slot.stage].wait(slot.parity);
        const char* stage = stage_at(slot.stage);
        add_stage<Number, K_MAJOR, K_MAJOR, 1, 0, 0>(d, stage + mine.group * PIECE, stage + A_BYTES);
        products_done<1>();
        if (i) give_back(spare[before]);
        before = slot.stage;
    }
    products_done<0>();
    hold(d);
    if (stages) give_back(spare[before]);
}

// Calls f(sum, column) for each of a thread's sums, with its column from the tile's first one on.
template <class F>
__device__ void each(const Mine& mine, Sums& d, F f) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) f(d[i], mine.column + i / 4 * 8 + i % 2);
}

__device__ float over_lanes(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(ALL, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(ALL, x, 2));
}

// The state of one of a thread's two rows in a tile, in all of the four lanes that share the row.
template <int HALF>
__device__ State state_of(const Sums& d, float c) {
    const auto at = [&](int j, int k) { return d[4 * j + 2 * HALF + k]; };
    float top = -infinity(), other = -infinity();
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) top = fmaxf(top, at(j, 0)), other = fmaxf(other, at(j, 1));
    top = fmaxf(top, other);
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
    const float r = reference_of(top, c);
    float sum[4] = {}, product[4] = {};
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int lane = j % 2 * 2 + k;
            const float exponent = __fmaf_rn(at(j, k), c, -r), power = exp2_fast(exponent);
            sum[lane] = __fadd_rn(sum[lane], power);
            if (ENTROPY) product[lane] = __fmaf_rn(power, fmaxf(exponent, LEAST), product[lane]);
        }
    }
    return {top, over_lanes(pairs(sum)), ENTROPY ? over_lanes(pairs(product)) : 0.0f};
}

// What a row has come to in a part: blocks 0 and 1, and blocks 2 and 3.
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

// Bias, and -inf beyond the last column; then what a row selects, if this thread has it.
__device__ void finish_logits(const Args& p, const Mine& mine, int row, int column, const int (&target)[2], Sums& d) {
    if (p.bias) {
        const auto* bias = static_cast<const char*>(p.bias) + static_cast<i64>(column) * Number::SIZE;
        each(mine, d, [&](float& x, int at) {
            if (column + at < p.columns) x = __fadd_rn(x, Number::read(bias + at * Number::SIZE));
        });
    }
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
            if (mine.column + i / 4 * 8 + i % 2 == wanted) p.chosen[row + 8 * half] = d[i];
    }
}

__device__ void consume(const Args& p) {
    const Mine mine;
    const int stages = stages_of(p.inner);
    Slot<STAGES> slot;
    for (Parts part(p); !part.done(); part.advance()) {
        const int row = part.row + mine.row;
        Pairs pairs[2];
        float c[2];
        int target[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int safe = min(row + 8 * half, p.rows - 1);
            const i64 id = row + 8 * half < p.rows ? p.ids[safe] : -1;
            c[half] = p.scale(safe);
            target[half] = id >= 0 && id < p.columns ? static_cast<int>(id) : -1;
        }
        int block = 0;
        for (int column = part.begin(); column < part.end(); column += TILE_N, ++block) {
            Sums d;
            multiply(stages, mine, slot, d);
            finish_logits(p, mine, row, column, target, d);
            pairs[0].add(block, state_of<0>(d, c[0]), c[0]);
            pairs[1].add(block, state_of<1>(d, c[1]), c[1]);
        }
        if (mine.column) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half >= p.rows) continue;
            const State s = pairs[half].all(c[half]);
            float* to = p.parts + static_cast<i64>(part.number) * 3 * p.rows + row + 8 * half;
            to[0] = s.top;
            to[p.rows] = s.total;
            if (ENTROPY) to[2 * static_cast<i64>(p.rows)] = s.weighted;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    states(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
           const __grid_constant__ Args p) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) full[i].init(1), spare[i].init(GROUPS * WARPS_OF_GROUP);
        fence_init();
    }
    __syncthreads();
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0 && elected()) produce(p, hidden, weight);
    } else {
        take_registers<232>();
        consume(p);
    }
}

// One warp a row: its parts, merged, and its statistics; 0 where its token is ignored, NaN where its id is no column.
extern "C" __global__ void __launch_bounds__(256) finish(Args p) {
    const int row = static_cast<int>((static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP);
    if (row >= p.rows) return;
    const int parts = (p.columns + TILE_N * p.blocks - 1) / (TILE_N * p.blocks);
    const float c = p.scale(row);
    const auto load = [&](int part) {
        if (part >= parts) return empty();
        const float* from = p.parts + static_cast<i64>(part) * 3 * p.rows + row;
        return State{from[0], from[p.rows], ENTROPY ? from[2 * static_cast<i64>(p.rows)] : 0.0f};
    };
    const int units = p.blocks == 1 ? (parts + UNIT - 1) / UNIT : parts;
    const State s = over_states<ENTROPY>(units, c, [&](int unit) {
        if (p.blocks > 1) return load(unit);
        const State low = merged<ENTROPY>(load(UNIT * unit), load(UNIT * unit + 1), c);
        return merged<ENTROPY>(low, merged<ENTROPY>(load(UNIT * unit + 2), load(UNIT * unit + 3), c), c);
    });
    if (threadIdx.x % WARP) return;
    const i64 id = p.ids[row];
    Statistics found = {0.0f, 0.0f, 0.0f};
    if (!(p.has_ignored && id == p.ignore_index)) {
        const float x = id >= 0 && id < p.columns ? p.chosen[row] : not_a_number();
        found = finished<ENTROPY>(s, x, p.inverse(row), c);
    }
    p.logp[row] = found.logp;
    p.lse[row] = found.lse;
    if (ENTROPY) p.entropy[row] = found.entropy;
}
