// Attention on Hopper: the forward pass.
//
// Order of the sums, which is the contract. Keys are walked in ascending blocks of 128, or 64 with values wider than 128,
// in ascending segments of 1024.
// A segment has a state of its own: top, which follows the largest score in base 2; total, the sum of 2^(score - top);
// acc, the sum of those powers, rounded to 16 bits, times the values.
//   score      one canonical chain over D (wgmma.cuh)
//   total      thread q of the four that share a row takes columns 8 j + 2 q + {0, 1}; over j, a chain for each of the
//              two, then their sum; blocks in ascending order; at the end of a segment (0 + 1) + (2 + 3) over the
//              four threads
//   top        raised to a block's largest score where that exceeds it by more than SLACK; then total and acc are
//              rescaled
//   acc        one chain over the keys of a block, 16 at a time, which continues that of the block before
//   segments   merged in ascending order; with keys wider than 128 the merged top is raised as a block raises it, and a
//              sum is its rescaled value plus the rescaled value of the segment, each rounded
// A block or a segment of which a row sees nothing changes no bit of its state. So nothing depends on the tile that a
// row is in, on the other rows there, or on whether one block or several walk over its segments.
//
//   block      a producer warpgroup and GROUPS consumer warpgroups; persistent: it takes tile after tile (queue.cuh)
//   tile       64 GROUPS rows of a sequence and a KV head; consumer g holds rows 64 g to 64 g + 63 (wgmma.cuh)
//   turns      of two consumers one multiplies while the other works on its scores; three need no turns
//   ring       STAGES blocks of k, and as many of v, in shared memory, swizzled; TMA fills them
//   overlap    with one or two consumers, the products of a block with v overlap with the powers of the next block
//
//   split      a tile can be one segment: its state is written to memory, and `finish` merges. With one consumer, a
//              tile of several segments always is
//
// Defines, beside those of attention.cuh: GROUPS 1, 2, or with 64 columns 3; STAGES; SHARED_BYTES, of dynamic shared memory.
#include "forward.cuh"

