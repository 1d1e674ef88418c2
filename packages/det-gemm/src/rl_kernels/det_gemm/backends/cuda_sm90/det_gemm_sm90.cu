// det_gemm on Hopper: out[rows, columns] = a[rows, inner] b[columns, inner]^T (+ bias), one FP32 chain for each element.
//
// Order of every sum, which is the contract: acc = 0, or what out holds if it continues; for k = 0, 16, 32, ... ascending
// acc = wgmma(acc, a[:, k:k+16], b[:, k:k+16]), beyond the edges 0; + bias in FP32; rounded once. No tile, stage
// or major changes it.
//
//   block      a producer warpgroup, and CONSUMERS consumer warpgroups; it stays, and takes tile after tile
//   tile       TILE_M rows x TILE_N columns in the registers of its consumers, 64 rows each (wgmma.cuh). Of less than 64
//              rows the instruction's others multiply what lies behind them, and are thrown away: where there are few
//              columns, every multiprocessor has its share of a's rows, and a tile's chain waits for less of them
//   turns      two consumers with a tile of 64 rows each: one multiplies while the other stores, or reads what it continues
//   stage      64 BOXES terms of K of both operands of a tile in shared memory, swizzled; STAGES of them go round
//   epilogue   a consumer's tile goes through two boxes in shared memory
//
// Defines: DTYPE 1 BF16, 2 FP16; TILE_M, TILE_N, CONSUMERS, BOXES, STAGES; A_MAJOR and B_MAJOR: 0 an operand whose
// terms of K lie beside each other, 1 one whose rows do, 2 one of any strides and addresses, which the producer reads
// number by number; OUT the type of out, 0 FP32; STORED 0 by strides, 1 in boxes through its map, 2 in boxes of its
// transpose; CONTINUES; A_ONCE: a tile has all columns, so no other reads its rows.
#include <rl_kernels/boxes.cuh>

using namespace rlk;

template <int CODE>
struct Numbers {
    using Type = FP32;
};
template <>
struct Numbers<1> {
    using Type = BF16;
};
template <>
struct Numbers<2> {
    using Type = FP16;
};
using Number = Numbers<DTYPE>::Type;
using Out = Numbers<OUT>::Type;

struct Args {
    void* out;
    const void *bias, *a, *b;
    // In elements; those of a and b are for A_MAJOR and B_MAJOR 2.
    i64 out_row, out_column, a_row, a_inner, b_row, b_inner;
    int rows, columns, inner;
    // Rows of tiles that are worked on together: what they share stays in the L2 cache.
    int group;
    // The bias: 0 there is none, 1 it has a number for each row, 2 for each column.
    int bias_along;
};

