// The gradient dz of linear_logp's logits on Hopper: forms tiles of logits again, turns them into dz element by element
// (Gradient in softmax.cuh), rounds once and stores them by TMA (boxes.cuh). Block, tile, turns, stage, which thread
// holds what, and the order within a logit: linear_logp.cuh. Tiles of rows whose tokens are all ignored get zeros.
// gradient_of_kept reads logits that the forward pass kept instead of forming them.
//
// Order of the sums for dbias, which is the contract: dz is summed over tokens in FP32, before it is rounded. A tree
// adds the 16 rows of one warp: rows r and r + 8 of a thread, then xor shuffles at distances 4, 8, 16. add_rows adds
// these sums in ascending order.
#include "linear_logp.cuh"

using namespace rlk;

// ENTROPY: there is an upstream gradient of the entropy. A missing upstream gradient is null and counts as 0.
struct Args : Inputs {
    const Norm* norm;
    const float* entropy;
    const float* grad_logp;
    const float* grad_lse;
    const float* grad_entropy;
    float* sums;  // [rows / 16, rounded up, width]: sums of dz over 16 rows each; or null
    // Only for gradient_of_kept: the logits of this launch's columns, FP32, and their gradient. Rows are kept_row and
    // dz_row elements apart, multiples of 256 that are at least the width, so that whole vectors are read and written.
    const void* kept;
    void* dz;
    // First column and number of columns of this launch.
    int begin, width;
    int kept_row, dz_row;

    __device__ int across() const { return (width + TILE_N - 1) / TILE_N; }
};

namespace {

// Rows of one term of dbias. Threads of a block of gradient_of_kept.
constexpr int SUMMED = 16, KEPT_THREADS = 128;
using Boxes = Outgoing<Number, TILE_N, false>;

__device__ void produce(const Args& p, const Ring& ring, const TensorMap& hidden, const TensorMap& weight) {
    const int stages = Ring::stages_of(p.inner);
    prefetch(hidden);
    prefetch(weight);
    Ring::Slot slot;
    for (Tiles tile(p, 0, p.computed(), p.across()); !tile.done(); tile.advance())
        load_stages(ring, slot, hidden, weight, tile.row, p.begin + tile.unit * TILE_N, stages);
}

// The gradient of one row, and its selected column, counted from `column`. Unset if not `active`: the row is ignored or
// out of range, and differentiate writes 0.
struct Row {
    Gradient<ENTROPY> gradient;
    int target = -1;
    bool active;
#if MIN_LOGIT
    NotBelow counted;
#else
    static constexpr Every counted = {};
#endif

    __device__ Row(const Args& p, int row, int column) {
        active = row < p.rows && !p.ignored(row);
        if (!active) return;
        const i64 id = p.ids[row];
        const int at = p.column_of(id);
        if (at >= 0) target = at - column;
        const auto or_0 = [&](const float* of) { return of ? of[row] : 0.0f; };
        const float entropy = ENTROPY ? p.entropy[row] : 0.0f, g_entropy = ENTROPY ? p.grad_entropy[row] : 0.0f;
        gradient = {p.inverse(row), p.norm[row], entropy, or_0(p.grad_logp), or_0(p.grad_lse), g_entropy, p.valid(id)};
#if MIN_LOGIT
        // A row without a distribution, or whose id is not a column, is NaN as a whole.
        const float least = p.counted(row).least;
        counted = {isnan(gradient.log_total) || !p.valid(id) ? -infinity() : least};
#endif
    }

    // The gradient of the logit x, which is in column `at`.
    __device__ float at(float x, int at) const { return gradient.at(x, at == target, counted); }
};

// Replaces the logits of one of a thread's two rows (HALF) by their gradient.
template <int HALF>
__device__ void differentiate(const Args& p, const Row& row, Sums& d) {
    // One branch per row: with a branch per element, each would wait for its exponential before the next one starts.
    if (row.active) {
#pragma unroll
        for (int i = 2 * HALF; i < TILE_N / 2; i += i % 2 ? 3 : 1) {
            const float x = d[i];
            d[i] = row.at(x, i / 4 * 8 + i % 2);
#if CAPPED
            d[i] = __fmul_rn(d[i], p.softcap().slope(x));
#endif
        }
    } else {
#pragma unroll
        for (int i = 2 * HALF; i < TILE_N / 2; i += i % 2 ? 3 : 1) d[i] = 0.0f;
    }
}

// Sums dz over the 16 rows of each warp and stores the sums.
__device__ void sum_rows(const Args& p, const Mine& mine, int row, int column, const Sums& d) {
    const int first = row - row % SUMMED;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i += i % 2 ? 3 : 1) {
        float sum = __fadd_rn(d[i], d[i + 2]);
#pragma unroll
        for (int apart = 4; apart < WARP; apart *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, apart));
        const int at = column + mine.column + i / 4 * 8 + i % 2;
        if (threadIdx.x % WARP < 4 && first < p.rows && at < p.width)
            p.sums[static_cast<i64>(first / SUMMED) * p.width + at] = sum;
    }
}

