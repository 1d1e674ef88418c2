// The kernel of dq: a tile is 128 rows of a sequence and a KV head, 64 a consumer. Blocks of 64 keys and values come
// through a ring. Order of the sum: attention_backward_sm90.cu.
#pragma once

#include "backward.cuh"

namespace rlk {

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

template <int BOXES>
__device__ inline void load_keys(const Args& p, const TensorMap& map, char* stages, Barrier* full, Barrier* empty) {
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

__device__ inline void load_rows(const Args& p, const Memory& m) {
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

}  // namespace rlk
