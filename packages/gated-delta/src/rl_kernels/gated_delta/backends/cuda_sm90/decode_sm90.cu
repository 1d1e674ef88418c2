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
#include <rl_kernels/warp_mma.cuh>

#include "order.cuh"

using namespace rlk;

struct Args {
    const void *q, *k, *v, *g, *beta;
    void* out;
    float* state;
    void *keys, *residuals;
    float *decays, *inverse;
    int* lengths;
    i64 q_batch, q_head, k_batch, k_head, v_batch, v_head;
    int group, g_type, beta_type, normalizes, shift;
    float scale;
};

namespace {

#if DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

constexpr int STEP = 16, STEPS = SIZE / STEP, PIECES = ROWS / STEP;
constexpr int COLUMNS = SIZE / PARTS, ACROSS = STEP * TILES, VECTOR = 2 * TILES, COLUMN_WARPS = COLUMNS / ACROSS;
// The first PIECES warps copy rows and multiply keys, 16 each. Of other roles, the first warp: two form the inverse, the
// first of which normalizes, and two round the inverse.
constexpr int INVERSE_WARP = SPREAD ? PIECES : 0, ROUND_WARP = SPREAD ? PIECES : 2, COLUMN_WARP = SPREAD ? PIECES + 2 : 0;
constexpr int WARPS = COLUMN_WARP + COLUMN_WARPS, THREADS = WARPS * WARP, PAIR = 2 * WARP, COPIERS = PIECES * WARP;
static_assert(WARPS >= PIECES, "warps for each role");
// Rows of shared memory, padded against bank conflicts: of keys and of the weights, of the inverse, of 16-bit copies of it.
constexpr int KEY_ROW = SIZE * 2 + CHUNK, INVERSE_ROW = ROWS + 4, ROUNDED_ROW = ROWS * 2 + CHUNK;
// Of residuals.
constexpr int COLUMN_ROW = COLUMNS * 2 + CHUNK;

struct Shared {
    alignas(16) char keys[ROWS * KEY_ROW];
    union {
        alignas(16) float inverse[ROWS * INVERSE_ROW];
        alignas(16) char weights[ROWS * KEY_ROW];
    };
    // The inverse, rounded, then F.
    alignas(16) char rounded[ROWS * ROUNDED_ROW];
    alignas(16) char residuals[ROWS * COLUMN_ROW];
    // The normalized key and query.
    alignas(16) Chunk unit[2][LANES];
    alignas(16) float sums[ROWS];
    // The token's row of A; those of P and of M, rounded.
    alignas(16) float below[ROWS];
    alignas(16) unsigned short scores[ROWS], mixing[ROWS];
};

static_assert(sizeof(Shared) == SHARED, "the bytes that the host asks for");
// From the keys to the inverse.
constexpr int AT_INVERSE = ROWS * KEY_ROW;

// A number or an address, formed here and not elsewhere.
__device__ __forceinline__ u32 formed(u32 at) {
    asm volatile("" : "+r"(at));
    return at;
}
template <class T>
__device__ __forceinline__ const T* formed(const T* at) {
    asm volatile("" : "+l"(at));
    return at;
}

// What a block reads and writes. It is formed anew where it is needed, since addresses would take registers meanwhile.
struct Tensors {
    u32 item;
    float *state, *decays, *inverse;
    char *keys, *residuals, *out;
    __device__ __forceinline__ Tensors(const Args& p) {
        const u32 key_item = formed(blockIdx.z * gridDim.y + blockIdx.y);
        item = key_item * p.group + blockIdx.x / PARTS;
        state = p.state + static_cast<i64>(item) * (SIZE * SIZE);
        decays = p.decays + static_cast<i64>(item) * ROWS, inverse = p.inverse + static_cast<i64>(item) * (ROWS * ROWS);
        keys = static_cast<char*>(p.keys) + static_cast<i64>(key_item) * (ROWS * SIZE * 2);
        residuals = static_cast<char*>(p.residuals) + static_cast<i64>(item) * (ROWS * SIZE * 2);
        out = static_cast<char*>(p.out) + static_cast<i64>(item) * (SIZE * 2);
    }
};

// The place of this thread: its block's part of a head; its lane is 4 i + j; the first column of its warp, and whether its
// warp has columns.
struct Place {
    int part, warp, lane, i, j, column;
    bool has_columns;
    __device__ Place() {
        part = blockIdx.x % PARTS;
        warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, i = lane / 4, j = lane % 4;
        const int of = warp - COLUMN_WARP;
        has_columns = of >= 0;
        column = part * COLUMNS + of * ACROSS;
    }
};

template <int COUNT>
__device__ inline void load_words(u32 (&word)[COUNT], const void* at) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "a load");
    if constexpr (COUNT == 1)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word[0]) : "l"(at));
    else if constexpr (COUNT == 2)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(at));
    else
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(at));
}

