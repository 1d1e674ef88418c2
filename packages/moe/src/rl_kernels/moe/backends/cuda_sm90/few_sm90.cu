// Products of few routes on Hopper, bound by loads of weights: out[route, rows of b] = a[route, K] b[expert, rows, K]^T
// (+ bias); the first product of experts also forms the activation.
//
// Rows of weights are the 16 rows of mma.sync, routes its 8 columns: a route costs a column, not a tile of 16 rows. Nothing
// is sorted: each block counts the routes of all experts and collects those of its own.
//
// Order of every sum, which is the contract: one FP32 chain per element over K, 16 terms a step, as in core's product.
//
//   segment    up to 16 routes of one expert; of a single token each route is one
//   phase      segments of a block with up to 16 routes, whose rows of a are in shared memory; most blocks have one phase
//   unit       16 rows of the expert's weights: 8 of gate and 8 of up with PAIR; the work of a warp
//   block      units from an equal share of all segments' units; its warps take them in turns
//   ring       of each warp: STAGES stages of 64 BOXES terms of its unit, which TMA fills across units and segments
//
// Defines: DTYPE 1 BF16, 2 FP16; PAIR: 0 or 1: rows of gate, then those of up; ACTIVATION is read only with PAIR; GATHERED:
// rows of a are tokens, else routes; WIDE_IDS: ids are 64-bit; WARPS, STAGES, BOXES.
#include <rl_kernels/warp_mma.cuh>

#include "activation.cuh"
#include "rows.cuh"

using namespace rlk;

struct Args {
    const void *a, *bias, *ids;
    void* out;
    int routes, slots, experts, columns, inner;
};

