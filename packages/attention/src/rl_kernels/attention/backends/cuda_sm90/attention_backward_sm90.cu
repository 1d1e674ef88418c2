// Attention on Hopper: the backward pass, by a kernel of dq and one of dk and dv, which both form the weights again.
//
// With s = scale q k^T (capped), p = 2^(s log2(e) - lse), dp = g v^T, ds = p (dp - delta), where g is the gradient of
// out and delta the sum of out times g: dq = scale ds k, dk = scale ds^T q, dv = p^T g. p and ds are rounded to 16 bits.
//
// Order of the sums, which is the contract:
//   delta      16 lanes, each a chain over 8 columns; then xor shuffles at distances 8, 4, 2, 1
//   dq         one chain over the keys of the sequence, 16 at a time
//   dk, dv     one chain over the rows of the sequence, 16 at a time, counted from the first query that may see a key
// What a row does not see adds 0, which changes nothing. No tile, batch or padding changes a bit; there are no atomics.
//
//   block      a producer warpgroup and 2 consumer warpgroups; persistent: it takes tile after tile
//   dq         a tile is 128 rows of a sequence and a KV head, 64 a consumer; blocks of 64 keys come through a ring
//   dk, dv     a tile is 128 keys, 64 a consumer, whose scores are transposed; blocks of 64 rows come through a ring
//
// Defines, beside those of attention.cuh: STAGES of both rings; SHARED_BYTES, of dynamic shared memory.
#include "attention.cuh"

namespace rlk {
namespace {

constexpr int GROUPS = 2, HEIGHT = MMA_M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP, PART = 64;
constexpr int WIDEST_ROOM = K_WIDTH > V_WIDTH ? ROOM<K_WIDTH> : ROOM<V_WIDTH>;
// Of the operands of a whole tile, and of a stage.
constexpr int K_TILE = BOXES_K * bytes_of(HEIGHT), V_TILE = BOXES_V * bytes_of(HEIGHT);
constexpr int K_PART = BOXES_K * bytes_of(PART), V_PART = BOXES_V * bytes_of(PART);
static_assert(SHARED_BYTES >= ATOM + K_TILE + V_TILE + STAGES * (K_PART + V_PART) + GROUPS * WIDEST_ROOM,
              "what the host made room for");

struct Args : Shape {
    const void *q, *grad;
    // Of row r of a sequence: number ((b kv_heads + head) queries + first query) group + r.
    const float *lses, *deltas;
    void *dq, *dk, *dv;
    // In numbers, from one sequence, query or head to the next: of q and of grad.
    i64 q_batch, q_row, q_head, g_batch, g_row, g_head;
    int tiles;
    float factor, scale, cap, rate;

    // The first row of a sequence in lses and deltas.
    __device__ i64 rows_of(const Sequence& s, int b, int head) const {
        return ((static_cast<i64>(starts_q ? 0 : b) * kv_heads + head) * queries + s.first_q) * group;
    }
};

// A thread block's tile in the round that begins at tile `first`; every second round goes backwards. A number of
// `tiles` or more is none.
struct Turn {
    int number, b, head;
    __device__ Turn(const Args& p, int first) {
        const int wide = static_cast<int>(gridDim.x), mine = static_cast<int>(blockIdx.x);
        const int index = first + (first / wide % 2 ? wide - 1 - mine : mine);
        head = index % p.kv_heads, b = index / p.kv_heads % p.batch, number = index / p.kv_heads / p.batch;
    }
};

// Calls f(first) for each round of tiles.
template <class F>
__device__ inline void over_rounds(const Args& p, F f) {
    for (int first = 0; first < p.tiles * p.batch * p.kv_heads; first += static_cast<int>(gridDim.x)) f(first);
}

// Calls f(number, b, head) for each of a thread block's tiles.
template <class F>
__device__ inline void over_tiles(const Args& p, F f) {
    over_rounds(p, [&](int first) {
        const Turn turn(p, first);
        if (turn.number < p.tiles) f(turn.number, turn.b, turn.head);
    });
}

// A tile of rows: blocks begin to end - 1 of their keys.
struct RowTile {
    int b, head, query, member, begin, end;
    Sequence s;

    // Tiles with the most keys come first.
    __device__ RowTile(const Args& p, int number, int b, int head) : b(b), head(head), begin(0), end(0), s(p, b) {
        const int first = (p.tiles - 1 - number) * HEIGHT;
        query = first / p.group, member = first - query * p.group;
        if (query >= s.used) return;
        begin = s.from(p, query) / PART * PART, end = s.to(p, min(row(p, HEIGHT - 1).query, s.used - 1));
    }
    __device__ Row row(const Shape& p, int ahead) const { return {p, query, member, ahead}; }
    __device__ bool exists() const { return query < s.count; }
    __device__ bool has_keys() const { return begin < end; }
};

// A tile of keys: rows begin to end - 1 may see them, begin counted in blocks from the first row that sees any key.
struct KeyTile {
    int b, head, first, begin, end;
    Sequence s;

