// One token of each sequence with a cache on Hopper, bound by loads of the state: the row that prefill would compute.
//
// Columns of the state are the 16 rows of mma.sync, in an order in which a thread's loads are wide; key and query are two of
// its 8 columns. Products of earlier keys with both, the mixing row and the output are formed alike: a row of one token
// is a column of mma.sync.
//
// Order of every sum, which is the contract: one FP32 chain per element, 16 terms a step, ascending, as in prefill; the
// row of the inverse by one fused multiply-add a term, ascending. Terms beyond the token are left out or are zeros.
//
//   block      one of PARTS equal parts of a value head's columns; the first part also writes the row of the cache that
//              all columns share
//   warp       TILES times 16 columns, 16 earlier keys, or half of the inverse's row; with SPREAD each of these has warps
//              of its own, since a warp's instructions bound a block that has a multiprocessor for itself; without, every
//              warp does its share of all, and blocks hide each other's latency
//   thread     lane 4 i + j: of four keys, 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of a step, the i-th VECTOR columns of its warp
//
// `lengths` counts the blocks of a sequence, in its bits from `shift` on, until the last one has read it: that one then
// writes the new length.
//
// Defines: DTYPE 1 BF16, 2 FP16; PARTS; TILES 1, 2; BLOCKS: blocks of a multiprocessor, for registers; SPREAD.
#include "decode_sums.cuh"

using namespace rlk;

