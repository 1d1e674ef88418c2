// Stands for core's ptx.cuh where a C++ compiler builds a kernel for the CPU: the threads of a block are fibers, which
// take turns at collectives. One block runs at a time, so atomics are plain.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct Place {
    int x, y, z;
};
static Place threadIdx, blockIdx, gridDim;
struct float4 {
    float x, y, z, w;
};

namespace rlk {

using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;
constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;
inline float infinity() { return INFINITY; }
inline float not_a_number() { return NAN; }
inline void wait_for_prerequisites() {}
inline void launch_dependents() {}

// What lanes of a warp exchange, by turns in one of two rooms: a lane is at most one exchange ahead.
struct Warp {
    u64 rooms[2][WARP];
    int arrived;
    u32 turn;
};

static struct {
    std::vector<ucontext_t> threads;
    std::vector<std::vector<char>> stacks;
    std::vector<Warp> warps;
    ucontext_t main;
    int left, arrived;
    u32 turn;
    void (*body)();
} fibers;

inline void pause() {
    const int me = threadIdx.x;
    swapcontext(&fibers.threads[me], &fibers.main);
    threadIdx.x = me;
}

inline void run_fiber() {
    fibers.body();
    --fibers.left;
    for (;;) pause();
}

// Runs a block of `count` threads.
inline void run_block(int count, void (*body)()) {
    fibers.threads.resize(count);
    fibers.stacks.resize(count, std::vector<char>(1 << 16));
    fibers.warps.assign(count / WARP, Warp{});
    fibers.body = body, fibers.left = count, fibers.arrived = 0;
    for (int i = 0; i < count; ++i) {
        getcontext(&fibers.threads[i]);
        fibers.threads[i].uc_stack.ss_sp = fibers.stacks[i].data();
        fibers.threads[i].uc_stack.ss_size = fibers.stacks[i].size();
        makecontext(&fibers.threads[i], run_fiber, 0);
    }
    while (fibers.left) {
        for (int i = 0; i < count; ++i) {
            threadIdx.x = i;
            swapcontext(&fibers.main, &fibers.threads[i]);
        }
    }
}

// The values of all lanes.
inline const u64* exchanged(u64 value) {
    Warp& warp = fibers.warps[threadIdx.x / WARP];
    const u32 turn = warp.turn;
    warp.rooms[turn % 2][threadIdx.x % WARP] = value;
    if (++warp.arrived == WARP)
        warp.arrived = 0, ++warp.turn;
    else
        while (warp.turn == turn) pause();
    return warp.rooms[turn % 2];
}

}  // namespace rlk

using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() {
    const unsigned turn = rlk::fibers.turn;
    if (++rlk::fibers.arrived == static_cast<int>(rlk::fibers.threads.size()))
        rlk::fibers.arrived = 0, ++rlk::fibers.turn;
    else
        while (rlk::fibers.turn == turn) rlk::pause();
}
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned, T x, int lane) {
    return static_cast<T>(rlk::exchanged(x)[lane]);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int apart) {
    return static_cast<T>(rlk::exchanged(x)[threadIdx.x % rlk::WARP ^ apart]);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int apart) {
    return static_cast<T>(rlk::exchanged(x)[max(threadIdx.x % rlk::WARP - apart, 0)]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const rlk::u64* all = rlk::exchanged(x);
    unsigned mask = 0;
    for (int i = 0; i < rlk::WARP; ++i) mask |= static_cast<unsigned>(all[i]) << i;
    return mask;
}
inline bool __any_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x); }
inline bool __all_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) == lanes; }

template <class T>
T atomicAdd(T* at, T x) {
    return (*at += x) - x;
}
inline unsigned atomicMax(unsigned* at, unsigned x) {
    const unsigned before = *at;
    *at = max(before, x);
    return before;
}
template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T __ldcg(const T* at) {
    return *at;
}
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
