// The pass over the chunks of a sequence (sm_90a). A consumer warpgroup holds 64 value columns of the state of one
// head, S^T [64 x 128], as FP32 accumulators. All products are transposed, so what depends on the state stays in
// registers: accumulators of one product, rounded, are the left operand of the next (wgmma.cuh). For each chunk, with
// rows t, s:
//
//   Y^T = round(S)^T k^T    x^T = round(v^T - exp(G_t) Y^T)    S^T = exp(G_63) S^T + x^T W         the chain of chunks
//   R^T = round(S)^T q^T    o^T = scale (exp(G_t) R^T + x^T M^T)                                  beside it
//
// Blocks and stages: columns.cuh.
//
// Order of the sums: 16 terms a step, ascending, on top of exp(G_t) R and exp(G_63) S.
#include "columns.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

// A stage: q, k, v of each part, then the item.
constexpr int AT_K = UNIT, AT_V = UNITS, AT_ITEM = AT_V + PARTS * BOX, STAGE = whole(AT_ITEM + ITEM);

// initial, state: [sequences, Hv, 128, 128]; either may be null.
struct Args : Places {
    const char *units, *items;
    const float *tail, *initial;
    float* state;
    char *out, *held_keys, *held_residuals;
    float *held_sums, *held_inverse;
    int key_heads, heads;
    float scale;
    int padding;
};

// Writes what a cache holds of the last chunk, but for x; by all threads of a consumer.
__device__ inline void hold_chunk(const Args& a, const Job& job, const char* stage) {
    const int thread = threadIdx.x % WARPGROUP;
    const i64 item = job.sequence_item();
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

// Stores the output of a chunk, and gives its stage back.
__device__ inline void finish(const Args& a, const Job& job, const Columns& c, int chunk, int stage, int group,
                              const Rows& out) {
    Chunk rows[4];
    c.transpose(job.stages + stage * STAGE + AT_V + group * BOX, out, rows);
    c.give_back(job.ring.empty[stage]);
    const int token = job.token(chunk);
    const i64 apart = i64(a.heads) * (2 * SIZE);
    const i64 row = i64(job.sequence.batch) * a.tokens + job.sequence.first + token;
    const int end = min(job.sequence.count - token, ROWS);
    c.store(rows, a.out + row * apart + job.head * (2 * SIZE), apart, max(-token, 0), end);
}

__device__ inline void consume(const Args& a, const Job& job, int group) {
    Columns c(job.part + group);
    const bool is_cached = a.lengths != nullptr;
    const i64 item = job.sequence_item();
    char* held = a.held_residuals + item * ROWS * (2 * SIZE);
    c.load(a.initial, item);
    Factor factor;
    c.round<T>(factor);
    Rows x, out;
    float y[ROWS / 2], o[ROWS / 2];
    Slot<STAGES> at, before;
    for (int chunk = 0; chunk < job.chunks; ++chunk, at.advance()) {
        char* stage = job.stages + at.stage * STAGE;
        char* v = stage + AT_V + group * BOX;
        const float* decay = reinterpret_cast<const float*>(stage + AT_ITEM + AT_DECAY);
        const int used = job.sequence.count - job.token(chunk);

        job.ring.full[at.stage].wait(at.parity);
        issue_words_rows<T, ROWS, false>(factor, stage + AT_K, y);
        issue_words_rows<T, ROWS, false>(factor, stage, o);
        if (chunk > 0) {
            finish(a, job, c, chunk - 1, before.stage, group, out);
            before.advance();
        }
        products_done<1>();
        hold(y);
        subtract<T>(c, y, v, decay, held, max(-job.token(chunk), 0), min(used, ROWS), x);
        c.scale(decay[ROWS - 1]);
        keep(x);
        issue_words<T, SIZE>(x, stage + AT_ITEM + AT_W, c.state);

        products_done<1>();
        hold(o), keep(factor);
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) o[i] *= decay[i / 4 * 8 + c.lane % 4 * 2 + i % 2];
        issue_words_rows<T, ROWS, true>(x, stage + AT_ITEM, o);
        if (is_cached && used <= ROWS) {
            Chunk rows[4];
            c.transpose(v, x, rows);
            c.store(rows, held, 2 * SIZE, 0, used);
            if (c.part == 0) hold_chunk(a, job, stage);
        }
        products_done<1>();
        hold(c.state);
        c.round<T>(factor);
        products_done<0>();
        hold(o), keep(x);
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const float pair[2] = {o[2 * i] * a.scale, o[2 * i + 1] * a.scale};
            out[i / 4][i % 4] = T::pack(pair);
        }
        // A cache's open chunk is not part of its state.
        if (is_cached && used >= ROWS && used < 2 * ROWS) c.store(a.state, item);
    }
    if (job.chunks) finish(a, job, c, job.chunks - 1, before.stage, group, out);
    if (a.state != nullptr && !is_cached) c.store(a.state, item);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan(const __grid_constant__ TensorMap v_map, const Args a) {
    extern __shared__ char memory[];
    __shared__ Ring ring;
    ring.init();
    const Job job(ring, memory, a, a.heads, a.key_heads);
    const int warp = warp_index();
    if (warp < PARTS * WARPS) {
        if constexpr (PARTS > 1) take_registers<240>();
        consume(a, job, warp / WARPS);
    } else {
        if constexpr (PARTS > 1) give_registers<24>();
        if (warp == PARTS * WARPS && elected())
            produce<STAGE, UNITS + PARTS * BOX + ITEM>(job, [&](int chunk, char* stage, Barrier& full) {
                load_bytes(stage, a.units + job.key_item(chunk) * UNITS, UNITS, full);
                job.load_rows(stage + AT_V, v_map, chunk, full);
                load_bytes(stage + AT_ITEM, a.items + job.item(chunk) * ITEM, ITEM, full);
            });
    }
}
