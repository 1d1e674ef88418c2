// The kernel of dk and dv: a tile is 128 keys of a sequence, 64 a consumer, whose scores are transposed. Blocks of rows of
// q and of out's gradient come through a ring: as many whole queries as have 64 rows at most; where they have fewer, the
// other rows of the stages are 0 throughout. Order of the sums: attention_backward_sm90.cu.
#pragma once

#include "backward.cuh"

namespace rlk {

// A tile of keys: rows begin to end - 1 may see them, begin counted in blocks from the first row that sees any key.
struct KeyTile {
    int b, head, first, begin, end;
    Sequence s;

    __device__ KeyTile(const Args& p, const Lot& lot)
        : b(lot.b), head(lot.head), first(lot.before * HEIGHT), s(p, b) {
        const i64 right = p.right < 0 ? NEVER : p.right, left = p.left < 0 ? NEVER : p.left;
        const int origin = clamped(-s.shift - right, 0, s.used) * p.group;
        const int low = clamped(first - right - s.shift, 0, s.used) * p.group;
        end = clamped(first + HEIGHT + left - s.shift, 0, s.used) * p.group;
        const int rows = p.queries_of_block * p.group;
        begin = origin + max(low - origin, 0) / rows * rows;
    }
    static constexpr i64 NEVER = 1ll << 40;
    __device__ bool exists(const Args&) const { return first < s.length && first + HEIGHT > s.gone; }
    __device__ bool has_rows() const { return begin < end; }
};

// Number of arrivals at a stage: one for the copies of rows, and one per lane after its copies of lse and delta.
constexpr int ROW_ARRIVALS = 1 + WARP;

// One warp: the keys and values of each tile.
__device__ inline void load_tiles(const Args& p, const Memory<KeyTile>& m, const TensorMap& k, const TensorMap& v) {
    u32 parity = 1;
    m.queue.each([&](const KeyTile& t) {
        if (!t.has_rows()) return;
        m.tile_empty->wait(parity);
        parity ^= 1;
        if (!elected()) return;
        m.tile_full->arrive_expecting(K_TILE + V_TILE);
        const int outer = p.starts_k ? 0 : t.b, key = t.s.first_k + t.first;
#pragma unroll
        for (int row = 0; row < HEIGHT; row += PART) {
#pragma unroll
            for (int box = 0; box < BOXES_K; ++box)
                load_box(m.a + box * bytes_of(HEIGHT) + bytes_of(row), k, outer, key + row, t.head, box * SPAN,
                         *m.tile_full);
#pragma unroll
            for (int box = 0; box < BOXES_V; ++box)
                load_box(m.b + box * bytes_of(HEIGHT) + bytes_of(row), v, outer, key + row, t.head, box * SPAN,
                         *m.tile_full);
        }
    });
}

// Sets the rows of all stages to 0 that no copy reaches.
__device__ inline void clear_rest(const Args& p, const Memory<KeyTile>& m) {
    constexpr int ROW = SWIZZLE / CHUNK, BOXES = STAGES * (BOXES_K + BOXES_V);
    const int first = p.queries_of_block * p.group * ROW, count = PART * ROW - first;
    for (int i = threadIdx.x; i < BOXES * count; i += THREADS)
        *reinterpret_cast<Chunk*>(m.stages_a + i / count * bytes_of(PART) + (first + i % count) * CHUNK) = {};
    fence_copies();
}

// One warp: blocks of rows.
__device__ inline void load_blocks_of_rows(const Args& p, const Memory<KeyTile>& m, const TensorMap& q, const TensorMap& grad) {
    const int lane = threadIdx.x % WARP, count = p.queries_of_block * p.group;
    Slot<STAGES> slot;
    const auto load = [&](const KeyTile& t) {
        const i64 rows = p.rows_of(t.s, t.b, t.head);
        const int outer = p.starts_q ? 0 : t.b, heads = t.head * p.group;
#pragma unroll 1
        for (int r = t.begin; r < t.end; r += count, slot.advance()) {
            const int stage = slot.stage, query = t.s.first_q + r / p.group;
            m.a_empty[stage].wait(slot.parity ^ 1);
            if (lane == 0) {
                Barrier& full = m.a_full[stage];
                full.arrive_expecting((BOXES_K + BOXES_V) * bytes_of(count));
#pragma unroll
                for (int box = 0; box < BOXES_K; ++box)
                    load_box(m.stage_a(stage) + box * bytes_of(PART), q, outer, query, heads, box * SPAN, full);
#pragma unroll
                for (int box = 0; box < BOXES_V; ++box)
                    load_box(m.stage_b(stage) + box * bytes_of(PART), grad, outer, query, heads, box * SPAN, full);
            }
#pragma unroll
            for (int i = lane; i < PART; i += WARP) {
                const bool known = i < count && r + i < t.s.used * p.group;
                const i64 place = rows + (known ? r + i : 0);
                copy_word(m.lse + stage * PART + i, p.lses + place, !known);
                copy_word(m.lse + (STAGES + stage) * PART + i, p.deltas + place, !known);
            }
            m.a_full[stage].arrive_after_copies();
        }
    };
    m.queue.draw_each(p, p.order(), p.counter, load);
    outside(p, STARTS_K, p.starts_k, p.keys, lane, WARP, [&](int row) {
        clear_row(p.dk, row, p.kv_heads * p.size);
        clear_row(p.dv, row, p.kv_heads * p.size_v);
    });
}

// The rows that see each of a thread's two keys, from[half] to to[half] - 1, counted from its first column; and the rows
// that see all keys of its consumer.
struct SeenBy {
    int from[2], to[2], all_from, all_to;