namespace {

constexpr int PLAIN = 2, BOX_K = SPAN;
constexpr bool A_PLAIN = A_MAJOR == PLAIN, B_PLAIN = B_MAJOR == PLAIN, ANY_PLAIN = A_PLAIN || B_PLAIN;
constexpr Major MAJOR_OF_A = A_MAJOR == MN_MAJOR ? MN_MAJOR : K_MAJOR;
constexpr Major MAJOR_OF_B = B_MAJOR == MN_MAJOR ? MN_MAJOR : K_MAJOR;
// Consumers that share a tile, and whether they take turns with tiles of their own.
constexpr int SHARERS = TILE_M > MMA_M ? TILE_M / MMA_M : 1;
constexpr bool TURNS = CONSUMERS > SHARERS;
// Terms of K in a stage.
constexpr int INNER = BOXES * BOX_K;
// Of a box of 64 terms of K. Pieces of an MN_MAJOR tile are whole, whatever of the last one is needed.
constexpr int A_BYTES = TILE_M * SWIZZLE;
constexpr int B_PIECES = (TILE_N + SPAN - 1) / SPAN;
constexpr int B_BYTES = MAJOR_OF_B == MN_MAJOR ? B_PIECES * PIECE : TILE_N * SWIZZLE;
constexpr int STAGE_BYTES = BOXES * (A_BYTES + B_BYTES);
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr bool MOVES_REGISTERS = CONSUMERS == 2 && TILE_N > 128 && !ANY_PLAIN;
static_assert(!ANY_PLAIN || BOXES == 1, "only copies reach other boxes");
static_assert(TILE_M % MMA_M == 0 || (TILE_M % 8 == 0 && MAJOR_OF_A == K_MAJOR), "pieces are whole");
static_assert(TILE_M >= MMA_M || STORED == 0, "a box has 64 rows");
static_assert(CONSUMERS == SHARERS || (CONSUMERS == 2 && SHARERS == 1), "two take turns");
static_assert(B_BYTES % ATOM == 0, "what follows begins at a whole pattern of the swizzle");

// What a block holds in shared memory.
struct Ring {
    char* stages;
    // Where STORED; else there are none.
    char* boxes;
    Barrier *full, *empty, *turns;
    __device__ char* a(int stage, int box) const { return stages + stage * STAGE_BYTES + box * A_BYTES; }
    __device__ char* b(int stage, int box) const { return a(stage, BOXES) + box * B_BYTES; }
};

// The tiles of a block, one after the other: `group` rows of tiles at a time, column by column.
struct Tiles {
    const Args& p;
    int down, across, index, row, column;
    __device__ explicit Tiles(const Args& p) : p(p), index(static_cast<int>(blockIdx.x)) {
        down = (p.rows + TILE_M - 1) / TILE_M;
        across = (p.columns + TILE_N - 1) / TILE_N;
        place();
    }
    __device__ bool done() const { return index >= down * across; }
    __device__ void advance(int tiles = 1) {
        index += tiles * static_cast<int>(gridDim.x);
        place();
    }
    __device__ void place() {
        if (done()) return;
        const Place place = place_of(index, down, across, p.group);
        row = place.row * TILE_M;
        column = place.column * TILE_N;
    }
};

__device__ int stages_of(int inner) { return (inner + INNER - 1) / INNER; }

// ---- producer ----

// ROWS x 64 numbers of an operand of any strides into a K_MAJOR tile, by a warpgroup.
template <int ROWS>
__device__ void gather(char* tile, const void* source, i64 row_step, i64 inner_step, int row, int k, int rows, int inner) {
    const auto* numbers = static_cast<const unsigned short*>(source);
    const bool along_rows = row_step < inner_step;
    for (int i = threadIdx.x; i < ROWS * (SWIZZLE / CHUNK); i += WARPGROUP) {
        const int r = along_rows ? i % ROWS : i / (SWIZZLE / CHUNK);
        const int c = along_rows ? i / ROWS : i % (SWIZZLE / CHUNK);
        const int first = k + c * PER_CHUNK<Number>;
        const auto* from = numbers + (row + r) * row_step + first * inner_step;
        Chunk chunk = {};
#pragma unroll
        for (int n = 0; n < PER_CHUNK<Number>; ++n) {
            const bool inside = row + r < rows && first + n < inner;
            const u32 number = inside ? from[n * inner_step] : 0;
            chunk.word[n / 2] |= number << 16 * (n % 2);
        }
        *reinterpret_cast<Chunk*>(tile + swizzled<SWIZZLE>(r * SWIZZLE + c * CHUNK)) = chunk;
    }
}

// One thread, an elected one, where the copy engine brings both operands, else all of the warpgroup.
__device__ void produce(const Args& p, const Ring& ring, const TensorMap& map_a, const TensorMap& map_b) {
    constexpr u32 COPIED = BOXES * ((A_PLAIN ? 0 : A_BYTES) + (B_PLAIN ? 0 : B_BYTES));
    const int stages = stages_of(p.inner);
    const bool leads = !ANY_PLAIN || threadIdx.x == 0;
    if (leads && !A_PLAIN) prefetch(map_a);
    if (leads && !B_PLAIN) prefetch(map_b);
    Slot<STAGES> slot;
    for (Tiles tile(p); !tile.done(); tile.advance()) {
#pragma unroll 1
        for (int i = 0; i < stages; ++i, slot.advance()) {
            const int stage = slot.stage, k = i * INNER;
            ring.empty[stage].wait(slot.parity ^ 1);
            if (leads) {
                ring.full[stage].arrive_expecting(COPIED);
#pragma unroll
                for (int box = 0; box < BOXES; ++box) {
                    const int at = k + box * BOX_K;
                    if constexpr (!A_PLAIN)
                        load_tile<MAJOR_OF_A, TILE_M, A_ONCE>(ring.a(stage, box), map_a, ring.full[stage], tile.row, at);
                    if constexpr (!B_PLAIN)
                        load_tile<MAJOR_OF_B, TILE_N>(ring.b(stage, box), map_b, ring.full[stage], tile.column, at);
                }
            }
            if constexpr (A_PLAIN) gather<TILE_M>(ring.a(stage, 0), p.a, p.a_row, p.a_inner, tile.row, k, p.rows, p.inner);
            if constexpr (B_PLAIN)
                gather<TILE_N>(ring.b(stage, 0), p.b, p.b_row, p.b_inner, tile.column, k, p.columns, p.inner);
            if constexpr (ANY_PLAIN) {
                fence_copies();
                ring.full[stage].arrive();
            }
        }
    }
}

// ---- consumers ----

using Sums = float[TILE_N / 2];

// What one thread of a consumer has of a tile: rows and columns of its first number (wgmma.cuh); `part` is which 64 rows.
struct Mine {
    int group, part, thread, row, column;
    __device__ Mine() {
        group = warp_index() / WARPS_OF_GROUP - 1;
        part = SHARERS == 1 ? 0 : group;
        thread = threadIdx.x % WARPGROUP;
        const Fragment fragment;
        row = part * MMA_M + fragment.row;
        column = fragment.column;
    }
    __device__ bool leads() const { return thread == 0; }
};

// Calls f(sum, address) for those of a thread's sums that are inside out, with their place in it.
template <class F>
__device__ void each_inside(const Args& p, const Mine& mine, const Tiles& tile, Sums& d, F f) {
    i64 down = p.out_row, right = p.out_column;
    // Otherwise the compiler works out every multiple of them once for all tiles, and runs out of registers.
    asm volatile("" : "+l"(down), "+l"(right));
    const int row = tile.row + mine.row, column = tile.column + mine.column;
    const int end = TILE_M < MMA_M ? min(p.rows, tile.row + TILE_M) : p.rows;
    char* at = static_cast<char*>(p.out) + (row * down + column * right) * Out::SIZE;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int y = i / 2 % 2 * 8, x = i / 4 * 8 + i % 2;
        if (row + y < end && column + x < p.columns) f(d[i], at + (y * down + x * right) * Out::SIZE);
    }
}

