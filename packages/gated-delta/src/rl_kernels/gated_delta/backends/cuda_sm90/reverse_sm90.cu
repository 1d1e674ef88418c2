// The pass over the chunks of a sequence in descending order, for their gradients (sm_90a). A consumer warpgroup holds 64
// value columns of the gradient of the state of one head, dS^T [64 x 128], as FP32 accumulators; products are transposed
// as in scan_sm90.cu. For each chunk, with dS' the gradient of the state after it, do that of the output, rows t:
//
//   Y^T = round(dS')^T W^T      Z^T = do^T M      dx^T = Y^T + scale Z^T                    one fused multiply-add
//   dS^T = exp(G_63) dS'^T + (scale exp(G_t) do)^T q - round(exp(G_t) dx)^T k
//
// dx, rounded, is the gradient of v. scale exp(G_t) do is two factors: itself rounded, then what that took, rounded.
// Also written are round(dS'), and for each warp, which has 16 value columns, the sum of round(S) round(dS') with S the
// state at the start of the chunk. TMA copies round(S) to the stage, and round(dS') from its place.
//
// Order of the sums: 16 terms a step, ascending, dS on top of exp(G_63) dS', first q with either factor, then k. Of S dS'
// a thread adds its numbers (n, i, e) for each i, then these four in pairs; then lanes 16, 8, 4, 2 and 1 apart.
#include "columns.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

// A stage: q, k, do of each part, the item, then S of each part.
constexpr int AT_K = UNIT, AT_GRAD = UNITS, AT_ITEM = AT_GRAD + PARTS * BOX, AT_STATE = whole(AT_ITEM + ITEM);
constexpr int STAGE = AT_STATE + PARTS * UNIT, BYTES = UNITS + PARTS * BOX + ITEM + PARTS * UNIT;

// grad_state, initial: gradients of the states after the last chunk and before the first, [sequences, Hv, 128, 128];
// either may be null. kept: [slots, Hv, 8]. dv: [B, T, Hv, 128].
struct Args : Places {
    const char *units, *items;
    const float* grad_state;
    float *initial, *kept;
    char* dv;
    int key_heads, heads;
    float scale;
    int padding;
};

// Rows of do; rows from `to` on are zeros.
__device__ inline void load_grad(const Columns& c, char* box, int to, Rows& grad) {
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n) {
        load_transposed(grad[n], shared_address(c.box_at(box, n)));
        if (to < ROWS)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = c.row_of(n, i);
                grad[n][i] &= t + 1 < to ? ALL : t < to ? 0x0000ffffu : 0u;
            }
    }
}

// Rows times scale exp(G_t): rounded, and what rounding takes from it.
__device__ inline void decayed(const Columns& c, const Rows& rows, const float* decay, float scale, Rows& out,
                               Rows& rest) {
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = *reinterpret_cast<const float2*>(decay + c.row_of(n, i));
            float pair[2], near[2];
            T::unpack(rows[n][i], pair);
            pair[0] *= a.x * scale, pair[1] *= a.y * scale;
            out[n][i] = T::pack(pair);
            T::unpack(out[n][i], near);
            pair[0] -= near[0], pair[1] -= near[1];
            rest[n][i] = T::pack(pair);
        }
}

// The sum of this warp's columns of S in two boxes times those of dS'.
__device__ inline float times_state(const Columns& c, char* boxes, const Factor& factor) {
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < SIZE / 16; ++n) {
        u32 words[4];
        load_transposed(words, shared_address(c.box_at(boxes + n / 4 * BOX, n % 4)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float s[2], d[2];
            T::unpack(words[i], s), T::unpack(factor[n][i], d);
            sum[i] = fmaf(s[1], d[1], fmaf(s[0], d[0], sum[i]));
        }
    }
    float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) total += __shfl_xor_sync(ALL, total, apart);
    return total;
}

