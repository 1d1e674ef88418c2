// fused_logp's forward pass on Hopper: TMA copies rows to shared memory, ahead of the warps that sum them.
//
//   block      persistent: every gridDim.x-th row. Ten warps: 0 to 7 consumers, 8 the producer, 9 the epilogue
//   turn       eight steps of a row, one for each consumer warp
//   stage      one turn in shared memory; STAGES of them form a ring
//   producer   one thread starts the copies of a turn once its stage is empty
//   consumer   warp w takes step w of every turn, so it forms unit w of each segment; its lanes: fused_logp.cuh
//   epilogue   one warp merges the units of a row and writes its statistics
// Order of the sums: fused_logp.cuh.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY 0 or 1; BLOCKS resident on a multiprocessor, which bounds the
// registers; STAGES of the ring.
#include <rl_kernels/tma.cuh>

#include "fused_logp.cuh"

using namespace rlk;

namespace {

constexpr int STEP_BYTES = STEP * Number::SIZE;
// Bytes of a stage: the steps of a turn, and one more chunk if the row begins between multiples of 16 bytes.
constexpr int STAGE = WARPS * STEP_BYTES + CHUNK;
static_assert(UNITS == WARPS, "a warp forms one unit of each segment");

// What a stage holds: the steps from `first` on of active row `index`, and its scale. index -1: no more rows.
struct Turn {
    i64 index;
    float scale;
    int first;
};

// The ring of turns; found and merged are the barriers of the unit states, which are double-buffered over rows.
struct Shared {
    Turn turns[STAGES];
    Barrier full[STAGES], empty[STAGES];
    Barrier found[2], merged[2];
};

__shared__ Shared shared;
// The stages, then the unit states [2, units] of two rows.
extern __shared__ __align__(128) char memory[];

__device__ State* states_of(const Forward& p, u32 row) {
    return reinterpret_cast<State*>(memory + STAGES * STAGE) + row % 2 * p.units();
}

// What decides whether a row is active, and its temperature; loaded one row ahead.
struct Ahead {
    i64 id;
    float temperature;
    signed char mark;

    __device__ Ahead(const Forward& p, i64 index) : id(0), temperature(p.temperature), mark(1) {
        if (index >= p.rows) return;
        if (p.has_ignored) id = p.ids[index];
        if (p.marks) mark = p.marks[index];
        if (p.temperatures) temperature = p.temperatures[index];
    }
};

// Producer, one thread: describes each turn and starts its copy, once the stage is empty.
__device__ void copy_rows(const Forward& p) {
    u32 made = 0;
    const auto begin_turn = [&](Turn turn, u32 bytes) {
        shared.empty[made % STAGES].wait(made / STAGES % 2 ^ 1);
        shared.turns[made % STAGES] = turn;
        shared.full[made % STAGES].arrive_expecting(bytes);
        return made++ % STAGES;
    };
    Ahead next(p, blockIdx.x);
    for (i64 index = blockIdx.x; index < p.rows; index += gridDim.x) {
        const Ahead now = next;
        next = Ahead(p, index + gridDim.x);
        if (!now.mark || (p.has_ignored && now.id == p.ignore_index)) continue;
        const float scale = __fmul_rn(__frcp_rn(now.temperature), LOG2E);
        const Row<Number> row = p.row(index);
        const Steps steps(p, row);
        for (int first = 0; first < steps.count; first += WARPS) {
            const int begin = max(first, steps.first), end = min(first + WARPS, steps.last);
            const u32 bytes = begin < end ? (end - begin) * STEP_BYTES + (row.skew() ? CHUNK : 0) : 0;
            const u32 stage = begin_turn({index, scale, first}, bytes);
            char* target = memory + stage * STAGE + (begin - first) * STEP_BYTES;
            if (bytes) copy_once(target, row.floor_at(begin * STEP), bytes, shared.full[stage]);
        }
    }
    begin_turn({-1, 0.0f, 0}, 0);
}

// Consumer, one of eight warps: adds its step of each turn. At the end of a segment it stores the state of its unit in
// shared memory.
__device__ void sum_rows(const Forward& p) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, units = p.units();
    Row<Number> row = p.row(0);
    Steps steps(p, row);
    State s = empty();
    u32 rows = 0;
    for (u32 taken = 0;; ++taken) {
        const u32 stage = taken % STAGES;
        shared.full[stage].wait(taken / STAGES % 2);
        const Turn turn = shared.turns[stage];
        if (turn.index < 0) return;
        if (turn.first == 0) {
            row = p.row(turn.index);
            steps = Steps(p, row);
        }
        const int step = turn.first + warp, next = turn.first + WARPS;
        if (step < steps.count) {
            u32 words[VECTORS * WORDS<Number>];
            const char* held = memory + stage * STAGE + warp * STEP_BYTES;
            const auto load = [&](int beyond) { return *reinterpret_cast<const Chunk*>(held + beyond); };
            read_step<true>(row, step, steps.wide(step), load, words);
            add<ENTROPY, Number>(s, words, turn.scale);
        }
        fence_copies();
        __syncwarp();
        if (lane == 0) shared.empty[stage].arrive();
        if (next % PER_SEGMENT && next < steps.count) continue;
        s = over_warp<ENTROPY>(s, turn.scale);
        const int unit = turn.first / PER_SEGMENT * UNITS + warp;
        if (lane == 0) {
            if (turn.first < PER_SEGMENT) shared.merged[rows % 2].wait(rows / 2 % 2 ^ 1);
            if (unit < units) states_of(p, rows)[unit] = s;
            if (next >= steps.count) shared.found[rows % 2].arrive();
        }
        s = empty();
        if (next >= steps.count) ++rows;
    }
}

// Epilogue, one warp: merges the unit states of each row and writes its statistics.
__device__ void write_rows(const Forward& p) {
    const int lane = threadIdx.x % WARP, units = p.units();
    u32 rows = 0;
    for (i64 index = blockIdx.x; index < p.rows; index += gridDim.x) {
        const bool is_active = p.active(index);
        const float x = is_active ? p.selected(index, p.ids[index]) : 0.0f;
        State s = empty();
        if (is_active) {
            shared.found[rows % 2].wait(rows / 2 % 2);
            const State* states = states_of(p, rows);
            s = over_states<ENTROPY>(units, p.scale(index), [&](int k) { return states[k]; });
            if (lane == 0) shared.merged[rows % 2].arrive();
            ++rows;
        }
        if (lane == 0) p.write(index, is_active, s, x);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__((WARPS + 2) * WARP, BLOCKS) forward_rows(Forward p) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) shared.full[i].init(1), shared.empty[i].init(WARPS);
        for (int i = 0; i < 2; ++i) shared.found[i].init(WARPS), shared.merged[i].init(1);
        fence_init();
    }
    __syncthreads();
    const int warp = threadIdx.x / WARP;
    if (warp < WARPS) return sum_rows(p);
    if (warp > WARPS) return write_rows(p);
    if (threadIdx.x % WARP == 0) copy_rows(p);
}
