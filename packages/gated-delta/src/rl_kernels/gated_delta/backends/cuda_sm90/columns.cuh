// Parts of the pass over chunks: the ring of stages, its producer, and the columns of a state in registers.
//
//   block      PARTS consumers, for all 128 value columns of a head or a half of them, and a producer warp, which is in
//              a warpgroup of its own if there are two consumers
//   stage      k and q, M and W, exp(G) and G of a chunk, and 64 columns of v for each consumer; STAGES in the ring
//   rows       a warp reads its own 16 columns of v by ldmatrix, and writes results over them before it stores them
#pragma once

#include <rl_kernels/boxes.cuh>
#include <rl_kernels/products.cuh>
#include <rl_kernels/warp_mma.cuh>

#include "places.cuh"

namespace rlk {

constexpr int WIDTH = 64, THREADS = PARTS == 1 ? WARPGROUP + WARP : 3 * WARPGROUP, WARPS = WARPGROUP / WARP;
// A stage: q, k, v of each part, then the item; whole atoms of the swizzle.
constexpr int AT_K = UNIT, AT_V = UNITS, AT_ITEM = AT_V + PARTS * BOX;
constexpr int STAGE = (AT_ITEM + ITEM + 1023) / 1024 * 1024;

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

    // The number of this head in tensors [slots, Hv] and [sequences, Hv].
    __device__ i64 item(int chunk) const { return i64(sequence.slot + chunk) * heads + head; }
    __device__ i64 sequence_item() const { return i64(s) * heads + head; }
    // The token of row 0 of a chunk, counted from the sequence's first one; negative if the cache has rows before it.
    __device__ int token(int chunk) const { return chunk * ROWS - sequence.opened; }
};

// Fills the ring with the chunks of a sequence.
__device__ inline void produce(const Job& job, const TensorMap& v_map, const char* units, const char* items) {
    Slot<STAGES> at;
    for (int chunk = 0; chunk < job.chunks; ++chunk, at.advance()) {
        Barrier& full = job.ring.full[at.stage];
        char* stage = job.stages + at.stage * STAGE;
        job.ring.empty[at.stage].wait(at.parity ^ 1);
        full.arrive_expecting(UNITS + ITEM + PARTS * BOX);
        load_bytes(stage, units + (i64(job.sequence.slot + chunk) * job.key_heads + job.key_head) * UNITS, UNITS, full);
        const int token = job.sequence.first + job.token(chunk);
        for (int i = 0; i < PARTS; ++i)
            load_box(stage + AT_V + i * BOX, v_map, job.sequence.batch, token, job.head, (job.part + i) * WIDTH, full);
        load_bytes(stage + AT_ITEM, items + job.item(chunk) * ITEM, ITEM, full);
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

    // Writes words of 64 rows to a box, and reads this warp's columns of rows l / 2 + 16 i.
    __device__ void transpose(char* box, const u32 (*words)[4], Chunk* rows) const {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n) store_matrices<true>(box_at(box, n), words[n]);
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
        __syncwarp();
        if (lane == 0) empty.arrive();
    }
};

}  // namespace rlk
