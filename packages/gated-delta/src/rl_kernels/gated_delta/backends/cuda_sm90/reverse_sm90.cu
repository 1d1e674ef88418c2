// The pass over the chunks of a sequence in descending order (sm_90a), for gradients. A consumer warpgroup holds 64
// value columns of the gradient dS' of the next state, transposed, as FP32 accumulators. For each chunk, with
// dO' = scale dO and a_t = exp(G_t):
//
//   dX^T = round(dS')^T W^T + round(dO')^T M     dS^T = a_63 dS'^T + round(a dO')^T q + round(-a dX)^T k
//
// It stores round(dS'), dX as the gradient of v, and sums of the rounded state times round(dS'), one for each warp and
// its 16 columns. Blocks and stages: columns.cuh, with dO for v.
//
// Order of the sums: 16 terms a step, ascending, in the order of the terms above.
#include "columns.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

// last, initial: [sequences, Hv, 128, 128], gradients of the last and of the initial states; either may be null. dv:
// [B, T, Hv, 128]; states, dstates: [slots, Hv, 128, 128]; kept: [slots, Hv, 8].
struct Args : Places {
    const char *units, *items, *states;
    const float* last;
    float* initial;
    char *dv, *dstates;
    float* kept;
    int key_heads, heads;
    float scale;
    int padding;
};

// Reads dO' and a dO', rounded; rows from `to` on are zeros.
__device__ inline void read_gradient(const Columns& c, char* box, const float* decay, float scale, int to, Rows& rows,
                                     Rows& decayed) {
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n) {
        u32 words[4];
        load_transposed(words, shared_address(c.box_at(box, n)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = c.row_of(n, i);
            const float2 a = *reinterpret_cast<const float2*>(decay + t);
            float pair[2];
            T::unpack(words[i], pair);
            pair[0] = t < to ? pair[0] * scale : 0.0f;
            pair[1] = t + 1 < to ? pair[1] * scale : 0.0f;
            rows[n][i] = T::pack(pair);
            pair[0] *= a.x, pair[1] *= a.y;
            decayed[n][i] = T::pack(pair);
        }
    }
}

// The sum of products of all numbers of two tiles of this warp.
__device__ inline float dot(const Chunk (&x)[8], const Chunk (&y)[8]) {
    float total[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float a[2], b[2];
            T::unpack(x[i].word[n], a);
            T::unpack(y[i].word[n], b);
            total[0] = fmaf(a[0], b[0], total[0]);
            total[1] = fmaf(a[1], b[1], total[1]);
        }
    float sum = total[0] + total[1];
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) sum += __shfl_xor_sync(ALL, sum, apart);
    return sum;
}

__device__ inline void consume(const Args& a, const Job& job, int group) {
    Columns c(job.part + group);
    c.load(a.last, job.sequence_item());
    Factor factor;
    c.round<T>(factor);
    Rows rows, decayed, x, y;
    float dx[ROWS / 2];
    const i64 apart = i64(a.heads) * (2 * SIZE);
    Slot<STAGES> at;
    for (int chunk = job.chunks - 1; chunk >= 0; --chunk, at.advance()) {
        char* stage = job.stages + at.stage * STAGE;
        char* box = stage + AT_V + group * BOX;
        const float* decay = reinterpret_cast<const float*>(stage + AT_ITEM + AT_DECAY);
        const int token = job.token(chunk), to = min(job.sequence.count - token, ROWS);

        job.ring.full[at.stage].wait(at.parity);
        c.scale(decay[ROWS - 1]);
        hold(dx);
        fence_products();
        issue<T, K_MAJOR, ROWS, false>(dx, factor, stage + AT_ITEM + AT_W);
        commit_products();
        hold(dx);
        read_gradient(c, box, decay, a.scale, to, rows, decayed);
        keep(rows), keep(decayed);
        hold(c.state);
        fence_products();
        issue<T, MN_MAJOR, ROWS, true>(dx, rows, stage + AT_ITEM);
        commit_products();
        issue<T, MN_MAJOR, SIZE, true>(c.state, decayed, stage);
        commit_products();
        hold(c.state);
        products_done<1>();
        hold(dx), keep(factor), keep(rows);
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 b = *reinterpret_cast<const float2*>(decay + c.row_of(n, i));
                const float* pair = dx + 8 * n + 2 * i;
                const float product[2] = {-b.x * pair[0], -b.y * pair[1]};
                x[n][i] = T::pack(pair);
                y[n][i] = T::pack(product);
            }
        keep(y);
        hold(c.state);
        fence_products();
        issue<T, MN_MAJOR, SIZE, true>(c.state, y, stage + AT_K);
        commit_products();
        hold(c.state);

        Chunk state[8], dstate[8], values[4];
        const i64 item = job.item(chunk);
        c.read(state, a.states + item * (2 * SIZE * SIZE));
        c.transpose(box, factor, dstate);
        c.transpose(box, factor + ROWS / 16, dstate + 4);
        c.transpose(box, x, values);
        const float kept = dot(state, dstate);
        products_done<0>();
        hold(c.state), keep(y), keep(decayed);
        if (c.lane == 0) a.kept[item * 8 + c.part * WARPS + c.warp] = kept;
        c.store(dstate, a.dstates + item * (2 * SIZE * SIZE));
        c.store(dstate + 4, a.dstates + item * (2 * SIZE * SIZE) + 2 * SIZE * ROWS);
        const i64 row = i64(job.sequence.batch) * a.tokens + job.sequence.first + token;
        c.store(values, a.dv + row * apart + job.head * (2 * SIZE), apart, 0, to);
        c.give_back(job.ring.empty[at.stage], to == ROWS);
        c.round<T>(factor);
    }
    if (a.initial != nullptr) c.store(a.initial, job.sequence_item());
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reverse(const __grid_constant__ TensorMap grad_map, const Args a) {
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
        if (warp == PARTS * WARPS && elected()) produce<true>(job, grad_map, a.units, a.items);
    }
}
