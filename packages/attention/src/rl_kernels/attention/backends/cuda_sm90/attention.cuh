// Shared by det_attention's kernels on Hopper: sequences, which keys a row sees, and the copies of keys and values.
//
// A row is one query in one of the `group` query heads that share a KV head: row t group + g of a sequence. Keys are
// counted from the first of their sequence, in blocks of BLOCK; SEGMENT keys are a segment.
//
// Defines: DTYPE 1 BF16, 2 FP16; K_WIDTH and V_WIDTH: columns of a tile of k and of v, 64 or 128, or together 192 and
// 128, or 256 and 256; CAPPED 0 or 1.
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/mainloop.cuh>
#include <rl_kernels/products.cuh>
#include <rl_kernels/softcap.cuh>

namespace rlk {

#if DTYPE == 1
using Number = BF16;
#else
using Number = FP16;
#endif

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Wide heads leave no shared memory for sums of segments, and with values of 256 no registers for 128 scores a row.
constexpr bool WIDE = K_WIDTH > 128;
constexpr int BLOCK = V_WIDTH > 128 ? 64 : 128, SEGMENT = 1024;
// Number of boxes of 64 columns side by side, and bytes of a box with `rows` rows.
constexpr int BOXES_K = K_WIDTH / SPAN, BOXES_V = V_WIDTH / SPAN;
__device__ constexpr int bytes_of(int rows) { return rows * SWIZZLE; }

// Bits of Shape::wide, which says which integer tensors have 64 bits.
enum Integers { STARTS_Q, STARTS_K, FIRST_K, USED_Q, USED_K, TABLE };

// The sizes and integer tensors of a call; null pointers are not read. k and v are loaded by TMA descriptors
// [sequences or pages, keys, KV heads, size].
struct Shape {
    const void *starts_q, *starts_k, *first_k, *used_q, *used_k, *table;
    // -1 is an unlimited side of the window. box: keys of one copy, which divides a block, and a page if there are
    // pages. inverse: 2^32 / group, rounded up, without the 2^32 of a group of 1.
    int wide, batch, kv_heads, group, size, size_v, queries, keys, pages, page, table_step, left, right, box, inverse;
    // Bytes of a sink.
    int sink_size;
    // Queries in a block of rows of the kernel of dk and dv: as many whole groups as fit into 64 rows.
    int queries_of_block;

    __device__ i64 integer(Integers which, const void* at, i64 index) const {
        return wide >> which & 1 ? static_cast<const i64*>(at)[index] : static_cast<const int*>(at)[index];
    }
    __device__ int heads() const { return kv_heads * group; }
};

// Query and member of its group of a row: `ahead` rows, not many, after member `member` of query `query`.
struct Row {
    int query, member;
    __device__ Row(const Shape& p, int query, int member, int ahead) {
        const u32 all = member + ahead, more = p.group == 1 ? all : __umulhi(all, static_cast<u32>(p.inverse));
        this->query = query + more, this->member = all - more * p.group;
    }
};

__device__ inline int clamped(i64 x, int low, int high) {
    return x < low ? low : x > high ? high : static_cast<int>(x);
}

// A sequence: its queries, `used` of them in use, and its keys. Row `first_q` of q and row `first_k` of k are its
// first; the first `gone` keys must not be read. Query t stands at position t + shift among the keys.
struct Sequence {
    int first_q, count, used, first_k, length, gone, shift;