    __device__ KeyTile(const Args& p, int number, int b, int head) : b(b), head(head), first(number * HEIGHT), s(p, b) {
        const i64 right = p.right < 0 ? NEVER : p.right, left = p.left < 0 ? NEVER : p.left;
        const int origin = clamped(-s.shift - right, 0, s.used) * p.group;
        const int low = clamped(first - right - s.shift, 0, s.used) * p.group;
        end = clamped(first + HEIGHT + left - s.shift, 0, s.used) * p.group;
        begin = origin + max(low - origin, 0) / PART * PART;
    }
    static constexpr i64 NEVER = 1ll << 40;
    __device__ bool exists() const { return first < s.length && first + HEIGHT > s.gone; }
    __device__ bool has_rows() const { return begin < end; }
};

// Shared memory: operands a (as wide as k) and b (as wide as v) of a tile, and stages of the other side's.
struct Memory {
    char *a, *b, *stages_a, *stages_b, *room;
    // After the stages of lse come those of delta.
    float* lse;
    Barrier *tile_full, *tile_empty, *a_full, *a_empty, *b_full, *b_empty;

    __device__ Memory() {
        extern __shared__ char memory[];
        __shared__ Barrier barriers[2 + 4 * STAGES];
        __shared__ float rows[2][STAGES][PART];
        a = memory + (-shared_address(memory) & (ATOM - 1));
        b = a + K_TILE, stages_a = b + V_TILE, stages_b = stages_a + STAGES * K_PART, room = stages_b + STAGES * V_PART;
        tile_full = barriers, tile_empty = tile_full + 1, a_full = tile_full + 2;
        a_empty = a_full + STAGES, b_full = a_empty + STAGES, b_empty = b_full + STAGES;
        lse = rows[0][0];
    }
    __device__ void open(int tile_arrivals, int stage_arrivals) const {
        if (threadIdx.x == 0) {
            tile_full->init(tile_arrivals), tile_empty->init(GROUPS * WARPS_OF_GROUP);
            for (int i = 0; i < STAGES; ++i) {
                a_full[i].init(stage_arrivals), b_full[i].init(stage_arrivals);
                a_empty[i].init(GROUPS * WARPS_OF_GROUP), b_empty[i].init(GROUPS * WARPS_OF_GROUP);
            }
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

// Caps a score, but not one that is hidden, and returns how it changes with the score: its slope, without the scale.
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
// The slope of a score from its weight.
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

// ---------------------------------------------------------------------------------------------------------- dq

template <int BOXES>
__device__ void load_keys(const Args& p, const TensorMap& map, char* stages, Barrier* full, Barrier* empty) {
    Slot<STAGES> slot;
    over_tiles(p, [&](int number, int b, int head) {
        const RowTile t(p, number, b, head);
        if (!t.has_keys()) return;
        Blocks<PART> blocks(p, t.s, t.b, t.head, t.begin);
        for (int n = t.begin; n < t.end; n += PART, slot.advance()) {
            const i64 next = n + PART < t.end ? blocks.page_of(n + PART) : 0;
            empty[slot.stage].wait(slot.parity ^ 1);
            blocks.template copy<BOXES>(stages + slot.stage * BOXES * bytes_of(PART), map, full[slot.stage], n);
            blocks.page = next;
        }
    });
}

constexpr int ROW_COPIERS = WARPGROUP - 2 * WARP;

__device__ void load_rows(const Args& p, const Memory& m) {
    const int thread = static_cast<int>(threadIdx.x) - 2 * WARP;
    const Copier<K_WIDTH, ROW_COPIERS> of_q(thread, p.size);
    const Copier<V_WIDTH, ROW_COPIERS> of_grad(thread, p.size_v);
    u32 parity = 1;
    over_tiles(p, [&](int number, int b, int head) {
        const RowTile t(p, number, b, head);
        if (!t.has_keys()) return;
        m.tile_empty->wait(parity);
        parity ^= 1;
        of_q.template copy<HEIGHT>(m.a, p, t.s, b, head, t.row(p, 0), p.q, p.q_batch, p.q_row, p.q_head);
        of_grad.template copy<HEIGHT>(m.b, p, t.s, b, head, t.row(p, 0), p.grad, p.g_batch, p.g_row, p.g_head);
        commit_copies();
        copies_done<0>();
        fence_copies();
        m.tile_full->arrive();
    });
}

__device__ __forceinline__ void consume_keys(const Args& p, const Memory& m, int group) {
    const Fragment mine;
    const int first = group * MMA_M;
    Slot<STAGES> slot;
    u32 parity = 0;
    Scores d = {}, dp = {};
    Weights weights = {};
    over_tiles(p, [&](int number, int b, int head) {
        const RowTile t(p, number, b, head);
        if (!t.exists()) return;
        float lse[2], delta[2], acc[K_WIDTH / 2];
        zero(acc);
        if (t.has_keys()) {
            const i64 rows = p.rows_of(t.s, b, head);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Row at = t.row(p, first + mine.row + 8 * half);
                const bool used = at.query < t.s.used;
                const i64 place = rows + static_cast<i64>(at.query) * p.group + at.member;
                lse[half] = used ? p.lses[place] : infinity(), delta[half] = used ? p.deltas[place] : 0.0f;
            }
            const Seen<PART> seen(p, t, mine, first);
            m.tile_full->wait(parity);
            parity ^= 1;
            int before = -1;
#pragma unroll 1
            for (int n = t.begin; n < t.end; n += PART, slot.advance()) {
                const int stage = slot.stage;
                m.a_full[stage].wait(slot.parity);
                if (n + PART > t.s.length) {
                    clear<BOXES_K, PART, GROUPS>(m.stage_a(stage), t.s.length - n);
                    m.b_full[stage].wait(slot.parity);
                    clear<BOXES_V, PART, GROUPS>(m.stage_b(stage), t.s.length - n);
                    cleared<GROUPS>();
                }
                issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a + bytes_of(first), m.stage_a(stage), d);
                m.b_full[stage].wait(slot.parity);
                issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b + bytes_of(first), m.stage_b(stage), dp);
                // The sums of the block before are done; their keys and weights are free.
                products_done<2>();
                hold(acc), keep(weights);
                if (before >= 0) give_back(m.a_empty[before]);
                before = stage;
                products_done<1>();
                hold(d);
                if (!seen.all(n)) seen.mask(d, n, -infinity());
                each(d, [&](float& x, int half, int) {
                    const float slope = capped(p, x);
                    x = times(power(p, x, lse[half]), slope);
                });
                products_done<0>();
                hold(dp);
                give_back(m.b_empty[stage]);
                if (n + PART >= t.end) give_back(*m.tile_empty);
#pragma unroll
                for (int i = 0; i < PART / 4; ++i) {
                    float x[2];
#pragma unroll
                    for (int k = 0; k < 2; ++k) x[k] = __fmul_rn(d[2 * i + k], __fsub_rn(dp[2 * i + k], delta[i % 2]));
                    weights[i / 4][i % 4] = Number::pack(x);
                }
                issue_words<Number, K_WIDTH>(weights, m.stage_a(stage), acc);
            }
            products_done<0>();
            hold(acc), keep(weights);
            give_back(m.a_empty[before]);
#pragma unroll
            for (int i = 0; i < K_WIDTH / 2; ++i) acc[i] = __fmul_rn(acc[i], p.scale);
        }
        store_rows<K_WIDTH>(m.room + group * WIDEST_ROOM, 1 + group, acc, p.size, [&](int ahead) -> char* {
            const Row at = t.row(p, first + ahead);
            const i64 row = static_cast<i64>(p.starts_q ? 0 : b) * p.queries + t.s.first_q + at.query;
            const i64 place = (row * p.heads() + head * p.group + at.member) * p.size;
            return at.query < t.s.count ? static_cast<char*>(p.dq) + place * Number::SIZE : nullptr;
        });
    });
}

// ------------------------------------------------------------------------------------------------------ dk, dv

constexpr int COPIERS = WARPGROUP - WARP;

// One warp: the keys and values of each tile.
__device__ void load_tiles(const Args& p, const Memory& m, const TensorMap& k, const TensorMap& v) {
    u32 parity = 1;
    over_tiles(p, [&](int number, int b, int head) {
        const KeyTile t(p, number, b, head);
        if (!t.exists() || !t.has_rows()) return;
        m.tile_empty->wait(parity);
        parity ^= 1;
        if (!elected()) return;
        m.tile_full->arrive_expecting(K_TILE + V_TILE);
        const int outer = p.starts_k ? 0 : b, row = t.s.first_k + t.first;
#pragma unroll
        for (int box = 0; box < BOXES_K; ++box)
            load_box(m.a + box * bytes_of(HEIGHT), k, outer, row, head, box * SPAN, *m.tile_full);
#pragma unroll
        for (int box = 0; box < BOXES_V; ++box)
            load_box(m.b + box * bytes_of(HEIGHT), v, outer, row, head, box * SPAN, *m.tile_full);
    });
}

// The other warps of the producer: blocks of rows, each one while those of the one before arrive.
__device__ void load_blocks_of_rows(const Args& p, const Memory& m) {
    const int thread = static_cast<int>(threadIdx.x) - WARP;
    const Copier<K_WIDTH, COPIERS> of_q(thread, p.size);
    const Copier<V_WIDTH, COPIERS> of_grad(thread, p.size_v);
    Slot<STAGES> slot;
    int before = -1;
    over_tiles(p, [&](int number, int b, int head) {
        const KeyTile t(p, number, b, head);
        if (!t.exists()) return;
        const i64 rows = p.rows_of(t.s, b, head);
#pragma unroll 1
        for (int r = t.begin; r < t.end; r += PART, slot.advance()) {
            const int stage = slot.stage, query = r / p.group;
            const Row row(p, query, r - query * p.group, 0);
            m.a_empty[stage].wait(slot.parity ^ 1);
            of_q.template copy<PART>(m.stage_a(stage), p, t.s, b, head, row, p.q, p.q_batch, p.q_row, p.q_head);
            of_grad.template copy<PART>(m.stage_b(stage), p, t.s, b, head, row, p.grad, p.g_batch, p.g_row, p.g_head);
            if (thread < PART) {
                const bool known = r + thread < t.s.used * p.group;
                const i64 place = rows + (known ? r + thread : 0);
                copy_word(m.lse + stage * PART + thread, p.lses + place, !known);
                copy_word(m.lse + (STAGES + stage) * PART + thread, p.deltas + place, !known);
            }
            commit_copies();
            if (before >= 0) {
                copies_done<1>();
                fence_copies();
                m.a_full[before].arrive();
            }
            before = stage;
        }
    });
    if (before < 0) return;
    copies_done<0>();
    fence_copies();
    m.a_full[before].arrive();
}

// Which rows see each of a thread's two keys: from[half] to to[half] - 1, counted from its first column; and which rows
// see all keys of its consumer.
struct Seeing {
    int from[2], to[2], all_from, all_to;