// Loads the bits of a number of g or beta, whose dtype is 0 (FP32), 1 (BF16) or 2 (FP16); number_of is its value.
__device__ __forceinline__ u32 load_number(const void* numbers, i64 index, int dtype) {
    u32 bits;
    asm volatile(
        "{\n.reg .pred wide;\n.reg .b16 half;\nsetp.eq.s32 wide, %2, 0;\n@wide ld.global.u32 %0, [%1];\n"
        "@!wide ld.global.u16 half, [%1];\n@!wide cvt.u32.u16 %0, half;\n}"
        : "=r"(bits)
        : "l"(static_cast<const char*>(numbers) + index * (dtype ? 2 : 4)), "r"(dtype));
    return bits;
}
__device__ __forceinline__ float number_of(u32 bits, int dtype) {
    float pair[2];
    if (dtype == 2)
        FP16::unpack(bits, pair);
    else
        pair[0] = __uint_as_float(dtype ? bits << 16 : bits);
    return pair[0];
}

// A thread's numbers of the state: of each step and eight keys of it, those that it holds of a product [columns, keys] of
// mma.sync, of each tile. Rows i and i + 8 of the tile are columns 2 tile and 2 tile + 1 of the i-th vector of the warp.
using State = float[STEPS][2][TILES][4];

// The row of the state with term `term` of a thread's pairs; `i` and `j` are in `own`.
__device__ __forceinline__ void load_state(const Place& at, const float* state, State& d) {
    const float* own = formed(state + at.column + VECTOR * at.i + 2 * at.j * SIZE);
#pragma unroll
    for (int n = 0; n < 4 * STEPS; ++n) {
        u32 word[VECTOR];
        load_words(word, own + (n / 2 * 8 + n % 2) * SIZE);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) d[n / 4][n / 2 % 2][c / 2][c % 2 * 2 + n % 2] = __uint_as_float(word[c]);
    }
}

__device__ __forceinline__ void store_state(const Place& at, float* state, const State& d) {
    float* own = state + at.column + VECTOR * at.i + 2 * at.j * SIZE;
#pragma unroll
    for (int n = 0; n < 4 * STEPS; ++n) {
        float* row = own + (n / 2 * 8 + n % 2) * SIZE;
        const auto& of = d[n / 4][n / 2 % 2];
        const int m = n % 2;
        if constexpr (TILES == 2)
            *reinterpret_cast<float4*>(row) = {of[0][m], of[0][m + 2], of[1][m], of[1][m + 2]};
        else
            *reinterpret_cast<float2*>(row) = {of[0][m], of[0][m + 2]};
    }
}

// Starts a copy of 16 bytes, or fills them with 0.
__device__ __forceinline__ void copy_to(u32 target, const void* source, bool fill = false) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(fill ? 0 : CHUNK)
                 : "memory");
}

// By COPIERS threads: starts copies of the `count` first rows of keys, decays, the inverse, and the block's columns of
// residuals. Those of later rows of a piece are filled with 0.
__device__ __forceinline__ void copy_rows(const Tensors& of, int part, int count, Shared& s) {
    constexpr int OF_ROW = SIZE * 2 / CHUNK, APART = COPIERS / OF_ROW;
    static_assert(INVERSE_ROW * 4 == KEY_ROW && ROWS % APART == 0, "as many chunks in a row of either");
    const int thread = threadIdx.x, first = thread / OF_ROW, chunk = thread % OF_ROW;
    u32 target = formed(shared_address(s.keys) + first * KEY_ROW + chunk * CHUNK);
    const char* keys = formed(of.keys + thread * CHUNK);
    const float* inverse = formed(of.inverse + thread * 4);
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count) copy_to(target + n * APART * KEY_ROW, keys + n * COPIERS * CHUNK);
    if (thread * 4 < count) copy_chunk(s.sums + thread * 4, of.decays + thread * 4, false);
    target += AT_INVERSE;
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count && chunk * 4 <= first + n * APART)
            copy_to(target + n * APART * KEY_ROW, inverse + n * COPIERS * 4);
    constexpr int OF_PART = COLUMNS * 2 / CHUNK, ROWS_APART = COPIERS / OF_PART;
    const int row = thread / OF_PART, at = thread % OF_PART * CHUNK;
    target = formed(shared_address(s.residuals) + row * COLUMN_ROW + at);
    const char* residuals = formed(of.residuals + part * COLUMNS * 2 + row * SIZE * 2 + at);
