// Draws a token from each row of logits. drawing.py defines what top-k, top-p and min-p keep, and which token is drawn:
// by sums of integer masses, which are exact in any order, so no cut into blocks and no order of atomics changes a bit.
//
//   narrow    counts entries by distance d from the largest z, in BUCKETS. The counts tell the bucket of top-k's
//             threshold, and bounds of masses that tell the few buckets in which top-p's lies
//   collect   lists the entries of these buckets, in any order, and sums the masses of those above for each segment of
//             SEGMENT columns. Then the last block of a row draws: it finds the thresholds among the listed entries by
//             their bits, 11 at a time, then the segment and the column of the token
//
// Where more than LISTED entries are in these buckets, as with many equal ones, that block reads them from the row
// instead: three times for a threshold at most. blockIdx: row, part of its columns.
#include "sampling.cuh"

using namespace rlk;

namespace {

__device__ u64 target_of(const Row& row, u64 mass) {
    const u64 target = share(mass, fraction(row.p));
    return target ? target : 1;
}

// Finds the buckets with a row's thresholds from its counts.
__device__ void find_range(const Args& a, Block& block, const Row& row, Shared& found) {
    constexpr int MINE = BUCKETS / BLOCK;
    const int begin = MINE * static_cast<int>(threadIdx.x);
    int of_k = -1;
    if (row.k > 0.0f) {
        const Reached reached = reach<BUCKETS>(block, block.counts, static_cast<u64>(row.k));
        if (reached.own) of_k = reached.at;
        if (!threadIdx.x) found.count_before = static_cast<u32>(reached.before);
    }
    const int end = of_k < 0 ? BUCKETS - 1 : of_k, from = of_k < 0 ? BUCKETS : of_k;
    if (!threadIdx.x) {
        found.of_k = of_k;
        found.from = row.p < 1.0f ? from : 0;
        found.first = of_k < 0 && !(row.p < 1.0f) ? BUCKETS : end;
        found.last = end;
    }
    if (!(row.p < 1.0f)) return;
    // Masses of the entries as if all lay where their bucket begins (high) or ends (low).
    u64 high = 0, low = 0;
    const auto add = [&](int bucket, u64& at_begin) {
        const u32 count = block.counts[bucket];
        const u64 at_end = mass_from(bucket + 1);
        if (bucket <= end) high += count * at_begin;
        if (bucket < from) low += count * at_end;
        at_begin = at_end;
    };
    u64 at_begin = mass_from(begin);
#pragma unroll 1
    for (int i = 0; i < MINE; ++i) add(begin + i, at_begin);
    u64 total_high, total_low;
    high = before_thread(block, high, total_high);
    low = before_thread(block, low, total_low);
    const u64 units = fraction(row.p);
    // Whether the threshold may lie, and does lie, in the buckets so far.
    const auto may = [&] {
        const u64 mass = most(high, a.columns);
        return mass >= max(share(mass + least(total_low - low, a.columns), units), 1ull);
    };
    const auto does = [&] {
        const u64 mass = least(low, a.columns);
        return mass >= max(share(mass + most(total_high - high, a.columns), units), 1ull);
    };
    bool may_before = begin && may(), does_before = begin && does();
    at_begin = mass_from(begin);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < MINE && begin + i < end && !does_before; ++i) {
        add(begin + i, at_begin);
        const bool may_now = may(), does_now = does();
        if (may_now && !may_before) found.first = begin + i;
        if (does_now && !does_before) found.last = begin + i;
        may_before = may_now, does_before = does_now;
    }
}

// Whether a threshold may be equal to an entry.
__device__ bool is_among(const Range& range, const Entry& e, int bucket) {
    return e.valid && ((bucket >= range.first && bucket <= range.last) || bucket == range.of_k);
}

// The entries among which a row's thresholds lie.
struct Candidates {
    const Row& row;
    const Shared& range;
    const float* x;
    const int* columns;  // null: x is the whole row
    int count;