    __device__ Seeing(const Args& p, const KeyTile& t, const Fragment& mine, int first) {
        const i64 right = p.right < 0 ? KeyTile::NEVER : p.right, left = p.left < 0 ? KeyTile::NEVER : p.left;
        const auto low = [&](int key) { return clamped(key - right - t.s.shift, 0, t.s.used) * p.group; };
        const auto high = [&](int key) { return clamped(key + left - t.s.shift + 1, 0, t.s.used) * p.group; };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = t.first + first + mine.row + 8 * half;
            from[half] = low(key) - mine.column, to[half] = high(key) - mine.column;
        }
        const int begin = t.first + first;
        all_from = low(begin + MMA_M - 1), all_to = high(begin);
    }
    __device__ bool all(int r) const { return r >= all_from && r + PART <= all_to; }
    __device__ void mask(Scores& d, int r) const {
        const int low[2] = {from[0] - r, from[1] - r}, high[2] = {to[0] - r, to[1] - r};
        each(d, [&](float& x, int half, int column) {
            if (column < low[half] || column >= high[half]) x = -infinity();
        });
    }
};

// Adds the blocks of rows of a tile to dk and dv.
__device__ __forceinline__ void add_rows(const Args& p, const Memory& m, const KeyTile& t, int first,
                                         Slot<STAGES>& slot, float (&dk)[K_WIDTH / 2], float (&dv)[V_WIDTH / 2]) {
    const Fragment mine;
    const Seeing seeing(p, t, mine, first);
    Scores d = {}, dp = {};
    Weights weights = {};
#pragma unroll 1
    for (int r = t.begin; r < t.end; r += PART, slot.advance()) {
        const int stage = slot.stage;
        m.a_full[stage].wait(slot.parity);
        issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a + bytes_of(first), m.stage_a(stage), d);
        issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b + bytes_of(first), m.stage_b(stage), dp);
        const float* lse = m.lse + stage * PART + mine.column;
        products_done<1>();
        hold(d);
        if (!seeing.all(r)) seeing.mask(d, r);
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) {
            capped(p, d[i]);
            d[i] = power(p, d[i], lse[i / 4 * 8 + i % 2]);
        }
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) weights[i / 4][i % 4] = Number::pack(d + 2 * i);
        issue_words<Number, V_WIDTH>(weights, m.stage_b(stage), dv);
        products_done<0>();
        hold(dp), hold(dv), keep(weights);
        // The rounded weights, for which there are registers.
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) {
            float x[2];
            Number::unpack(weights[i / 4][i % 4], x);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int column = i / 2 * 8 + k;
                const float slope = slope_of(p, x[k], lse[column]);
                x[k] = __fmul_rn(times(x[k], slope), __fsub_rn(dp[2 * i + k], lse[STAGES * PART + column]));
            }
            weights[i / 4][i % 4] = Number::pack(x);
        }
        issue_words<Number, K_WIDTH>(weights, m.stage_a(stage), dk);
        products_done<0>();
        hold(dk), keep(weights);
        give_back(m.a_empty[stage]);
    }
}

