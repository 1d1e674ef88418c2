// The kernel of dq: a tile is 128 rows of a sequence and a KV head, 64 a consumer; WIDE, it is 64 rows, of which one
// consumer has the even blocks of keys, and the other the odd ones. Blocks of 64 keys and values come through a ring. Order
// of the sum: attention_backward_sm90.cu.
#pragma once

#include "backward.cuh"

namespace rlk {

// A tile of rows: blocks begin to end - 1 of their keys.
struct RowTile {
    int b, head, query, member, begin, end;
    Sequence s;

    __device__ RowTile(const Args& p, const Lot& lot) : b(lot.b), head(lot.head), begin(0), end(0), s(p, b) {
        const int first = (p.tiles - 1 - lot.before) * HEIGHT;
        query = first / p.group, member = first - query * p.group;
        if (query >= s.used) return;
        begin = s.from(p, query) / PART * PART, end = s.to(p, min(row(p, HEIGHT - 1).query, s.used - 1));
    }
    __device__ Row row(const Shape& p, int ahead) const { return {p, query, member, ahead}; }
    __device__ bool exists(const Args&) const { return query < s.count; }
    __device__ bool has_keys() const { return begin < end; }
};

__device__ inline void load_keys(const Args& p, const Memory<RowTile>& m, const TensorMap& k) {
    Slot<STAGES> slot;
    m.queue.draw_each(
        p, p.order(), p.counter,
        [&](const RowTile& t) { load_blocks<PART, BOXES_K>(p, k, t, slot, m.stages_a, m.a_full, m.a_empty); });
}

__device__ inline void load_values(const Args& p, const Memory<RowTile>& m, const TensorMap& v) {
    Slot<STAGES> slot;
    m.queue.each([&](const RowTile& t) {
        load_blocks<PART, BOXES_V>(p, v, t, slot, m.stages_b, m.b_full, m.b_empty);
    });
}

constexpr int ROW_COPIERS = WARPGROUP - 2 * WARP;

__device__ inline void load_rows(const Args& p, const Memory<RowTile>& m) {
    const int thread = static_cast<int>(threadIdx.x) - 2 * WARP;
    const Copier<K_WIDTH, ROW_COPIERS> of_q(thread, p.size);
    const Copier<V_WIDTH, ROW_COPIERS> of_grad(thread, p.size_v);
    u32 parity = 1;
    m.queue.each([&](const RowTile& t) {
        if (!t.has_keys()) return;
        m.tile_empty->wait(parity);
        parity ^= 1;
        of_q.template copy<HEIGHT>(m.a, p, t.s, t.b, t.head, t.row(p, 0), p.q, p.q_batch, p.q_row, p.q_head);
        of_grad.template copy<HEIGHT>(m.b, p, t.s, t.b, t.head, t.row(p, 0), p.grad, p.g_batch, p.g_row, p.g_head);
        commit_copies();
        copies_done<0>();
        fence_copies();
        m.tile_full->arrive();
    });
    outside(p, STARTS_Q, p.starts_q, p.queries, thread, ROW_COPIERS,
            [&](int row) { clear_row(p.dq, row, p.heads() * p.size); });
}

// A consumer warpgroup's part of a tile.
struct RowSums {
    const Args& p;
    const Memory<RowTile>& m;
    const Seen<PART> seen;
    // The consumer's first row; its keys are begin to end - 1, whole blocks; the sequence has `length` keys.
    const int first, begin, end, length;
    // The stage of the block whose scores were issued last.
    Slot<STAGES>& slot;
    float lse[2], delta[2];
    Scores dp;
    Weights weights;
    float (&acc)[K_WIDTH / 2];

    __device__ __forceinline__ RowSums(const Args& p, const Memory<RowTile>& m, const RowTile& t, const Fragment& mine,
                                       int first, Slot<STAGES>& slot, float (&acc)[K_WIDTH / 2])
        : p(p), m(m), seen(p, t, mine, first), first(first), begin(t.begin), end(t.end), length(t.s.length), slot(slot), dp{},
          weights{}, acc(acc) {
        const i64 rows = p.rows_of(t.s, t.b, t.head);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row at = t.row(p, first + mine.row + 8 * half);
            const bool used = at.query < t.s.used;
            const i64 place = rows + static_cast<i64>(at.query) * p.group + at.member;
            lse[half] = used ? p.lses[place] : infinity(), delta[half] = used ? p.deltas[place] : 0.0f;
        }
    }