__device__ void begin(const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    if constexpr (CONTINUES)
        each_inside(p, mine, tile, d, [](float& sum, const char* at) { sum = *reinterpret_cast<const float*>(at); });
}

// The whole chain of a tile.
__device__ void mainloop(const Args& p, const Ring& ring, const Mine& mine, Slot<STAGES>& slot, Turns& turns, Sums& d) {
    const int stages = stages_of(p.inner);
    if constexpr (TURNS) turns.wait();
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < stages; ++i, slot.advance()) {
        ring.full[slot.stage].wait(slot.parity);
        add_stage<Number, MAJOR_OF_A, MAJOR_OF_B, BOXES, A_BYTES, B_BYTES>(
            d, ring.a(slot.stage, 0) + mine.part * PIECE, ring.b(slot.stage, 0));
        products_done<1>();
        if (i) give_back(ring.empty[before]);
        before = slot.stage;
    }
    if constexpr (TURNS) turns.pass();
    products_done<0>();
    hold(d);
    if (stages) give_back(ring.empty[before]);
}

// A bias that has a number for each row, or for each column.
template <bool BY_ROW>
__device__ void add_bias(const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
    const int first = BY_ROW ? tile.row + mine.row : tile.column + mine.column, end = BY_ROW ? p.rows : p.columns;
    const auto* bias = static_cast<const unsigned short*>(p.bias) + first;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int beyond = BY_ROW ? i / 2 % 2 * 8 : i / 4 * 8 + i % 2;
        if (first + beyond < end) d[i] = __fadd_rn(d[i], Number::read(bias + beyond));
    }
}

#if STORED
using Boxes = Outgoing<Out, TILE_N, STORED == 2>;

__device__ void store(const Ring& ring, const Args&, const Mine& mine, const Tiles& tile, const TensorMap& map, Sums& d) {
    char* boxes = ring.boxes + mine.group * Boxes::BYTES;
    Boxes::store(boxes, 1 + mine.group, map, tile.row + mine.part * MMA_M, tile.column, d);
}
#else
// By strides: any address, any edge.
__device__ void store(const Ring&, const Args& p, const Mine& mine, const Tiles& tile, const TensorMap&, Sums& d) {
    each_inside(p, mine, tile, d, [](float& sum, char* at) { Out::write(at, sum); });
}
#endif

__device__ void consume(const Args& p, const Ring& ring, const TensorMap& map_out) {
    const Mine mine;
    Slot<STAGES> slot;
    Tiles tile(p);
    Turns turns(ring.turns, mine.group);
    if (TURNS && mine.group == 1) tile.advance(), slot.skip(stages_of(p.inner));
    for (; !tile.done(); tile.advance(TURNS ? 2 : 1)) {
        Sums d;
        begin(p, mine, tile, d);
        mainloop(p, ring, mine, slot, turns, d);
        if constexpr (TURNS) slot.skip(stages_of(p.inner));
        if (p.bias_along == 1) add_bias<true>(p, mine, tile, d);
        if (p.bias_along == 2) add_bias<false>(p, mine, tile, d);
        store(ring, p, mine, tile, map_out, d);
    }
    if (mine.leads()) stores_read<0>();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    det_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_out, const __grid_constant__ Args p) {
    extern __shared__ char raw[];
    __shared__ Barrier full[STAGES], empty[STAGES], turns[2];
    // The swizzle begins anew at multiples of 1024 bytes.
    char* stages = raw + (-shared_address(raw) & (ATOM - 1));
    const Ring ring = {stages, stages + STAGES * STAGE_BYTES, full, empty, turns};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            full[i].init(ANY_PLAIN ? 1 + WARPGROUP : 1);
            empty[i].init(SHARERS * WARPS_OF_GROUP);
        }
        Turns::init(turns);
        fence_init();
    }
    __syncthreads();
    wait_for_prerequisites();
    launch_dependents();
    if (warp_index() < WARPS_OF_GROUP) {
        if constexpr (MOVES_REGISTERS) give_registers<40>();
        if (ANY_PLAIN || (warp_index() == 0 && elected())) produce(p, ring, map_a, map_b);
    } else {
        if constexpr (MOVES_REGISTERS) take_registers<232>();
        consume(p, ring, map_out);
    }
}
