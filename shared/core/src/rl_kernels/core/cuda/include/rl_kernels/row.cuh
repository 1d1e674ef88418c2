// Reads a row in vectors of eight columns by 16-byte loads, at whatever address the row begins.
//
// Vector v of lane l holds columns 256 v + 8 l to 256 v + 8 l + 7, counted from where the warp begins to read. This
// depends on the column alone, so no sum depends on an address.
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

constexpr int COLUMNS = 8;
// 32-bit words and 16-byte chunks of a vector of eight numbers.
template <class T>
constexpr int WORDS = COLUMNS / PER_WORD<T>;
template <class T>
constexpr int CHUNKS = WORDS<T> / 4;

// Bytes from a lane's vector to its next one: 32 lanes of eight columns.
template <class T>
constexpr int APART = WARP * COLUMNS * T::SIZE;

template <class T>
struct Row {
    const char* begin;
    int size;    // columns
    i64 stride;  // bytes from a column to the next; wide loads need T::SIZE

    __device__ const char* at(int column) const { return begin + column * stride; }

    __device__ bool contiguous() const { return stride == T::SIZE; }

    // Bytes by which a contiguous row, and so each of its vectors, begins beyond a multiple of 16.
    __device__ int skew() const { return contiguous() ? static_cast<int>(reinterpret_cast<u64>(begin) % CHUNK) : 0; }

    // The address of a column that is a multiple of eight, rounded down to a multiple of 16 bytes.
    __device__ const char* floor_at(int column) const { return at(column) - skew(); }
};

// Reads N vectors per lane into words, if the row begins at a multiple of 16 bytes. `load(offset)` returns the chunk at
// this offset in bytes from the lane's first one. The whole warp must call it.
template <class T, int N, class Load>
__device__ inline void read_aligned(Load load, u32* words) {
#pragma unroll
    for (int i = 0; i < N * CHUNKS<T>; ++i) {
        const Chunk c = load(i / CHUNKS<T> * APART<T> + i % CHUNKS<T> * CHUNK);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[4 * i + k] = c.word[k];
    }
}

// The same for a row that begins WORD words and `bits` bits beyond a multiple of 16 bytes. The end of a vector then
// lies in the chunk after its own. Its words come from the next lane (lane 31 takes them from lane 0's next vector), and
// are loaded only for a lane's last vector.
template <class T, int N, int WORD, class Load>
__device__ inline void read_skewed(int bits, Load load, u32* words) {
    constexpr int SIZE = WORDS<T>;
    const int lane = threadIdx.x % WARP;
    read_aligned<T, N>(load, words);
#pragma unroll
    for (int v = 0; v < N; ++v) {
        const bool loaded = v + 1 == N;
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

// The same for any skew. All chunks must be readable.
template <class T, int N, class Load>
__device__ inline void read_wide(int skew, Load load, u32* words) {
    if (!skew) return read_aligned<T, N>(load, words);
    const int bits = skew % 4 * 8;
    switch (skew / 4) {
        case 0: return read_skewed<T, N, 0>(bits, load, words);
        case 1: return read_skewed<T, N, 1>(bits, load, words);
        case 2: return read_skewed<T, N, 2>(bits, load, words);
        default: return read_skewed<T, N, 3>(bits, load, words);
    }
}

// The columns of one chunk, with -inf beyond the end of the row: by one load if the chunk is aligned and lies in the
// row, else column by column. For the end of a row, and for columns that are not contiguous.
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