    __device__ SeenBy(const Args& p, const KeyTile& t, const Fragment& mine, int first) {
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
    // Whether all keys of the consumer are seen by all rows from r to r + count - 1.
    __device__ bool all(int r, int count) const { return r >= all_from && r + count <= all_to; }
    __device__ void mask(Scores& d, int r) const {
        const int low[2] = {from[0] - r, from[1] - r}, high[2] = {to[0] - r, to[1] - r};
        each(d, [&](float& x, int half, int column) {
            if (column < low[half] || column >= high[half]) x = -infinity();
        });
    }
};

// Loads one number for each of a thread's columns.
__device__ inline void load_columns(const float* from, float (&x)[PART / 4]) {
#pragma unroll
    for (int j = 0; j < PART / 8; ++j) {
        const float2 two = *reinterpret_cast<const float2*>(from + 8 * j);
        x[2 * j] = two.x, x[2 * j + 1] = two.y;
    }
}

// Two gradients of scores, number 2 i and 2 i + 1 of a thread, from their rounded weights; `lse`: those of its columns.
__device__ inline u32 slope_word(const Args& p, u32 weights, int i, const Scores& dp, const float (&delta)[PART / 4],
                                 const float* lse) {
    float x[2];
    Number::unpack(weights, x);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float slope = slope_of(p, x[k], lse[i / 2 * 8 + k]);
        x[k] = __fmul_rn(times(x[k], slope), __fsub_rn(dp[2 * i + k], delta[i / 2 * 2 + k]));
    }
    return Number::pack(x);
}

// WIDE: where a thread's words of step i of 16 rows are given.
__device__ inline Chunk* given_at(const Memory<KeyTile>& m, const Slot<GIVEN>& given, int i) {
    return reinterpret_cast<Chunk*>(m.given + given.stage * GIVEN_BYTES) + i * WARPGROUP + threadIdx.x % WARPGROUP;
}

// Clears the rows of a stage behind the last query, which may hold anything.
__device__ inline void clear_behind(const Memory<KeyTile>& m, int stage, int known) {
    clear<BOXES_K, PART, GROUPS>(m.stage_a(stage), known);
    clear<BOXES_V, PART, GROUPS>(m.stage_b(stage), known);
    cleared<GROUPS>();
}

// Adds the blocks of rows of a tile to dk and dv.
__device__ __forceinline__ void add_rows(const Args& p, const Memory<KeyTile>& m, const KeyTile& t, int first,
                                         Slot<STAGES>& slot, float (&dk)[K_WIDTH / 2], float (&dv)[V_WIDTH / 2]) {
    const Fragment mine;
    const SeenBy seen_by(p, t, mine, first);
    const int count = p.queries_of_block * p.group, used = t.s.used * p.group, end = t.end;
    Scores d = {}, dp = {};
    Weights weights = {}, slopes = {};
    int before = -1;
#pragma unroll 1
    for (int r = t.begin; r < end; r += count, slot.advance()) {
        const int stage = slot.stage;
        m.a_full[stage].wait(slot.parity);
        if (r + count > used) clear_behind(m, stage, used - r);
        issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a + bytes_of(first), m.stage_a(stage), d);
        // The sums of the previous block are done; its rows may be overwritten.
        products_done<1>();
        hold(dk), keep(slopes);
        if (before >= 0) m.a_empty[before].arrive();
        before = stage;
        issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b + bytes_of(first), m.stage_b(stage), dp);
        // Loads overlap with products: shared memory is busy then, and slow.
        const float* of_rows = m.lse + stage * PART + mine.column;
        float lse[PART / 4], delta[PART / 4];
        load_columns(of_rows, lse);
        products_done<1>();
        hold(d);
        if (!seen_by.all(r, count)) seen_by.mask(d, r);
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) {
            capped(p, d[i]);
            d[i] = power(p, d[i], lse[i / 4 * 2 + i % 2]);
        }
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) weights[i / 4][i % 4] = Number::pack(d + 2 * i);
        load_columns(of_rows + STAGES * PART, delta);
        issue_words<Number, V_WIDTH>(weights, m.stage_b(stage), dv);
        products_done<1>();
        hold(dp);
        // Uses the rounded weights: there are no registers for the unrounded ones.
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) slopes[i / 4][i % 4] = slope_word(p, weights[i / 4][i % 4], i, dp, delta, of_rows);
        issue_words<Number, K_WIDTH>(slopes, m.stage_a(stage), dk);
        products_done<1>();
        hold(dv), keep(weights);
    }
    products_done<0>();
    hold(dk), keep(slopes);
    m.a_empty[before].arrive();
}

