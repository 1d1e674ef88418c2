// Both products of one token on Hopper, bound by loads of weights: out[slot, rows of b] = a[slot, K] b[expert, rows, K]^T
// (+ bias); the first product of experts also forms the activation, and its a is the token for all slots.
//
// Rows of weights are the 16 rows of mma.sync, and the route is one of its 8 columns: as a row it would cost a tile of 16.
//
// Order of every sum, which is the contract: one FP32 chain per element over K, 16 terms a step, as in core's product.
//
//   unit       16 rows of an expert's weights: 8 of gate and 8 of up with PAIR; the work of a warp
//   block      an equal share of the units of all routes, and the rows of a of its routes; its warps take units in turns
//   ring       of each warp: STAGES stages of 64 BOXES terms of its unit, which TMA fills across units
//
// Defines: DTYPE 1 BF16, 2 FP16; PAIR: 0 or 1: rows of gate, then those of up; ACTIVATION is read only with PAIR; WIDE_IDS:
// ids are 64-bit; WARPS, STAGES, BOXES.
#include <rl_kernels/warp_mma.cuh>

#include "activation.cuh"
#include "rows.cuh"

using namespace rlk;

struct Args {
    const void *a, *bias, *ids;
    void* out;
    int routes, experts, columns, inner;
};

