// The gradient of fused_logp on every architecture from sm_80: a row is read once and written once, element by element
// (Gradient in softmax.cuh). There are no sums.
//
//   block    a chunk of one row: 32 columns per thread, 512 threads at most
//   thread   16-byte chunks thread, thread + threads, ... of it, two in flight; single columns at unaligned ends, or
//            everywhere if columns are not contiguous or input and output are aligned differently
//
// With thresholds `find_kept` runs first, a thread for each row; chunks of which nothing counts are 0 without a power.
//
// Defines: DTYPE 0 FP32, 1 BF16, 2 FP16; ENTROPY 0 or 1: whether there is an upstream gradient of the entropy;
// MIN_LOGIT 0 or 1.
#include "fused_logp.cuh"

using namespace rlk;

// Of a row: the smallest raw value that counts, -inf in a row that is NaN as a whole, because it has no distribution or
// its id is no column; and the upstream gradient of logp, 0 if the target does not count.
struct Kept {
    float least, grad_logp;
};

// A missing upstream gradient is null and counts as 0.
struct Backward : Rows {
    const char* logits;
    char* out;
    const Norm* norm;
    const float* entropy;
    const float* grad_logp;
    const float* grad_lse;
    const float* grad_entropy;
    i64 row_stride, column_stride, out_row_stride, out_column_stride;
    int vocab, chunks;
#if MIN_LOGIT
    Kept* kept;
    i64 rows;
#endif

#if MIN_LOGIT
    __device__ float upstream(i64 row) const { return kept[row].grad_logp; }
#else
    __device__ float upstream(i64 row) const { return grad_logp ? grad_logp[row] : 0.0f; }
#endif
    __device__ bool valid(i64 id) const { return id >= 0 && id < vocab; }
};

namespace {

constexpr int UNROLLED = 2, THREADS = 512, PER_THREAD = 32;

__device__ Gradient<ENTROPY> gradient_of(const Backward& p, i64 row, i64 id) {
    const auto or_0 = [&](const float* values) { return values ? values[row] : 0.0f; };
    const float entropy = ENTROPY ? p.entropy[row] : 0.0f, g_entropy = ENTROPY ? p.grad_entropy[row] : 0.0f;
    return {p.inverse(row), p.norm[row], entropy, p.upstream(row), or_0(p.grad_lse), g_entropy, p.valid(id)};
}

// Writes value(x, column) for columns first to last - 1, which is 0 for what is not `counted`; if `reads` is false, x is
// 0 and not read.
template <class Counted, class Value>
__device__ void stream(const char* from, i64 from_stride, char* to, i64 to_stride, int first, int last, bool reads,
                       Counted counted, Value value) {
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
        Chunk loaded[UNROLLED];
#pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const int k = v + u * threads;
            if (reads && k < vectors) loaded[u] = load_once(reinterpret_cast<const Chunk*>(source) + k);
        }
#pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const int k = v + u * threads, column = head + k * PER;
            if (k >= vectors) break;
            Chunk gradients = {};
            const u32(&words)[4] = loaded[u].word;
            const auto larger = Counted::template larger<Number>;
            const u32 most = larger(larger(words[0], words[1]), larger(words[2], words[3]));
            const bool none = reads && counted.template none_of<Number>(most);
#pragma unroll
            for (int w = 0; w < 4 && !none; ++w) {
                float x[2] = {};
                if (reads) Number::unpack(loaded[u].word[w], x);
#pragma unroll
                for (int j = 0; j < PER_WORD<Number>; ++j) x[j] = value(x[j], column + w * PER_WORD<Number> + j);
                gradients.word[w] = Number::pack(x);
            }
            store_once(reinterpret_cast<Chunk*>(target) + k, gradients);
        }
    }
    narrow(head + vectors * PER, last);
}

}  // namespace

// One block per chunk of a row. The gradient of a row that is not active is 0. Launch bounds ask for full occupancy,
// which is faster than fewer threads with more loads in flight each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) backward(Backward p) {
    const i64 row = blockIdx.x / p.chunks;
    const int width = blockDim.x * PER_THREAD, first = blockIdx.x % p.chunks * width;
    const int last = first + min(width, p.vocab - first);
    const char* from = p.logits + row * p.row_stride;
    char* to = p.out + row * p.out_row_stride;
    if (!p.active(row)) {
        stream(from, p.column_stride, to, p.out_column_stride, first, last, false, Every(),
               [](float, int) { return 0.0f; });
        return;
    }
#if MIN_LOGIT
    // Logits come while the numbers of the row do.
    const char* line = from + first * p.column_stride + static_cast<int>(threadIdx.x) * LINE;
    if (p.column_stride == Number::SIZE && line < from + last * p.column_stride) read_ahead(line);
    const NotBelow counted = {p.kept[row].least};
#else
    const Every counted;
#endif
    const i64 id = p.ids[row];
    const auto gradient = gradient_of(p, row, id);
    stream(from, p.column_stride, to, p.out_column_stride, first, last, true, counted,
           [&](float x, int column) { return gradient.at(x, column == id, counted); });
}

#if MIN_LOGIT

extern "C" __global__ void __launch_bounds__(WARPS* WARP) find_kept(Backward p) {
    const i64 row = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= p.rows || !p.active(row)) return;
    const i64 id = p.ids[row];
    const float least = p.counted(row).least, log_total = p.norm[row].log_total;
    const float grad_logp = p.grad_logp ? p.grad_logp[row] : 0.0f;
    if (!p.valid(id) || isnan(log_total)) {
        p.kept[row] = {-infinity(), grad_logp};
    } else {
        const float x = Number::read(p.logits + row * p.row_stride + id * p.column_stride);
        p.kept[row] = {least, x < least ? 0.0f : grad_logp};
    }
}

#endif
