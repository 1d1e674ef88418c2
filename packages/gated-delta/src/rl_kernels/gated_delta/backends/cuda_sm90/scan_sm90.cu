// The pass over the chunks of a sequence (sm_90a). A consumer warpgroup holds 64 value columns of the state of one head,
// S^T [64 x 128], as FP32 accumulators. All products are transposed, so what depends on the state stays in registers:
// accumulators of one product, rounded, are the left operand of the next (wgmma.cuh). For each chunk, with rows t, s:
//
//   Y^T = round(S)^T k^T    x^T = round(v^T - exp(G_t) Y^T)    S^T = exp(G_63) S^T + x^T W         the chain of chunks
//   R^T = round(S)^T q^T    o^T = scale (exp(G_t) R^T + x^T M^T)                                  beside it
//
//   block      PARTS consumers, for all 128 columns or a half of them, and a producer warp, which is in a warpgroup of its own if there are two
//   stage      k and q, M and W, exp(G) and G of a chunk, and 64 columns of v for each consumer; STAGES in the ring
//   v, o, x    a warp reads its own 16 columns of v by ldmatrix, and writes o or x over them before it stores them
//
// Order of the sums: 16 terms a step, ascending, on top of exp(G_t) R and exp(G_63) S.
#include <rl_kernels/boxes.cuh>
#include <rl_kernels/products.cuh>
#include <rl_kernels/warp_mma.cuh>

#include "places.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

constexpr int WIDTH = 64, THREADS = PARTS == 1 ? WARPGROUP + WARP : 3 * WARPGROUP, WARPS = WARPGROUP / WARP;
// A stage: q, k, v of each part, then the item; whole atoms of the swizzle.
constexpr int AT_K = UNIT, AT_V = UNITS, AT_ITEM = AT_V + PARTS * BOX;
constexpr int STAGE = (AT_ITEM + ITEM + 1023) / 1024 * 1024;

struct Args {
    const char *units, *items;
    const float* tail;
    const float* initial;
    float* state;  // [sequences, Hv, 128, 128], as initial; either may be null
    char* out;
    char *held_keys, *held_residuals;
    float *held_sums, *held_inverse;
    Places places;
    int key_heads, heads;
    float scale;
    int unused;
};

struct Shared {
    Barrier full[STAGES], empty[STAGES];
};

