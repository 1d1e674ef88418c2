// Code shared by the two kernels of the backward pass: arguments, the order of tiles, shared memory, weights.
//
//   block      a producer warpgroup and 2 consumer warpgroups; persistent: it takes tile after tile (queue.cuh)
//
// Defines: those of attention_backward_sm90.cu.
#pragma once

#include "queue.cuh"

namespace rlk {

// HEIGHT: rows or keys of a tile, 64 for each consumer; WIDE, 64 for both, which have the sums of either half of the work.
constexpr int GROUPS = 2, HEIGHT = WIDE ? MMA_M : MMA_M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP, PART = 64;
constexpr int WIDEST_ROOM = ROOM<AT_ONCE<(K_WIDTH > V_WIDTH ? K_WIDTH : V_WIDTH)>>;
// Bytes of the operands of a whole tile, and of a stage.
constexpr int K_TILE = BOXES_K * bytes_of(HEIGHT), V_TILE = BOXES_V * bytes_of(HEIGHT);
constexpr int K_PART = BOXES_K * bytes_of(PART), V_PART = BOXES_V * bytes_of(PART);
// WIDE: weights on their way from one consumer to the other, GIVEN blocks of them.
constexpr int GIVEN = 2, GIVEN_BYTES = WIDE ? MMA_M * PART * Number::SIZE : 0;
static_assert(SHARED_BYTES >= ATOM + K_TILE + V_TILE + STAGES * (K_PART + V_PART) + GROUPS * WIDEST_ROOM + GIVEN * GIVEN_BYTES,
              "what the host made room for");

static_assert(WIDE || STAGES > 2, "the kernel of dq holds the keys of two blocks when it waits for those of the next");

struct Args : Shape {
    const void *q, *grad;
    // Row r of a sequence has the index ((b kv_heads + head) queries + first query) group + r.
    const float *lses, *deltas;
    void *dq, *dk, *dv;
    // Strides of q and of grad in elements, between sequences, queries and heads.
    i64 q_batch, q_row, q_head, g_batch, g_row, g_head;
    // 0 before the kernel.
    int* counter;
    // As in Order (queue.cuh).
    int tiles, section;
    float factor, scale, cap, rate;

    __device__ Order order() const { return {tiles, 1, section}; }
    // The first row of a sequence in lses and deltas.
    __device__ i64 rows_of(const Sequence& s, int b, int head) const {
        return ((static_cast<i64>(starts_q ? 0 : b) * kv_heads + head) * queries + s.first_q) * group;
    }
};

// Shared memory: operands a (as wide as k) and b (as wide as v) of a tile, and a ring of stages: blocks of keys for a tile
// of rows, and of rows for a tile of keys.
template <class T>
struct Memory {
    char *a, *b, *stages_a, *stages_b, *room, *given;
    // After the stages of lse come those of delta.
    float* lse;
    Barrier *tile_full, *tile_empty, *a_full, *a_empty, *b_full, *b_empty, *given_full, *given_empty;
    Queue<T> queue;

    __device__ Memory() {
        extern __shared__ char memory[];
        __shared__ Barrier barriers[2 + 4 * STAGES + 2 * GIVEN];
        __shared__ float rows[2][STAGES][PART];
        a = memory + (-shared_address(memory) & (ATOM - 1));
        b = a + K_TILE, stages_a = b + V_TILE, stages_b = stages_a + STAGES * K_PART, room = stages_b + STAGES * V_PART;
        tile_full = barriers, tile_empty = tile_full + 1, a_full = tile_full + 2;
        a_empty = a_full + STAGES, b_full = a_empty + STAGES, b_empty = b_full + STAGES;
        given = room + GROUPS * WIDEST_ROOM, given_full = b_empty + STAGES, given_empty = given_full + GIVEN;
        lse = rows[0][0];
    }
    // Number of arrivals at a full tile, at a full stage, and at an empty stage. `readers`: warps of the producer that read
    // the queue.
    __device__ void open(int tile_arrivals, int stage_arrivals, int empty_arrivals, int readers) const {
        if (threadIdx.x == 0) {
            tile_full->init(tile_arrivals), tile_empty->init(GROUPS * WARPS_OF_GROUP);
            for (int i = 0; i < STAGES; ++i) {
                a_full[i].init(stage_arrivals), b_full[i].init(stage_arrivals);
                a_empty[i].init(empty_arrivals), b_empty[i].init(empty_arrivals);
            }
            for (int i = 0; i < GIVEN; ++i) given_full[i].init(WARPGROUP), given_empty[i].init(WARPGROUP);
            queue.init(readers + GROUPS * WARPS_OF_GROUP);
            fence_init();
        }
        __syncthreads();
    }
    __device__ char* stage_a(int stage) const { return stages_a + stage * K_PART; }
    __device__ char* stage_b(int stage) const { return stages_b + stage * V_PART; }
};

using Scores = float[PART / 2];
using Weights = u32[PART / MMA_K][4];

template <int COUNT>
__device__ inline void zero(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) d[i] = 0.0f;
}

__device__ inline float power(const Args& p, float score, float lse) {
    return exp2_fast(__fmaf_rn(score, p.factor, -lse));
}

// Caps a score unless it is hidden (-inf), and returns the derivative of the cap, without the scale.
__device__ inline float capped(const Args& p, float& x) {
#if CAPPED
    if (x == -infinity()) return 0.0f;
    cap(p.cap, p.rate, x);
    const float t = __fdiv_rn(x, p.cap);
    return __fmaf_rn(-t, t, 1.0f);
#else
    return 1.0f;
#endif
}
// Returns the derivative of the cap, computed from the weight.
__device__ inline float slope_of(const Args& p, float weight, float lse) {
#if CAPPED
    if (weight == 0.0f) return 0.0f;
    const float t = __fdiv_rn(__fmul_rn(__fadd_rn(log2_fast(weight), lse), LN2), p.cap);
    return __fmaf_rn(-t, t, 1.0f);
#else
    return 1.0f;
#endif
}
__device__ inline float times(float x, float slope) { return CAPPED ? __fmul_rn(x, slope) : x; }

}  // namespace rlk
