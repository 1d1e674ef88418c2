// The forward pass: arguments, tiles, shared memory, loads of the producer, and the epilogue of a tile.
//
// Defines: those of attention_sm90.cu.
#pragma once

#include "queue.cuh"
#include "states.cuh"

namespace rlk {

constexpr int ROWS = MMA_M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
constexpr int Q_BYTES = BOXES_K * bytes_of(ROWS);
constexpr int K_BYTES = BOXES_K * bytes_of(BLOCK), V_BYTES = BOXES_V * bytes_of(BLOCK);
// Shared memory of a consumer: the sums of earlier segments, or its output.
constexpr bool MERGES = GROUPS > 1, TURNS = GROUPS == 2;
constexpr int SUMS_BYTES = MMA_M * V_WIDTH * 4, ROOM_BYTES = ROOM<AT_ONCE<V_WIDTH>>;
// WIDE: its output, and a state of earlier segments for each thread.
constexpr int KEPT_BYTES = WIDE ? ROOM_BYTES + WARPGROUP * CHUNK : MERGES ? SUMS_BYTES : ROOM_BYTES;
static_assert(SHARED_BYTES >= ATOM + Q_BYTES + STAGES * (K_BYTES + V_BYTES) + GROUPS * KEPT_BYTES,
              "what the host made room for");
// Registers of a thread; all threads of a multiprocessor have 65536.
constexpr int CONSUMER_REGISTERS = GROUPS > 2 ? 160 : GROUPS > 1 ? (WIDE ? 240 : 232) : 248;
constexpr int PRODUCER_REGISTERS = GROUPS > 2 ? 32 : GROUPS > 1 && WIDE ? 24 : 40;
// Warp 0 of the producer loads k, warp 1 loads v, and warps 2 and 3 load q.
constexpr int COPIERS = WARPGROUP - 2 * WARP;

struct Args : Shape {
    const void* q;
    void* out;
    float* lse;
    const void* sinks;
    // If tiles are split, the states of their parts: all tops, all totals, all sums. Otherwise, WIDE, room for each
    // consumer's sums of earlier segments; or null.
    float* states;
    // Strides of q in elements, between sequences, queries and heads.
    i64 q_batch, q_row, q_head;
    // Null, or 0 before the kernel (queue.cuh).
    int* counter;
    // As in Order (queue.cuh). Parts of a tile: segments if tiles are split, else 1.
    int tiles, parts, section;
    // Rows of a tile that have states: all but those beyond its last query, and an even number of them.
    int held;
    float factor, cap, rate;

    __device__ bool splits() const { return parts > 1; }
    // Number of the state of part `part` of row `row` of a tile.
    __device__ i64 state_of(int b, int head, int tile, int part, int row) const {
        return (((static_cast<i64>(b) * kv_heads + head) * tiles + tile) * parts + part) * held + row;
    }
    __device__ float* tops() const { return states; }
    __device__ float* totals() const { return states + state_of(batch, 0, 0, 0, 0); }
    __device__ float* accs() const { return totals() + state_of(batch, 0, 0, 0, 0); }
    __device__ Order order() const { return {tiles, parts, section}; }
};

// A unit of work: blocks begin to end - 1 of a tile's keys.
struct Tile {
    // `query` and `member` are those of the first row.
    int b, head, number, part, query, member, begin, end;
    Sequence s;

    __device__ Tile(const Args& p, const Lot& lot) : b(lot.b), head(lot.head), part(lot.part), s(p, b) {
        number = p.tiles - 1 - lot.before;
        query = number * ROWS / p.group, member = number * ROWS - query * p.group;
        begin = end = 0;
        if (query >= s.used) return;
        const int last = min(row(p, ROWS - 1).query, s.used - 1);
        begin = s.from(p, query) / BLOCK * BLOCK, end = s.to(p, last);
        if (p.splits()) begin = max(begin, part * SEGMENT), end = min(end, part * SEGMENT + SEGMENT);
    }
    __device__ Row row(const Shape& p, int ahead) const { return {p, query, member, ahead}; }
    // A part without keys writes no state.
    __device__ bool exists(const Args& p) const { return query < s.count && (has_keys() || !p.splits()); }
    __device__ bool has_keys() const { return begin < end; }
};

struct Memory {
    char *q, *k, *v, *kept;
    Barrier *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty, *turns;
    u32* missing;
    Queue<Tile> queue;

