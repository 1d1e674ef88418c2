// What the kernels of fused_logp share: their arguments, the cut of a row, and the statistics.
//
// Order of the sums, which is the contract of the CUDA backends: a row is cut into segments of 4096 columns, a segment
// into steps of 1024. A lane of a warp takes the columns 8 l to 8 l + 7 of each 256 of a step, and steps in ascending
// order; the lanes are added by a tree, and the segments of a row merged in ascending order. Which warp takes which
// segment, and how the columns come to it, changes no bit.
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

constexpr int SEGMENT = 4096;
constexpr int STEP = 1024;
constexpr int VECTORS = STEP / WARP / COLUMNS;
constexpr int WARPS = 8;

// Without strides of their own, tensors are contiguous; strides of logits are in bytes. A pointer that is null is not
// read: temperatures falls back to the number, and without marks every row is computed.
struct Forward {
    const char* logits;
    const i64* ids;
    const float* temperatures;
    const signed char* marks;
    float* logp;
    float* lse;
    float* entropy;
    float* parts;  // [segments, 3, rows]: states, where segments are merged by a kernel of its own
    i64 rows, row_stride, column_stride, ignore_index;
    int vocab;
    float temperature;
    int has_ignored, warps, slots;  // warps of a block, a power of two, that share a row, and rows that share a block

    __device__ int segments() const { return (vocab - 1) / SEGMENT + 1; }
    __device__ Row<Number> row(i64 index) const { return {logits + index * row_stride, vocab, column_stride}; }
    __device__ bool active(i64 index) const {
        return (!marks || marks[index]) && !(has_ignored && ids[index] == ignore_index);
    }
    __device__ float inverse(i64 index) const { return __frcp_rn(temperatures ? temperatures[index] : temperature); }

    // The statistics of a row; 0 where it is not active, NaN where its id is no column.
    __device__ void write(i64 index, bool is_active, State s) const {
        Statistics found = {0.0f, 0.0f, 0.0f};
        if (is_active) {
            const i64 id = ids[index];
            const bool inside = id >= 0 && id < vocab;
            const float x = inside ? Number::read(row(index).at(static_cast<int>(id))) : not_a_number();
            const float inv = inverse(index);
            found = finished<ENTROPY>(s, x, inv, __fmul_rn(inv, LOG2E));
        }
        logp[index] = found.logp;
        lse[index] = found.lse;
        if (ENTROPY) entropy[index] = found.entropy;
    }
};

// The state of a row, in every lane of a warp, from those of its segments, which `load` brings: lanes ask for 32 at once.
template <class Load>
__device__ inline State over_segments(int segments, float c, Load load) {
    const int lane = threadIdx.x % WARP;
    State s = empty();
    for (int first = 0; first < segments; first += WARP) {
        const State mine = first + lane < segments ? load(first + lane) : empty();
        const int count = min(segments - first, WARP);
        for (int k = 0; k < count; ++k) {
            const State next = {__shfl_sync(ALL, mine.top, k), __shfl_sync(ALL, mine.total, k),
                                ENTROPY ? __shfl_sync(ALL, mine.weighted, k) : 0.0f};
            s = merged<ENTROPY>(s, next, c);
        }
    }
    return s;
}

// The steps of a segment. All chunks of those numbered first to last - 1 lie in the row; one before them and one after
// them may reach beyond it.
struct Steps {
    int count, first, last;

    __device__ Steps(const Row<Number>& row, int segment) {
        const int left = row.size - segment * SEGMENT;
        count = (min(left, SEGMENT) - 1) / STEP + 1;
        first = segment == 0 && row.skew() ? 1 : 0;
        last = row.contiguous() ? min(max(left - row.beyond(), 0) / STEP, count) : 0;
    }
    __device__ bool wide(int step) const { return step >= first && step < last; }
};

// Take a step of a row whose columns begin at `first`: where it is wide, `load` brings the chunk that lies so many bytes
// behind the one in which the step begins.
template <class Load>
__device__ inline void add_step(State& s, const Row<Number>& row, int first, bool wide, float c, Load load) {
    const int lane = threadIdx.x % WARP * COLUMNS;
    u32 words[VECTORS * WORDS<Number>];
    if (wide) {
        read_wide<Number, VECTORS>(row.skew(), [&](int beyond) { return load(lane * Number::SIZE + beyond); }, words);
    } else {
        const auto load = [&](int beyond) { return guarded(row, first + lane + beyond / Number::SIZE); };
        read_aligned<Number, VECTORS>(load, words);
    }
    add<ENTROPY, Number>(s, words, c);
}

}  // namespace rlk