// Starts the copy of contiguous bytes, multiples of 16.
__device__ inline void load_bytes(void* target, const void* source, int bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

// The ring, a sequence, and this block's head and first part.
struct Job {
    const Args& a;
    Shared& shared;
    char* ring;
    Sequence sequence;
    int s, head, key_head, part, chunks;
};

__device__ inline void produce(const Job& job, const TensorMap& v_map) {
    const Args& a = job.a;
    const i64 slot = job.sequence.slot;
    const char* units = a.units + (slot * a.key_heads + job.key_head) * UNITS;
    const char* items = a.items + (slot * a.heads + job.head) * ITEM;
    Slot<STAGES> at;
    for (int chunk = 0; chunk < job.chunks; ++chunk, at.advance()) {
        Barrier& full = job.shared.full[at.stage];
        char* stage = job.ring + at.stage * STAGE;
        job.shared.empty[at.stage].wait(at.parity ^ 1);
        full.arrive_expecting(UNITS + ITEM + PARTS * BOX);
        load_bytes(stage, units, UNITS, full);
        const int token = job.sequence.first + chunk * ROWS - job.sequence.opened;
        for (int i = 0; i < PARTS; ++i)
            load_box(stage + AT_V + i * BOX, v_map, job.sequence.batch, token, job.head, (job.part + i) * WIDTH, full);
        load_bytes(stage + AT_ITEM, items, ITEM, full);
        units += i64(a.key_heads) * UNITS, items += i64(a.heads) * ITEM;
    }
}

// One consumer: state[4 j + 2 h + e] is number (d, c) of the state with d = 8 j + 2 (l % 4) + e, and c = l / 4 + 8 h of
// the 16 columns of this warp, of lane l.
struct Consumer {
    const Job& job;
    const int lane = threadIdx.x % WARP, warp = warp_index() % WARPS;
    const int part;  // of 64 columns
    float state[SIZE / 2];

    __device__ Consumer(const Job& job, int part) : job(job), part(part) {}

    __device__ int column() const { return part * WIDTH + 16 * warp + lane / 4; }
    __device__ i64 state_at() const {
        return ((i64(job.s) * job.a.heads + job.head) * SIZE + lane % 4 * 2) * SIZE + column();
    }

    __device__ void load_state() {
        const float* at = job.a.initial + state_at();
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i)
            state[i] = job.a.initial ? at[(i / 4 * 8 + i % 2) * SIZE + i / 2 % 2 * 8] : 0.0f;
    }
    __device__ void store_state() const {
        float* at = job.a.state + state_at();
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) at[(i / 4 * 8 + i % 2) * SIZE + i / 2 % 2 * 8] = state[i];
    }

    __device__ void round_state(u32 (&factor)[SIZE / 16][4]) const {
#pragma unroll
        for (int i = 0; i < SIZE / 4; ++i) factor[i / 4][i % 4] = T::pack(state + 2 * i);
    }

    // The address for four matrices of a 64 x 64 box of v: words 4 n to 4 n + 3 of x are those of rows 16 n on.
    __device__ char* box_at(char* box, int n) const {
        return box + chunk_at(16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
    }

    // Stores rows [from, to) of this warp's 16 columns of a box; row 0 goes to `out`, rows are `apart` bytes apart.
    __device__ void store_rows(const char* box, char* out, i64 apart, int from, int to) const {
        out += 2 * (part * WIDTH + 16 * warp) + lane % 2 * CHUNK;
#pragma unroll
        for (int i = 0; i < ROWS; i += WARP / 2) {
            const int row = i + lane / 2;
            if (row >= from && row < to)
                *reinterpret_cast<Chunk*>(out + row * apart) =
                    *reinterpret_cast<const Chunk*>(box + chunk_at(row, 2 * warp + lane % 2));
        }
    }

    // x from Y, rounded. Rows before `from` are the cache's, rows from `to` on are zeros.
    __device__ void residuals(const float (&y)[ROWS / 2], const char* v, const float* decay, int from, int to,
                              u32 (&x)[4][4]) const {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 words[4];
            load_transposed(words, shared_address(box_at(const_cast<char*>(v), n)));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = 2 * n + i / 2, t = 8 * j + lane % 4 * 2;
                const float2 a = *reinterpret_cast<const float2*>(decay + t);
                float pair[2];
                T::unpack(words[i], pair);
                const float* product = y + 8 * n + 2 * i;
                pair[0] = fmaf(-a.x, product[0], pair[0]);
                pair[1] = fmaf(-a.y, product[1], pair[1]);
                x[n][i] = T::pack(pair);
            }
        }
        if (from > 0 || to < ROWS) mask(from, to, x);
    }
    __device__ void mask(int from, int to, u32 (&x)[4][4]) const {
        const char* held = job.a.held_residuals + ((i64(job.s) * job.a.heads + job.head) * ROWS) * (2 * SIZE);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int t = 16 * n + i / 2 * 8 + lane % 4 * 2 + e;
                    const u32 keep = e ? 0x0000ffffu : 0xffff0000u;
                    if (t >= to) x[n][i] &= keep;
                    if (t < from)
                        x[n][i] = (x[n][i] & keep) |
                                  T::bits(held + (i64(t) * SIZE + column() + i % 2 * 8) * 2) << 16 * e;
                }
    }

    // Stores the output of a chunk, and gives its stage back.
    __device__ void finish(const Slot<STAGES>& at, int group, int chunk, const u32 (&o)[ROWS / 16][4]) const {
        const Args& a = job.a;
        const Sequence& sequence = job.sequence;
        char* box = job.ring + at.stage * STAGE + AT_V + group * BOX;
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n) store_matrices<true>(box_at(box, n), o[n]);
        __syncwarp();
        const int token = chunk * ROWS - sequence.opened;
        const i64 apart = i64(a.heads) * (2 * SIZE);
        char* out = a.out + (i64(sequence.batch) * a.places.tokens + sequence.first + token) * apart +
                    job.head * (2 * SIZE);
        store_rows(box, out, apart, max(-token, 0), min(sequence.count - token, ROWS));
        fence_copies();
        __syncwarp();
        if (lane == 0) job.shared.empty[at.stage].arrive();
    }

    // Writes what a cache holds of the last chunk, which has `used` rows; x goes over v.
    __device__ void hold_chunk(const char* stage, char* v, int used, const u32 (&x)[ROWS / 16][4]) const {
        const Args& a = job.a;
        const i64 item = i64(job.s) * a.heads + job.head;
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n) store_matrices<true>(box_at(v, n), x[n]);
        __syncwarp();
        store_rows(v, a.held_residuals + item * ROWS * (2 * SIZE), 2 * SIZE, 0, used);
        __syncwarp();
        if (part) return;
        const int thread = threadIdx.x % WARPGROUP;
        if (job.head % (a.heads / a.key_heads) == 0) {
            Chunk* keys = reinterpret_cast<Chunk*>(a.held_keys + (i64(job.s) * a.key_heads + job.key_head) * UNIT);
            for (int i = thread; i < UNIT / CHUNK; i += WARPGROUP) {
                const int t = i / LANES, chunk = i % LANES;
                keys[i] = *reinterpret_cast<const Chunk*>(stage + AT_K + chunk / 8 * BOX + chunk_at(t, chunk % 8));
            }
        }
        const float* sums = reinterpret_cast<const float*>(stage + AT_ITEM + AT_SUMS);
        if (thread < ROWS) a.held_sums[item * ROWS + thread] = sums[thread];
        const Chunk* tail = reinterpret_cast<const Chunk*>(a.tail + item * ROWS * ROWS);
        Chunk* inverse = reinterpret_cast<Chunk*>(a.held_inverse + item * ROWS * ROWS);
        for (int i = thread; i < ROWS * ROWS * 4 / CHUNK; i += WARPGROUP) inverse[i] = tail[i];
    }
};