#pragma unroll
    for (int n = 0; n < ROWS / ROWS_APART; ++n)
        if (row + n * ROWS_APART < (count / STEP + 1) * STEP)
            copy_to(target + n * ROWS_APART * COLUMN_ROW, residuals + n * ROWS_APART * SIZE * 2,
                    row + n * ROWS_APART >= count);
    commit_copies();
}

// By a warp: the token's key, a chunk in each of the first lanes, then its query.
__device__ __forceinline__ Chunk load_row(const Args& p, int lane, u32 b, u32 key_head) {
    const bool is_key = lane < LANES;
    const i64 at = is_key ? b * p.k_batch + key_head * p.k_head : b * p.q_batch + key_head * p.q_head;
    Chunk chunk;
    load_words(chunk.word, static_cast<const char*>(is_key ? p.k : p.q) + at * Number::SIZE + lane % LANES * CHUNK);
    return chunk;
}

// Columns of operand b that are not stored may be any numbers, since none depends on another.
//
// Address of a lane's terms of the key and the query as columns 0 and 1 of operand b, or of a row as all its columns.
__device__ __forceinline__ u32 units_at(const Place& at, const Shared& s) {
    return formed(shared_address(s.unit) + at.i % 2 * sizeof(s.unit[0]) + at.j * 4);
}
__device__ __forceinline__ u32 row_at(const Place& at, const unsigned short (&row)[ROWS]) {
    return formed(shared_address(row) + at.j * 4);
}
// Loads 16 terms of operand b.
__device__ __forceinline__ void load_terms(u32 (&b)[2], u32 from, int step) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b[n]) : "r"(from + (2 * step + n) * CHUNK) : "memory");
}

// Adds the products of the key and of the query with the rounded state, of lanes with j = 0: d[tile][0], d[tile][1] of column
// 2 tile of its vector, d[tile][2], d[tile][3] of the next one.
__device__ __forceinline__ void multiply_state(const Place& at, const Shared& s, const State& state,
                                               float (&d)[TILES][4]) {
    const u32 units = units_at(at, s);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 b[2];
        load_terms(b, units, step);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            u32 a[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) a[n] = Number::pack(state[step][n / 2][tile] + n % 2 * 2);
            add_product<Number>(d[tile], a, b[0], b[1]);
        }
    }
}

// By warp `piece`: the token's row of A and of P, 16 keys of them.
__device__ __forceinline__ void multiply_keys(const Place& at, int t, float total, float beta, Shared& s) {
    if (at.warp == t / STEP) {
        if (at.lane < LANES) *reinterpret_cast<Chunk*>(s.keys + t * KEY_ROW + at.lane * CHUNK) = s.unit[0][at.lane];
        __syncwarp();
    }
    const u32 rows = shared_address(s.keys) + (at.warp * STEP + at.lane % 16) * KEY_ROW + at.lane / 16 * CHUNK;
    const u32 units = units_at(at, s);
    float d[4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4], b[2];
        load_matrices(a, rows + step * STEP * 2);
        load_terms(b, units, step);
        add_product<Number>(d, a, b[0], b[1]);
    }
    if (at.j) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int row = at.warp * STEP + at.i + 8 * n;
        const float between = row < t ? exp_fast(__fsub_rn(total, s.sums[row])) : 1.0f;
        s.below[row] = __fmul_rn(beta, __fmul_rn(between, d[2 * n]));
        Number::write(s.scores + row, row <= t ? __fmul_rn(between, d[2 * n + 1]) : 0.0f);
    }
}

