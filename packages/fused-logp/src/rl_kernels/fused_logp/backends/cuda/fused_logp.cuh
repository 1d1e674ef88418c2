// Shared by the kernels of fused_logp: arguments, segments and units of a row, and the statistics.
//
//   segment   32768 columns: 32 steps
//   step      1024 columns; lane l of a warp holds columns 8 l to 8 l + 7 of each 256 of them (row.cuh)
//   unit      steps u, u + 8, u + 16 and u + 24 of a segment, u = 0 to 7; one warp computes it
//
// Order of the sums, which is the contract of the backend:
//   lane      adds the steps of a unit in ascending order (`add` in softmax.cuh)
//   unit      a tree adds the 32 lanes (over_warp)
//   row       units are numbered segment by segment. Lane l merges units l, l + 32, ... in this order, and a tree adds
//             the 32 lanes (over_states)
// Which warp computes which unit changes no bit.
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

// Which rows are computed, and their scale. Null pointers are not read: without `temperatures` the scalar temperature
// holds for all rows, and without `marks` every row is computed.
struct Rows {
    const i64* ids;
    const float* temperatures;
    const signed char* marks;
    i64 ignore_index;
    float temperature;
    int has_ignored;
#if MIN_LOGIT
    const float* min_logits;
#endif

    __device__ bool active(i64 index) const {
        return (!marks || marks[index]) && !(has_ignored && ids[index] == ignore_index);
    }
    __device__ float divisor(i64 index) const { return temperatures ? temperatures[index] : temperature; }
    // The factor from raw values to logits, and to exponents of 2.
    __device__ float inverse(i64 index) const { return __frcp_rn(divisor(index)); }
    __device__ float scale(i64 index) const { return __fmul_rn(inverse(index), LOG2E); }
#if MIN_LOGIT
    __device__ bool keeps_all(i64 index) const { return min_logits[index] == -infinity(); }
    __device__ NotBelow counted(i64 index) const { return {least_kept(min_logits[index], divisor(index))}; }
#else
    __device__ bool keeps_all(i64) const { return false; }
    __device__ Every counted(i64) const { return {}; }
#endif
};

// Strides are of logits, in bytes; all other tensors are contiguous.
struct Forward : Rows {
    const char* logits;
    float* logp;
    Norm* norm;
    // Written only with ENTROPY.
    float* lse;
    float* entropy;
    float* parts;  // [units, 3, rows]: states, if merge_parts merges them
    i64 rows, row_stride, column_stride;
    int vocab;

    __device__ int steps() const { return (vocab - 1) / STEP + 1; }
    __device__ int units() const {
        const int last = (steps() - 1) / PER_SEGMENT;
        return last * UNITS + min(steps() - last * PER_SEGMENT, UNITS);
    }
    __device__ Row<Number> row(i64 index) const { return {logits + index * row_stride, vocab, column_stride}; }

    // The raw value that a row selects; NaN if its id is not a column.
    __device__ float selected(i64 index, i64 id) const {
        return id >= 0 && id < vocab ? Number::read(row(index).at(static_cast<int>(id))) : not_a_number();
    }

    // Writes the statistics of a row that selects x; 0 if the row is not active.
    __device__ void write(i64 index, bool is_active, State s, float x) const {
        Statistics stats = {};
#if MIN_LOGIT
        const float least = is_active ? counted(index).least : 0.0f;
        if (s.top < least) s = empty();
        if (x < least) x = -infinity();
#endif
        if (is_active) stats = finished<ENTROPY>(s, x, inverse(index), scale(index));
        logp[index] = stats.logp;
        norm[index] = stats.norm;
        if (!ENTROPY) return;
        lse[index] = stats.lse;
        entropy[index] = stats.entropy;
    }
};

// The steps of a row. Steps first to last - 1 are wide: all their 16-byte chunks lie in the tensor, though perhaps not
// in the row, so they may be read whole.
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

// Reads a lane's words of a step. If the step is wide, load(offset) returns the chunk at this offset in bytes from the
// chunk in which the step begins.
template <class Load>
__device__ inline void read_step(const Row<Number>& row, int step, bool wide, Load load,
                                 u32 (&words)[VECTORS * WORDS<Number>]) {
    const int lane = threadIdx.x % WARP * COLUMNS;
    if (wide) {
        const auto mine = [&](int beyond) { return load(lane * Number::SIZE + beyond); };
        read_wide<Number, VECTORS>(row.skew(), mine, words);
    } else {
        const auto mine = [&](int beyond) { return guarded(row, step * STEP + lane + beyond / Number::SIZE); };
        read_aligned<Number, VECTORS>(mine, words);
    }
}

}  // namespace rlk
