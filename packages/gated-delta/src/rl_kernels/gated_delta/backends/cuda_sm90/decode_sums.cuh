// The sums of decode_sm90.cu: a token's row of each product, and the state after a chunk.
#pragma once

#include "decode_rows.cuh"

namespace rlk {

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
    for (int n = 0; n < 2; ++n) b[n] = load_shared(from + (2 * step + n) * CHUNK);
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

// Address of a lane's row of four matrices that `load_transposed` makes operand a of: 16 columns from `column` on, of 16
// rows from `row` on.
__device__ __forceinline__ u32 transposed_at(const Place& at, const char* rows, int stride, int row, int column) {
    return shared_address(rows) + (row + at.lane % 8 + at.lane / 16 * 8) * stride + (column + at.lane / 8 % 2 * 8) * 2;
}

// 16 columns of the rounded inverse as operand a: their terms in PIECES steps of rows.
using Columns = u32[PIECES][4];

// By warp `piece`: one step of its 16 columns of earlier rows. Later rows are zeros.
__device__ __forceinline__ void load_inverse(const Place& at, int t, const Shared& s, int step, u32 (&a)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int column = at.warp * STEP + at.i + n % 2 * 8, row = step * STEP + 2 * at.j + n / 2 * 8;
        float pair[2] = {};
        if (row < t && row + 1 >= column) {
            if (row >= column) pair[0] = s.inverse[row * INVERSE_ROW + column];
            if (row + 1 < t) pair[1] = s.inverse[(row + 1) * INVERSE_ROW + column];
        }
        a[n] = Number::pack(pair);
    }
}

// By warp `piece`: 16 numbers of the token's row of M. `a`: with SPREAD its columns.
__device__ __forceinline__ void mix(const Place& at, int t, Columns& a, Shared& s) {
    const u32 scores = row_at(at, s.scores);
    u32 newest[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float x = s.inverse[t * INVERSE_ROW + at.warp * STEP + at.i + n * 8];
        const float pair[2] = {t % 2 ? 0.0f : x, t % 2 ? x : 0.0f};
        newest[n] = Number::pack(pair);
    }
    float d[4] = {};
#pragma unroll
    for (int step = 0; step < PIECES; ++step) {
        if (step < at.warp || step * STEP > t) continue;
        u32 b[2];
        if (!SPREAD) load_inverse(at, t, s, step, a[step]);
        load_terms(b, scores, step);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (step * STEP + 2 * at.j + n / 2 * 8 == t / 2 * 2) a[step][n] |= newest[n % 2];
        add_product<Number>(d, a[step], b[0], b[1]);
    }
    if (at.j) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) Number::write(s.mixing + at.warp * STEP + at.i + 8 * n, d[2 * n]);
}

using Residuals = u32[PIECES][TILES][4];

// The residuals of 16 rows as operand a, whose rows are columns of the state.
__device__ __forceinline__ void load_residuals(const Place& at, const Shared& s, int piece, u32 (&a)[TILES][4]) {
    u32 word[4][TILES];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = piece * STEP + 2 * at.j + r % 2 + r / 2 * 8;
        read_words(word[r], s.residuals + row * COLUMN_ROW + at.own());
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n)
            a[tile][n] = __byte_perm(word[n / 2 * 2][tile], word[n / 2 * 2 + 1][tile], n % 2 ? 0x7632 : 0x5410);
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

// Adds the mixed residuals to the sums of the output, and rounds it, of lanes with j = 0. `a`: with SPREAD the residuals.
__device__ __forceinline__ void finish_row(const Place& at, int t, float scale, const Shared& s, Residuals& a,
                                           float (&d)[TILES][4], u32 (&result)[TILES]) {
    const u32 mixing = row_at(at, s.mixing);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece * STEP > t) break;
        u32 b[2];
        if (!SPREAD) load_residuals(at, s, piece, a[piece]);
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

// By all threads: the inverse times decays to the end of the chunk, rounded.
__device__ __forceinline__ void fade(Shared& s) {
    for (int i = threadIdx.x; i < ROWS * ROWS / 2; i += THREADS) {
        const int row = i / (ROWS / 2), column = i % (ROWS / 2) * 2;
        const float fading = exp_fast(__fsub_rn(s.sums[ROWS - 1], s.sums[row]));
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            pair[n] = column + n <= row ? __fmul_rn(fading, s.inverse[row * INVERSE_ROW + column + n]) : 0.0f;
        *reinterpret_cast<u32*>(s.faded + row * FADED_ROW + column * 2) = Number::pack(pair);
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
            load_transposed(a, transposed_at(at, s.faded, FADED_ROW, step * STEP, piece * STEP));
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

}  // namespace rlk