// By 64 threads: returns the number of the inverse in row t and this thread's column. With SPREAD the numbers of
// the next terms are read while those before are added.
__device__ __forceinline__ float next_inverse(int t, float beta, const Shared& s) {
    const int column = threadIdx.x - INVERSE_WARP * WARP;
    constexpr int BATCH = SPREAD ? STEP : STEP / 2, AHEAD = SPREAD;
    float sum = column == t ? beta : 0.0f, below[1 + AHEAD][BATCH], above[1 + AHEAD][BATCH];
    const auto read = [&](int batch) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch * BATCH + n, at = batch % (1 + AHEAD);
            below[at][n] = s.below[row], above[at][n] = s.inverse[row * INVERSE_ROW + column];
        }
    };
    if (AHEAD) read(0);
#pragma unroll
    for (int batch = 0; batch < ROWS / BATCH; ++batch) {
        if (batch * BATCH >= t) break;
        if (batch + AHEAD < ROWS / BATCH) read(batch + AHEAD);
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch * BATCH + n, at = batch % (1 + AHEAD);
            if (row >= column && row < t) sum = __fmaf_rn(-below[at][n], above[at][n], sum);
        }
    }
    return sum;
}

// By PAIR threads: earlier rows of the inverse, rounded; rows after the token's are zeros.
__device__ __forceinline__ void round_inverse(int t, Shared& s) {
    constexpr int WORDS = ROWS / 2;
    for (int i = threadIdx.x - ROUND_WARP * WARP; i < (t / STEP + 1) * STEP * WORDS; i += PAIR) {
        const int row = i / WORDS, column = i % WORDS * 2;
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            pair[n] = row < t && column + n <= row ? s.inverse[row * INVERSE_ROW + column + n] : 0.0f;
        if (row != t) *reinterpret_cast<u32*>(s.rounded + row * ROUNDED_ROW + column * 2) = Number::pack(pair);
    }
}

// Address of a lane's row of four matrices that `load_transposed` makes operand a of: 16 columns from `column` on, of 16
// rows from `row` on.
__device__ __forceinline__ u32 transposed_at(const Place& at, const char* rows, int stride, int row, int column) {
    return shared_address(rows) + (row + at.lane % 8 + at.lane / 16 * 8) * stride + (column + at.lane / 8 % 2 * 8) * 2;
}

// By warp `piece`: 16 numbers of the token's row of M.
__device__ __forceinline__ void mix(const Place& at, int t, Shared& s) {
    const u32 scores = row_at(at, s.scores);
    float d[4] = {};
    for (int step = at.warp; step * STEP <= t; ++step) {
        u32 a[4], b[2];
        load_transposed(a, transposed_at(at, s.rounded, ROUNDED_ROW, step * STEP, at.warp * STEP));
        load_terms(b, scores, step);
        add_product<Number>(d, a, b[0], b[1]);
    }
    if (at.j) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) Number::write(s.mixing + at.warp * STEP + at.i + 8 * n, d[2 * n]);
}

// Words of 16-bit numbers in shared or global memory: one vector of columns.
__device__ __forceinline__ void read_words(u32 (&word)[TILES], const void* at) {
    if constexpr (TILES == 2) {
        const uint2 pair = *static_cast<const uint2*>(at);
        word[0] = pair.x, word[1] = pair.y;
    } else {
        word[0] = *static_cast<const u32*>(at);
    }
}
__device__ __forceinline__ void store_words(void* at, const u32 (&word)[TILES]) {
    if constexpr (TILES == 2)
        *static_cast<uint2*>(at) = {word[0], word[1]};
    else
        *static_cast<u32*>(at) = word[0];
}

// The residuals of 16 rows as operand a, whose rows are columns of the state.
__device__ __forceinline__ void load_residuals(const Place& at, const Shared& s, int piece, u32 (&a)[TILES][4]) {
    u32 word[4][TILES];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = piece * STEP + 2 * at.j + r % 2 + r / 2 * 8;
        read_words(word[r], s.residuals + row * COLUMN_ROW + (at.column % COLUMNS + VECTOR * at.i) * Number::SIZE);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n)
            a[tile][n] = __byte_perm(word[n / 2 * 2][tile], word[n / 2 * 2 + 1][tile], n % 2 ? 0x7632 : 0x5410);
}