__device__ __forceinline__ void consume_rows(const Args& p, const Memory& m, int group) {
    const int first = group * MMA_M;
    Slot<STAGES> slot;
    u32 parity = 0;
    over_rounds(p, [&](int begin) {
        float dk[K_WIDTH / 2], dv[V_WIDTH / 2];
        zero(dk), zero(dv);
        {
            const Turn turn(p, begin);
            const KeyTile t(p, turn.number, turn.b, turn.head);
            if (turn.number >= p.tiles || !t.exists()) return;
            if (t.has_rows()) {
                m.tile_full->wait(parity);
                parity ^= 1;
                add_rows(p, m, t, first, slot, dk, dv);
                give_back(*m.tile_empty);
            }
        }
        // The tile again, or it would take registers while rows are added.
        asm volatile("" : "+r"(begin));
        const Turn turn(p, begin);
        const KeyTile t(p, turn.number, turn.b, turn.head);
#pragma unroll
        for (int i = 0; i < K_WIDTH / 2; ++i) dk[i] = __fmul_rn(dk[i], p.scale);
        char* room = m.room + group * WIDEST_ROOM;
        const i64 row = static_cast<i64>(p.starts_k ? 0 : t.b) * p.keys + t.s.first_k;
        const auto at = [&](void* to, int size, int ahead) -> char* {
            const int key = t.first + first + ahead;
            if (key < t.s.gone || key >= t.s.length) return nullptr;
            return static_cast<char*>(to) + ((row + key) * p.kv_heads + t.head) * size * Number::SIZE;
        };
        store_rows<K_WIDTH>(room, 1 + group, dk, p.size, [&](int ahead) { return at(p.dk, p.size, ahead); });
        store_rows<V_WIDTH>(room, 1 + group, dv, p.size_v, [&](int ahead) { return at(p.dv, p.size_v, ahead); });
    });
}

