// Attention on Hopper: the forward pass.
//
// Order of the sums, which is the contract. Keys are walked in ascending blocks of 128, in ascending segments of 1024.
// A segment has a state of its own: top, which follows the largest score in base 2; total, the sum of 2^(score - top);
// acc, the sum of those powers, rounded to 16 bits, times the values.
//   score      one canonical chain over D (wgmma.cuh)
//   total      thread q of the four that share a row takes columns 8 j + 2 q + {0, 1}; over j, a chain for each of the
//              two, then their sum; blocks in ascending order; at the end of a segment (0 + 1) + (2 + 3) over the
//              four threads
//   top        raised to a block's largest score where that exceeds it by more than SLACK; then total and acc are
//              rescaled
//   acc        one chain over the keys of a block, 16 at a time, which continues that of the block before
//   segments   merged in ascending order
// A block or a segment of which a row sees nothing changes no bit of its state. So nothing depends on the tile that a
// row is in, on the other rows there, or on whether one block or several walk over its segments.
//
//   block      a producer warpgroup and GROUPS consumer warpgroups; persistent: it takes tile after tile (queue.cuh)
//   tile       64 GROUPS rows of a sequence and a KV head; consumer g holds rows 64 g to 64 g + 63 (wgmma.cuh)
//   turns      of two consumers one multiplies while the other works on its scores
//   ring       STAGES blocks of k, and as many of v, in shared memory, swizzled; TMA fills them
//   overlap    the products of a block with v run while the next block's scores become powers
//
//   split      a tile can be one segment: its state is written to memory, and `finish` merges. With one consumer, a
//              tile of several segments always is
//
// Defines, beside those of attention.cuh: GROUPS 1 or 2; STAGES; SHARED_BYTES, of dynamic shared memory.
#include "queue.cuh"
#include "states.cuh"

namespace rlk {
namespace {

constexpr int ROWS = MMA_M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
constexpr int Q_BYTES = BOXES_K * bytes_of(ROWS);
constexpr int K_BYTES = BOXES_K * bytes_of(BLOCK), V_BYTES = BOXES_V * bytes_of(BLOCK);
// Of a consumer: the sums of earlier segments, or its output.
constexpr bool MERGES = GROUPS > 1;
constexpr int KEPT_BYTES = MERGES ? MMA_M * V_WIDTH * 4 : ROOM<V_WIDTH>;
static_assert(SHARED_BYTES >= ATOM + Q_BYTES + STAGES * (K_BYTES + V_BYTES) + GROUPS * KEPT_BYTES,
              "what the host made room for");
// The others of a multiprocessor are the producer's, 40 each.
constexpr int CONSUMER_REGISTERS = GROUPS > 1 ? 232 : 248;
// Warp 0 of the producer copies k, warp 1 v, and the others q.
constexpr int COPIERS = WARPGROUP - 2 * WARP;

struct Args : Shape {
    const void* q;
    void* out;
    float* lse;
    const void* sinks;
    // Null, or if tiles are split, their states: all tops, all totals, all sums.
    float* states;
    // In numbers, from one sequence, query or head to the next.
    i64 q_batch, q_row, q_head;
    // Null, or 0 before the kernel (queue.cuh).
    int* counter;
    // As in Order (queue.cuh). Parts of a tile: segments if tiles are split, else 1.
    int tiles, parts, section;
    float factor, cap, rate;

