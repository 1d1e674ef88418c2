// Attention on Hopper: the backward pass, a kernel of dq and a kernel of dk and dv; both recompute the weights.
//
// With s = scale q k^T (capped), p = 2^(s log2(e) - lse), dp = g v^T, ds = p (dp - delta), where g is the gradient of
// out and delta the sum of out times g: dq = scale ds k, dk = scale ds^T q, dv = p^T g. p and ds are rounded to 16 bits.
//
// Order of the sums, which is the contract:
//   delta      16 lanes, each a chain over 8 columns, and the 8 that are 128 further on; then xor shuffles at distances
//              8, 4, 2, 1
//   dq         one chain over the keys of the sequence, 16 at a time; with heads wider than 128 one over the even blocks of
//              64 keys and one over the odd ones, then their sum
//   dk, dv     one chain over the rows of the sequence, counted from the first query that may see a key: in blocks of as
//              many whole queries as have 64 rows at most, in each 16 rows at a time, the last ones filled up with 0
// What a row does not see adds 0, which changes nothing. No tile, batch or padding changes a bit; there are no atomics.
//
// Defines, beside those of attention.cuh: STAGES of both rings; SHARED_BYTES, of dynamic shared memory.
#include "dkdv.cuh"
#include "dq.cuh"

namespace rlk {
namespace {

struct Rows {
    const void *out, *grad;
    const float* lse;
    float *lses, *deltas;
    // The tile counters of the two kernels that follow.
    int* counters;
    i64 g_batch, g_row, g_head;
    int queries, heads, group, size_v;
};

}  // namespace

// Writes Args::lses, the lse of each row in base 2, and Args::deltas. An lse is inf where a row sees nothing, which
// makes its weights 0. Sets the counters of the queues to 0. 16 lanes a row.
extern "C" __global__ void __launch_bounds__(256) rows_of(const __grid_constant__ Rows p) {
    if (blockIdx.x == 0 && threadIdx.x < 2) p.counters[threadIdx.x] = 0;
    constexpr int LANES = 16, NUMBERS = PER_CHUNK<Number>;
    const i64 count = static_cast<i64>(p.queries) * p.heads;
    // Thread blocks of a sequence.
    const u32 blocks = static_cast<u32>((count * LANES + blockDim.x - 1) / blockDim.x), b = blockIdx.x / blocks;
    const i64 row = (static_cast<i64>(blockIdx.x % blocks) * blockDim.x + threadIdx.x) / LANES;
    const i64 safe = min(row, count - 1);
    const int lane = threadIdx.x % LANES;
    const int query = static_cast<int>(safe / p.heads), head = static_cast<int>(safe % p.heads);
    float delta = 0.0f;
#pragma unroll
    for (int column = lane * NUMBERS; column < V_WIDTH; column += LANES * NUMBERS) {
        if (column >= p.size_v) break;
        const i64 of_out = (b * count + safe) * p.size_v + column;
        const i64 of_grad = b * p.g_batch + query * p.g_row + head * p.g_head + column;
        const Chunk out = load_constant(static_cast<const char*>(p.out) + of_out * Number::SIZE);
        const Chunk grad = load_constant(static_cast<const char*>(p.grad) + of_grad * Number::SIZE);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            float x[2], g[2];
            Number::unpack(out.word[i], x), Number::unpack(grad.word[i], g);
            delta = __fmaf_rn(x[1], g[1], __fmaf_rn(x[0], g[0], delta));
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
        delta = __fadd_rn(delta, __shfl_xor_sync(ALL, delta, distance));
    if (lane || row >= count) return;
    const float lse = p.lse[(static_cast<i64>(b) * p.heads + head) * p.queries + query];
    const i64 groups = static_cast<i64>(b) * (p.heads / p.group) + head / p.group;
    const i64 place = (groups * p.queries + query) * p.group + head % p.group;
    p.lses[place] = lse == -infinity() ? infinity() : __fmul_rn(lse, LOG2E);
    p.deltas[place] = delta;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) of_queries(const __grid_constant__ TensorMap k,
                                                                    const __grid_constant__ TensorMap v,
                                                                    const __grid_constant__ Args p) {
    const Memory<RowTile> m;
    m.open(ROW_COPIERS, 1, GROUPS * WARPS_OF_GROUP, 3);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0)
            load_keys(p, m, k);
        else if (warp_index() == 1)
            load_values(p, m, v);
        else
            load_rows(p, m);
    } else {
        take_registers<232>();
        consume_keys(p, m, warp_index() / WARPS_OF_GROUP - 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    of_keys(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
            const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_grad,
            const __grid_constant__ Args p) {
    const Memory<KeyTile> m;
    clear_rest(p, m);
    // Each lane has read lse and delta.
    m.open(1, ROW_ARRIVALS, GROUPS * WARPGROUP, 1);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0)
            load_tiles(p, m, k, v);
        else if (warp_index() == 1)
            load_blocks_of_rows(p, m, of_q, of_grad);
    } else {
        take_registers<232>();
        consume_rows(p, m, warp_index() / WARPS_OF_GROUP - 1);
    }
}

}  // namespace rlk