// WIDE: adds the blocks of rows of a tile to dv, and gives their weights to the other consumer.
__device__ __forceinline__ void add_values(const Args& p, const Memory<KeyTile>& m, const KeyTile& t, Slot<STAGES>& slot,
                                           Slot<GIVEN>& given, float (&dv)[V_WIDTH / 2]) {
    const Fragment mine;
    const SeenBy seen_by(p, t, mine, 0);
    const int count = p.queries_of_block * p.group, used = t.s.used * p.group, end = t.end;
    Scores d = {};
    Weights weights = {};
    int before = -1;
#pragma unroll 1
    for (int r = t.begin; r < end; r += count, slot.advance(), given.advance()) {
        const int stage = slot.stage;
        m.a_full[stage].wait(slot.parity);
        if (r + count > used) clear_behind(m, stage, used - r);
        issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a, m.stage_a(stage), d);
        products_done<1>();
        hold(dv), keep(weights);
        if (before >= 0) m.a_empty[before].arrive();
        before = stage;
        float lse[PART / 4];
        load_columns(m.lse + stage * PART + mine.column, lse);
        products_done<0>();
        hold(d);
        if (!seen_by.all(r, count)) seen_by.mask(d, r);
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) {
            capped(p, d[i]);
            d[i] = power(p, d[i], lse[i / 4 * 2 + i % 2]);
        }
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) weights[i / 4][i % 4] = Number::pack(d + 2 * i);
        issue_words<Number, V_WIDTH>(weights, m.stage_b(stage), dv);
        m.given_empty[given.stage].wait(given.parity ^ 1);
#pragma unroll
        for (int i = 0; i < PART / MMA_K; ++i) {
            const u32(&word)[4] = weights[i];
            *given_at(m, given, i) = {word[0], word[1], word[2], word[3]};
        }
        m.given_full[given.stage].arrive();
    }
    products_done<0>();
    hold(dv), keep(weights);
    m.a_empty[before].arrive();
}

