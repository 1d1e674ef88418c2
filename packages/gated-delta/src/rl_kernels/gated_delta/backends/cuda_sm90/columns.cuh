// Parts of the pass over chunks: the ring of stages, its producer, and the columns of a state in registers.
//
//   block      PARTS consumers, for all 128 value columns of a head or a half of them, and a producer warp, which is in
//              a warpgroup of its own if there are two consumers
//   stage      what a kernel reads of a chunk, with 64 columns of rows of v or of the output's gradient for each
//              consumer; STAGES in the ring
//   rows       a warp reads its own 16 columns of them by ldmatrix, and may write results over them
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/products.cuh>
#include <rl_kernels/warp_mma.cuh>

#include "places.cuh"

namespace rlk {

constexpr int WIDTH = 64, THREADS = PARTS == 1 ? WARPGROUP + WARP : 3 * WARPGROUP, WARPS = WARPGROUP / WARP;
// A number of bytes, filled up to whole atoms of the swizzle.
__device__ constexpr int whole(int bytes) { return (bytes + 1023) / 1024 * 1024; }

// Rows of a chunk as left operands, and columns of a state: `words` of the 16-bit numbers that a thread holds of
// 64 columns, 16 rows of them after the other.
using Rows = u32[ROWS / 16][4];
using Factor = u32[SIZE / 16][4];

struct Ring {
    Barrier full[STAGES], empty[STAGES];

    // By all threads of the block.
    __device__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) full[i].init(1), empty[i].init(PARTS * WARPS);
            fence_init();
        }
        __syncthreads();
    }
};

// A sequence and a head of a block, its first part, and the ring with its stages in shared memory.
struct Job {
    Ring& ring;
    char* stages;
    Sequence sequence;
    int s, head, heads, key_head, key_heads, part, chunks;

    __device__ Job(Ring& ring, char* memory, const Places& places, int heads, int key_heads)
        : ring(ring),
          stages(memory + (0u - shared_address(memory)) % 1024),
          sequence(sequence_at(places, blockIdx.x)),
          s(blockIdx.x),
          head(blockIdx.y),
          heads(heads),
          key_head(head / (heads / key_heads)),
          key_heads(key_heads),
          part(blockIdx.z * PARTS),
          chunks(sequence.chunks()) {}

    // The number of this head in tensors [slots, Hv], [slots, Hk] and [sequences, Hv].
    __device__ i64 item(int chunk) const { return i64(sequence.slot + chunk) * heads + head; }
    __device__ i64 key_item(int chunk) const { return i64(sequence.slot + chunk) * key_heads + key_head; }
    __device__ i64 sequence_item() const { return i64(s) * heads + head; }
    // The token of row 0 of a chunk, counted from the sequence's first one; negative if the cache has rows before it.
    __device__ int token(int chunk) const { return chunk * ROWS - sequence.opened; }

    // Starts copies of a chunk's rows of each part to boxes.
    __device__ void load_rows(char* boxes, const TensorMap& map, int chunk, Barrier& full) const {
        for (int i = 0; i < PARTS; ++i)
            load_box(boxes + i * BOX, map, sequence.batch, sequence.first + token(chunk), head, (part + i) * WIDTH,
                     full);
    }
};

// Fills the ring: `load(i, stage, full)` starts copies of BYTES for the i-th chunk.
template <int STAGE, int BYTES, class Load>
__device__ inline void produce(const Job& job, const Load& load) {
    Slot<STAGES> at;
    for (int i = 0; i < job.chunks; ++i, at.advance()) {
        Barrier& full = job.ring.full[at.stage];
        job.ring.empty[at.stage].wait(at.parity ^ 1);
        full.arrive_expecting(BYTES);
        load(i, job.stages + at.stage * STAGE, full);
    }
}

// 64 value columns of a state: state[4 j + 2 h + e] of lane l is number (d, c) with d = 8 j + 2 (l % 4) + e, and
// c = l / 4 + 8 h of the 16 columns of this warp.
struct Columns {
    const int lane = threadIdx.x % WARP, warp = warp_index() % WARPS;
    const int part;
    float state[SIZE / 2];

