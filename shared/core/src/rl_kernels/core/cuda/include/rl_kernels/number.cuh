// Conversion between FP32, BF16 and FP16 in memory and FP32 in registers.
#pragma once

#include <rl_kernels/ptx.cuh>

namespace rlk {

// Each type has:
//   SIZE, LEAST    bytes of a number; the bits of -inf
//   bits, read     the bits and the value of a number in memory; `write` stores a value
//   unpack, pack   a 32-bit word to the numbers in it, the lower half first, and back, rounded to nearest, ties to even
//   larger         the maximum of two words, number by number; of a NaN and a number, the number
//   larger_or_nan  the same; of a NaN and a number, NaN
struct FP32 {
    static constexpr int SIZE = 4;
    static constexpr u32 LEAST = 0xff800000u;
    __device__ static u32 bits(const void* at) { return *static_cast<const u32*>(at); }
    __device__ static float read(const void* at) { return *static_cast<const float*>(at); }
    __device__ static void write(void* at, float x) { *static_cast<float*>(at) = x; }
    __device__ static void unpack(u32 word, float* x) { x[0] = __uint_as_float(word); }
    __device__ static u32 pack(const float* x) { return __float_as_uint(x[0]); }
    __device__ static u32 larger(u32 a, u32 b) { return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b))); }
    __device__ static u32 larger_or_nan(u32 a, u32 b) {
        float x;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
        return __float_as_uint(x);
    }
};

// Shared by the 16-bit types.
template <class T>
struct Half {
    static constexpr int SIZE = 2;
    __device__ static u32 bits(const void* at) { return *static_cast<const unsigned short*>(at); }
    __device__ static float read(const void* at) {
        float pair[2];
        T::unpack(bits(at), pair);
        return pair[0];
    }
    __device__ static void write(void* at, float x) {
        const float pair[2] = {x, 0.0f};
        *static_cast<unsigned short*>(at) = static_cast<unsigned short>(T::pack(pair));
    }
};

struct BF16 : Half<BF16> {
    static constexpr u32 LEAST = 0xff80u;
    __device__ static void unpack(u32 word, float* x) {
        x[0] = __uint_as_float(word << 16);
        x[1] = __uint_as_float(word & 0xffff0000u);
    }
    __device__ static u32 pack(const float* x) {
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
    __device__ static u32 larger(u32 a, u32 b) {
        u32 word;
        asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
        return word;
    }
    __device__ static u32 larger_or_nan(u32 a, u32 b) {
        u32 word;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
        return word;
    }
};

struct FP16 : Half<FP16> {
    static constexpr u32 LEAST = 0xfc00u;
    __device__ static void unpack(u32 word, float* x) {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(x[0]), "=f"(x[1])
            : "r"(word));
    }
    __device__ static u32 pack(const float* x) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
    __device__ static u32 larger(u32 a, u32 b) {
        u32 word;
        asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
        return word;
    }
    __device__ static u32 larger_or_nan(u32 a, u32 b) {
        u32 word;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
        return word;
    }
};

// Numbers in a 32-bit word and in a 16-byte chunk.
template <class T>
constexpr int PER_WORD = 4 / T::SIZE;
template <class T>
constexpr int PER_CHUNK = CHUNK / T::SIZE;

}  // namespace rlk