namespace {

using Number = Numbers<DTYPE>::Type;

constexpr int ROWS = 16, MOST = 8, THREADS = WARPS * WARP, BOX = ROWS * SWIZZLE, STAGE = BOXES * BOX, STEP_K = 16;
constexpr int WIDTH = PAIR ? ROWS / 2 : ROWS;
// The first product reads the token, the second one a row of each route.
constexpr bool OF_TOKEN = PAIR;

struct Route {
    int expert, slot;
};

struct Shared {
    Barrier full[WARPS * STAGES];
    Route routes[MOST];
    int count;
};

// Lists the routes that have an expert; by one warp.
__device__ void list_routes(const Args& p, Shared& s) {
    const int lane = threadIdx.x;
    i64 id = -1;
    if (lane < p.routes) id = WIDE_IDS ? static_cast<const i64*>(p.ids)[lane] : static_cast<const int*>(p.ids)[lane];
    const bool is_here = id >= 0 && id < p.experts;
    const u32 all = __ballot_sync(ALL, is_here);
    if (is_here) s.routes[__popc(all & ((1u << lane) - 1))] = {static_cast<int>(id), lane};
    if (lane == 0) s.count = __popc(all);
}

// Copies the rows of `count` listed routes from `first` on; terms beyond K up to a whole step are 0.
__device__ void copy_rows(const Args& p, const Shared& s, int first, int count, char* rows, int stride) {
    const int chunks = (p.inner + STEP_K - 1) / STEP_K * STEP_K / PER_CHUNK<Number>;
    for (int i = threadIdx.x; i < count * chunks; i += THREADS) {
        const int row = i / chunks, chunk = i % chunks, from = OF_TOKEN ? 0 : s.routes[first + row].slot;
        const bool is_beyond = chunk * PER_CHUNK<Number> >= p.inner;
        const char* at = static_cast<const char*>(p.a) + static_cast<i64>(from) * p.inner * Number::SIZE;
        copy_chunk(rows + row * stride + chunk * CHUNK, at + (is_beyond ? 0 : chunk * CHUNK), is_beyond);
    }
    commit_copies();
    copies_done<0>();
}

// A warp's ring and the units that it loads: number `unit` and those WARPS apart, up to `end`.
struct Loader {
    const Args& p;
    const Shared& s;
    const TensorMap& map;
    char* ring;
    Barrier* full;
    int unit, end, tiles, k = 0, slot = 0;
    // By one lane: starts the copies of the next stage.
    __device__ void start() {
        if (unit >= end) return;
        const int expert = s.routes[unit / tiles].expert, row = unit % tiles * WIDTH;
        const int boxes = min(BOXES, (p.inner - k + SPAN - 1) / SPAN);
        full[slot].arrive_expecting(boxes * BOX);
        for (int i = 0; i < boxes; ++i)
            load_box(ring + slot * STAGE + i * BOX, map, expert, 0, row, k + i * SPAN, full[slot]);
        if (++slot == STAGES) slot = 0;
        k += BOXES * SPAN;
        if (k >= p.inner) k = 0, unit += WARPS;
    }
};

// Adds a unit's chains to d. The route is column 0, whose terms are row `first` of `rows`; other columns are not stored.
__device__ void multiply_unit(const Args& p, Loader& loader, Slot<STAGES>& slot, u32 rows, int first, int stride,
                              float (&d)[4]) {
    const int lane = threadIdx.x % WARP, row = lane % 16;
    const u32 left = row * SWIZZLE, flip = row % 8;
    const u32 right = rows + min(first + lane % 8, MOST - 1) * stride + lane / 8 % 2 * CHUNK;
    for (int k = 0; k < p.inner; k += BOXES * SPAN, slot.advance()) {
        loader.full[slot.stage].wait(slot.parity);
        const u32 stage = shared_address(loader.ring + slot.stage * STAGE) + left;
        const int steps = min(BOXES * SPAN, p.inner - k);
#pragma unroll
        for (int step = 0; step < BOXES * SPAN; step += STEP_K) {
            if (step >= steps) break;
            u32 a[4], b[2];
            load_matrices(a, stage + step / SPAN * BOX + ((step % SPAN / 8 + lane / 16) ^ flip) * CHUNK);
            load_matrices(b, right + (k + step) * Number::SIZE);
            add_product<Number>(d, a, b[0], b[1]);
        }
        fence_copies();
        __syncwarp();
        if (lane == 0) loader.start();
    }
}

// Adds the bias to a unit's sums, and stores them or their activation.
__device__ void finish(const Args& p, const Route& route, int first, float (&d)[4]) {
    const int lane = threadIdx.x % WARP, row = first + lane / 4, other = PAIR ? row + p.columns : row + 8;
    if (lane % 4 || row >= p.columns) return;
    const bool has_other = PAIR || other < p.columns;
    float high[2] = {d[0], d[1]}, low[2] = {d[2], d[3]};
    if (p.bias) {
        const auto* bias =
            static_cast<const unsigned short*>(p.bias) + static_cast<i64>(route.expert) * p.columns * (PAIR ? 2 : 1);
        high[0] = __fadd_rn(high[0], Number::read(bias + row));
        if (has_other) low[0] = __fadd_rn(low[0], Number::read(bias + other));
    }
    char* out = static_cast<char*>(p.out) + static_cast<i64>(route.slot) * p.columns * Number::SIZE;
#if PAIR
    float h[2];
    activate<Number, static_cast<Activation>(ACTIVATION)>(high, low, h);
    Number::write(out + row * Number::SIZE, h[0]);
#else
    Number::write(out + row * Number::SIZE, high[0]);
    if (has_other) Number::write(out + other * Number::SIZE, low[0]);
#endif
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    token(const __grid_constant__ TensorMap map, const __grid_constant__ Args p) {
    extern __shared__ char memory[];
    __shared__ Shared s;
    char* ring = memory + (-shared_address(memory) & 1023);
    char* rows = ring + WARPS * STAGES * STAGE;
    const int stride = (p.inner + STEP_K - 1) / STEP_K * STEP_K * Number::SIZE + CHUNK;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        prefetch(map);
        for (int i = 0; i < WARPS * STAGES; ++i) s.full[i].init(1);
        fence_init();
    }
    // The second product's ids and weights are older than the first product, for which it waits later.
    if (OF_TOKEN) {
        wait_for_prerequisites();
        launch_dependents();
    }
    if (threadIdx.x < WARP) list_routes(p, s);
    __syncthreads();
    const int tiles = (p.columns + WIDTH - 1) / WIDTH;
    const i64 units = static_cast<i64>(s.count) * tiles;
    const int begin = static_cast<int>(units * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
    Loader loader{p, s, map, ring + warp * STAGES * STAGE, s.full + warp * STAGES, begin + warp, end, tiles};
    if (lane == 0)
        for (int i = 0; i < STAGES; ++i) loader.start();
    __syncwarp();
    if (!OF_TOKEN) {
        wait_for_prerequisites();
        launch_dependents();
    }
    const int first = begin / tiles, count = begin < end ? (end - 1) / tiles + 1 - first : 0;
    copy_rows(p, s, first, count, rows, stride);
    __syncthreads();
    Slot<STAGES> slot;
    for (int unit = begin + warp; unit < end; unit += WARPS) {
        float d[4] = {};
        multiply_unit(p, loader, slot, shared_address(rows), unit / tiles - first, stride, d);
        finish(p, s.routes[unit / tiles], unit % tiles * WIDTH, d);
    }
}
