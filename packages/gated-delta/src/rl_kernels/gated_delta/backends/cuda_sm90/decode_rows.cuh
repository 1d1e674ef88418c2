// Sizes, roles of warps and shared memory of a block of decode_sm90.cu, and its loads and stores.
#pragma once

#include <rl_kernels/warp_mma.cuh>

#include "order.cuh"

namespace rlk {

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

#if DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

constexpr int STEP = 16, STEPS = SIZE / STEP, PIECES = ROWS / STEP;
constexpr int COLUMNS = SIZE / PARTS, ACROSS = STEP * TILES, VECTOR = 2 * TILES, COLUMN_WARPS = COLUMNS / ACROSS;
// The first PIECES warps copy rows and multiply keys, 16 each. Of other roles, the first warp: two form the inverse, the
// first of which normalizes.
constexpr int INVERSE_WARP = SPREAD ? PIECES : 0, COLUMN_WARP = SPREAD ? PIECES + 2 : 0;
constexpr int WARPS = COLUMN_WARP + COLUMN_WARPS, THREADS = WARPS * WARP, COPIERS = PIECES * WARP;
static_assert(WARPS >= PIECES, "warps for each role");
// Rows of shared memory, padded against bank conflicts: of keys and of the weights, of the inverse, of F.
constexpr int KEY_ROW = SIZE * 2 + CHUNK, INVERSE_ROW = ROWS + 4, FADED_ROW = ROWS * 2 + CHUNK;
// Of residuals.
constexpr int COLUMN_ROW = COLUMNS * 2 + CHUNK;

struct Shared {
    alignas(16) char keys[ROWS * KEY_ROW];
    union {
        alignas(16) float inverse[ROWS * INVERSE_ROW];
        alignas(16) char weights[ROWS * KEY_ROW];
    };
    // F.
    alignas(16) char faded[ROWS * FADED_ROW];
    alignas(16) char residuals[ROWS * COLUMN_ROW];
    // g and beta.
    alignas(16) float gates[4];
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
    // Byte of this thread's vector of columns in a row of the block's residuals.
    __device__ __forceinline__ int own() const { return (column % COLUMNS + VECTOR * i) * 2; }
};

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

// A thread's numbers of the state: of each step and eight keys of it, those that it holds of a product [columns, keys] of
// mma.sync, of each tile. Rows i and i + 8 of the tile are columns 2 tile and 2 tile + 1 of the i-th vector of the warp.
using State = float[STEPS][2][TILES][4];

__device__ __forceinline__ void load_state(const Place& at, const float* state, State& d) {
    const float* own = formed(state + at.column + VECTOR * at.i + 2 * at.j * SIZE);
#pragma unroll
    for (int n = 0; n < 4 * STEPS; ++n) {
        u32 word[VECTOR];
        load_once(word, own + (n / 2 * 8 + n % 2) * SIZE);
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

// By COPIERS threads: starts copies of the `count` first rows of keys and decays, then of the inverse and of the block's
// columns of residuals, whose later rows of a piece are filled with 0.
__device__ __forceinline__ void copy_rows(const Tensors& of, int part, int count, Shared& s) {
    constexpr int OF_ROW = SIZE * 2 / CHUNK, APART = COPIERS / OF_ROW;
    static_assert(INVERSE_ROW * 4 == KEY_ROW && ROWS % APART == 0, "as many chunks in a row of either");
    const int thread = threadIdx.x, first = thread / OF_ROW, chunk = thread % OF_ROW;
    u32 target = formed(shared_address(s.keys) + first * KEY_ROW + chunk * CHUNK);
    const char* keys = formed(of.keys + thread * CHUNK);
    const float* inverse = formed(of.inverse + thread * 4);
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count) copy_chunk(target + n * APART * KEY_ROW, keys + n * COPIERS * CHUNK, false);
    if (thread * 4 < count) copy_chunk(s.sums + thread * 4, of.decays + thread * 4, false);
    commit_copies();
    target += AT_INVERSE;
#pragma unroll
    for (int n = 0; n < ROWS / APART; ++n)
        if (first + n * APART < count && chunk * 4 <= first + n * APART)
            copy_chunk(target + n * APART * KEY_ROW, inverse + n * COPIERS * 4, false);
    constexpr int OF_PART = COLUMNS * 2 / CHUNK, ROWS_APART = COPIERS / OF_PART;
    const int row = thread / OF_PART, at = thread % OF_PART * CHUNK;
    target = formed(shared_address(s.residuals) + row * COLUMN_ROW + at);
    const char* residuals = formed(of.residuals + part * COLUMNS * 2 + row * SIZE * 2 + at);
#pragma unroll
    for (int n = 0; n < ROWS / ROWS_APART; ++n)
        if (row + n * ROWS_APART < (count / STEP + 1) * STEP)
            copy_chunk(target + n * ROWS_APART * COLUMN_ROW, residuals + n * ROWS_APART * SIZE * 2,
                       row + n * ROWS_APART >= count);
    commit_copies();
}

}  // namespace rlk