struct Rows {
    const void *out, *grad;
    const float* lse;
    float *lses, *deltas;
    i64 g_batch, g_row, g_head;
    int queries, heads, group, size_v;
};

}  // namespace

// Writes Args::lses, the lse of each row in base 2, and Args::deltas. An lse is inf where a row sees nothing, which
// makes its weights 0. 16 lanes a row; blockIdx.y: the sequence.
extern "C" __global__ void __launch_bounds__(256) rows_of(const __grid_constant__ Rows p) {
    constexpr int LANES = 16, NUMBERS = PER_CHUNK<Number>;
    const i64 count = static_cast<i64>(p.queries) * p.heads;
    const i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / LANES, safe = min(row, count - 1);
    const int lane = threadIdx.x % LANES, b = static_cast<int>(blockIdx.y);
    const int query = static_cast<int>(safe / p.heads), head = static_cast<int>(safe % p.heads);
    const int column = lane * NUMBERS;
    float delta = 0.0f;
    if (column < p.size_v) {
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
    const Memory m;
    m.open(ROW_COPIERS, 1);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0)
            load_keys<BOXES_K>(p, k, m.stages_a, m.a_full, m.a_empty);
        else if (warp_index() == 1)
            load_keys<BOXES_V>(p, v, m.stages_b, m.b_full, m.b_empty);
        else
            load_rows(p, m);
    } else {
        take_registers<232>();
        consume_keys(p, m, warp_index() / WARPS_OF_GROUP - 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) of_keys(const __grid_constant__ TensorMap k,
                                                                 const __grid_constant__ TensorMap v,
                                                                 const __grid_constant__ Args p) {
    const Memory m;
    m.open(1, COPIERS);
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0)
            load_tiles(p, m, k, v);
        else
            load_blocks_of_rows(p, m);
    } else {
        take_registers<232>();
        consume_rows(p, m, warp_index() / WARPS_OF_GROUP - 1);
    }
}

}  // namespace rlk
