// Columns of a row, eight at a time in wide loads, wherever in memory the row begins: which lane gets which column
// follows the column alone, so no sum follows an address.
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

constexpr int COLUMNS = 8;
// Words and chunks that eight numbers fill.
template <class T>
constexpr int WORDS = COLUMNS / PER_WORD<T>;
template <class T>
constexpr int CHUNKS = WORDS<T> / 4;

// Bytes from a vector of a lane to its next one.
template <class T>
constexpr int APART = WARP * COLUMNS * T::SIZE;

template <class T>
struct Row {
    const char* begin;
    int size;    // columns
    i64 stride;  // bytes from a column to the next; wide loads need T::SIZE

    __device__ const char* at(int column) const { return begin + column * stride; }

    __device__ bool contiguous() const { return stride == T::SIZE; }

    // How far, in bytes, every vector of eight lies beyond a multiple of 16.
    __device__ int skew() const { return contiguous() ? static_cast<int>(reinterpret_cast<u64>(begin) % CHUNK) : 0; }

    // The multiple of 16 at a column, a multiple of eight, or before it.
    __device__ const char* floor_at(int column) const { return at(column) - skew(); }
};

// N vectors of eight columns a lane, 32 lanes in a row and vectors of all lanes in a row, as words; `load` brings a lane's
// chunks by their offset in bytes. The whole warp must call it.
template <class T, int N, class Load>
__device__ inline void read_aligned(Load load, u32* words) {
#pragma unroll
    for (int i = 0; i < N * CHUNKS<T>; ++i) {
        const Chunk c = load(i / CHUNKS<T> * APART<T> + i % CHUNKS<T> * CHUNK);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[4 * i + k] = c.word[k];
    }
}

// The same where the first word of a lane's vector is number WORD of its first chunk, and `bits` of that belong to the
// column before. What a vector has in the next chunk is loaded twice, where that is cheap, or else comes from the next
// lane, and of lane 31 from lane 0's next vector.
template <class T, int N, bool Twice, int WORD, class Load>
__device__ inline void read_skewed(int bits, Load load, u32* words) {
    constexpr int SIZE = WORDS<T>;
    const int lane = threadIdx.x % WARP;
    read_aligned<T, N>(load, words);
#pragma unroll
    for (int v = 0; v < N; ++v) {
        const bool loaded = Twice || v + 1 == N;
        const Chunk beyond = loaded ? load(v * APART<T> + CHUNKS<T> * CHUNK) : Chunk{};
        u32 held[SIZE + WORD + 1];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) held[i] = words[v * SIZE + i];
#pragma unroll
        for (int k = 0; k <= WORD; ++k) {
            u32 next = beyond.word[k];
            if (!loaded) next = __shfl_sync(ALL, lane == 0 ? words[(v + 1) * SIZE + k] : held[k], (lane + 1) % WARP);
            held[SIZE + k] = next;
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) words[v * SIZE + i] = __funnelshift_r(held[WORD + i], held[WORD + i + 1], bits);
    }
}

// The same wherever the row begins; all chunks must be there.
template <class T, int N, bool Twice, class Load>
__device__ inline void read_wide(int skew, Load load, u32* words) {
    if (!skew) return read_aligned<T, N>(load, words);
    const int bits = skew % 4 * 8;
    switch (skew / 4) {
        case 0: return read_skewed<T, N, Twice, 0>(bits, load, words);
        case 1: return read_skewed<T, N, Twice, 1>(bits, load, words);
        case 2: return read_skewed<T, N, Twice, 2>(bits, load, words);
        default: return read_skewed<T, N, Twice, 3>(bits, load, words);
    }
}

// As many columns as a chunk holds: at once if they are a chunk of the row, else one at a time, and -inf for what is not in
// the row. That is for the ends of a row and for columns that are not contiguous.
template <class T>
__device__ inline Chunk guarded(const Row<T>& row, int column) {
    if (row.contiguous() && !row.skew() && row.size - column >= PER_CHUNK<T>) return load_constant(row.at(column));
    Chunk made;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        made.word[k] = 0;
#pragma unroll
        for (int j = 0; j < PER_WORD<T>; ++j) {
            const int at = column + k * PER_WORD<T> + j;
            made.word[k] |= (at < row.size ? T::bits(row.at(at)) : T::LEAST) << 8 * T::SIZE * j;
        }
    }
    return made;
}

}  // namespace rlk