__device__ void consume(const Args& p, const Ring& ring, const TensorMap& dz_map) {
    const Mine mine;
    const int stages = Ring::stages_of(p.inner);
    char* boxes = ring.end() + mine.group * Boxes::BYTES;
    const auto leave = [&](const Tiles& tile, const Sums& d) {
        const int column = tile.unit * TILE_N;
        if (p.sums) sum_rows(p, mine, tile.row + mine.row, column, d);
        Boxes::store(boxes, 1 + mine.group, dz_map, tile.row + mine.group * MMA_M, column, d);
    };
    Ring::Slot slot;
    Turns turns(ring.turns, mine.group);
    for (Tiles tile(p, 0, p.computed(), p.across()); !tile.done(); tile.advance()) {
        const int row = tile.row + mine.row, column = p.begin + tile.unit * TILE_N;
        const Row low(p, row, column + mine.column), high(p, row + 8, column + mine.column);
        Sums d;
        form_logits(ring, stages, mine, slot, turns, d);
        add_bias(p, mine, column, d);
        cap(p, d);
        differentiate<0>(p, low, d);
        differentiate<1>(p, high, d);
        leave(tile, d);
    }
    for (Tiles tile(p, p.computed(), p.tiles(), p.across()); !tile.done(); tile.advance()) {
        const Sums none = {};
        leave(tile, none);
    }
    if (threadIdx.x % WARPGROUP == 0) stores_read<0>();
}

// Columns of a thread of gradient_of_kept.
constexpr int WIDE = 4;
static_assert(Number::SIZE == 2, "a thread stores two words");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradient(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
             const __grid_constant__ TensorMap dz_map, const __grid_constant__ Args p) {
    const Ring ring;
    ring.open(1, 1);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0 && elected()) produce(p, ring, hidden, weight);
    } else {
        take_registers<232>();
        consume(p, ring, dz_map);
    }
}

// dz of kept logits. A block has 16 rows; a thread has 4 columns of each, which it also sums in the order above.
extern "C" __global__ void __launch_bounds__(KEPT_THREADS) gradient_of_kept(const __grid_constant__ Args p) {
    __shared__ alignas(16) char room[SUMMED * sizeof(Row)];
    Row* rows = reinterpret_cast<Row*>(room);
    const int first = static_cast<int>(blockIdx.x) * SUMMED;
    const int column = static_cast<int>(blockIdx.y * KEPT_THREADS + threadIdx.x) * WIDE;
    if (threadIdx.x < SUMMED) rows[threadIdx.x] = Row(p, first + static_cast<int>(threadIdx.x), p.begin);
    __syncthreads();
    if (column >= p.width) return;
    float d[SUMMED][WIDE];
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        // An ignored row may never have been kept.
        const auto* from = static_cast<const float*>(p.kept) + static_cast<i64>(first + i) * p.kept_row + column;
        const float4 x = rows[i].active ? __ldcs(reinterpret_cast<const float4*>(from)) : float4{};
        d[i][0] = x.x, d[i][1] = x.y, d[i][2] = x.z, d[i][3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        const Row row = rows[i];
        if (!row.active) continue;
#pragma unroll
        for (int k = 0; k < WIDE; ++k) {
            const float x = d[i][k];
            d[i][k] = row.at(x, column + k);
#if CAPPED
            d[i][k] = __fmul_rn(d[i][k], p.softcap().slope(x));
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        if (first + i >= p.rows) break;
        char* to = static_cast<char*>(p.dz) + (static_cast<i64>(first + i) * p.dz_row + column) * Number::SIZE;
        *reinterpret_cast<uint2*>(to) = make_uint2(Number::pack(d[i]), Number::pack(d[i] + 2));
    }
    if (!p.sums) return;
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
        float sum[SUMMED / 2];
#pragma unroll
        for (int i = 0; i < SUMMED / 2; ++i) sum[i] = __fadd_rn(d[i][k], d[i + SUMMED / 2][k]);
#pragma unroll
        for (int apart = 1; apart < SUMMED / 2; apart *= 2)
#pragma unroll
            for (int i = 0; i < SUMMED / 2; i += 2 * apart) sum[i] = __fadd_rn(sum[i], sum[i + apart]);
        if (column + k < p.width) p.sums[static_cast<i64>(blockIdx.x) * p.width + column + k] = sum[0];
    }
}

// One thread per column: adds the sums of each 16 rows to `out`, in ascending order.
extern "C" __global__ void __launch_bounds__(256) add_rows(const float* sums, float* out, int rows, int width) {
    const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= width) return;
    float total = out[column];
    for (int i = 0; i < (rows + SUMMED - 1) / SUMMED; ++i)
        total = __fadd_rn(total, sums[static_cast<i64>(i) * width + column]);
    out[column] = total;
}