    __device__ Candidates(const Args& a, const Row& row, const Shared& range, int index) : row(row), range(range) {
        const bool fits = range.listed <= LISTED;
        x = fits ? a.listed_x + static_cast<i64>(index) * LISTED : row.logits;
        columns = fits ? a.listed_columns + static_cast<i64>(index) * LISTED : nullptr;
        count = fits ? static_cast<int>(range.listed) : a.columns;
    }
    // Calls f(entry, bucket, column, whether it is one) in all lanes of a warp at once.
    template <class F>
    __device__ void each(F f) const {
        constexpr int AT_ONCE = 2;
        for (int start = threadIdx.x / WARP * WARP; start < count; start += AT_ONCE * BLOCK) {
            float values[AT_ONCE];
            int places[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = start + i * BLOCK + threadIdx.x % WARP;
                values[i] = at < count ? __ldcg(x + at) : -infinity();
                places[i] = columns && at < count ? __ldcg(columns + at) : at;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const Entry e = row.entry(values[i]);
                const int bucket = bucket_of(e.d);
                f(e, bucket, places[i], is_among(range, e, bucket));
            }
        }
    }
};

// The largest z from which on the candidates in some buckets reach a target, by their masses or their number.
__device__ float threshold(Block& block, const Candidates& candidates, int first, int last, bool weighed, u64 target) {
    u32 low = ~candidates.range.low, high = candidates.range.high;
    while (low < high) {
        const int shift = max(32 - __clz(high - low) - 11, 0);
        __syncthreads();
        block.sums.clear();
        __syncthreads();
        candidates.each([&](const Entry& e, int bucket, int, bool is_one) {
            const u32 key = key_of(e.z);
            const bool counts = is_one && bucket >= first && bucket <= last && key >= low && key <= high;
            block.sums.add(static_cast<int>((high - key) >> shift), weighed ? mass_of(e.d) : 1, counts);
        });
        const Reached found = reach(block, block.sums, target);
        if (!found.own) break;
        target -= found.before;
        high -= static_cast<u32>(found.at) << shift;
        low = max(low, high - min(high, (1u << shift) - 1));
    }
    return of_key(high);
}