namespace {

// Loads the bits of a number of g or beta, whose dtype is 0 (FP32), 1 (BF16) or 2 (FP16); number_of is its value.
__device__ __forceinline__ u32 load_number(const void* numbers, i64 index, int dtype) {
    if (dtype) return static_cast<const unsigned short*>(numbers)[index];
    return static_cast<const u32*>(numbers)[index];
}
__device__ __forceinline__ float number_of(u32 bits, int dtype) {
    float pair[2];
    if (dtype == 2)
        FP16::unpack(bits, pair);
    else
        pair[0] = __uint_as_float(dtype ? bits << 16 : bits);
    return pair[0];
}

// By a warp: the token's key, a chunk in each of the first lanes, then its query.
__device__ __forceinline__ Chunk load_row(const Args& p, int lane, u32 b, u32 key_head) {
    const bool is_key = lane < LANES;
    const i64 at = is_key ? b * p.k_batch + key_head * p.k_head : b * p.q_batch + key_head * p.q_head;
    Chunk chunk;
    load_once(chunk.word, static_cast<const char*>(is_key ? p.k : p.q) + at * Number::SIZE + lane % LANES * CHUNK);
    return chunk;
}

// What a thread holds of its token from one barrier to the next.
struct Token {
    int t;
    u32 v[TILES];
    // Products of the key and of the query with the state, then sums of the output.
    float d[TILES][4] = {};
};

// Waits for the kernel before, starts all loads, and normalizes the key and the query.
__device__ __forceinline__ void begin(const Args& p, const Place& at, Shared& s, State& held, Token& token) {
    const u32 b = blockIdx.z;
    // Addresses are formed while the kernel before still runs.
    const Tensors tensors(p);
    wait_for_prerequisites();
    launch_dependents();
    // Other blocks may have counted themselves in it.
    const u32 length = *reinterpret_cast<const volatile u32*>(p.lengths + b);
    const int type = at.lane ? p.beta_type : p.g_type;
    Chunk row;
    u32 gate = 0;
    if (at.warp == INVERSE_WARP) {
        row = load_row(p, at.lane, b, blockIdx.y);
        if (at.lane < 2) gate = load_number(at.lane ? p.beta : p.g, tensors.item, type);
    }
    if (at.has_columns) load_state(at, tensors.state, held);
    if (at.warp == INVERSE_WARP) {
        s.unit[at.lane / LANES][at.lane % LANES] = p.normalizes ? unit_row<Number>(row) : row;
        if (at.lane < 2) s.gates[at.lane] = number_of(gate, type);
    }
    token.t = length % ROWS;
    if (at.warp < PIECES) copy_rows(tensors, at.part, token.t, s);
    if (at.has_columns && at.j == 0) {
        const u32 head = blockIdx.y * p.group + blockIdx.x / PARTS;
        const i64 first = b * p.v_batch + head * p.v_head + at.column + VECTOR * at.i;
        load_once(token.v, static_cast<const char*>(p.v) + first * Number::SIZE);
    }
}

// The products of the key and of the query.
__device__ __forceinline__ void multiply(const Place& at, Shared& s, const State& held, Token& token) {
    const int t = token.t;
    const float total = t ? __fadd_rn(s.sums[t - 1], s.gates[0]) : s.gates[0];
    if (threadIdx.x == 0) s.sums[t] = total;
    if (at.warp < PIECES && at.warp * STEP <= t) multiply_keys(at, t, total, s.gates[1], s);
    if (SPREAD && at.has_columns) multiply_state(at, s, held, token.d);
}

// The token's row of the inverse, and its residuals.
__device__ __forceinline__ void solve(const Args& p, const Place& at, Shared& s, Token& token, Columns& columns) {
    const int column = threadIdx.x - INVERSE_WARP * WARP, t = token.t;
    if (column >= 0 && column < ROWS) {
        const float x = next_inverse(t, s.gates[1], s);
        s.inverse[t * INVERSE_ROW + column] = x;
        if (at.part == 0) Tensors(p).inverse[t * ROWS + column] = x;
    }
    if (SPREAD && at.warp < PIECES && at.warp * STEP <= t)
#pragma unroll
        for (int step = 0; step < PIECES; ++step) load_inverse(at, t, s, step, columns[step]);
    if (at.has_columns) begin_row(at, exp_fast(s.sums[t]), token.v, token.d, s.residuals + t * COLUMN_ROW + at.own());
}

// Writes the output, and the token's row of the cache.
__device__ __forceinline__ void write(const Args& p, const Place& at, const Shared& s, Token& token, Residuals& a) {
    const Tensors to(p);
    const int t = token.t;
    if (at.has_columns) {
        u32 result[TILES];
        finish_row(at, t, p.scale, s, a, token.d, result);
        if (at.j == 0) {
            const int first = at.column + VECTOR * at.i;
            store_words(to.out + first * Number::SIZE, result);
            read_words(result, s.residuals + t * COLUMN_ROW + at.own());
            store_words(to.residuals + (t * SIZE + first) * Number::SIZE, result);
        }
    }
    if (at.part == 0 && threadIdx.x == 0) to.decays[t] = s.sums[t];
    if (blockIdx.x == 0 && threadIdx.x < LANES)
        reinterpret_cast<Chunk*>(to.keys)[t * LANES + threadIdx.x] = s.unit[0][threadIdx.x];
}

// Adds the chunk to the state.
__device__ __forceinline__ void close(const Args& p, const Place& at, Shared& s, State& held) {
    fade(s);
    __syncthreads();
    weigh(at, s);
    __syncthreads();
    if (!at.has_columns) return;
    add_chunk(at, exp_fast(s.sums[ROWS - 1]), s, held);
    store_state(at, Tensors(p).state, held);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const __grid_constant__ Args p) {
    extern __shared__ char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const Place at;
    State held;
    Token token;
    begin(p, at, s, held, token);
    if (!SPREAD) {
        __syncthreads();
        multiply_state(at, s, held, token.d);
    }
    copies_done<1>();
    __syncthreads();
    multiply(at, s, held, token);
    copies_done<0>();
    __syncthreads();
    // All threads have read the length.
    u32 count = 0;
    if (threadIdx.x == 0) count = atomicAdd(reinterpret_cast<u32*>(p.lengths) + blockIdx.z, 1u << p.shift);
    Columns columns;
    solve(p, at, s, token, columns);
    __syncthreads();
    if (at.warp < PIECES && at.warp * STEP <= token.t) mix(at, token.t, columns, s);
    Residuals residuals;
    if (SPREAD && at.has_columns)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) load_residuals(at, s, piece, residuals[piece]);
    __syncthreads();
    write(p, at, s, token, residuals);
    if (token.t == ROWS - 1) close(p, at, s, held);
    if (threadIdx.x == 0 && count >> p.shift == gridDim.x * gridDim.y - 1)
        p.lengths[blockIdx.z] = (count & ((1u << p.shift) - 1)) + 1;
}