// By all threads: the inverse times decays to the end of the chunk, rounded.
__device__ __forceinline__ void fade(Shared& s) {
    for (int i = threadIdx.x; i < ROWS * ROWS / 2; i += THREADS) {
        const int row = i / (ROWS / 2), column = i % (ROWS / 2) * 2;
        const float fading = exp_fast(__fsub_rn(s.sums[ROWS - 1], s.sums[row]));
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            pair[n] = column + n <= row ? __fmul_rn(fading, s.inverse[row * INVERSE_ROW + column + n]) : 0.0f;
        *reinterpret_cast<u32*>(s.rounded + row * ROUNDED_ROW + column * 2) = Number::pack(pair);
    }
}

// By all warps: W, the transposed faded inverse times the keys.
__device__ __forceinline__ void weigh(const Place& at, Shared& s) {
#pragma unroll 1
    for (int n = at.warp; n < PIECES * STEPS; n += WARPS) {
        const int piece = n / STEPS, column = n % STEPS * STEP;
        float d[2][4] = {};
#pragma unroll 1
        for (int step = piece; step < PIECES; ++step) {
            u32 a[4], b[4];
            load_transposed(a, transposed_at(at, s.rounded, ROUNDED_ROW, step * STEP, piece * STEP));
            load_transposed(b, shared_address(s.keys) + (step * STEP + at.lane % 16) * KEY_ROW +
                                   (column + at.lane / 16 * 8) * 2);
            add_product<Number>(d[0], a, b[0], b[1]);
            add_product<Number>(d[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            char* row = s.weights + (piece * STEP + at.i + m % 2 * 8) * KEY_ROW;
            *reinterpret_cast<u32*>(row + (column + m / 2 * 8 + 2 * at.j) * 2) = Number::pack(d[m / 2] + m % 2 * 2);
        }
    }
}

// By a warp with columns: the state after the chunk.
__device__ __forceinline__ void add_chunk(const Place& at, float grown, const Shared& s, State& d) {
#pragma unroll
    for (int n = 0; n < STEPS * 2 * TILES * 4; ++n) {
        float& x = d[n / (8 * TILES)][n / (4 * TILES) % 2][n / 4 % TILES][n % 4];
        x = __fmul_rn(grown, x);
    }
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        u32 a[TILES][4];
        load_residuals(at, s, piece, a);
        const u32 weights = shared_address(s.weights) + (piece * STEP + at.lane % 16) * KEY_ROW + at.lane / 16 * CHUNK;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 b[4];
            load_transposed(b, weights + step * STEP * 2);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                add_product<Number>(d[step][0][tile], a[tile], b[0], b[1]);
                add_product<Number>(d[step][1][tile], a[tile], b[2], b[3]);
            }
        }
    }
}

// Writes the token's residuals, of lanes with j = 0, from the products of the key, and begins the sums of the output with those
// of the query.
__device__ __forceinline__ void begin_row(const Place& at, float grown, const u32 (&v)[TILES], float (&d)[TILES][4],
                                          char* own) {
    u32 residual[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float pair[2];
        Number::unpack(v[tile], pair);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            pair[n] = __fmaf_rn(-grown, d[tile][2 * n], pair[n]);
            d[tile][2 * n] = __fmul_rn(grown, d[tile][2 * n + 1]), d[tile][2 * n + 1] = 0.0f;
        }
        residual[tile] = Number::pack(pair);
    }
    if (at.j == 0) store_words(own, residual);
}