    __device__ Memory() {
        extern __shared__ char memory[];
        __shared__ Barrier barriers[2 + GROUPS + 4 * STAGES];
        __shared__ u32 parts[STAGES];
        q = memory + (-shared_address(memory) & (ATOM - 1));
        k = q + Q_BYTES, v = k + STAGES * K_BYTES, kept = v + STAGES * V_BYTES;
        Barrier* first = barriers;
        // Otherwise the compiler recomputes the address at each use.
        asm volatile("" : "+l"(first));
        q_full = first, q_empty = q_full + 1, turns = q_full + 2;
        k_full = turns + GROUPS, k_empty = k_full + STAGES, v_full = k_empty + STAGES, v_empty = v_full + STAGES;
        missing = parts;
    }
    __device__ void open() const {
        if (threadIdx.x == 0) {
            q_full->init(COPIERS), q_empty->init(GROUPS * WARPS_OF_GROUP);
            for (int i = 0; i < STAGES; ++i) {
                k_full[i].init(1), v_full[i].init(1);
                k_empty[i].init(GROUPS * WARPS_OF_GROUP), v_empty[i].init(GROUPS * WARPS_OF_GROUP);
            }
            Turns::init(turns, GROUPS);
            // The warps that copy v and q, and the consumers.
            queue.init(3 + GROUPS * WARPS_OF_GROUP);
            fence_init();
        }
        __syncthreads();
    }
};

__device__ inline void load_keys(const Args& p, const Memory& m, const TensorMap& k) {
    Slot<STAGES> slot;
    m.queue.draw_each(
        p, p.order(), p.counter,
        [&](const Tile& t) { load_blocks<BLOCK, BOXES_K>(p, k, t, slot, m.k, m.k_full, m.k_empty, m.missing); });
}

__device__ inline void load_values(const Args& p, const Memory& m, const TensorMap& v) {
    Slot<STAGES> slot;
    m.queue.each([&](const Tile& t) {
        load_blocks<BLOCK, BOXES_V>(p, v, t, slot, m.v, m.v_full, m.v_empty);
    });
}

// The result of a row that is in no sequence.
__device__ inline void write_nothing(const Args& p, int row) {
    clear_row(p.out, row, p.heads() * p.size_v);
    if (!p.lse) return;
#pragma unroll 1
    for (int head = 0; head < p.heads(); ++head) p.lse[static_cast<i64>(head) * p.queries + row] = -infinity();
}

// Warps 2 and 3 of the producer: rows of q.
__device__ inline void load_queries(const Args& p, const Memory& m) {
    const int thread = static_cast<int>(threadIdx.x) - 2 * WARP;
    const Copier<K_WIDTH, COPIERS> copier(thread, p.size);
    u32 parity = 1;
    m.queue.each([&](const Tile& t) {
        if (!t.has_keys()) return;
        m.q_empty->wait(parity);
        parity ^= 1;
        copier.copy<ROWS>(m.q, p, t.s, t.b, t.head, t.row(p, 0), p.q, p.q_batch, p.q_row, p.q_head);
        commit_copies();
        copies_done<0>();
        fence_copies();
        m.q_full->arrive();
    });
    outside(p, STARTS_Q, p.starts_q, p.queries, thread, COPIERS, [&](int row) { write_nothing(p, row); });
}

__device__ inline float* lse_at(const Args& p, const Sequence& s, int b, int head, int query) {
    const i64 batch = p.starts_q ? 0 : b;
    return p.lse + (batch * p.heads() + head) * p.queries + s.first_q + query;
}

__device__ inline char* out_at(const Args& p, const Sequence& s, int b, int head, int query) {
    const i64 batch = p.starts_q ? 0 : b, row = batch * p.queries + s.first_q + query;
    return static_cast<char*>(p.out) + (row * p.heads() + head) * p.size_v * Number::SIZE;
}

// Writes rows of the output and their lse. `room`: the consumer's buffer; `id`: its named barrier.
__device__ inline void put(const Args& p, const Tile& t, const Fragment& mine, int first, State& state, Sums& acc, char* room,
                    int id) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Row at = t.row(p, first + mine.row + 8 * half);
        const int head = t.head * p.group + at.member;
        const bool used = at.query < t.s.used;
        const Finished done(p, p.sinks, state.top[half], state.total[half], head);
        if (p.lse && at.query < t.s.count && mine.column == 0)
            *lse_at(p, t.s, t.b, head, at.query) = used ? done.lse : -infinity();
#pragma unroll
        for (int i = 2 * half; i < V_WIDTH / 2; i += i % 2 ? 3 : 1) acc[i] = used ? done.of(acc[i]) : 0.0f;
    }
    store_rows<V_WIDTH>(room, id, acc, p.size_v, [&](int ahead) -> char* {
        const Row at = t.row(p, first + ahead);
        return at.query < t.s.count ? out_at(p, t.s, t.b, t.head * p.group + at.member, at.query) : nullptr;
    });
}

// Writes the states of rows of a tile, whose keys are one segment.
__device__ inline void put_state(const Args& p, const Tile& t, const Fragment& mine, int first, const State& state,
                          const Sums& acc) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + mine.row + 8 * half;
        if (t.row(p, row).query >= t.s.count) continue;
        const i64 at = p.state_of(t.b, t.head, t.number, t.part, row);
        if (mine.column == 0) p.tops()[at] = state.top[half], p.totals()[at] = state.total[half];
#pragma unroll
        for (int j = 0; j < V_WIDTH / 8; ++j)
            *reinterpret_cast<float2*>(p.accs() + at * V_WIDTH + 8 * j + mine.column) =
                make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
    }
}

}  // namespace rlk
