// The consumer of gemm_sm90.cu with segments: the chains of a block, where sums wait, and the merge over a cluster.
#pragma once

#include "tile.cuh"

namespace {

// Adds a chain from 0 of one segment.
__device__ void add_segment(const Args& p, const Ring& ring, Ring::Slot& slot, const Mine& mine, int index, Sums& d) {
    // Hides the index from the compiler. Otherwise it computes the spans of all segments at once, and runs out of registers.
    asm volatile("" : "+r"(index));
    const Span span = span_of(p, index);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) d[i] = 0.0f;
    ring.mainloop<false>(slot, span.stages, mine.part, Turns(ring.turns, mine.group), d);
    if (span.rest) ring.steps(slot, span.rest, mine.part, d);
}

// Where this thread's left sum of a level waits; level 1 is the lowest that does not wait in registers.
template <int LEVEL>
__device__ float4* waiting(const Args& p, const Ring& ring, const Mine& mine) {
    char* place;
    if constexpr (LEVEL <= NEAR)
        place = ring.end() + mine.group * BEHIND_BYTES + (LEVEL - 1) * SUMS_BYTES;
    else
        place = p.scratch + ((blockIdx.x * CONSUMERS + mine.group) * FAR + LEVEL - 1 - NEAR) * static_cast<i64>(SUMS_BYTES);
    return reinterpret_cast<float4*>(place) + mine.thread;
}

// Sets d to the tree sum of COUNT segments of this block from `first` on.
template <int COUNT>
__device__ void add_segments(const Args& p, const Ring& ring, Ring::Slot& slot, const Mine& mine, int first, Sums& d) {
    constexpr int LEVEL = levels_of(COUNT) - (levels_of(SEGMENTS) - NEAR - FAR);
    if constexpr (COUNT == 1) {
        add_segment(p, ring, slot, mine, first, d);
    } else if constexpr (LEVEL > 0) {
        add_segments<COUNT / 2>(p, ring, slot, mine, first, d);
        float4* left = waiting<LEVEL>(p, ring, mine);
        if constexpr (LEVEL <= NEAR) {
            // TMA may still read the boxes of the tile before.
            if (mine.leads()) stores_read<0>();
            sync_threads(1 + mine.group, WARPGROUP);
        }
#pragma unroll
        for (int i = 0; i < TILE_N / 8; ++i)
            left[i * WARPGROUP] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
        add_segments<COUNT / 2>(p, ring, slot, mine, first + COUNT / 2, d);
#pragma unroll
        for (int i = 0; i < TILE_N / 8; ++i) {
            const float4 four = left[i * WARPGROUP];
            d[4 * i] = __fadd_rn(four.x, d[4 * i]), d[4 * i + 1] = __fadd_rn(four.y, d[4 * i + 1]);
            d[4 * i + 2] = __fadd_rn(four.z, d[4 * i + 2]), d[4 * i + 3] = __fadd_rn(four.w, d[4 * i + 3]);
        }
    } else {
        Sums left;
        add_segments<COUNT / 2>(p, ring, slot, mine, first, left);
        add_segments<COUNT / 2>(p, ring, slot, mine, first + COUNT / 2, d);
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) d[i] = __fadd_rn(left[i], d[i]);
    }
}

#if CLUSTER > 1
// Adds the bias to WIDTH sums of a row, and stores them.
template <int WIDTH>
__device__ void finish(const Args& p, int row, int column, float (&sum)[WIDTH]) {
    if (row >= p.rows || column >= p.columns) return;
    const auto* bias = static_cast<const unsigned short*>(p.bias);
    const int inside = min(WIDTH, p.columns - column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        if (p.bias_along && i < inside)
            sum[i] = __fadd_rn(sum[i], Number::read(bias + (p.bias_along == 1 ? row : column + i)));
    char* at = static_cast<char*>(p.out) + (row * p.out_row + column * p.out_column) * Out::SIZE;
    if (inside == WIDTH && p.out_column == 1 && reinterpret_cast<u64>(at) % (WIDTH * Out::SIZE) == 0) {
        constexpr int WORDS = WIDTH * Out::SIZE / 4;
        u32 word[4];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = Out::pack(sum + i * PER_WORD<Out> % WIDTH);
        if constexpr (WORDS == 2)
            *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
        else if constexpr (WORDS == 4)
            *reinterpret_cast<uint4*>(at) = make_uint4(word[0], word[1], word[2], word[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        if (i < inside) Out::write(at + i * p.out_column * Out::SIZE, sum[i]);
}

// Merges the sums of the blocks of a cluster: each block a part of the tile.
__device__ void merge_blocks(const Ring& ring, const Args& p, const Mine& mine, const Tiles& tile, Sums& d) {
    // Numbers of a thread side by side, threads that merge, pitch of a row without bank conflicts.
    constexpr int WIDTH = 4, ACROSS = TILE_N / WIDTH, TOGETHER = CONSUMERS * WARPGROUP, PITCH = TILE_N + 8;
    auto* sums = reinterpret_cast<float*>(ring.a(0));
    // The other consumer's products may still read the stages.
    sync_threads(1, TOGETHER);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i += 2) {
        const int at = (mine.row + i / 2 % 2 * 8) * PITCH + mine.column + i / 4 * 8;
        *reinterpret_cast<float2*>(sums + at) = make_float2(d[i], d[i + 1]);
    }
    sync_cluster();
    const auto row_of = [](int i) { return i / ACROSS; };
    const auto column_of = [](int i) { return i % ACROSS * WIDTH; };
    int first = cluster_rank() * TOGETHER + mine.group * WARPGROUP + mine.thread;
    // Hides the index from the compiler. Otherwise it computes addresses before the products, and runs out of registers.
    asm volatile("" : "+r"(first));
    merge_from<CLUSTER, WIDTH, TILE_M * ACROSS, CLUSTER * TOGETHER>(
        sums, first, [=](int i) { return row_of(i) * PITCH + column_of(i); },
        [&](int i, float (&sum)[WIDTH]) { finish(p, tile.row + row_of(i), tile.column + column_of(i), sum); });
    // No block ends while others read its sums.
    sync_cluster();
}
#endif

}  // namespace