    // WIDE: adds every second block of the tile, from block n on.
    __device__ __forceinline__ void run_half(int n, int group) {
        Scores d = {};
        if (n > begin) pass();
#pragma unroll 1
        for (; n < end; n += 2 * PART) {
            const int stage = slot.stage;
            m.a_full[stage].wait(slot.parity), m.b_full[stage].wait(slot.parity);
            if (length - n < PART) {
                clear<BOXES_K, PART, 1>(m.stage_a(stage), length - n);
                clear<BOXES_V, PART, 1>(m.stage_b(stage), length - n);
                fence_copies();
                sync_threads(1 + group, WARPGROUP);
            }
            issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a, m.stage_a(stage), d);
            issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b, m.stage_b(stage), dp);
            products_done<1>();
            hold(d);
            weigh(n, d);
            products_done<0>();
            hold(dp);
            give_back(m.b_empty[stage]);
            slopes(d);
            issue_words<Number, K_WIDTH>(weights, m.stage_a(stage), acc);
            products_done<0>();
            hold(acc), keep(weights);
            give_back(m.a_empty[stage]);
            slot.advance();
            if (n + PART < end) pass();
        }
    }
    // Leaves a block to the other consumer.
    __device__ __forceinline__ void pass() {
        m.a_full[slot.stage].wait(slot.parity), m.b_full[slot.stage].wait(slot.parity);
        // No product follows for which the warp would wait: a lane still at the wait would miss a stage filled twice.
        __syncwarp();
        give_back(m.a_empty[slot.stage]), give_back(m.b_empty[slot.stage]);
        slot.advance();
    }

    // Adds all blocks of the tile. The scores of a block are computed while the previous block is weighted.
    __device__ __forceinline__ void run() {
        Scores even = {}, odd = {};
        int n = begin;
        score(n, even);
        products_done<0>();
        hold(even), hold(acc), hold(dp), keep(weights), hold(odd);
#pragma unroll 1
        for (;; n += PART) {
            if (n + PART >= end) return step<true>(n, even, odd);
            step<false>(n, even, odd);
            n += PART;
            if (n + PART >= end) return step<true>(n, odd, even);
            step<false>(n, odd, even);
        }
    }

    // Issues the scores of block n.
    __device__ __forceinline__ void score(int n, Scores& d) {
        m.a_full[slot.stage].wait(slot.parity);
        if (n + PART > length) {
            clear<BOXES_K, PART, GROUPS>(m.stage_a(slot.stage), length - n);
            m.b_full[slot.stage].wait(slot.parity);
            clear<BOXES_V, PART, GROUPS>(m.stage_b(slot.stage), length - n);
            cleared<GROUPS>();
        }
        issue_rows<Number, PART, K_WIDTH, HEIGHT>(m.a + bytes_of(first), m.stage_a(slot.stage), d);
    }

    // Adds block n, whose scores are being computed in d, and issues the scores of the next block.
    template <bool LAST>
    __device__ __forceinline__ void step(int n, Scores& d, Scores& next) {
        const int stage = slot.stage;
        m.b_full[stage].wait(slot.parity);
        issue_rows<Number, PART, V_WIDTH, HEIGHT>(m.b + bytes_of(first), m.stage_b(stage), dp);
        slot.advance();
        if constexpr (!LAST) score(n + PART, next);
        // The scores, and the sums of the block before: its keys and weights are free.
        products_done<LAST ? 1 : 2>();
        hold(d), hold(acc), keep(weights);
        if (n > begin) give_back(m.a_empty[stage ? stage - 1 : STAGES - 1]);
        weigh(n, d);
        products_done<LAST ? 0 : 1>();
        hold(dp);
        give_back(m.b_empty[stage]);
        if constexpr (LAST) give_back(*m.tile_empty);
        slopes(d);
        issue_words<Number, K_WIDTH>(weights, m.stage_a(stage), acc);
        if constexpr (LAST) {
            products_done<0>();
            hold(acc), keep(weights);
            give_back(m.a_empty[stage]);
        }
    }

    // Turns the scores of block n into weights, times the derivative of the cap.
    __device__ __forceinline__ void weigh(int n, Scores& d) const {
        if (!seen.all(n)) seen.mask(d, n, -infinity());
        each(d, [&](float& x, int half, int) {
            const float slope = capped(p, x);
            x = times(power(p, x, lse[half]), slope);
        });
    }
    // Packs the gradients of the scores.
    __device__ __forceinline__ void slopes(const Scores& d) {
#pragma unroll
        for (int i = 0; i < PART / 4; ++i) {
            float x[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) x[k] = __fmul_rn(d[2 * i + k], __fsub_rn(dp[2 * i + k], delta[i % 2]));
            weights[i / 4][i % 4] = Number::pack(x);
        }
    }
};

