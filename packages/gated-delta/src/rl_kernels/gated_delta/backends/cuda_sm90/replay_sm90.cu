// The pass over the chunks of a sequence that comes before the one of their gradients (sm_90a): the chain of chunks of
// scan_sm90.cu with its order of sums, which writes the rounded state at the start of each chunk, and the residuals x.
// TMA stores both from boxes beside the ring, while the next product runs.
#include "columns.cuh"

using namespace rlk;

#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif

// A stage: k, v of each part, then the item from W on.
constexpr int TAIL = ITEM - AT_W, AT_V = UNIT, AT_TAIL = AT_V + PARTS * BOX, STAGE = whole(AT_TAIL + TAIL);
// Boxes of a part: its columns of a state, then of x.
constexpr int AT_X = UNIT, BOXES = AT_X + BOX;

// initial: [sequences, Hv, 128, 128]; may be null.
struct Args : Places {
    const char *units, *items;
    const float* initial;
    int key_heads, heads;
};

__device__ inline void consume(const Args& a, const TensorMap& states, const TensorMap& residuals, const Job& job,
                               int group) {
    Columns c(job.part + group);
    char* boxes = job.stages + STAGES * STAGE + group * BOXES;
    const bool stores = threadIdx.x % WARPGROUP == 0;
    c.load(a.initial, job.sequence_item());
    Factor factor;
    c.round<T>(factor);
    Rows x;
    float y[ROWS / 2];
    Slot<STAGES> at;
    for (int chunk = 0; chunk < job.chunks; ++chunk, at.advance()) {
        char* stage = job.stages + at.stage * STAGE;
        const float* decay = reinterpret_cast<const float*>(stage + AT_TAIL + AT_DECAY - AT_W);
        const int used = job.sequence.count - job.token(chunk), item = static_cast<int>(job.item(chunk));

        job.ring.full[at.stage].wait(at.parity);
        issue_words_rows<T, ROWS, false>(factor, stage, y);
        if (stores) stores_read<0>();
        sync_threads(1 + group, WARPGROUP);
        c.put(boxes, factor);
        products_done<0>();
        hold(y), keep(factor);
        subtract<T>(c, y, stage + AT_V + group * BOX, decay, nullptr, 0, min(used, ROWS), x);
        c.scale(decay[ROWS - 1]);
        keep(x);
        issue_words<T, SIZE>(x, stage + AT_TAIL, c.state);
        c.put(boxes + AT_X, x);
        fence_copies();
        sync_threads(1 + group, WARPGROUP);
        if (stores) {
            store_box(states, item * SIZE, c.part * WIDTH, boxes);
            store_box(states, item * SIZE + ROWS, c.part * WIDTH, boxes + BOX);
            store_box(residuals, item * ROWS, c.part * WIDTH, boxes + AT_X);
            commit_stores();
        }
        products_done<0>();
        hold(c.state), keep(x);
        c.give_back(job.ring.empty[at.stage]);
        c.round<T>(factor);
    }
    if (stores) stores_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    replay(const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap states_map,
           const __grid_constant__ TensorMap residuals_map, const Args a) {
    extern __shared__ char memory[];
    __shared__ Ring ring;
    ring.init();
    const Job job(ring, memory, a, a.heads, a.key_heads);
    const int warp = warp_index();
    if (warp < PARTS * WARPS) {
        if constexpr (PARTS > 1) take_registers<240>();
        consume(a, states_map, residuals_map, job, warp / WARPS);
    } else {
        if constexpr (PARTS > 1) give_registers<24>();
        if (warp == PARTS * WARPS && elected())
            produce<STAGE, UNIT + PARTS * BOX + TAIL>(job, [&](int chunk, char* stage, Barrier& full) {
                load_bytes(stage, a.units + job.key_item(chunk) * UNITS + UNIT, UNIT, full);
                job.load_rows(stage + AT_V, v_map, chunk, full);
                load_bytes(stage + AT_TAIL, a.items + job.item(chunk) * ITEM + AT_W, TAIL, full);
            });
    }
}