namespace rlk {
namespace {

// A consumer warpgroup.
struct Consumer {
    const Args& p;
    const Memory& m;
    const Fragment mine;
    // The consumer's index, its first row in a tile, its rows of q, and its buffer for sums.
    const int group, first;
    const char* q;
    char* kept;
    Turns turns;
    Slot<STAGES> key, value;
    Scores d;
    Sums acc;
    // The state of the current segment, and of the previous segments of the tile, if there are any.
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
                if constexpr (GROUPS == 3)
                    attend_block_by_block(t);
                else
                    attend(t);
            }
            if (p.splits()) {
                if (t.has_keys()) put_state(p, t, mine, first, state, acc);
            } else {
                if (merges && WIDE)
                    add_far(state), earlier().get(acc), state = load(kept + ROOM_BYTES);
                else if (merges)
                    earlier().join(before, state, acc), state = before;
                put(p, t, mine, first, state, acc, kept, 1 + group);
            }
        });
    }

    // Walks over the blocks of a tile: the products with the values of a block follow the scores of the next one.
    __device__ __forceinline__ void attend(const Tile& t) {
        const Seen<BLOCK> seen(p, t, mine, first);
        // A warp without a row computes no powers: with few queries that is most warps.
        const bool active = GROUPS > 1 || t.row(p, first + mine.row / 16 * 16).query < t.s.used;
        const int end = t.end;
        int n = t.begin;
        multiply_keys();
        if constexpr (TURNS) turns.pass();
        lose(seen, state, n, lost(), p.box);
        products_done<0>();
        scored(seen, n, end);
        Powers powers = {}, others = {};
        float sum[2], shrink[2];
        weigh_again(shrink, sum, powers);
        add(shrink, sum);
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

    // One block: its scores and powers, and the sums of the previous block.
    __device__ __forceinline__ void step(const Seen<BLOCK>& seen, int n, int end, bool active, Powers& before,
                                         Powers& powers) {
        multiply_keys();
        m.v_full[value.stage].wait(value.parity);
        issue_words<Number, V_WIDTH>(before, m.v + value.stage * V_BYTES, acc);
        if constexpr (TURNS) turns.pass();
        const bool starts = MERGES && n % SEGMENT == 0;
        State closed;
        if (starts) {
            if constexpr (WIDE) {
                // Other threads may still read the previous output.
                sync_threads(1 + group, WARPGROUP);
                store(kept, state);
            } else {
                closed = state;
            }
            state = State();
        }
        lose(seen, state, n, lost(), p.box);
        products_done<1>();
        scored(seen, n, end);
        bool raises = starts;
        float sum[2], shrink[2] = {1.0f, 1.0f};
        if (active) {
            // A row that has seen nothing has a top of -inf, and so a sum of inf or NaN.
            if (!starts) weigh_both(sum, powers);
            if (starts || !are_small(sum)) raises = weigh_again(shrink, sum, powers) || starts;
        }
        // In each branch, not before: the compiler would wait for the sums before it computes the powers.
        if (raises) {
            summed(before, powers);
            if constexpr (WIDE) {
                if (starts) closed = load(kept);
            }
            if (starts) join(closed);
            rescale(acc, shrink);
        } else {
            summed(before, powers);
        }
        if (active) add(shrink, sum);
    }

    // Adds the sums of the last block.
    __device__ __forceinline__ void add_last(const Tile& t, Powers& powers) {
        multiply_values(powers, true, known_of_last(t));
        summed(powers, powers);
        close(state);
    }

    // Like attend, but a block's sums follow its scores: other consumers multiply while this one computes powers. It needs
    // registers for one set of powers only.
    __device__ __forceinline__ void attend_block_by_block(const Tile& t) {
        const Seen<BLOCK> seen(p, t, mine, first);
        const int begin = t.begin, end = t.end, known = known_of_last(t);
        Powers powers = {};
#pragma unroll 1
        for (int n = begin; n < end; n += BLOCK) {
            multiply_keys();
            const u32 missing = lost();
            products_done<0>();
            hold(d), hold(acc), keep(powers);
            if (n > begin) give_back(m.v_empty[value.stage]), value.advance();
            scored(seen, n, end);
            const bool starts = n == begin || n % SEGMENT == 0;
            if (starts && n > begin) {
                State closed = state;
                state = State();
                join(closed);
            }
            lose(seen, state, n, missing, p.box);
            float sum[2], shrink[2] = {1.0f, 1.0f};
            if (!starts) weigh_both(sum, powers);
            if (starts || !are_small(sum))
                if (weigh_again(shrink, sum, powers)) rescale(acc, shrink);
            add(shrink, sum);
            multiply_values(powers, n + BLOCK >= end, known);
        }
        summed(powers, powers);
        close(state);
    }

    // Turns the scores into powers, with the tops as they are.
    __device__ __forceinline__ void weigh_both(float (&sum)[2], Powers& powers) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[half] = weigh(d, half, state.top[half], p.factor, powers);
    }
    // Whether no row of this warp has to be raised.
    __device__ __forceinline__ static bool are_small(const float (&sum)[2]) {
        return __all_sync(ALL, sum[0] <= SMALL && sum[1] <= SMALL);
    }

    // Raises tops where a block's scores exceed them, and turns the scores into powers. Whether a row of this warp was
    // raised.
    __device__ __forceinline__ bool weigh_again(float (&shrink)[2], float (&sum)[2], Powers& powers) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            shrink[half] = raise(d, half, state, p.factor);
            sum[half] = weigh(d, half, finite(state.top[half]), p.factor, powers);
        }
        return __any_sync(ALL, shrink[0] != 1.0f || shrink[1] != 1.0f);
    }

    __device__ __forceinline__ void add(const float (&shrink)[2], const float (&sum)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            state.total[half] = __fmaf_rn(state.total[half], shrink[half], sum[half]);
    }

    // Issues the scores of the next block, in this consumer's turn.
    __device__ __forceinline__ void multiply_keys() {
        // Computed before this consumer's turn, not in it.
        const u64 left = formed(operand_at<K_MAJOR>(q)), right = formed(operand_at<K_MAJOR>(m.k + key.stage * K_BYTES));
        m.k_full[key.stage].wait(key.parity);
        if constexpr (TURNS) turns.wait();
        issue_rows<Number, BLOCK, K_WIDTH, ROWS>(left, right, d);
    }

    // Issues the products with the values of a block; behind the last of a tile there may be anything.
    __device__ __forceinline__ void multiply_values(Powers& powers, bool last, int known) {
        char* v = m.v + value.stage * V_BYTES;
        m.v_full[value.stage].wait(value.parity);
        if (last && known < BLOCK) {
            clear<BOXES_V, BLOCK, GROUPS>(v, known);
            cleared<GROUPS>();
        }
        issue_words<Number, V_WIDTH>(powers, v, acc);
    }
    // Keys of a sequence in the last block of a tile, or more.
    __device__ static int known_of_last(const Tile& t) { return t.s.length - (t.end - 1) / BLOCK * BLOCK; }

    // The missing parts of the block whose scores are being computed.
    __device__ __forceinline__ u32 lost() const { return p.table ? m.missing[key.stage] : 0; }

    // After the scores of block n are computed: releases its keys, and with the tile's last block also q.
    __device__ __forceinline__ void scored(const Seen<BLOCK>& seen, int n, int end) {
        hold(d);
        give_back(m.k_empty[key.stage]);
        if (n + BLOCK >= end) give_back(*m.q_empty);
        key.advance();
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) cap(p.cap, p.rate, d[i]);
        if (!seen.all(n)) seen.mask(d, n, -infinity());
    }

    // Waits for the products with the values, and releases the values. `powers`: computed by then.
    __device__ __forceinline__ void summed(Powers& before, Powers& powers) {
        keep(powers);
        products_done<0>();
        hold(acc), keep(before);
        give_back(m.v_empty[value.stage]);
        value.advance();
    }

    // WIDE: states of this thread in shared memory, because registers are scarce: that of earlier segments, and in the
    // buffer for the output that of a segment that has ended.
    __device__ __forceinline__ static State load(const char* from) {
        const float4 x = reinterpret_cast<const float4*>(from)[threadIdx.x % WARPGROUP];
        State state;
        state.top[0] = x.x, state.top[1] = x.y, state.total[0] = x.z, state.total[1] = x.w;
        return state;
    }
    __device__ __forceinline__ static void store(char* to, const State& x) {
        reinterpret_cast<float4*>(to)[threadIdx.x % WARPGROUP] = make_float4(x.top[0], x.top[1], x.total[0], x.total[1]);
    }
    // WIDE: merges a segment into the earlier ones.
    __device__ __forceinline__ void add_far(const State& closed) const {
        State all = load(kept + ROOM_BYTES);
        const Merge low(all.top[0], all.total[0], closed.top[0], closed.total[0]);
        const Merge high(all.top[1], all.total[1], closed.top[1], closed.total[1]);
        store(kept + ROOM_BYTES, all);
        earlier().add(low, high, acc);
    }
    __device__ __forceinline__ Earlier earlier() const {
        return WIDE ? reinterpret_cast<char*>(p.states) + (blockIdx.x * GROUPS + group) * SUMS_BYTES : kept;
    }

    // Ends a segment within a tile: merges it into the previous segments, and begins the next one.
    __device__ __forceinline__ void join(State& closed) {
        close(closed);
        if (merges && WIDE) {
            add_far(closed);
        } else {
            if (merges)
                earlier().join(before, closed, acc);
            else if (before = closed; !WIDE)
                // Other threads may still read the previous output.
                sync_threads(1 + group, WARPGROUP);
            earlier().put(acc);
            if constexpr (WIDE) store(kept + ROOM_BYTES, before);
        }
        merges = true;
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
        give_registers<PRODUCER_REGISTERS>();
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

// Merges the states that `attend` wrote, in ascending order. One warp for each row; lane l has columns 4 l to 4 l + 3, and
// with values wider than 128 those 128 further on.
extern "C" __global__ void __launch_bounds__(128) finish(const __grid_constant__ Args p) {
    constexpr int PIECE_WIDTH = 4 * WARP, PIECES = (V_WIDTH + PIECE_WIDTH - 1) / PIECE_WIDTH, AHEAD = 16 / PIECES;
    wait_for_prerequisites();
    const int lane = threadIdx.x % WARP, row = static_cast<int>(blockIdx.y) * 4 + static_cast<int>(threadIdx.x) / WARP;
    const int head = static_cast<int>(blockIdx.z), b = static_cast<int>(blockIdx.x);
    const Sequence s(p, b);
    if (row >= s.count * p.group) return;
    const int query = row / p.group, of = head * p.group + row % p.group;
    const bool used = query < s.used;
    // Never more than were written, even if the maximum length was given too small and not validated.
    const int from = s.from(p, query), to = used ? min(s.to(p, query), p.parts * SEGMENT) : 0;
    float top = -infinity(), total = 0.0f, acc[PIECES][4] = {};
    // A row that sees no key has no states.
    const int last = from < to ? (to + SEGMENT - 1) / SEGMENT : 0;
    for (int segment = from / SEGMENT; segment < last; segment += AHEAD) {
        float tops[AHEAD], totals[AHEAD];
        float4 accs[AHEAD][PIECES] = {};
        const i64 first = p.state_of(b, head, row / ROWS, segment, row % ROWS);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            tops[i] = -infinity(), totals[i] = 0.0f;
            if (segment + i >= last) continue;
            const i64 at = first + i * p.held;
            tops[i] = p.tops()[at], totals[i] = p.totals()[at];
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                if (const int column = piece * PIECE_WIDTH + 4 * lane; column < V_WIDTH)
                    accs[i][piece] = *reinterpret_cast<const float4*>(p.accs() + at * V_WIDTH + column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Merge merge(top, total, tops[i], totals[i]);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                float(&x)[4] = acc[piece];
                const float4 y = accs[i][piece];
                x[0] = merge(x[0], y.x), x[1] = merge(x[1], y.y), x[2] = merge(x[2], y.z), x[3] = merge(x[3], y.w);
            }
        }
    }
    const Finished done(p, p.sinks, top, total, of);
    if (p.lse && lane == 0) *lse_at(p, s, b, of, query) = used ? done.lse : -infinity();
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int column = piece * PIECE_WIDTH + 4 * lane;
        if (column >= p.size_v) return;
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = used ? done.of(acc[piece][i]) : 0.0f;
        *reinterpret_cast<uint2*>(out_at(p, s, b, of, query) + column * Number::SIZE) =
            make_uint2(Number::pack(x), Number::pack(x + 2));
    }
}

}  // namespace rlk