// Adds the mixed residuals to the sums of the output, and rounds it, of lanes with j = 0.
__device__ __forceinline__ void finish_row(const Place& at, int t, float scale, const Shared& s, float (&d)[TILES][4],
                                           u32 (&result)[TILES]) {
    const u32 mixing = row_at(at, s.mixing);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece * STEP > t) break;
        u32 a[TILES][4], b[2];
        load_residuals(at, s, piece, a);
        load_terms(b, mixing, piece);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) add_product<Number>(d[tile], a[tile], b[0], b[1]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float pair[2] = {__fmul_rn(scale, d[tile][0]), __fmul_rn(scale, d[tile][2])};
        result[tile] = Number::pack(pair);
    }
}


}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const __grid_constant__ Args p) {
    extern __shared__ char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const Place at;
    const u32 b = blockIdx.z;
    wait_for_prerequisites();
    launch_dependents();

    u32 length;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(length) : "l"(p.lengths + b));
    Chunk row;
    if (at.warp == INVERSE_WARP) row = load_row(p, at.lane, b, blockIdx.y);
    const Tensors tensors(p);
    State held;
    if (at.has_columns) load_state(at, tensors.state, held);
    if (at.warp == INVERSE_WARP)
        s.unit[at.lane / LANES][at.lane % LANES] = p.normalizes ? unit_row<Number>(row) : row;
    const int t = length % ROWS;
    if (at.warp < PIECES) copy_rows(tensors, at.part, t, s);
    u32 v[TILES] = {};
    if (at.has_columns && at.j == 0) {
        const u32 head = blockIdx.y * p.group + blockIdx.x / PARTS;
        const i64 first = b * p.v_batch + head * p.v_head + at.column + VECTOR * at.i;
        load_words(v, static_cast<const char*>(p.v) + first * Number::SIZE);
    }
    const u32 g_bits = load_number(p.g, tensors.item, p.g_type), beta_bits = load_number(p.beta, tensors.item, p.beta_type);
    float d[TILES][4] = {};
    if (!SPREAD) {
        __syncthreads();
        if (at.has_columns) multiply_state(at, s, held, d);
    }
    copies_done<0>();
    __syncthreads();
    const float g = number_of(g_bits, p.g_type), beta = number_of(beta_bits, p.beta_type);
    const float total = t ? __fadd_rn(s.sums[t - 1], g) : g;
    if (threadIdx.x == 0) s.sums[t] = total;
    if (at.warp < PIECES && at.warp * STEP <= t) multiply_keys(at, t, total, beta, s);
    if (SPREAD && at.has_columns) multiply_state(at, s, held, d);
    if (SPREAD && at.warp >= ROUND_WARP && at.warp < ROUND_WARP + 2) round_inverse(t, s);
    __syncthreads();

    // All threads have read the length.
    u32 count = 0;
    if (threadIdx.x == 0) count = atomicAdd(reinterpret_cast<u32*>(p.lengths) + b, 1u << p.shift);
    const int column = threadIdx.x - INVERSE_WARP * WARP;
    if (column >= 0 && column < ROWS) {
        const float x = next_inverse(t, beta, s);
        s.inverse[t * INVERSE_ROW + column] = x;
        Number::write(s.rounded + t * ROUNDED_ROW + column * Number::SIZE, x);
        if (at.part == 0) Tensors(p).inverse[t * ROWS + column] = x;
    }
    if (!SPREAD && at.warp >= ROUND_WARP && at.warp < ROUND_WARP + 2) round_inverse(t, s);
    char* const own = s.residuals + t * COLUMN_ROW + (at.column % COLUMNS + VECTOR * at.i) * 2;
    if (at.has_columns) begin_row(at, exp_fast(s.sums[t]), v, d, own);
    __syncthreads();
    if (at.warp < PIECES && at.warp * STEP <= t) mix(at, t, s);
    __syncthreads();

    const Tensors to(p);
    if (at.has_columns) {
        u32 result[TILES];
        finish_row(at, t, p.scale, s, d, result);
        if (at.j == 0) {
            const int first = at.column + VECTOR * at.i;
            store_words(to.out + first * 2, result);
            read_words(result, own);
            store_words(to.residuals + (t * SIZE + first) * 2, result);
        }
    }
    if (at.part == 0) {
        if (threadIdx.x == 0) to.decays[t] = s.sums[t];
        if (threadIdx.x < LANES && blockIdx.x == 0)
            reinterpret_cast<Chunk*>(to.keys)[t * LANES + threadIdx.x] = s.unit[0][threadIdx.x];
    }
    if (t == ROWS - 1) {
        fade(s);
        __syncthreads();
        weigh(at, s);
        __syncthreads();
        if (at.has_columns) {
            add_chunk(at, exp_fast(s.sums[ROWS - 1]), s, held);
            store_state(at, Tensors(p).state, held);
        }
    }
    if (threadIdx.x == 0 && count >> p.shift == gridDim.x * gridDim.y - 1)
        p.lengths[b] = (count & ((1u << p.shift) - 1)) + 1;
}