// WIDE: adds the blocks of rows of a tile to dk.
__device__ __forceinline__ void add_keys(const Args& p, const Memory<KeyTile>& m, const KeyTile& t, Slot<STAGES>& slot,
                                         Slot<GIVEN>& given, float (&dk)[K_WIDTH / 2]) {
    const Fragment mine;
    const int count = p.queries_of_block * p.group, used = t.s.used * p.group, end = t.end;
    Scores dp = {};
    Weights slopes = {};
    int before = -1;
#pragma unroll 1
    for (int r = t.begin; r < end; r += count, slot.advance(), given.advance()) {
        const int stage = slot.stage;
        m.a_full[stage].wait(slot.parity);
        if (r + count > used) clear_behind(m, stage, used - r);
        issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b, m.stage_b(stage), dp);
        products_done<1>();
        hold(dk), keep(slopes);
        if (before >= 0) m.a_empty[before].arrive();
        before = stage;
        const float* of_rows = m.lse + stage * PART + mine.column;
        float delta[PART / 4];
        load_columns(of_rows + STAGES * PART, delta);
        m.given_full[given.stage].wait(given.parity);
        products_done<0>();
        hold(dp);
#pragma unroll
        for (int i = 0; i < PART / MMA_K; ++i) {
            const Chunk words = *given_at(m, given, i);
#pragma unroll
            for (int j = 0; j < 4; ++j) slopes[i][j] = slope_word(p, words.word[j], 4 * i + j, dp, delta, of_rows);
        }
        m.given_empty[given.stage].arrive();
        issue_words<Number, K_WIDTH>(slopes, m.stage_a(stage), dk);
    }
    products_done<0>();
    hold(dk), keep(slopes);
    m.a_empty[before].arrive();
}

// Writes the sums of the keys of a tile from `first` on.
template <int WIDTH>
__device__ __forceinline__ void put_keys(const Args& p, const Memory<KeyTile>& m, const KeyTile& t, int group, int first,
                                         void* to, int size, const float (&sums)[WIDTH / 2]) {
    const i64 row = static_cast<i64>(p.starts_k ? 0 : t.b) * p.keys + t.s.first_k;
    store_rows<WIDTH>(m.room + group * WIDEST_ROOM, 1 + group, sums, size, [&](int ahead) -> char* {
        const int key = t.first + first + ahead;
        if (key < t.s.gone || key >= t.s.length) return nullptr;
        return static_cast<char*>(to) + ((row + key) * p.kv_heads + t.head) * size * Number::SIZE;
    });
}

__device__ __forceinline__ void consume_rows(const Args& p, const Memory<KeyTile>& m, int group) {
    Slot<STAGES> slot;
    Slot<GIVEN> given;
    u32 parity = 0;
    // Whether a tile has rows; waits for its keys.
    const auto begins = [&](const KeyTile& t) {
        if (!t.has_rows()) return false;
        m.tile_full->wait(parity);
        parity ^= 1;
        return true;
    };
    const auto scale = [&](float (&dk)[K_WIDTH / 2]) {
#pragma unroll
        for (int i = 0; i < K_WIDTH / 2; ++i) dk[i] = __fmul_rn(dk[i], p.scale);
    };
    if constexpr (!WIDE) {
        const int first = group * MMA_M;
        m.queue.each([&](const KeyTile& t) {
            float dk[K_WIDTH / 2], dv[V_WIDTH / 2];
            zero(dk), zero(dv);
            if (begins(t)) add_rows(p, m, t, first, slot, dk, dv), give_back(*m.tile_empty);
            scale(dk);
            put_keys<K_WIDTH>(p, m, t, group, first, p.dk, p.size, dk);
            put_keys<V_WIDTH>(p, m, t, group, first, p.dv, p.size_v, dv);
        });
    } else if (group == 0) {
        m.queue.each([&](const KeyTile& t) {
            float dv[V_WIDTH / 2];
            zero(dv);
            if (begins(t)) add_values(p, m, t, slot, given, dv), give_back(*m.tile_empty);
            put_keys<V_WIDTH>(p, m, t, group, 0, p.dv, p.size_v, dv);
        });
    } else {
        m.queue.each([&](const KeyTile& t) {
            float dk[K_WIDTH / 2];
            zero(dk);
            if (begins(t)) add_keys(p, m, t, slot, given, dk), give_back(*m.tile_empty);
            scale(dk);
            put_keys<K_WIDTH>(p, m, t, group, 0, p.dk, p.size, dk);
        });
    }
}

}  // namespace rlk