// Issues the product of the state's rounded columns and the rows of a tile of k or q.
__device__ inline void issue_state(const u32 (&factor)[SIZE / 16][4], u64 rows, float (&d)[ROWS / 2]) {
    hold(d);
    fence_products();
#pragma unroll
    for (int step = 0; step < SIZE / 16; ++step) {
        const u64 right = advanced<K_MAJOR>(moved(rows, step / 4 * BOX), step % 4);
        if (step == 0)
            Products<ROWS>::add<T, K_MAJOR, false>(d, factor[step], right);
        else
            Products<ROWS>::add<T, K_MAJOR>(d, factor[step], right);
    }
    commit_products();
    hold(d);
}

__device__ inline void consume(const Job& job, int group) {
    const Args& a = job.a;
    Consumer c(job, job.part + group);
    const Sequence& sequence = job.sequence;
    const bool is_cached = a.places.lengths != nullptr;
    c.load_state();
    u32 factor[SIZE / 16][4];
    c.round_state(factor);
    u32 x[ROWS / 16][4], out[ROWS / 16][4];
    float y[ROWS / 2], o[ROWS / 2];
    Slot<STAGES> at, before;
    for (int chunk = 0; chunk < job.chunks; ++chunk, at.advance()) {
        char* stage = job.ring + at.stage * STAGE;
        char* v = stage + AT_V + group * BOX;
        const float* decay = reinterpret_cast<const float*>(stage + AT_ITEM + AT_DECAY);
        const int used = sequence.opened + sequence.count - chunk * ROWS;

        job.shared.full[at.stage].wait(at.parity);
        issue_state(factor, operand_at<K_MAJOR>(stage + AT_K), y);
        if (chunk > 0) {
            c.finish(before, group, chunk - 1, out);
            before.advance();
        }
        issue_state(factor, operand_at<K_MAJOR>(stage), o);
        products_done<1>();
        hold(y);
        c.residuals(y, v, decay, max(sequence.opened - chunk * ROWS, 0), min(used, ROWS), x);
        const float last = decay[ROWS - 1];
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) c.state[i] *= last;
        hold(c.state), keep(x);
        fence_products();
        const u64 weighed = operand_at<MN_MAJOR>(stage + AT_ITEM + AT_W);
#pragma unroll
        for (int step = 0; step < ROWS / 16; ++step)
            Products<SIZE>::add<T, MN_MAJOR>(c.state, x[step], advanced<MN_MAJOR>(weighed, step));
        commit_products();
        hold(c.state);

        products_done<1>();
        hold(o), keep(factor);
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) o[i] *= decay[i / 4 * 8 + c.lane % 4 * 2 + i % 2];
        hold(o);
        fence_products();
        const u64 mixed = operand_at<K_MAJOR>(stage + AT_ITEM);
#pragma unroll
        for (int step = 0; step < ROWS / 16; ++step)
            Products<ROWS>::add<T, K_MAJOR>(o, x[step], advanced<K_MAJOR>(mixed, step));
        commit_products();
        hold(o);
        if (is_cached && used <= ROWS) c.hold_chunk(stage, v, used, x);
        products_done<1>();
        hold(c.state);
        c.round_state(factor);
        products_done<0>();
        hold(o), keep(x);
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const float pair[2] = {o[2 * i] * a.scale, o[2 * i + 1] * a.scale};
            out[i / 4][i % 4] = T::pack(pair);
        }
        // A cache's open chunk is not part of its state.
        if (is_cached && used >= ROWS && used < 2 * ROWS) c.store_state();
    }
    if (job.chunks) c.finish(before, group, job.chunks - 1, out);
    if (a.state != nullptr && !is_cached) c.store_state();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan(const __grid_constant__ TensorMap v_map,
                                                              const Args a) {
    extern __shared__ char dynamic[];
    __shared__ Shared shared;
    char* ring = dynamic + (0u - shared_address(dynamic)) % 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) shared.full[i].init(1), shared.empty[i].init(PARTS * WARPS);
        fence_init();
    }
    __syncthreads();
    const int s = blockIdx.x, head = blockIdx.y;
    const Sequence sequence = sequence_at(a.places, s);
    const Job job{a, shared, ring, sequence, s, head, head / (a.heads / a.key_heads), static_cast<int>(blockIdx.z) * PARTS,
                  sequence.chunks()};
    const int warp = warp_index();
    if (warp < PARTS * WARPS) {
        if constexpr (PARTS > 1) take_registers<240>();
        consume(job, warp / WARPS);
    } else {
        if constexpr (PARTS > 1) give_registers<24>();
        if (warp == PARTS * WARPS && elected()) produce(job, v_map);
    }
}