// WIDE: acc of consumer 0 becomes its own plus that of consumer 1, which goes through the tile's rows of q, half of the
// columns at a time.
__device__ __forceinline__ void add_other(const Memory<RowTile>& m, int group, float (&acc)[K_WIDTH / 2]) {
    float4* at = reinterpret_cast<float4*>(m.a) + threadIdx.x % WARPGROUP;
    static_assert(MMA_M * K_WIDTH / 2 * 4 <= K_TILE, "half of the columns");
    constexpr int HALF = K_WIDTH / 16;
#pragma unroll
    for (int first = 0; first < 2 * HALF; first += HALF) {
        // All products with the rows are done, and the first half is read.
        sync_threads(3, GROUPS * WARPGROUP);
        if (group)
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float* x = acc + 4 * (first + i);
                at[i * WARPGROUP] = make_float4(x[0], x[1], x[2], x[3]);
            }
        sync_threads(3, GROUPS * WARPGROUP);
        if (!group)
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float4 x = at[i * WARPGROUP];
                float* to = acc + 4 * (first + i);
                to[0] = __fadd_rn(to[0], x.x), to[1] = __fadd_rn(to[1], x.y);
                to[2] = __fadd_rn(to[2], x.z), to[3] = __fadd_rn(to[3], x.w);
            }
    }
}

__device__ __forceinline__ void consume_keys(const Args& p, const Memory<RowTile>& m, int group) {
    const Fragment mine;
    const int first = WIDE ? 0 : group * MMA_M;
    Slot<STAGES> slot;
    u32 parity = 0;
    m.queue.each([&](const RowTile& t) {
        float acc[K_WIDTH / 2];
        zero(acc);
        if (t.has_keys()) {
            m.tile_full->wait(parity);
            parity ^= 1;
            RowSums sums(p, m, t, mine, first, slot, acc);
            if constexpr (WIDE) {
                const int begin = t.begin + (t.begin / PART % 2 == group ? 0 : PART);
                sums.run_half(begin, group);
                add_other(m, group, acc);
                // All threads have read their sums, which the next tile's rows overwrite.
                sync_threads(1 + group, WARPGROUP);
                give_back(*m.tile_empty);
            } else {
                sums.run();
            }
#pragma unroll
            for (int i = 0; i < K_WIDTH / 2; ++i) acc[i] = __fmul_rn(acc[i], p.scale);
        }
        if (WIDE && group) return;
        store_rows<K_WIDTH>(m.room + group * WIDEST_ROOM, 1 + group, acc, p.size, [&](int ahead) -> char* {
            const Row at = t.row(p, first + ahead);
            const i64 row = static_cast<i64>(p.starts_q ? 0 : t.b) * p.queries + t.s.first_q + at.query;
            const i64 place = (row * p.heads() + t.head * p.group + at.member) * p.size;
            return at.query < t.s.count ? static_cast<char*>(p.dq) + place * Number::SIZE : nullptr;
        });
    });
}

}  // namespace rlk