namespace {

using Number = Numbers<DTYPE>::Type;

constexpr int ROWS = 16, MOST = 16, THREADS = WARPS * WARP, BOX = ROWS * SWIZZLE, STAGE = BOXES * BOX, STEP_K = 16;
// Largest numbers of experts, routes and segments.
constexpr int EXPERTS = 512, ROUTES = 2048, SEGMENTS = EXPERTS + ROUTES / MOST;
constexpr int WIDTH = PAIR ? ROWS / 2 : ROWS;

struct Shared {
    Barrier full[WARPS * STAGES];
    // A segment's expert; above 16 bits its number among the expert's, or its route of a single token.
    int segments[SEGMENTS], counts[EXPERTS], total, route[MOST];
    short ids[ROUTES];
};

__device__ inline int id_of(const Args& p, int route) {
#if WIDE_IDS
    const i64 id = static_cast<const i64*>(p.ids)[route];
#else
    const int id = static_cast<const int*>(p.ids)[route];
#endif
    return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

__device__ inline bool is_single(const Args& p) { return p.routes == p.slots && p.routes <= WARP; }

// Lists the routes of a single token as segments; by one warp.
__device__ void list_routes(const Args& p, Shared& s) {
    const int lane = threadIdx.x, id = lane < p.routes ? id_of(p, lane) : -1;
    const u32 live = __ballot_sync(ALL, id >= 0);
    if (id >= 0) s.segments[__popc(live & ((1u << lane) - 1))] = id | lane << 16;
    if (lane == 0) s.total = __popc(live);
}

// Lists the segments of all experts.
__device__ void list_segments(const Args& p, Shared& s) {
    if (is_single(p)) {
        if (threadIdx.x < WARP) list_routes(p, s);
        __syncthreads();
        return;
    }
    for (int i = threadIdx.x; i < p.experts; i += THREADS) s.counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.routes; i += THREADS) {
        const int id = id_of(p, i);
        s.ids[i] = static_cast<short>(id);
        if (id >= 0) atomicAdd(&s.counts[id], 1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        const int lane = threadIdx.x;
        int before = 0;
        for (int first = 0; first < p.experts; first += WARP) {
            const int e = first + lane, own = e < p.experts ? (s.counts[e] + MOST - 1) / MOST : 0;
            int sum = own;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int other = __shfl_up_sync(ALL, sum, step);
                if (lane >= step) sum += other;
            }
            for (int i = 0; i < own; ++i) s.segments[before + sum - own + i] = e | i << 16;
            before += __shfl_sync(ALL, sum, WARP - 1);
        }
        if (lane == 0) s.total = before;
    }
    __syncthreads();
}

// The number of routes of a segment.
__device__ inline int live_of(const Args& p, const Shared& s, int segment) {
    const int one = s.segments[segment];
    return is_single(p) ? 1 : min(MOST, s.counts[one & 0xffff] - (one >> 16) * MOST);
}

// Collects the routes of a segment, by one warp.
__device__ void collect(const Args& p, const Shared& s, int segment, int* routes) {
    const int expert = segment & 0xffff, lane = threadIdx.x % WARP;
    if (is_single(p)) {
        if (lane == 0) routes[0] = segment >> 16;
        return;
    }
    int count = -(segment >> 16) * MOST;
    for (int begin = 0; begin < p.routes && count < MOST; begin += WARP) {
        const int route = begin + lane;
        const bool is_own = route < p.routes && s.ids[route] == expert;
        const u32 all = __ballot_sync(ALL, is_own);
        const int place = count + __popc(all & ((1u << lane) - 1));
        if (is_own && place >= 0 && place < MOST) routes[place] = route;
        count += __popc(all);
    }
}

// Copies the rows of a phase's routes; terms beyond K up to a whole step are 0.
__device__ void copy_rows(const Args& p, const Shared& s, int count, char* rows, int stride) {
    const int chunks = (p.inner + STEP_K - 1) / STEP_K * STEP_K / PER_CHUNK<Number>;
    for (int i = threadIdx.x; i < count * chunks; i += THREADS) {
        const int row = i / chunks, chunk = i % chunks;
        const int from = GATHERED ? s.route[row] / p.slots : s.route[row];
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
        const int expert = s.segments[unit / tiles] & 0xffff, row = unit % tiles * WIDTH;
        const int boxes = min(BOXES, (p.inner - k + SPAN - 1) / SPAN);
        full[slot].arrive_expecting(boxes * BOX);
        for (int i = 0; i < boxes; ++i)
            load_box(ring + slot * STAGE + i * BOX, map, expert, 0, row, k + i * SPAN, full[slot]);
        if (++slot == STAGES) slot = 0;
        k += BOXES * SPAN;
        if (k >= p.inner) k = 0, unit += WARPS;
    }
};

// Adds a unit's chains to d: PARTS times 8 routes from row `first` on. Rows beyond the `room` of the block, whose sums are
// not stored, are the last one.
template <int PARTS>
__device__ void multiply_unit(const Args& p, Loader& loader, Slot<STAGES>& slot, u32 rows, int first, int room, int stride,
                              float (&d)[2][4]) {
    const int lane = threadIdx.x % WARP, row = lane % 16;
    const u32 left = row * SWIZZLE, flip = row % 8;
    const u32 right = rows + min(first + lane % 8 + lane / 16 * 8, room - 1) * stride + lane / 8 % 2 * CHUNK;
    for (int k = 0; k < p.inner; k += BOXES * SPAN, slot.advance()) {
        loader.full[slot.stage].wait(slot.parity);
        const u32 stage = shared_address(loader.ring + slot.stage * STAGE) + left;
        const int steps = min(BOXES * SPAN, p.inner - k);
#pragma unroll
        for (int step = 0; step < BOXES * SPAN; step += STEP_K) {
            if (step >= steps) break;
            u32 a[4];
            load_matrices(a, stage + step / SPAN * BOX + ((step % SPAN / 8 + lane / 16) ^ flip) * CHUNK);
            if constexpr (PARTS == 2) {
                u32 b[4];
                load_matrices(b, right + (k + step) * Number::SIZE);
                add_product<Number>(d[0], a, b[0], b[1]);
                add_product<Number>(d[1], a, b[2], b[3]);
            } else {
                u32 b[2];
                load_matrices(b, right + (k + step) * Number::SIZE);
                add_product<Number>(d[0], a, b[0], b[1]);
            }
        }
        fence_copies();
        __syncwarp();
        if (lane == 0) loader.start();
    }
}

__device__ inline void store(void* out, i64 at, float x) { Number::write(static_cast<char*>(out) + at * Number::SIZE, x); }

// Adds the bias to a unit's sums of 8 routes, and stores them or their activation.
__device__ void finish(const Args& p, const int* routes, int live, int expert, int first, int part, float (&d)[4]) {
    const int lane = threadIdx.x % WARP, row = first + lane / 4, column = part * 8 + lane % 4 * 2;
    const int other = PAIR ? row + p.columns : row + 8;
    if (row >= p.columns) return;
    const bool has_other = PAIR || other < p.columns;
    if (p.bias) {
        const auto* bias = static_cast<const unsigned short*>(p.bias) + static_cast<i64>(expert) * p.columns * (PAIR ? 2 : 1);
        const float one = Number::read(bias + row), two = has_other ? Number::read(bias + other) : 0.0f;
        d[0] = __fadd_rn(d[0], one), d[1] = __fadd_rn(d[1], one), d[2] = __fadd_rn(d[2], two), d[3] = __fadd_rn(d[3], two);
    }
    float high[2] = {d[0], d[1]}, low[2] = {d[2], d[3]};
#if PAIR
    float h[2];
    activate<Number, static_cast<Activation>(ACTIVATION)>(high, low, h);
    high[0] = h[0], high[1] = h[1];
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (column + i >= live) continue;
        const i64 at = static_cast<i64>(routes[column + i]) * p.columns;
        store(p.out, at + row, high[i]);
        if (!PAIR && has_other) store(p.out, at + other, low[i]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) few(const __grid_constant__ TensorMap map, const __grid_constant__ Args p) {
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
    // The second product's ids and weights are older than the first product, which the next kernel waits for.
    if (GATHERED) {
        wait_for_prerequisites();
        launch_dependents();
    }
    list_segments(p, s);
    const int tiles = (p.columns + WIDTH - 1) / WIDTH;
    const i64 units = static_cast<i64>(s.total) * tiles;
    const int begin = static_cast<int>(units * blockIdx.x / gridDim.x), end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
    Loader loader{p, s, map, ring + warp * STAGES * STAGE, s.full + warp * STAGES, begin + warp, end, tiles};
    if (lane == 0)
        for (int i = 0; i < STAGES; ++i) loader.start();
    __syncwarp();
    if (!GATHERED) {
        wait_for_prerequisites();
        launch_dependents();
    }
    const int room = p.routes <= MOST / 2 ? MOST / 2 : MOST;
    Slot<STAGES> slot;
    int unit = begin + warp;
    for (int first = begin / tiles, after; first * tiles < end; first = after) {
        // All threads find the same phase.
        int count = 0;
        for (after = first; after * tiles < end; ++after) {
            const int live = live_of(p, s, after);
            if (count + live > MOST) break;
            count += live;
        }
        __syncthreads();
        for (int segment = first, row = 0; segment < after; row += live_of(p, s, segment), ++segment)
            if ((segment - first) % WARPS == warp) collect(p, s, s.segments[segment], s.route + row);
        __syncthreads();
        copy_rows(p, s, count, rows, stride);
        __syncthreads();
        int segment = first, row = 0;
        for (; unit < min(end, after * tiles); unit += WARPS) {
            for (; segment < unit / tiles; ++segment) row += live_of(p, s, segment);
            const int live = live_of(p, s, segment), expert = s.segments[segment] & 0xffff;
            float d[2][4] = {};
            if (live > 8)
                multiply_unit<2>(p, loader, slot, shared_address(rows), row, room, stride, d);
            else
                multiply_unit<1>(p, loader, slot, shared_address(rows), row, room, stride, d);
#pragma unroll
            for (int part = 0; part < 2; ++part)
                if (part * 8 < live) finish(p, s.route + row, live, expert, unit % tiles * WIDTH, part, d[part]);
        }
    }
}
