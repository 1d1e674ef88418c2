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
constexpr int WEIGHERS = WARPS < SIZE / STEP ? WARPS / 4 * 4 : SIZE / STEP;
static_assert(WARPS >= PIECES, "warps for each role");
// Rows of shared memory, padded against bank conflicts: of keys and of the weights, of the inverse, of 16-bit copies of it.
constexpr int KEY_ROW = SIZE * 2 + CHUNK, INVERSE_ROW = ROWS + 4, ROUNDED_ROW = ROWS * 2 + CHUNK;

struct Shared {
    alignas(16) char keys[ROWS * KEY_ROW];
    union {
        alignas(16) float inverse[ROWS * INVERSE_ROW];
        alignas(16) char weights[ROWS * KEY_ROW];
    };
    // The inverse, rounded, then F.
    alignas(16) char rounded[ROWS * ROUNDED_ROW];
    // The normalized key and query.
    alignas(16) Chunk unit[2][LANES];
    alignas(16) float sums[ROWS];
    // The token's row of A; those of P and of M, rounded.
    alignas(16) float below[ROWS];
    alignas(16) unsigned short scores[ROWS], mixing[ROWS];
};

// From the keys in shared memory to the inverse, which follows them.
constexpr int AT_INVERSE = ROWS * KEY_ROW;

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

// An address, formed here and not before each use.
__device__ __forceinline__ u32 formed(u32 at) {
    asm volatile("" : "+r"(at));
    return at;
}
template <class T>
__device__ __forceinline__ const T* formed(const T* at) {
    asm volatile("" : "+l"(at));
    return at;
}

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

// A thread's numbers of the state, as `load_state` leaves them: of each step and term, VECTOR columns.
using State = u32[STEPS][4][VECTOR];
// Its residuals: of each piece and term, VECTOR columns.
using Residuals = u32[PIECES][4][TILES];
// Operands of mma.sync, which are a transposed operand of the next state too.
using Operands = u32[PIECES][TILES][4];

__device__ __forceinline__ void load_state(const Place& at, const float* state, State& word) {
    const float* own = state + at.column + VECTOR * at.i + 2 * at.j * SIZE;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) load_words(word[step][r], own + (step * STEP + r % 2 + r / 2 * 8) * SIZE);
}

// Loads those of the `count` first rows.
__device__ __forceinline__ void load_residuals(const Place& at, const char* residuals, int count, Residuals& word) {
    const char* own = residuals + (at.column + VECTOR * at.i + 2 * at.j * SIZE) * Number::SIZE;
    own = formed(own);
    count -= 2 * at.j;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = piece * STEP + r % 2 + r / 2 * 8;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) word[piece][r][tile] = 0;
            if (row < count) load_words(word[piece][r], own + row * SIZE * Number::SIZE);
        }
}