    __device__ bool splits() const { return states; }
    // Number of the state of part `part` of row `row` of a tile.
    __device__ i64 state_of(int b, int head, int tile, int part, int row) const {
        return (((static_cast<i64>(b) * kv_heads + head) * tiles + tile) * parts + part) * ROWS + row;
    }
    __device__ float* tops() const { return states; }
    __device__ float* totals() const { return states + state_of(batch, 0, 0, 0, 0); }
    __device__ float* accs() const { return totals() + state_of(batch, 0, 0, 0, 0); }
    __device__ Order order() const { return {tiles, parts, section}; }
};

// A unit of work: blocks begin to end - 1 of a tile's keys.
struct Tile {
    // `query` and `member`: of its first row.
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
    __device__ bool exists() const { return query < s.count; }
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
        // Else the compiler forms the address again at each use.
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

// A warp of the producer: a tile's blocks of k, or of v. `missing`: where it says which parts of a block are not there,
// or null.
template <int BOXES>
__device__ __forceinline__ void load_blocks(const Args& p, const TensorMap& map, const Tile& t, Slot<STAGES>& slot,
                                            char* stages, Barrier* full, Barrier* empty, u32* missing) {
    if (!t.has_keys()) return;
    Blocks<BLOCK> blocks(p, t.s, t.b, t.head, t.begin);
    for (int n = t.begin; n < t.end; n += BLOCK, slot.advance()) {
        const i64 next = n + BLOCK < t.end ? blocks.page_of(n + BLOCK) : 0;
        const u32 lost = blocks.missing(n);
        empty[slot.stage].wait(slot.parity ^ 1);
        if (missing && blocks.lane() == 0) missing[slot.stage] = lost;
        blocks.copy<BOXES>(stages + slot.stage * BOXES * bytes_of(BLOCK), map, full[slot.stage], n);
        blocks.page = next;
    }
}

__device__ void load_keys(const Args& p, const Memory& m, const TensorMap& k) {
    Slot<STAGES> slot;
    m.queue.draw_each(
        p, p.order(), p.counter,
        [&](const Tile& t) { load_blocks<BOXES_K>(p, k, t, slot, m.k, m.k_full, m.k_empty, m.missing); });
}

__device__ void load_values(const Args& p, const Memory& m, const TensorMap& v) {
    Slot<STAGES> slot;
    m.queue.each([&](const Tile& t) {
        load_blocks<BOXES_V>(p, v, t, slot, m.v, m.v_full, m.v_empty, nullptr);
    });
}

// The result of a row that is in no sequence.
__device__ inline void write_nothing(const Args& p, int row) {
    clear_row(p.out, row, p.heads() * p.size_v);
    if (!p.lse) return;
#pragma unroll 1
    for (int head = 0; head < p.heads(); ++head) p.lse[static_cast<i64>(head) * p.queries + row] = -infinity();
}

// The other warps of the producer: rows of q.
__device__ void load_queries(const Args& p, const Memory& m) {
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

// Writes rows of the output and their lse. `room`: of the consumer; `id`: its named barrier.
__device__ void put(const Args& p, const Tile& t, const Fragment& mine, int first, State& state, Sums& acc, char* room,
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
__device__ void put_state(const Args& p, const Tile& t, const Fragment& mine, int first, const State& state,
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

// A consumer warpgroup.
struct Consumer {
    const Args& p;
    const Memory& m;
    const Fragment mine;
    // Its index, the first of its rows in a tile, its rows of q, and its room for sums.
    const int group, first;
    const char* q;
    char* kept;
    Turns turns;
    Slot<STAGES> key, value;
    Scores d;
    Sums acc;
    // Of the segment at hand, and of those before it in the tile, if there are any.
    State state, before;
    bool merges;

    __device__ __forceinline__ Consumer(const Args& p, const Memory& m, int group)
        : p(p), m(m), group(group), first(group * MMA_M), q(m.q + bytes_of(first)), kept(m.kept + group * KEPT_BYTES),
          turns(m.turns, group, GROUPS), d{} {}

    __device__ __forceinline__ void run() {
        u32 parity = 0;
        m.queue.each([&](const Tile& t) {
            state = before = State();
            merges = false;
#pragma unroll
            for (int i = 0; i < V_WIDTH / 2; ++i) acc[i] = 0.0f;
            if (t.has_keys()) {
                m.q_full->wait(parity);
                parity ^= 1;
                attend(t);
            }
            if (p.splits()) {
                if (t.has_keys()) put_state(p, t, mine, first, state, acc);
            } else {
                if (merges) Kept(kept).join(before, state, acc), state = before;
                put(p, t, mine, first, state, acc, kept, 1 + group);
            }
        });
    }

    // Walks over the blocks of a tile: the products with the values of a block follow the scores of the next one.
    __device__ __forceinline__ void attend(const Tile& t) {
        const Seen<BLOCK> seen(p, t, mine, first);
        // A warp without a row has nothing to weigh: with few queries that is most of them.
        const bool active = GROUPS > 1 || t.row(p, first + mine.row / 16 * 16).query < t.s.used;
        const int end = t.end;
        int n = t.begin;
        multiply_keys();
        if constexpr (MERGES) turns.pass();
        lose(seen, state, n, lost(), p.box);
        products_done<0>();
        scored(seen, n, end);
        Powers powers = {}, others = {};
        float sum[2], keep[2];
        weigh_again(keep, sum, powers);
        add(keep, sum);
        n += BLOCK;
        // In turns: the products read one's registers while the next block's powers go to the other's.
#pragma unroll 1
        for (;; n += BLOCK) {
            if (n >= end) return add_last(t, powers);
            step(seen, n, end, active, powers, others);
            n += BLOCK;
            if (n >= end) return add_last(t, others);
            step(seen, n, end, active, others, powers);
        }
    }

    // One block: its scores, which become powers, and the sums of the block before.
    __device__ __forceinline__ void step(const Seen<BLOCK>& seen, int n, int end, bool active, Powers& before,
                                         Powers& powers) {
        multiply_keys();
        m.v_full[value.stage].wait(value.parity);
        issue_words<Number, V_WIDTH>(before, m.v + value.stage * V_BYTES, acc);
        if constexpr (MERGES) turns.pass();
        const bool starts = MERGES && n % SEGMENT == 0;
        State closed;
        if (starts) closed = state, state = State();
        lose(seen, state, n, lost(), p.box);
        products_done<1>();
        scored(seen, n, end);
        bool raises = starts;
        float sum[2], keep[2] = {1.0f, 1.0f};
        if (active) {
            // A row that has seen nothing has a top of -inf, and so a sum of inf or NaN.
            if (!starts)
#pragma unroll
                for (int half = 0; half < 2; ++half) sum[half] = weigh(d, half, state.top[half], p.factor, powers);
            if (starts || !__all_sync(ALL, sum[0] <= SMALL && sum[1] <= SMALL))
                raises = weigh_again(keep, sum, powers) || starts;
        }
        // In each branch, not before: the compiler would wait for the sums before it forms the powers.
        if (raises) {
            summed(before, powers);
            if (starts) join(closed);
            rescale(acc, keep);
        } else {
            summed(before, powers);
        }
        if (active) add(keep, sum);
    }

    // Adds the sums of the last block.
    __device__ __forceinline__ void add_last(const Tile& t, Powers& powers) {
        char* v = m.v + value.stage * V_BYTES;
        m.v_full[value.stage].wait(value.parity);
        const int known = t.s.length - (t.end - 1) / BLOCK * BLOCK;
        if (known < BLOCK) {
            clear<BOXES_V, BLOCK, GROUPS>(v, known);
            cleared<GROUPS>();
        }
        issue_words<Number, V_WIDTH>(powers, v, acc);
        summed(powers, powers);
        close(state);
    }

    // Raises tops where a block's scores exceed them, and turns the scores into powers. Whether a row of this warp was
    // raised.
    __device__ __forceinline__ bool weigh_again(float (&keep)[2], float (&sum)[2], Powers& powers) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            keep[half] = raise(d, half, state, p.factor);
            sum[half] = weigh(d, half, finite(state.top[half]), p.factor, powers);
        }
        return __any_sync(ALL, keep[0] != 1.0f || keep[1] != 1.0f);
    }

    __device__ __forceinline__ void add(const float (&keep)[2], const float (&sum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            state.total[half] = __fmaf_rn(state.total[half], keep[half], sum[half]);
    }

    // Issues the scores of the next block, in this consumer's turn.
    __device__ __forceinline__ void multiply_keys() {
        // Formed before the turn comes, not in it.
        const u64 left = formed(operand_at<K_MAJOR>(q)), right = formed(operand_at<K_MAJOR>(m.k + key.stage * K_BYTES));
        m.k_full[key.stage].wait(key.parity);
        if constexpr (MERGES) turns.wait();
        issue_rows<Number, BLOCK, K_WIDTH, ROWS>(left, right, d);
    }

    // Which parts of the block are missing whose scores are being formed.
    __device__ __forceinline__ u32 lost() const { return p.table ? m.missing[key.stage] : 0; }

    // After the scores of block n are formed: releases its keys, and with the tile's last block also q.
    __device__ __forceinline__ void scored(const Seen<BLOCK>& seen, int n, int end) {
        hold(d);
        give_back(m.k_empty[key.stage]);
        if (n + BLOCK >= end) give_back(*m.q_empty);
        key.advance();
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) cap(p.cap, p.rate, d[i]);
        if (!seen.all(n)) seen.mask(d, n, -infinity());
    }

    // Waits for the products with the values, and releases those. `powers`: formed by then.
    __device__ __forceinline__ void summed(Powers& before, Powers& powers) {
        rlk::keep(powers);
        products_done<0>();
        hold(acc), rlk::keep(before);
        give_back(m.v_empty[value.stage]);
        value.advance();
    }

    // Ends a segment within a tile: joins it to those before, and begins the next one.
    __device__ __forceinline__ void join(State& closed) {
        close(closed);
        if (merges) {
            Kept(kept).join(before, closed, acc);
        } else {
            before = closed;
            // Others may still read the output that was there.
            sync_threads(1 + group, WARPGROUP);
        }
        merges = true;
        Kept(kept).put(acc);
#pragma unroll
        for (int i = 0; i < V_WIDTH / 2; ++i) acc[i] = 0.0f;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ Args p) {
    const Memory m;
    m.open();
    if (warp_index() < WARPS_OF_GROUP) {
        give_registers<40>();
        if (warp_index() == 0)
            load_keys(p, m, k);
        else if (warp_index() == 1)
            load_values(p, m, v);
        else
            load_queries(p, m);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer(p, m, warp_index() / WARPS_OF_GROUP - 1).run();
    }
}

// Merges the states that `attend` wrote, in ascending order. One warp for each row; lane l has columns 4 l to 4 l + 3.
extern "C" __global__ void __launch_bounds__(128) finish(const __grid_constant__ Args p) {
    constexpr int AHEAD = 16;
    wait_for_prerequisites();
    const int lane = threadIdx.x % WARP, row = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / WARP;
    const int head = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z), column = 4 * lane;
    const Sequence s(p, b);
    if (row >= s.count * p.group) return;
    const int query = row / p.group, of = head * p.group + row % p.group;
    const bool used = query < s.used;
    // Never more than were written, even if the maximum length was given too small and not validated.
    const int from = s.from(p, query), to = used ? min(s.to(p, query), p.parts * SEGMENT) : 0;
    float top = -infinity(), total = 0.0f, acc[4] = {};
    const int last = (to + SEGMENT - 1) / SEGMENT;
    for (int segment = from / SEGMENT; segment < last; segment += AHEAD) {
        float tops[AHEAD], totals[AHEAD];
        float4 accs[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            tops[i] = -infinity(), totals[i] = 0.0f;
            if (segment + i >= last) continue;
            const i64 at = p.state_of(b, head, row / ROWS, segment + i, row % ROWS);
            tops[i] = p.tops()[at], totals[i] = p.totals()[at];
            if (column < V_WIDTH) accs[i] = *reinterpret_cast<const float4*>(p.accs() + at * V_WIDTH + column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Merge merge(top, total, tops[i], totals[i]);
            acc[0] = merge(acc[0], accs[i].x), acc[1] = merge(acc[1], accs[i].y);
            acc[2] = merge(acc[2], accs[i].z), acc[3] = merge(acc[3], accs[i].w);
        }
    }
    const Finished done(p, p.sinks, top, total, of);
    if (p.lse && lane == 0) *lse_at(p, s, b, of, query) = used ? done.lse : -infinity();
    if (column >= p.size_v) return;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = used ? done.of(acc[i]) : 0.0f;
    *reinterpret_cast<uint2*>(out_at(p, s, b, of, query) + column * Number::SIZE) =
        make_uint2(Number::pack(x), Number::pack(x + 2));
}

}  // namespace rlk