// Writes the results of a row, whose range is known.
__device__ void draw(const Args& a, Block& block, const Row& row, int index) {
    const Shared& range = block.range;
    const Candidates candidates(a, row, range, index);
    float lowest = -infinity();
    if (range.of_k >= 0) {
        const u64 target = static_cast<u64>(row.k) - range.count_before;
        lowest = threshold(block, candidates, range.of_k, range.of_k, false, target);
    }
    if (range.first < BUCKETS && row.p < 1.0f) {
        u64 mass = 0;
        if (range.from < BUCKETS) {
            candidates.each([&](const Entry& e, int bucket, int, bool is_one) {
                if (is_one && bucket >= range.from && e.z >= lowest) mass += mass_of(e.d);
            });
            mass = over_block(block, mass);
        }
        const u64 target = target_of(row, range.base + mass) - range.mass_before;
        lowest = fmaxf(lowest, threshold(block, candidates, range.first, range.last, true, target));
    }
    // Masses of segments.
    Histogram& masses = block.sums;
    const int segments = (a.columns + SEGMENT - 1) / SEGMENT;
    __syncthreads();
    for (int i = threadIdx.x; i < Histogram::PLACES; i += BLOCK)
        masses.set(i, i < segments ? __ldcg(a.sums + static_cast<i64>(index) * segments + i) : 0);
    __syncthreads();
    u32 smallest = range.least;
    const auto is_kept = [&](const Entry& e) { return e.valid && e.z >= lowest && e.d <= row.far; };
    candidates.each([&](const Entry& e, int bucket, int column, bool is_one) {
        const bool kept = is_one && is_kept(e);
        if (kept) smallest = max(smallest, ~key_of(e.x));
        masses.add(column / SEGMENT, mass_of(e.d), kept);
    });
    __syncthreads();
    u64 total = 0;
    for (int i = threadIdx.x; i < segments; i += BLOCK) total += masses[i];
    total = over_block(block, total);
    for (int apart = WARP / 2; apart; apart /= 2) smallest = max(smallest, __shfl_xor_sync(ALL, smallest, apart));
    block.ticket = 0;
    __syncthreads();
    if (threadIdx.x % WARP == 0) atomicMax(&block.ticket, smallest);
    const double u = a.uniform_is_double ? static_cast<const double*>(a.uniform)[index]
                                         : static_cast<const float*>(a.uniform)[index];
    const u64 units = row.greedy ? 0 : min(fraction(u), (1ull << FRACTION_BITS) - 1), wanted = share(total, units) + 1;
    const Reached segment = reach(block, masses, wanted);
    // Masses of its columns.
    for (int i = threadIdx.x; i < Histogram::PLACES; i += BLOCK) {
        const int column = segment.at * SEGMENT + i;
        const bool is_in = i < SEGMENT && column < a.columns;
        const Entry e = row.entry(is_in ? row.logits[column] : -infinity());
        masses.set(i, is_in && is_kept(e) ? mass_of(e.d) : 0);
    }
    const Reached token = reach(block, masses, wanted - segment.before);
    if (threadIdx.x) return;
    const bool keeps_all = row.greedy || (lowest == -infinity() && row.far == infinity());
    // Nothing is kept where parameters are out of range.
    const float kept = block.ticket ? of_key(~block.ticket) : infinity(), low = keeps_all ? -infinity() : kept;
    a.ids[index] = total ? segment.at * SEGMENT + token.at : 0;
    a.min_logit[index] = __fdiv_rn(low, row.t);
    a.smallest[index] = low;
    a.temperature[index] = row.t;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(BLOCK, 4) narrow(Args a) {
    __shared__ Block block;
    launch_dependents();
    const int index = static_cast<int>(blockIdx.x), begin = blockIdx.y * a.each * SEGMENT;
    const Row row(a, index);
    Shared& shared = a.shared[index];
    if (row.undefined || !row.filters()) return;
    for (int i = threadIdx.x; i < BUCKETS; i += BLOCK) block.counts[i] = 0;
    __syncthreads();
    const int end = min(begin + a.each * SEGMENT, a.columns);
    constexpr int AT_ONCE = 2;
    for (int start = begin; start < end; start += AT_ONCE * 4 * BLOCK) {
        float x[AT_ONCE][4];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int column = start + 4 * (j * BLOCK + static_cast<int>(threadIdx.x));
            load(a, row, column < end ? column : a.columns, x[j]);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Entry e = row.entry(x[j][i]);
                if (e.valid) atomicAdd(&block.counts[bucket_of(e.d)], 1u);
            }
        }
    }
    __syncthreads();
    if (gridDim.y > 1) {
        u32* counts = a.counts + static_cast<i64>(index) * BUCKETS;
        for (int i = threadIdx.x; i < BUCKETS; i += BLOCK)
            if (block.counts[i]) atomicAdd(counts + i, block.counts[i]);
        if (!is_last(block, shared.narrowed)) return;
        for (int i = threadIdx.x; i < BUCKETS; i += BLOCK) block.counts[i] = __ldcg(counts + i);
        __syncthreads();
    }
    find_range(a, block, row, shared);
}