// Starts a copy of 16 bytes.
__device__ __forceinline__ void copy_to(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// By COPIERS threads: starts copies of the `count` first rows of keys, decays and the inverse.
__device__ __forceinline__ void copy_rows(const char* keys, const float* decays, const float* inverse, int count,
                                          Shared& s) {
    constexpr int OF_ROW = SIZE * 2 / CHUNK, APART = COPIERS / OF_ROW;
    static_assert(INVERSE_ROW * 4 == KEY_ROW && ROWS % APART == 0, "as many chunks in a row of either");
    const int thread = threadIdx.x, first = thread / OF_ROW, chunk = thread % OF_ROW;
    u32 target = formed(shared_address(s.keys) + first * KEY_ROW + chunk * CHUNK);
    keys = formed(keys + thread * CHUNK), inverse = formed(inverse + thread * 4);
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count) copy_to(target + n * APART * KEY_ROW, keys + n * COPIERS * CHUNK);
    if (thread * 4 < count) copy_chunk(s.sums + thread * 4, decays + thread * 4, false);
    target += AT_INVERSE;
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count && chunk * 4 <= first + n * APART)
            copy_to(target + n * APART * KEY_ROW, inverse + n * COPIERS * 4);
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
__device__ __forceinline__ void multiply_state(const Place& at, const Shared& s, const State& word,
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
            for (int n = 0; n < 4; ++n) {
                const int column = 2 * tile + n % 2, r = n / 2 * 2;
                const float pair[2] = {__uint_as_float(word[step][r][column]),
                                       __uint_as_float(word[step][r + 1][column])};
                a[n] = Number::pack(pair);
            }
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

// By 64 threads: returns the number of the inverse in row t and this thread's column. The numbers of the next 16 terms are
// read while those before are added.
__device__ __forceinline__ float next_inverse(int t, float beta, const Shared& s) {
    const int column = threadIdx.x - INVERSE_WARP * WARP;
    float sum = column == t ? beta : 0.0f, below[2][STEP], above[2][STEP];
    const auto read = [&](int piece) {
#pragma unroll
        for (int n = 0; n < STEP; ++n) {
            const int row = piece * STEP + n;
            below[piece % 2][n] = s.below[row], above[piece % 2][n] = s.inverse[row * INVERSE_ROW + column];
        }
    };
    read(0);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece * STEP >= t) break;
        if (piece + 1 < PIECES) read(piece + 1);
#pragma unroll
        for (int n = 0; n < STEP; ++n) {
            const int row = piece * STEP + n;
            if (row >= column && row < t) sum = __fmaf_rn(-below[piece % 2][n], above[piece % 2][n], sum);
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

// Puts the token's residuals, of lanes with j = 0, among those of earlier rows, as operands; held rows from t on are zeros.
__device__ __forceinline__ void operands_of(const Place& at, int t, const Residuals& held, const u32 (&own)[TILES],
                                            Operands& a) {
    t -= 2 * at.j;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const u32 newest = __shfl_sync(ALL, own[tile], at.lane & ~3);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            u32 word[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                word[r] = piece * STEP + r % 2 + r / 2 * 8 == t ? newest : held[piece][r][tile];
#pragma unroll
            for (int n = 0; n < 4; ++n)
                a[piece][tile][n] = __byte_perm(word[n / 2 * 2], word[n / 2 * 2 + 1], n % 2 ? 0x7632 : 0x5410);
        }
    }
}

// By all threads: the inverse times decays to the end of the chunk, rounded.
__device__ __forceinline__ void fade(float total, Shared& s) {
    for (int i = threadIdx.x; i < ROWS * ROWS / 2; i += THREADS) {
        const int row = i / (ROWS / 2), column = i % (ROWS / 2) * 2;
        const float fading = exp_fast(row < ROWS - 1 ? __fsub_rn(total, s.sums[row]) : 0.0f);
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            pair[n] = column + n <= row ? __fmul_rn(fading, s.inverse[row * INVERSE_ROW + column + n]) : 0.0f;
        *reinterpret_cast<u32*>(s.rounded + row * ROUNDED_ROW + column * 2) = Number::pack(pair);
    }
}

// By the first WEIGHERS warps: W, the transposed faded inverse times the keys.
__device__ __forceinline__ void weigh(const Place& at, Shared& s) {
    constexpr int WIDE = SIZE / WEIGHERS / STEP;
    const int first = at.warp * WIDE * STEP;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        float d[WIDE][2][4] = {};
#pragma unroll 1
        for (int step = piece; step < PIECES; ++step) {
            u32 a[4];
            load_transposed(a, transposed_at(at, s.rounded, ROUNDED_ROW, step * STEP, piece * STEP));
#pragma unroll
            for (int n = 0; n < WIDE; ++n) {
                u32 b[4];
                load_transposed(b, shared_address(s.keys) + (step * STEP + at.lane % 16) * KEY_ROW +
                                       (first + n * STEP + at.lane / 16 * 8) * 2);
                add_product<Number>(d[n][0], a, b[0], b[1]);
                add_product<Number>(d[n][1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4 * WIDE; ++n) {
            const int row = piece * STEP + at.i + n % 2 * 8, column = first + n / 2 * 8 + 2 * at.j;
            *reinterpret_cast<u32*>(s.weights + row * KEY_ROW + column * 2) =
                Number::pack(d[n / 4][n / 2 % 2] + n % 2 * 2);
        }
    }
}

// By a warp with columns: the state after the chunk, whose operands are `a`. A thread has two vectors of columns, those
// numbered 2 j and 2 j + 1, of keys i and i + 8 of each 16.
__device__ __forceinline__ void add_chunk(const Place& at, float* state, float grown, const Operands& a,
                                          const Shared& s) {
    float* own = state + at.column + 2 * VECTOR * at.j + at.i * SIZE;
#pragma unroll 1
    for (int block = 0; block < STEPS; ++block) {
        // Of column c of a vector: d[c][0], d[c][1] of its two vectors, then those of key i + 8.
        float d[VECTOR][4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 word[VECTOR];
            load_words(word, own + (block * STEP + n / 2 * 8) * SIZE + n % 2 * VECTOR);
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) d[c][n] = __fmul_rn(grown, __uint_as_float(word[c]));
        }
#pragma unroll
        for (int step = 0; step < PIECES; ++step) {
            u32 w[4];
            load_transposed(w, transposed_at(at, s.weights, KEY_ROW, step * STEP, block * STEP));
#pragma unroll
            for (int c = 0; c < VECTOR; ++c)
                add_product<Number>(d[c], w, a[step][c / 2][c % 2], a[step][c / 2][c % 2 + 2]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float* at_row = own + (block * STEP + n / 2 * 8) * SIZE + n % 2 * VECTOR;
            if constexpr (VECTOR == 4)
                *reinterpret_cast<float4*>(at_row) = {d[0][n], d[1][n], d[2][n], d[3][n]};
            else
                *reinterpret_cast<float2*>(at_row) = {d[0][n], d[1][n]};
        }
    }
}

// Returns this lane's residuals from the products of the key, and begins the sums of the output with those of the query.
__device__ __forceinline__ void begin_row(float grown, const u32 (&v)[TILES], float (&d)[TILES][4],
                                          u32 (&residual)[TILES]) {
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
}

// Adds the mixed residuals to the sums of the output, and rounds it, of lanes with j = 0.
__device__ __forceinline__ void finish_row(const Place& at, int t, float scale, const Shared& s, const Operands& a,
                                           float (&d)[TILES][4], u32 (&result)[TILES]) {
    const u32 mixing = row_at(at, s.mixing);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece * STEP > t) break;
        u32 b[2];
        load_terms(b, mixing, piece);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) add_product<Number>(d[tile], a[piece][tile], b[0], b[1]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float pair[2] = {__fmul_rn(scale, d[tile][0]), __fmul_rn(scale, d[tile][2])};
        result[tile] = Number::pack(pair);
    }
}

__device__ __forceinline__ void store_words(void* at, const u32 (&word)[TILES]) {
    if constexpr (TILES == 2)
        *static_cast<uint2*>(at) = {word[0], word[1]};
    else
        *static_cast<u32*>(at) = word[0];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const __grid_constant__ Args p) {
    __shared__ Shared s;
    const Place at;
    const u32 head = blockIdx.y * p.group + blockIdx.x / PARTS, b = blockIdx.z;
    const i64 key_item = b * gridDim.y + blockIdx.y, item = b * gridDim.y * p.group + head;
    float *state = p.state + item * SIZE * SIZE, *decays = p.decays + item * ROWS, *inverse = p.inverse + item * ROWS * ROWS;
    char* keys = static_cast<char*>(p.keys) + key_item * ROWS * SIZE * Number::SIZE;
    char* residuals = static_cast<char*>(p.residuals) + item * ROWS * SIZE * Number::SIZE;
    wait_for_prerequisites();
    launch_dependents();

    u32 length, *const lengths = reinterpret_cast<u32*>(p.lengths) + b;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(length) : "l"(lengths));
    Chunk row;
    if (at.warp == INVERSE_WARP) row = load_row(p, at.lane, b, blockIdx.y);
    State word;
    if (at.has_columns) load_state(at, state, word);
    if (at.warp == INVERSE_WARP)
        s.unit[at.lane / LANES][at.lane % LANES] = p.normalizes ? unit_row<Number>(row) : row;
    length &= (1u << p.shift) - 1;
    const int t = length % ROWS;
    if (at.warp < PIECES) copy_rows(keys, decays, inverse, t, s);
    float d[TILES][4] = {};
    if (!SPREAD) {
        __syncthreads();
        if (at.has_columns) multiply_state(at, s, word, d);
    }
    Residuals held;
    u32 v[TILES] = {};
    if (at.has_columns) {
        load_residuals(at, residuals, t, held);
        const i64 first = b * p.v_batch + head * p.v_head + at.column + VECTOR * at.i;
        if (at.j == 0) load_words(v, static_cast<const char*>(p.v) + first * Number::SIZE);
    }
    const u32 g_bits = load_number(p.g, item, p.g_type), beta_bits = load_number(p.beta, item, p.beta_type);
    copies_done<0>();
    __syncthreads();
    const float g = number_of(g_bits, p.g_type), beta = number_of(beta_bits, p.beta_type);
    const float total = t ? __fadd_rn(s.sums[t - 1], g) : g, grown = exp_fast(total);
    if (at.warp < PIECES && at.warp * STEP <= t) multiply_keys(at, t, total, beta, s);
    if (SPREAD && at.has_columns) multiply_state(at, s, word, d);
    if (SPREAD && at.warp >= ROUND_WARP && at.warp < ROUND_WARP + 2) round_inverse(t, s);
    __syncthreads();

    // All threads have read the length.
    u32 count = 0;
    if (threadIdx.x == 0) count = atomicAdd(lengths, 1u << p.shift);
    const int column = threadIdx.x - INVERSE_WARP * WARP;
    if (column >= 0 && column < ROWS) {
        const float x = next_inverse(t, beta, s);
        s.inverse[t * INVERSE_ROW + column] = x;
        Number::write(s.rounded + t * ROUNDED_ROW + column * Number::SIZE, x);
        if (at.part == 0) inverse[t * ROWS + column] = x;
    }
    if (!SPREAD && at.warp >= ROUND_WARP && at.warp < ROUND_WARP + 2) round_inverse(t, s);
    u32 own[TILES];
    Operands a;
    if (at.has_columns) {
        begin_row(grown, v, d, own);
        operands_of(at, t, held, own, a);
    }
    __syncthreads();
    if (at.warp < PIECES && at.warp * STEP <= t) mix(at, t, s);
    __syncthreads();

    if (at.has_columns) {
        u32 result[TILES];
        finish_row(at, t, p.scale, s, a, d, result);
        if (at.j == 0) {
            const i64 first = at.column + VECTOR * at.i;
            store_words(static_cast<char*>(p.out) + (item * SIZE + first) * Number::SIZE, result);
            store_words(residuals + (t * SIZE + first) * Number::SIZE, own);
        }
    }
    if (at.part == 0) {
        if (threadIdx.x == 0) decays[t] = total;
        if (threadIdx.x < LANES && blockIdx.x == 0)
            reinterpret_cast<Chunk*>(keys)[t * LANES + threadIdx.x] = s.unit[0][threadIdx.x];
    }
    if (t == ROWS - 1) {
        fade(total, s);
        __syncthreads();
        if (at.warp < WEIGHERS) weigh(at, s);
        __syncthreads();
        if (at.has_columns) add_chunk(at, state, grown, a, s);
    }
    if (threadIdx.x == 0 && count >> p.shift == gridDim.x * gridDim.y - 1) *lengths = length + 1;
}
