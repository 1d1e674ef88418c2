// What the kernels of fused_logp share: their arguments, the cut of a row, and the statistics.
//
// Order of the sums, which is the contract of the CUDA backends: a row is cut into segments of 32768 columns, a segment
// into steps of 1024, and these go to its eight units in turn. In a unit a lane of a warp takes the columns 8 l to 8 l + 7
// of each 256 of a step, and steps in ascending order; a tree adds the lanes. Of the units of a row, segment by segment,
// every 32nd is merged in ascending order, and a tree adds those 32 states. Which warp forms which unit, and how the
// columns come to it, changes no bit.
#pragma once

#include <rl_kernels/row.cuh>
#include <rl_kernels/softmax.cuh>

namespace rlk {

#if DTYPE == 0
using Number = FP32;
#elif DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

constexpr int STEP = 1024;
constexpr int VECTORS = STEP / WARP / COLUMNS;
constexpr int WARPS = 8;
constexpr int UNITS = 8;        // of a segment
constexpr int PER_SEGMENT = 32;  // steps

// What tells which rows are computed, and what scales them. A pointer that is null is not read: temperatures falls back
// to the number, and without marks every row is computed.
struct Rows {
    const i64* ids;
    const float* temperatures;
    const signed char* marks;
    i64 ignore_index;
    float temperature;
    int has_ignored;

    __device__ bool active(i64 index) const {
        return (!marks || marks[index]) && !(has_ignored && ids[index] == ignore_index);
    }
    // What raw values are multiplied by: to logits, and to exponents of 2.
    __device__ float inverse(i64 index) const { return __frcp_rn(temperatures ? temperatures[index] : temperature); }
    __device__ float scale(i64 index) const { return __fmul_rn(inverse(index), LOG2E); }
};

// Without strides of their own, tensors are contiguous; strides of logits are in bytes.
struct Forward : Rows {
    const char* logits;
    float* logp;
    Norm* norm;
    // Written with ENTROPY alone.
    float* lse;
    float* entropy;
    float* parts;  // [units, 3, rows]: states, where they are merged by a kernel of their own
    i64 rows, row_stride, column_stride;
    int vocab;

    __device__ int steps() const { return (vocab - 1) / STEP + 1; }
    __device__ int units() const {
        const int last = (steps() - 1) / PER_SEGMENT;
        return last * UNITS + min(steps() - last * PER_SEGMENT, UNITS);
    }
    __device__ Row<Number> row(i64 index) const { return {logits + index * row_stride, vocab, column_stride}; }

    // The raw value that a row selects; NaN where its id is no column.
    __device__ float selected(i64 index, i64 id) const {
        return id >= 0 && id < vocab ? Number::read(row(index).at(static_cast<int>(id))) : not_a_number();
    }

    // The statistics of a row that selects x; 0 where it is not active.
    __device__ void write(i64 index, bool is_active, State s, float x) const {
        Statistics found = {};
        if (is_active) found = finished<ENTROPY>(s, x, inverse(index), scale(index));
        logp[index] = found.logp;
        norm[index] = found.norm;
        if (!ENTROPY) return;
        lse[index] = found.lse;
        entropy[index] = found.entropy;
    }
};

// The steps of a row. All chunks of those numbered first to last - 1 may be read whole: they lie in the tensor, if not in
// the row.
struct Steps {
    int count, first, last;

    __device__ Steps(const Forward& p, const Row<Number>& row) : count(p.steps()), first(0), last(0) {
        if (!row.contiguous()) return;
        const char* end = row.at(row.size);
        const int skew = row.skew();
        const bool inside = end + (CHUNK - skew) <= p.row(p.rows - 1).at(row.size);
        first = skew && row.begin - skew < p.logits ? 1 : 0;
        last = (skew && !inside ? row.size - PER_CHUNK<Number> : row.size) / STEP;
    }
    __device__ bool wide(int step) const { return step >= first && step < last; }
};

// The words of a step: where it is wide, `load` brings the chunk that lies so many bytes behind the one in which the step
// begins; `Twice` as for read_wide.
template <bool Twice, class Load>
__device__ inline void read_step(const Row<Number>& row, int step, bool wide, Load load,
                                 u32 (&words)[VECTORS * WORDS<Number>]) {
    const int lane = threadIdx.x % WARP * COLUMNS;
    if (wide) {
        const auto mine = [&](int beyond) { return load(lane * Number::SIZE + beyond); };
        read_wide<Number, VECTORS, Twice>(row.skew(), mine, words);
    } else {
        const auto mine = [&](int beyond) { return guarded(row, step * STEP + lane + beyond / Number::SIZE); };
        read_aligned<Number, VECTORS>(mine, words);
    }
}

}  // namespace rlk