    __device__ Sequence(const Shape& p, int b) {
        first_q = 0, count = p.queries, gone = 0, first_k = 0, length = p.keys;
        if (p.starts_q) {
            first_q = clamped(p.integer(STARTS_Q, p.starts_q, b), 0, p.queries);
            count = clamped(p.integer(STARTS_Q, p.starts_q, b + 1), first_q, p.queries) - first_q;
        }
        used = p.used_q ? clamped(p.integer(USED_Q, p.used_q, b), 0, count) : count;
        if (p.starts_k) {
            first_k = clamped(p.integer(STARTS_K, p.starts_k, b), 0, p.keys);
            length = clamped(p.integer(STARTS_K, p.starts_k, b + 1), first_k, p.keys) - first_k;
        } else {
            if (p.used_k) length = clamped(p.integer(USED_K, p.used_k, b), 0, p.keys);
            if (p.first_k) {
                // Negative: keys that a cache has dropped. They count, except whole segments of them.
                const i64 start = p.integer(FIRST_K, p.first_k, b);
                first_k = clamped(start, 0, length);
                if (p.left >= 0 && start < 0) gone = static_cast<int>(-start % SEGMENT), first_k = -gone;
                length -= first_k;
            }
        }
        shift = length - count;
    }
    // Query t sees the keys from `from` to `to` - 1.
    __device__ int from(const Shape& p, int t) const {
        return p.left < 0 ? gone : clamped(static_cast<i64>(t) + shift - p.left, gone, length);
    }
    __device__ int to(const Shape& p, int t) const {
        return p.right < 0 ? length : clamped(static_cast<i64>(t) + shift + p.right + 1, 0, length);
    }
};

// Calls f(row) for each row of q, or of k, that is in no sequence, before the first or after the last; only calls without
// validation have such rows. `mine`: this thread's index among the `threads` threads of its thread block that call it.
template <class F>
__device__ inline void outside(const Shape& p, Integers which, const void* starts, int rows, int mine, int threads, F f) {
    if (!starts) return;
    const int first = clamped(p.integer(which, starts, 0), 0, rows);
    const int last = clamped(p.integer(which, starts, p.batch), first, rows);
    const int step = static_cast<int>(gridDim.x) * threads;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) * threads + mine; i < first + rows - last; i += step)
        f(i < first ? i : last + i - first);
}
// Sets a row to 0; `numbers` in each.
__device__ inline void clear_row(void* rows, i64 row, int numbers) {
    const i64 chunks = numbers / PER_CHUNK<Number>;
#pragma unroll 1
    for (i64 i = row * chunks; i < (row + 1) * chunks; ++i) static_cast<Chunk*>(rows)[i] = {};
}

// The copies of blocks of a sequence's keys and values, by one warp: lane i copies keys i box to (i + 1) box - 1 of a
// block. A part whose page does not exist, or that lies beyond the sequence's last page, is filled with 0.
template <int KEYS>
struct Blocks {
    const Shape& p;
    const Sequence& s;
    int b, head;
    // The lane's page of the block at hand; whoever goes on to another block asks for its page early.
    i64 page;

    // `n`: the first block.
    __device__ Blocks(const Shape& p, const Sequence& s, int b, int head, int n)
        : p(p), s(s), b(b), head(head), page(page_of(n)) {}
    __device__ static int lane() { return threadIdx.x % WARP; }
    __device__ int key(int n) const { return n + lane() * p.box; }
    __device__ bool copies() const { return lane() < KEYS / p.box; }
    // The lane's page of block n; `pages` beyond the end.
    __device__ i64 page_of(int n) const {
        if (!p.table || !copies() || key(n) >= s.length) return p.pages;
        return p.integer(TABLE, p.table, static_cast<i64>(b) * p.table_step + key(n) / p.page);
    }
    // Bit i: part i of block n is missing.
    __device__ u32 missing(int n) const {
        return p.table ? __ballot_sync(ALL, key(n) < s.length && copies() && !exists()) : 0;
    }
    __device__ bool exists() const { return page >= 0 && page < p.pages; }

    // Starts the copy of block n to `target`, BOXES boxes of 64 columns.
    template <int BOXES>
    __device__ void copy(char* target, const TensorMap& map, Barrier& full, int n) const {
        if (lane() == 0) full.arrive_expecting(BOXES * bytes_of(KEYS));
        __syncwarp();
        if (!copies()) return;
        const int outer = p.table ? exists() ? static_cast<int>(page) : p.pages : p.starts_k ? 0 : b;
        const int row = p.table ? key(n) % p.page : s.first_k + key(n);
#pragma unroll
        for (int box = 0; box < BOXES; ++box)
            load_box(target + box * bytes_of(KEYS) + lane() * bytes_of(p.box), map, outer, row, head, box * SPAN, full);
    }
};