__device__ inline void consume(const Args& a, const TensorMap& dstates, const Job& job, int group) {
    Columns c(job.part + group);
    const bool stores = threadIdx.x % WARPGROUP == 0;
    c.load(a.grad_state, job.sequence_item());
    Factor factor;
    c.round<T>(factor);
    Slot<STAGES> at;
    for (int chunk = job.chunks - 1; chunk >= 0; --chunk, at.advance()) {
        char *stage = job.stages + at.stage * STAGE, *state = stage + AT_STATE + group * UNIT;
        char* box = stage + AT_GRAD + group * BOX;
        const float* decay = reinterpret_cast<const float*>(stage + AT_ITEM + AT_DECAY);
        const int used = min(job.sequence.count - job.token(chunk), ROWS);
        const i64 item = job.item(chunk);

        job.ring.full[at.stage].wait(at.parity);
        float y[ROWS / 2], z[ROWS / 2] = {};
        issue_words_rows<T, ROWS, false>(factor, stage + AT_ITEM + AT_W, y);
        Rows grad, left, rest, x;
        load_grad(c, box, used, grad);
        keep(grad);
        issue_words<T, ROWS>(grad, stage + AT_ITEM, z);
        decayed(c, grad, decay, a.scale, left, rest);
        c.scale(decay[ROWS - 1]);
        keep(left), keep(rest);
        issue_words<T, SIZE>(left, stage, c.state);
        issue_words<T, SIZE>(rest, stage, c.state);

        const float kept = times_state(c, state, factor);
        c.put(state, factor);
        // Not later: the barrier comes between these reads and the stage's release.
        float2 decays[ROWS / 16][2];
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            decays[n / 2][n % 2] = *reinterpret_cast<const float2*>(decay + c.row_of(n / 2, n % 2 * 2));
        fence_copies();
        sync_threads(1 + group, WARPGROUP);
        if (stores) {
            store_box(dstates, static_cast<int>(item) * SIZE, c.part * WIDTH, state);
            store_box(dstates, static_cast<int>(item) * SIZE + ROWS, c.part * WIDTH, state + BOX);
            commit_stores();
        }
        products_done<2>();
        hold(y), hold(z), keep(factor), keep(grad);
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const float pair[2] = {fmaf(a.scale, z[2 * i], y[2 * i]), fmaf(a.scale, z[2 * i + 1], y[2 * i + 1])};
            const float2 d = decays[i / 4][i % 4 / 2];
            const float of_state[2] = {-d.x * pair[0], -d.y * pair[1]};
            x[i / 4][i % 4] = T::pack(pair), grad[i / 4][i % 4] = T::pack(of_state);
        }
        keep(grad);
        issue_words<T, SIZE>(grad, stage + AT_K, c.state);

        Chunk rows[4];
        c.transpose(box, x, rows);
        // Here and not later: it waits, as the products do.
        fence_copies();
        products_done<0>();
        hold(c.state), keep(left), keep(rest), keep(grad);
        if (stores) stores_read<0>();
        c.arrive(job.ring.empty[at.stage]);
        c.round<T>(factor);
        const i64 apart = i64(a.heads) * (2 * SIZE);
        const i64 row = i64(job.sequence.batch) * a.tokens + job.sequence.first + job.token(chunk);
        c.store(rows, a.dv + row * apart + job.head * (2 * SIZE), apart, 0, used);
        if (c.lane == 0) a.kept[item * (SIZE / 16) + c.part * WARPS + c.warp] = kept;
    }
    if (a.initial != nullptr) c.store(a.initial, job.sequence_item());
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reverse(const __grid_constant__ TensorMap grad_map, const __grid_constant__ TensorMap states_map,
            const __grid_constant__ TensorMap dstates_map, const Args a) {
    extern __shared__ char memory[];
    __shared__ Ring ring;
    ring.init();
    const Job job(ring, memory, a, a.heads, a.key_heads);
    const int warp = warp_index();
    if (warp < PARTS * WARPS) {
        if constexpr (PARTS > 1) take_registers<240>();
        consume(a, dstates_map, job, warp / WARPS);
    } else {
        if constexpr (PARTS > 1) give_registers<24>();
        if (warp == PARTS * WARPS && elected())
            produce<STAGE, BYTES>(job, [&](int i, char* stage, Barrier& full) {
                const int chunk = job.chunks - 1 - i, state = static_cast<int>(job.item(chunk)) * SIZE;
                load_bytes(stage, a.units + job.key_item(chunk) * UNITS, UNITS, full);
                job.load_rows(stage + AT_GRAD, grad_map, chunk, full);
                load_bytes(stage + AT_ITEM, a.items + job.item(chunk) * ITEM, ITEM, full);
                for (int n = 0; n < 2 * PARTS; ++n)
                    load_box(stage + AT_STATE + n * BOX, states_map, state + n % 2 * ROWS,
                             (job.part + n / 2) * WIDTH, full);
            });
    }
}
