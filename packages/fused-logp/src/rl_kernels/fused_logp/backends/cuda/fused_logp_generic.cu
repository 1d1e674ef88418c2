// fused_logp's forward pass on every architecture from sm_80: rows are read by 16-byte loads, straight into registers.
//
//   forward_rows                 a block per row: the warps compute its units, warp 0 merges them
//   forward_parts, merge_parts   a warp per unit of a row, then a warp per row
// Which columns a lane holds, and the order of the sums: fused_logp.cuh.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY and MIN_LOGIT 0 or 1; BLOCKS resident on a multiprocessor, which
// bounds the registers.
#include "fused_logp.cuh"

using namespace rlk;

namespace {

template <class Counted>
__device__ State unit_state(const Row<Number>& row, const Steps& steps, int unit, float c, Counted counted) {
    State s = empty();
    int step = unit / UNITS * PER_SEGMENT + unit % UNITS;
    const int end = min((unit / UNITS + 1) * PER_SEGMENT, steps.count);
    const char* floor = row.floor_at(step * STEP);
    for (; step < end; step += UNITS, floor += UNITS * STEP * Number::SIZE) {
        u32 words[VECTORS * WORDS<Number>];
        const auto load = [&](int beyond) { return load_constant(floor + beyond); };
        read_step(row, step, steps.wide(step), load, words);
        add<ENTROPY, Number>(s, words, c, counted);
    }
    return over_warp<ENTROPY>(s, c);
}

// Writes the states of those units of a row that this warp computes.
template <class Counted>
__device__ void unit_states(const Row<Number>& row, const Steps& steps, int units, float c, Counted counted,
                            State* states) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (int unit = warp; unit < units; unit += warps) {
        const State s = unit_state(row, steps, unit, c, counted);
        if (lane == 0) states[unit] = s;
    }
}

}  // namespace

// One block per row: warp w computes units w, w + warps, ... Shared memory holds a state for each unit.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) forward_rows(Forward p) {
    extern __shared__ State states[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, units = p.units();
    const i64 index = blockIdx.x;
    const bool is_active = p.active(index);
    const i64 id = p.ids[index];
    const float c = is_active ? p.scale(index) : 0.0f;
    if (is_active) {
        const Row<Number> row = p.row(index);
#if MIN_LOGIT
        // Logits come while the threshold does.
        const char* line = row.begin + static_cast<int>(threadIdx.x) * LINE;
        if (row.contiguous() && line < row.at(row.size)) read_ahead(line);
#endif
        const Steps steps(p, row);
        if (p.keeps_all(index))
            unit_states(row, steps, units, c, Every(), states);
        else
            unit_states(row, steps, units, c, p.counted(index), states);
    }
    __syncthreads();
    if (warp) return;
    const State s = is_active ? over_states<ENTROPY>(units, c, [&](int k) { return states[k]; }) : empty();
    if (lane == 0) p.write(index, is_active, s, is_active ? p.selected(index, id) : 0.0f);
}

// One warp per unit of a row; writes its state to parts.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) forward_parts(Forward p) {
    const i64 number = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    const int unit = static_cast<int>(number / p.rows);
    const i64 index = number % p.rows;
    if (unit >= p.units() || !p.active(index)) return;
    const Row<Number> row = p.row(index);
    const State s = unit_state(row, Steps(p, row), unit, p.scale(index), p.counted(index));
    if (threadIdx.x % WARP) return;
    float* part = p.parts + unit * 3 * p.rows + index;
    part[0] = s.top;
    part[p.rows] = s.total;
    if (ENTROPY) part[2 * p.rows] = s.weighted;
}

// One warp per row: merges its units and writes the statistics.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS) merge_parts(Forward p) {
    const i64 index = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (index >= p.rows) return;
    const bool is_active = p.active(index);
    State s = empty();
    if (is_active) {
        s = over_states<ENTROPY>(p.units(), p.scale(index), [&](int k) {
            const float* part = p.parts + k * 3 * p.rows + index;
            return State{part[0], part[p.rows], ENTROPY ? part[2 * p.rows] : 0.0f};
        });
    }
    if (threadIdx.x % WARP == 0) p.write(index, is_active, s, is_active ? p.selected(index, p.ids[index]) : 0.0f);
}
