// PTX instructions without a CUDA C++ intrinsic, approximate math with fixed instructions, short names of types.
// Includes nothing.
#pragma once

namespace rlk {

using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;

// Maximum resident threads of a multiprocessor.
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int RESIDENT = 2048;
#else
constexpr int RESIDENT = 1536;
#endif

// 16 bytes, the widest load of a thread.
struct alignas(16) Chunk {
    u32 word[4];
};
constexpr int CHUNK = sizeof(Chunk);

// The 32-bit address of shared memory that PTX instructions take.
__device__ inline u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// 1 / x within one unit in the last place; subnormals are flushed to 0.
__device__ inline float inverse_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / sqrt(x) within two units in the last place; subnormals are flushed to 0.
__device__ inline float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x within two units in the last place; subnormals are flushed to 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x), within 2^-22 relative, absolute between 0.5 and 2; subnormals are flushed to 0.
__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }

// Load from global memory that no thread writes while the kernel runs.
__device__ inline Chunk load_constant(const void* at) {
    Chunk c;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
        : "l"(at));
    return c;
}

// Load and store of global memory that is accessed once: no allocation in the L1 cache.
__device__ inline Chunk load_once(const Chunk* at) {
    Chunk c;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                 : "l"(at));
    return c;
}
__device__ inline void store_once(Chunk* at, Chunk c) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(c.word[0]), "r"(c.word[1]),
                 "r"(c.word[2]), "r"(c.word[3])
                 : "memory");
}

// Starts a read of the line of 128 bytes that holds an address into the L2 cache.
constexpr int LINE = 128;
__device__ inline void read_ahead(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The same for 4, 8 or 16 bytes; it stays where it is among other such loads.
template <int COUNT>
__device__ inline void load_once(u32 (&word)[COUNT], const void* at) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "the sizes of a load");
    if constexpr (COUNT == 1)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word[0]) : "l"(at));
    else if constexpr (COUNT == 2)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(at));
    else
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(at));
}

// x + y, with subnormal operands and sums flushed to 0, as add_to adds.
__device__ inline float add_flushed(float x, float y) {
    float sum;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
    return sum;
}

// Adds to four numbers in global memory, without reading them into registers (sm_90 and later): each as one atomic
// addition. A thread that alone adds to them adds in the order of its calls. load_written reads what it has written.
__device__ inline void add_to(float4* at, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}
__device__ inline float4 load_written(const float4* at) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}

// Loads 4 bytes of shared memory, by their address.
__device__ inline u32 load_shared(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}

// Starts a copy of 16 bytes from global to shared memory (sm_80 and later), or fills 16 bytes with 0, without reading.
__device__ inline void copy_chunk(u32 target, const void* source, bool fill) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(fill ? 0 : CHUNK)
                 : "memory");
}
__device__ inline void copy_chunk(void* target, const void* source, bool fill) {
    copy_chunk(shared_address(target), source, fill);
}
// The same for 4 bytes.
__device__ inline void copy_word(void* target, const void* source, bool fill) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source),
                 "r"(fill ? 0 : 4)
                 : "memory");
}
// Closes a group of this thread's copies. copies_done waits for all but the last PENDING groups.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Programmatic dependent launch (sm_90 and later). In a kernel that is launched without it, both calls do nothing.
// Waits until the earlier kernels on the stream have ended and their writes are visible. Every thread calls it before
// it accesses memory that one of them may use.
__device__ inline void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel on the stream start once every block has called it or has ended.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace rlk
