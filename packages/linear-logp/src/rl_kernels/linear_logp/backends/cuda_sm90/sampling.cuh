// Shared by the kernels that draw tokens: a row, masses of its entries as drawing.py defines them, and sums over places.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

// Null pointers are not read: the number holds for all rows.
struct Parameter {
    const float* rows;
    float number;
    int unused;

    __device__ float of(int row) const { return rows ? rows[row] : number; }
};

// Buckets of a row in which top-p's threshold lies, and that of top-k's, -1 if there is none. Entries above `first` are
// kept.
struct Range {
    int first, last, of_k;
};

// What blocks of a row share; all 0 before the first kernel.
struct Shared : Range {
    // Top-p takes its share of `base`, the mass before bucket `from`, and of what top-k keeps from there on.
    int from;
    u64 base, mass_before;  // mass_before, count_before: before `first` and `of_k`
    u32 count_before;
    u32 narrowed, collected;  // blocks that are done
    u32 listed;
    // Of the z of what is listed, and of the x that are above: keys, so that the largest is sought.
    u32 high, low, least;
    u32 unused;
};

static_assert(sizeof(Shared) == 64, "what the host made room for");

constexpr int BUCKETS = 4096, WARPS = 16, BLOCK = WARPS * WARP, SEGMENT = 1024, LISTED = 4096;

struct Args {
    const float* logits;  // [rows, columns]; rows begin at multiples of 16 bytes
    const float* norm;    // [rows, 2]
    const void* uniform;
    Shared* shared;
    u32* counts;  // [rows, BUCKETS] of 0, if a row has several blocks
    float* listed_x;  // [rows, LISTED]
    int* listed_columns;
    u64* sums;  // [rows, segments]
    i64* ids;
    float* min_logit;
    float* temperature;  // that of the log-probabilities
    float* smallest;     // the smallest x that is kept
    i64 stride;
    int rows, columns;
    int each;  // segments of a block
    int uniform_is_double;
    Parameter divisor, top_k, top_p, limit;
};

constexpr float LOG2E = 1.4426950408889634f;
constexpr int MASS_BITS = 40, FRACTION_BITS = 31;
constexpr float POWERS[] = {1.0f,
                            -0.6931437253952026f,
                            0.2401801496744156f,
                            -0.055297356098890305f,
                            0.009205796755850315f,
                            -0.0009449030621908605f};

__device__ inline u64 mass_of(float d) {
    const float t = fminf(__fmul_rn(d, LOG2E), 62.0f), whole = floorf(t), f = __fsub_rn(t, whole);
    float power = POWERS[5];
#pragma unroll
    for (int i = 4; i >= 0; --i) power = __fadd_rn(__fmul_rn(power, f), POWERS[i]);
    return static_cast<u64>(static_cast<u32>(power * 16777216.0f)) << (MASS_BITS - 24) >> static_cast<int>(whole);
}

// In units of 2^-31, rounded down.
__device__ inline u64 fraction(double x) {
    const double units = x * 2147483648.0;
    return units >= 0.0 ? static_cast<u64>(fmin(units, 2147483648.0)) : 0;
}

__device__ inline u64 share(u64 mass, u64 units) {
    const u64 low = mass & ((1ull << FRACTION_BITS) - 1);
    return (mass >> FRACTION_BITS) * units + (low * units >> FRACTION_BITS);
}

// 512 buckets for each octave of 0.25 + d, up to d = 63.75; all farther entries are in the last one.
constexpr u32 FIRST_BITS = 0x3e800000u, BUCKET_BITS = 14;
__device__ inline int bucket_of(float d) {
    const u32 bits = __float_as_uint(__fadd_rn(d, 0.25f));
    return static_cast<int>(min((bits >> BUCKET_BITS) - (FIRST_BITS >> BUCKET_BITS), BUCKETS - 1u));
}
// The mass of an entry where a bucket begins, up to what `most` and `least` allow for.
__device__ inline u64 mass_from(int bucket) {
    return mass_of(__uint_as_float(FIRST_BITS + (static_cast<u32>(bucket) << BUCKET_BITS)) - 0.25f);
}
// Bounds of a sum of masses that were taken from the ends of their buckets: roundings of d and of mass_of are below
// 2^-17 of a mass, and each entry's is rounded down.
__device__ inline u64 most(u64 mass, int entries) { return mass + (mass >> 15) + entries; }
__device__ inline u64 least(u64 mass, int entries) {
    const u64 less = (mass >> 15) + entries;
    return mass - min(mass, less);
}

