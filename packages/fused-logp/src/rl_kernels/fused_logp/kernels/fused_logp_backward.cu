// The gradient of fused_logp on every architecture from sm_80: a row is read and written once, element by element.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY 0 or 1: whether an upstream gradient of the entropy is there.
#include "fused_logp.cuh"

using namespace rlk;

// A missing upstream gradient is null and counts as 0.
struct Backward : Rows {
    const char* logits;
    char* out;
    const float* lse;
    const float* entropy;
    const float* grad_logp;
    const float* grad_lse;
    const float* grad_entropy;
    i64 row_stride, column_stride, out_row_stride, out_column_stride;
    int vocab, chunks;
};

namespace {

constexpr int UNROLLED = 2, THREADS = 512, PER_THREAD = 32;

// dx_j = g_logp (1[j is selected] - p_j) + g_lse p_j - g_H p_j (z_j - lse + H), all over the temperature.
struct Gradient {
    i64 id;
    float inv, lse, entropy, chosen, slope, curve, rest;

    __device__ Gradient(const Backward& p, i64 row) {
        id = p.ids[row];
        inv = p.inverse(row);
        lse = p.lse[row];
        entropy = ENTROPY ? p.entropy[row] : 0.0f;
        const float g = p.grad_logp ? p.grad_logp[row] : 0.0f, g_lse = p.grad_lse ? p.grad_lse[row] : 0.0f;
        chosen = __fmul_rn(g, inv);
        slope = __fmul_rn(__fsub_rn(g_lse, g), inv);
        curve = ENTROPY ? __fmul_rn(p.grad_entropy[row], inv) : 0.0f;
        // An id that is no column has no gradient.
        rest = id >= 0 && id < p.vocab ? 0.0f : not_a_number();
    }
    __device__ float at(float x, int column) const {
        const float d = __fmaf_rn(x, inv, -lse), power = exp2_fast(__fmul_rn(d, LOG2E));
        const bool selected = column == id;
        if (!ENTROPY) return __fmaf_rn(power, __fadd_rn(slope, rest), selected ? chosen : 0.0f);
        // Where the probability is 0 its factor may be infinite.
        const float target = selected ? chosen : rest;
        if (power == 0.0f) return target;
        return __fmaf_rn(power, __fmaf_rn(__fadd_rn(d, entropy), -curve, slope), target);
    }
};

// `value(x, column)` of each column from first to last; where `reads` is false, x is not read.
template <class Value>
__device__ void stream(const char* from, i64 from_stride, char* to, i64 to_stride, int first, int last, bool reads,
                       Value value) {
    constexpr int SIZE = Number::SIZE, PER = PER_CHUNK<Number>;
    const int thread = threadIdx.x, threads = blockDim.x;
    const auto narrow = [&](int begin, int end) {
        for (int column = begin + thread; column < end; column += threads) {
            const float x = reads ? Number::read(from + column * from_stride) : 0.0f;
            Number::write(to + column * to_stride, value(x, column));
        }
    };
    const u64 skew = reinterpret_cast<u64>(to + first * static_cast<i64>(SIZE)) % CHUNK;
    const bool alike = (reinterpret_cast<u64>(to) ^ reinterpret_cast<u64>(from)) % CHUNK == 0;
    if (from_stride != SIZE || to_stride != SIZE || !alike) return narrow(first, last);
    const int head = first + min(static_cast<int>((CHUNK - skew) % CHUNK) / SIZE, last - first);
    const int vectors = (last - head) / PER;
    narrow(first, head);
    const char* source = from + head * static_cast<i64>(SIZE);
    char* target = to + head * static_cast<i64>(SIZE);
    for (int v = thread; v < vectors; v += UNROLLED * threads) {
        Chunk held[UNROLLED];
#pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const int k = v + u * threads;
            if (reads && k < vectors) held[u] = load_once(reinterpret_cast<const Chunk*>(source) + k);
        }
#pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const int k = v + u * threads, column = head + k * PER;
            if (k >= vectors) break;
            Chunk made;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float x[2] = {};
                if (reads) Number::unpack(held[u].word[w], x);
#pragma unroll
                for (int j = 0; j < PER_WORD<Number>; ++j) x[j] = value(x[j], column + w * PER_WORD<Number> + j);
                made.word[w] = Number::pack(x);
            }
            store_once(reinterpret_cast<Chunk*>(target) + k, made);
        }
    }
    narrow(head + vectors * PER, last);
}

}  // namespace

// One block a chunk of a row. The gradient of a row that is not active is 0. As many threads as a multiprocessor has room
// for read and write faster than fewer with more under way each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) backward(Backward p) {
    const i64 row = blockIdx.x / p.chunks;
    const int width = blockDim.x * PER_THREAD, first = blockIdx.x % p.chunks * width;
    const int last = first + min(width, p.vocab - first);
    const char* from = p.logits + row * p.row_stride;
    char* to = p.out + row * p.out_row_stride;
    if (!p.active(row)) {
        stream(from, p.column_stride, to, p.out_column_stride, first, last, false, [](float, int) { return 0.0f; });
        return;
    }
    const Gradient gradient(p, row);
    stream(from, p.column_stride, to, p.out_column_stride, first, last, true,
           [&](float x, int column) { return gradient.at(x, column); });
}
