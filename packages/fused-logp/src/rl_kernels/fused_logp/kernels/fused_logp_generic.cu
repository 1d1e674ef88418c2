// fused_logp for every architecture from sm_80: rows in wide loads, straight into registers.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY 0 or 1; BLOCKS that share a multiprocessor, which bounds the registers.
#include "fused_logp.cuh"

using namespace rlk;

namespace {

__device__ State segment_state(const Row<Number>& row, int segment, float c) {
    State s = empty();
    const Steps steps(row, segment);
    const int first = segment * SEGMENT;
    const char* floor = row.floor_at(first);
    for (int step = 0; step < steps.count; ++step, floor += STEP * Number::SIZE) {
        const auto load = [&](int beyond) { return load_constant(floor + beyond); };
        add_step(s, row, first + step * STEP, steps.wide(step), c, load);
    }
    return over_warp<ENTROPY>(s, c);
}

}  // namespace

// One block some rows; `warps` of its warps take the segments of a row in turn. Shared memory holds a state for each
// segment of each of these rows.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) forward_rows(Forward p) {
    extern __shared__ State states[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = p.warps, segments = p.segments();
    const i64 index = static_cast<i64>(blockIdx.x) * p.slots + warp / warps;
    State* mine = states + warp / warps * segments;
    const bool is_active = index < p.rows && p.active(index);
    const float c = is_active ? __fmul_rn(p.inverse(index), LOG2E) : 0.0f;
    if (is_active) {
        for (int segment = warp % warps; segment < segments; segment += warps) {
            const State s = segment_state(p.row(index), segment, c);
            if (lane == 0) mine[segment] = s;
        }
    }
    __syncthreads();
    if (warp % warps || index >= p.rows) return;
    const State s = is_active ? over_segments(segments, c, [&](int k) { return mine[k]; }) : empty();
    if (lane == 0) p.write(index, is_active, s);
}

// One warp a segment of a row; its state goes to parts.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) forward_parts(Forward p) {
    const i64 unit = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    const int segment = static_cast<int>(unit / p.rows);
    const i64 index = unit % p.rows;
    if (segment >= p.segments() || !p.active(index)) return;
    const State s = segment_state(p.row(index), segment, __fmul_rn(p.inverse(index), LOG2E));
    if (threadIdx.x % WARP) return;
    float* part = p.parts + segment * 3 * p.rows + index;
    part[0] = s.top;
    part[p.rows] = s.total;
    if (ENTROPY) part[2 * p.rows] = s.weighted;
}

// One warp a row: its segments, merged.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) merge_parts(Forward p) {
    const i64 index = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (index >= p.rows) return;
    const bool is_active = p.active(index);
    State s = empty();
    if (is_active) {
        s = over_segments(p.segments(), __fmul_rn(p.inverse(index), LOG2E), [&](int k) {
            const float* part = p.parts + k * 3 * p.rows + index;
            return State{part[0], part[p.rows], ENTROPY ? part[2 * p.rows] : 0.0f};
        });
    }
    if (threadIdx.x % WARP == 0) p.write(index, is_active, s);
}