// Integers in the order of floats; 0 and -0 have one.
__device__ inline u32 key_of(float x) {
    const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ inline float of_key(u32 key) { return __uint_as_float(key >> 31 ? key & ~(1u << 31) : ~key); }

struct Entry {
    float x, z, d;
    bool valid;
};

struct Row {
    const float* logits;
    float t, top, k, p, far;
    bool greedy, undefined;

    __device__ Row(const Args& a, int row) : logits(a.logits + row * a.stride) {
        t = a.divisor.of(row);
        greedy = t == 0.0f;
        if (greedy) t = 1.0f;
        k = a.top_k.of(row);
        if (greedy || !(k > 0.0f && k < static_cast<float>(a.columns))) k = 0.0f;
        p = a.top_p.of(row);
        if (greedy || !(p < 1.0f)) p = 1.0f;
        far = greedy ? 0.0f : a.limit.of(row);
        top = __fdiv_rn(a.norm[2 * row], t);
        undefined = isnan(__fadd_rn(__fsub_rn(top, top), a.norm[2 * row + 1]));
    }
    // A NaN or -inf is no valid entry.
    __device__ Entry entry(float x) const {
        const float z = t == 1.0f ? x : __fdiv_rn(x, t);
        return {x, z, __fsub_rn(top, z), z > -infinity()};
    }
    __device__ bool filters() const { return k > 0.0f || p < 1.0f; }
};

// Four columns from `column` on; -inf beyond the last.
__device__ inline void load(const Args& a, const Row& row, int column, float (&x)[4]) {
    if (column + 4 <= a.columns) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(row.logits + column));
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = column + i < a.columns ? row.logits[column + i] : -infinity();
    }
}

__device__ inline u64 over_warp(u64 x) {
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) x += __shfl_xor_sync(ALL, x, apart);
    return x;
}

// Sums of 64 bits, from atomics of 32.
struct alignas(16) Histogram {
    static constexpr int PLACES = 2048;
    u32 low[PLACES], high[PLACES];

    __device__ void clear() {
        for (int i = threadIdx.x; i < PLACES; i += BLOCK) low[i] = high[i] = 0;
    }
    __device__ void set(int at, u64 value) {
        low[at] = static_cast<u32>(value);
        high[at] = static_cast<u32>(value >> 32);
    }
    __device__ u64 operator[](int at) const { return static_cast<u64>(high[at]) << 32 | low[at]; }
    __device__ void add(int at, u64 value) {
        const u32 part = static_cast<u32>(value), carry = atomicAdd(&low[at], part) > ~part;
        const u32 rest = static_cast<u32>(value >> 32) + carry;
        if (rest) atomicAdd(&high[at], rest);
    }
    // All lanes of a warp call it. Where all add to one place, a single one does: equal entries would wait in line.
    __device__ void add(int at, u64 value, bool active) {
        const u32 lanes = __ballot_sync(ALL, active);
        if (!lanes) return;
        const int leader = __ffs(lanes) - 1, place = __shfl_sync(ALL, at, leader);
        if (__all_sync(ALL, !active || at == place)) {
            value = over_warp(active ? value : 0);
            if (static_cast<int>(threadIdx.x) % WARP == leader) add(place, value);
        } else if (active) {
            add(at, value);
        }
    }
};

// Where a sum over the first places of a histogram reaches a target.
struct Reached {
    int at;
    u64 before, own;
};

struct Block {
    union {
        Histogram sums;
        u32 counts[BUCKETS];
    };
    u64 totals[WARPS];
    Reached reached;
    Shared range;
    u32 ticket;
};

__device__ inline u64 over_block(Block& block, u64 x) {
    x = over_warp(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) block.totals[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += block.totals[i];
    return x;
}

// The sum over the threads before this one, and over all.
__device__ inline u64 before_thread(Block& block, u64 mine, u64& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 sum = mine;
#pragma unroll
    for (int apart = 1; apart < WARP; apart *= 2) {
        const u64 left = __shfl_up_sync(ALL, sum, apart);
        if (lane >= apart) sum += left;
    }
    __syncthreads();
    if (lane == WARP - 1) block.totals[warp] = sum;
    __syncthreads();
    sum -= mine, total = 0;
#pragma unroll 4
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) sum += total;
        total += block.totals[i];
    }
    return sum;
}

// The first of PLACES up to which the sum is at least `target`, which is not 0; none with own = 0.
template <int PLACES = Histogram::PLACES, class Sums>
__device__ inline Reached reach(Block& block, const Sums& sums, u64 target) {
    constexpr int MINE = PLACES / BLOCK;
    const int first = MINE * static_cast<int>(threadIdx.x);
    __syncthreads();
    u64 own[MINE], before = 0, total;
#pragma unroll
    for (int i = 0; i < MINE; ++i) before += own[i] = sums[first + i];
    if (threadIdx.x == 0) block.reached = {PLACES - 1, 0, 0};
    before = before_thread(block, before, total);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        if (before < target && target <= before + own[i]) block.reached = {first + i, before, own[i]};
        before += own[i];
    }
    __syncthreads();
    return block.reached;
}

// Returns in the last of the blocks of a row that calls it, for which the others' writes are visible.
__device__ inline bool is_last(Block& block, u32& done) {
    if (gridDim.y == 1) {
        __syncthreads();
        return true;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) block.ticket = atomicAdd(&done, 1u);
    __syncthreads();
    __threadfence();
    return block.ticket == gridDim.y - 1;
}

}  // namespace rlk