extern "C" __global__ void __launch_bounds__(BLOCK) collect(Args a) {
    __shared__ Block block;
    wait_for_prerequisites();
    launch_dependents();
    const int index = static_cast<int>(blockIdx.x), lane = threadIdx.x % WARP;
    const Row row(a, index);
    if (row.undefined) {
        if (blockIdx.y || threadIdx.x) return;
        a.ids[index] = 0;
        a.min_logit[index] = a.smallest[index] = not_a_number();
        a.temperature[index] = row.t;
        return;
    }
    Shared& shared = a.shared[index];
    // Without a threshold of top-k and top-p, or where min-p's is above it, only the limit counts.
    const bool only_limit = !row.filters() || bucket_of(row.far) < shared.first;
    const Range range = only_limit ? Range{BUCKETS, -1, -1} : static_cast<const Range&>(shared);
    const int segments = (a.columns + SEGMENT - 1) / SEGMENT, begin = blockIdx.y * a.each;
    const int from = only_limit ? 0 : shared.from;
    u32 high = 0, low = 0, least = 0;
    for (int segment = begin + threadIdx.x / WARP; segment < min(begin + a.each, segments); segment += WARPS) {
        u64 above = 0, base = 0;
        constexpr int QUADS = 4;
#pragma unroll 1
        for (int first = segment * SEGMENT; first < segment * SEGMENT + SEGMENT; first += QUADS * 4 * WARP) {
            float x[QUADS][4];
            u32 in = 0;
#pragma unroll
            for (int j = 0; j < QUADS; ++j) load(a, row, first + 4 * (j * WARP + lane), x[j]);
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Entry e = row.entry(x[j][i]);
                    const int bucket = bucket_of(e.d);
                    const bool is_above = e.valid && bucket < range.first && e.d <= row.far;
                    if (is_above || (e.valid && bucket < from)) {
                        const u64 mass = mass_of(e.d);
                        if (bucket < from) base += mass;
                        if (is_above) above += mass;
                    }
                    if (is_above) {
                        least = max(least, ~key_of(e.x));
                    } else if (is_among(range, e, bucket)) {
                        in |= 1u << (4 * j + i);
                        high = max(high, key_of(e.z));
                        low = max(low, ~key_of(e.z));
                    }
                }
            }
            if (!__any_sync(ALL, in)) continue;
            u32 place = __popc(in);
            const u32 mine = place;
#pragma unroll
            for (int apart = 1; apart < WARP; apart *= 2) {
                const u32 left = __shfl_up_sync(ALL, place, apart);
                if (lane >= apart) place += left;
            }
            u32 start = 0;
            if (lane == WARP - 1) start = atomicAdd(&shared.listed, place);
            place += __shfl_sync(ALL, start, WARP - 1) - mine;
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!(in >> (4 * j + i) & 1)) continue;
                    if (place < LISTED) {
                        const i64 at = static_cast<i64>(index) * LISTED + place;
                        a.listed_x[at] = x[j][i];
                        a.listed_columns[at] = first + 4 * (j * WARP + lane) + i;
                    }
                    ++place;
                }
            }
        }
        above = over_warp(above);
        if (from) base = over_warp(base);
        if (lane) continue;
        a.sums[static_cast<i64>(index) * segments + segment] = above;
        if (!from) continue;
        if (above) atomicAdd(&shared.mass_before, above);
        if (base) atomicAdd(&shared.base, base);
    }
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) {
        high = max(high, __shfl_xor_sync(ALL, high, apart));
        low = max(low, __shfl_xor_sync(ALL, low, apart));
        least = max(least, __shfl_xor_sync(ALL, least, apart));
    }
    if (lane == 0) {
        if (high) atomicMax(&shared.high, high);
        if (low) atomicMax(&shared.low, low);
        if (least) atomicMax(&shared.least, least);
    }
    if (!is_last(block, shared.collected)) return;
    // Past the L1 cache, which may hold what was there before the atomics.
    if (threadIdx.x < sizeof(Shared) / 4)
        reinterpret_cast<u32*>(&block.range)[threadIdx.x] = __ldcg(reinterpret_cast<const u32*>(&shared) + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) static_cast<Range&>(block.range) = range;
    __syncthreads();
    draw(a, block, row, index);
}