    __device__ explicit Columns(int part) : part(part) {}

    __device__ int column() const { return part * WIDTH + 16 * warp + lane / 4; }

    // Of states [items, 128, 128]; zeros where there are none.
    __device__ void load(const float* states, i64 item) {
        const float* at = states + (item * SIZE + lane % 4 * 2) * SIZE + column();
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i)
            state[i] = states ? at[(i / 4 * 8 + i % 2) * SIZE + i / 2 % 2 * 8] : 0.0f;
    }
    __device__ void store(float* states, i64 item) const {
        float* at = states + (item * SIZE + lane % 4 * 2) * SIZE + column();
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) at[(i / 4 * 8 + i % 2) * SIZE + i / 2 % 2 * 8] = state[i];
    }
    template <class T>
    __device__ void round(Factor& factor) const {
#pragma unroll
        for (int i = 0; i < SIZE / 4; ++i) factor[i / 4][i % 4] = T::pack(state + 2 * i);
    }
    __device__ void scale(float factor) {
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) state[i] *= factor;
    }

    // The address for four matrices of a box of 64 rows: those of rows 16 n on.
    __device__ char* box_at(char* box, int n) const {
        return box + chunk_at(16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
    }
    // The row of word i of rows 16 n on, and the next one.
    __device__ int row_of(int n, int i) const { return 16 * n + i / 2 * 8 + lane % 4 * 2; }

    // Writes words of 16 N rows to boxes of 64.
    template <int N>
    __device__ void put(char* boxes, const u32 (&words)[N][4]) const {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < N; ++n) store_matrices<true>(box_at(boxes + n / 4 * BOX, n % 4), words[n]);
    }
    // Writes words of 64 rows to a box, and reads this warp's columns of rows l / 2 + 16 i.
    __device__ void transpose(char* box, const Rows& words, Chunk* rows) const {
        put(box, words);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rows[i] = *reinterpret_cast<const Chunk*>(box + chunk_at(lane / 2 + 16 * i, 2 * warp + lane % 2));
    }
    // Stores rows [from, to); row 0 goes to `out`, rows are `apart` bytes apart.
    __device__ void store(const Chunk* rows, char* out, i64 apart, int from, int to) const {
        out += lane / 2 * apart + 2 * (part * WIDTH + 16 * warp) + lane % 2 * CHUNK;
#pragma unroll
        for (int i = 0; i < 4; ++i, out += 16 * apart) {
            const int row = lane / 2 + 16 * i;
            if (row >= from && row < to) *reinterpret_cast<Chunk*>(out) = rows[i];
        }
    }
    // Gives a stage back, once this warp has read it; before stores to global memory, for which the fence would wait.
    __device__ void give_back(Barrier& empty) const {
        fence_copies();
        arrive(empty);
    }
    // The same after a fence.
    __device__ void arrive(Barrier& empty) const {
        __syncwarp();
        if (lane == 0) empty.arrive();
    }
};

// x^T = v^T - exp(G_t) Y^T, rounded. Rows before `from` are the cache's, rows from `to` on are zeros.
template <class T>
__device__ inline void subtract(const Columns& c, const float (&y)[ROWS / 2], char* v, const float* decay,
                                const char* held, int from, int to, Rows& x) {
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n) {
        u32 words[4];
        load_transposed(words, shared_address(c.box_at(v, n)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = *reinterpret_cast<const float2*>(decay + c.row_of(n, i));
            const float* product = y + 8 * n + 2 * i;
            float pair[2];
            T::unpack(words[i], pair);
            pair[0] = fmaf(-a.x, product[0], pair[0]);
            pair[1] = fmaf(-a.y, product[1], pair[1]);
            x[n][i] = T::pack(pair);
        }
    }
    if (from == 0 && to == ROWS) return;
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int t = c.row_of(n, i) + e;
                const u32 others = e ? 0x0000ffffu : 0xffff0000u;
                if (t >= to) x[n][i] &= others;
                if (t < from)
                    x[n][i] =
                        (x[n][i] & others) | T::bits(held + 2 * (t * SIZE + c.column() + i % 2 * 8)) << 16 * e;
            }
}

}  // namespace rlk
