// fused_logp's forward pass on Hopper: bulk copies bring rows into shared memory, several ahead of the warp that asked.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY 0 or 1; BLOCKS that share a multiprocessor, which bounds the
// registers; STAGES, steps that a warp has under way.
#include <rl_kernels/tma.cuh>

#include "fused_logp.cuh"

using namespace rlk;

namespace {

// A step, and what a skew adds.
constexpr int STAGE = STEP * Number::SIZE + CHUNK;

// From a row of a block's slot to its next one.
__device__ i64 apart(const Forward& p) { return static_cast<i64>(gridDim.x) * p.slots; }

// What one thread of a warp does ahead of it: it starts the copies of all steps that are the warp's own, in the order in
// which the warp takes them: rows index, index + apart(p), ..., and of a row the segments first, first + warps, ...
struct Ahead {
    const Forward& p;
    i64 index;
    int first, segment, step;
    Steps steps;
    const char* source;
    u32 bytes;

    __device__ Ahead(const Forward& p, i64 index, int first)
        : p(p), index(index), first(first), segment(first), step(0), steps(p.row(0), 0) {
        skip();
    }
    __device__ bool done() const { return index >= p.rows; }

    // The next step; of one whose chunks reach beyond the row nothing is copied.
    __device__ void fetch(char* stage, Barrier& full) {
        const bool wide = steps.wide(step);
        full.arrive_expecting(wide ? bytes : 0);
        if (wide) copy_once(stage, source, bytes, full);
        source += STEP * Number::SIZE;
        if (++step < steps.count) return;
        segment += p.warps;
        if (segment < p.segments()) return enter();
        segment = first;
        index += apart(p);
        skip();
    }

  private:
    // To the next row that has a segment for this warp and is active.
    __device__ void skip() {
        while (!done() && (first >= p.segments() || !p.active(index))) index += apart(p);
        if (!done()) enter();
    }
    __device__ void enter() {
        const Row<Number> row = p.row(index);
        step = 0;
        steps = Steps(row, segment);
        source = row.floor_at(segment * SEGMENT);
        bytes = STEP * Number::SIZE + (row.skew() ? CHUNK : 0);
    }
};

}  // namespace

// Some blocks, each taking rows as far apart as there are blocks; `warps` of a block's warps take the segments of a row
// in turn. No warp waits for another but once a row. Dynamic shared memory: stages, then states of two rows for each row
// that a block works on at once.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) forward_rows(Forward p) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Barrier full[WARPS][STAGES];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = p.warps, segments = p.segments();
    const int slots = p.slots, slot = warp / warps, first = warp % warps;
    char* stages = memory + warp * STAGES * STAGE;
    State* states = reinterpret_cast<State*>(memory + WARPS * STAGES * STAGE) + slot * segments;
    if (lane < STAGES) full[warp][lane].init(1);
    fence_init();
    __syncwarp();

    i64 index = static_cast<i64>(blockIdx.x) * slots + slot;
    Ahead ahead(p, index, first);
    if (lane == 0) {
        for (int s = 0; s < STAGES && !ahead.done(); ++s) ahead.fetch(stages + s * STAGE, full[warp][s]);
    }
    u32 taken = 0;
    // All warps of a block go around as often: as its first slot has rows.
    for (int round = 0; index - slot < p.rows; ++round, index += apart(p)) {
        State* mine = states + round % 2 * slots * segments;
        const bool is_active = index < p.rows && p.active(index);
        const float c = is_active ? __fmul_rn(p.inverse(index), LOG2E) : 0.0f;
        const Row<Number> row = p.row(index);
        for (int segment = first; is_active && segment < segments; segment += warps) {
            const Steps steps(row, segment);
            State s = empty();
            for (int step = 0; step < steps.count; ++step, ++taken) {
                const u32 stage = taken % STAGES;
                char* held = stages + stage * STAGE;
                full[warp][stage].wait(taken / STAGES % 2);
                add_step(s, row, segment * SEGMENT + step * STEP, steps.wide(step), c,
                         [&](int beyond) { return *reinterpret_cast<const Chunk*>(held + beyond); });
                __syncwarp();
                if (lane == 0 && !ahead.done()) ahead.fetch(held, full[warp][stage]);
            }
            s = over_warp<ENTROPY>(s, c);
            if (lane == 0) mine[segment] = s;
        }
        // The states of one row are read while those of the next are written to the other half.
        __syncthreads();
        if (first == round % warps && index < p.rows) {
            const State s = is_active ? over_segments(segments, c, [&](int k) { return mine[k]; }) : empty();
            if (lane == 0) p.write(index, is_active, s);
        }
    }
}