// A warp of the producer copies a tile's blocks of k, or of v, through a ring. `missing`: where it says which parts of a
// block are not there, or null.
template <int KEYS, int BOXES, int DEPTH, class Tile>
__device__ __forceinline__ void load_blocks(const Shape& p, const TensorMap& map, const Tile& t, Slot<DEPTH>& slot,
                                            char* stages, Barrier* full, Barrier* empty, u32* missing = nullptr) {
    if (!t.has_keys()) return;
    Blocks<KEYS> blocks(p, t.s, t.b, t.head, t.begin);
    for (int n = t.begin; n < t.end; n += KEYS, slot.advance()) {
        const i64 next = n + KEYS < t.end ? blocks.page_of(n + KEYS) : 0;
        const u32 lost = missing ? blocks.missing(n) : 0;
        empty[slot.stage].wait(slot.parity ^ 1);
        if (missing && blocks.lane() == 0) missing[slot.stage] = lost;
        blocks.template copy<BOXES>(stages + slot.stage * BOXES * bytes_of(KEYS), map, full[slot.stage], n);
        blocks.page = next;
    }
}

// Calls f(number, which of the thread's two rows, column) for each of a thread's accumulators; columns are counted from
// its first.
template <int COUNT, class F>
__device__ inline void each(float (&d)[COUNT], F f) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) f(d[i], i / 2 % 2, i / 4 * 8 + i % 2);
}

// The keys that a thread's two rows see, counted from its first column; those that all rows of its consumer see: from
// `low_most` to `high_least` - 1.
template <int KEYS>
struct Seen {
    int column, from[2], to[2], low_most, high_least;

    // `first`: row of the tile at which the consumer's begin.
    template <class Tile>
    __device__ Seen(const Shape& p, const Tile& t, const Fragment& mine, int first) : column(mine.column) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = t.row(p, first + mine.row + 8 * half).query;
            from[half] = t.s.from(p, query) - mine.column, to[half] = t.s.to(p, query) - mine.column;
        }
        const int last = max(min(t.row(p, first + MMA_M - 1).query, t.s.used - 1), 0);
        low_most = t.s.from(p, last), high_least = min(t.s.to(p, min(t.row(p, first).query, last)), t.end);
    }
    // Whether all rows see all keys of block n.
    __device__ bool all(int n) const { return n >= low_most && n + KEYS <= high_least; }
    // `hidden` where a row does not see a key of block n.
    __device__ void mask(float (&d)[KEYS / 2], int n, float hidden) const {
        const int low[2] = {from[0] - n, from[1] - n}, high[2] = {to[0] - n, to[1] - n};
        each(d, [&](float& x, int half, int column) {
            if (column < low[half] || column >= high[half]) x = hidden;
        });
    }
};

// Copies rows of q, or of out's gradient, to a K_MAJOR tile of WIDTH columns: zeros for queries that are not in use and
// for columns beyond the last. THREADS threads; each has one chunk of every STEP rows.
template <int WIDTH, int THREADS>
struct Copier {
    static constexpr int CHUNKS = WIDTH * Number::SIZE / CHUNK, PER_BOX = SWIZZLE / CHUNK;
    // Threads of a row: with columns of 192 a quarter of them has no chunk.
    static constexpr int ACROSS = CHUNKS == 24 ? 32 : CHUNKS, STEP = THREADS / ACROSS;
    static_assert(THREADS % ACROSS == 0, "a thread keeps its chunk");
    const int first, chunk;
    const bool inside;

    __device__ Copier(int thread, int size)
        : first(thread / ACROSS), chunk(thread % ACROSS), inside(chunk * CHUNK < size * Number::SIZE) {}

    // ROWS rows from `row` on; the last numbers are steps from one sequence, query or head to the next.
    template <int ROWS>
    __device__ void copy(char* to, const Shape& p, const Sequence& s, int b, int head, Row row, const void* from,
                         i64 of_batch, i64 of_query, i64 of_head) const {
        if (chunk >= CHUNKS) return;
        const i64 begin = (p.starts_q ? 0 : b) * of_batch + static_cast<i64>(head) * p.group * of_head;
        const char* base = static_cast<const char*>(from) + begin * Number::SIZE;
        to += chunk / PER_BOX * bytes_of(ROWS);
#pragma unroll 2
        for (int ahead = first; ahead < ROWS; ahead += STEP) {
            const Row at(p, row.query, row.member, ahead);
            const bool known = inside && at.query < s.used;
            const i64 place = (s.first_q + at.query) * of_query + at.member * of_head;
            copy_chunk(to + swizzled<SWIZZLE>(ahead * SWIZZLE + chunk % PER_BOX * CHUNK),
                       known ? base + place * Number::SIZE + chunk * CHUNK : base, !known);
        }
    }
};

// Sets the rows of a block of KEYS keys or values from `known` on to 0: they may hold anything, and 0 times anything is
// not always 0. All CONSUMERS of a block call it, and then `cleared`.
template <int BOXES, int KEYS, int CONSUMERS>
__device__ inline void clear(char* block, int known) {
    constexpr int CHUNKS = SWIZZLE / CHUNK;
    const int thread = (static_cast<int>(threadIdx.x) - WARPGROUP) % (CONSUMERS * WARPGROUP);
    for (int i = known * CHUNKS + thread; i < KEYS * CHUNKS; i += CONSUMERS * WARPGROUP)
#pragma unroll
        for (int box = 0; box < BOXES; ++box)
            *reinterpret_cast<Chunk*>(block + box * bytes_of(KEYS) + i * CHUNK) = {};
}
template <int CONSUMERS>
__device__ inline void cleared() {
    fence_copies();
    sync_threads(1 + CONSUMERS, CONSUMERS * WARPGROUP);
}

// Bytes of a consumer's buffer for 64 rows of WIDTH numbers. The row stride is 16 bytes more than a multiple of 128, so
// that stores to a column of 16-byte chunks have no bank conflicts.
template <int WIDTH>
constexpr int ROOM_ROW = WIDTH * Number::SIZE + CHUNK;
template <int WIDTH>
constexpr int ROOM = MMA_M * ROOM_ROW<WIDTH>;

// Columns of a result of WIDTH columns that a consumer writes at once.
template <int WIDTH>
constexpr int AT_ONCE = WIDE ? 32 : WIDTH;

// Rounds a consumer's sums and writes them: row `ahead` to at(ahead), the first `size` columns, or nowhere if that is
// null; through a buffer for as many columns as it writes at once. `id`: its named barrier.
template <int WIDTH, class F>
__device__ inline void store_rows(char* room, int id, const float (&d)[WIDTH / 2], int size, F at) {
    constexpr int COLUMNS = AT_ONCE<WIDTH>, CHUNKS = COLUMNS * Number::SIZE / CHUNK, STEP = WARPGROUP / CHUNKS;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    char* to = room + (thread / WARP * 16 + lane % 16) * ROOM_ROW<COLUMNS> + lane / 16 * CHUNK;
#pragma unroll
    for (int first = 0; first < WIDTH; first += COLUMNS) {
        // Other threads may still read the previous content.
        sync_threads(id, WARPGROUP);
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
            u32 word[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) word[n] = Number::pack(d + first / 2 + 8 * j + 2 * n);
            store_matrices<false>(to + 2 * j * CHUNK, word);
        }
        sync_threads(id, WARPGROUP);
        const int chunk = thread % CHUNKS, column = first * Number::SIZE + chunk * CHUNK;
        if (column >= size * Number::SIZE) continue;
#pragma unroll
        for (int i = 0; i < MMA_M / STEP; ++i) {
            const int ahead = thread / CHUNKS + i * STEP;
            if (char* row = at(ahead))
                *reinterpret_cast<Chunk*>(row + column) =
                    *reinterpret_cast<const Chunk*>(room + ahead * ROOM_ROW<COLUMNS> + chunk * CHUNK);
        }
    }
}

// Caps a score if CAPPED.
__device__ inline void cap(float cap, float rate, float& x) {
#if CAPPED
    x = Softcap{cap, rate, 0.0f, 0.0f}.at(x);
#endif
}

}  // namespace rlk
