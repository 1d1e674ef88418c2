// wgmma (sm_90a): d[64 x N] += a[64 x 16] b[N x 16]^T, FP32 accumulators d in registers. Operand b is in shared memory,
// and so is a, unless it is in registers.
//
// An operand tile is a box of 128-byte rows as TMA writes it with the 128-byte swizzle, aligned to 1024 bytes:
//   K_MAJOR    a row of the box holds 64 terms of K of one operand row; operand rows lie one after the other
//   MN_MAJOR   a row of the box holds one term of K of 64 operand rows; 64 terms of K are a piece, and every 64 operand
//              rows have a piece of their own
//
// Order of the sum: one instruction adds 16 terms of K to d, and instructions on the same d add in the order of issue.
// Issued with ascending k from 0, they are the canonical chain: 16 terms a step. The caller sets the initial d.
//
// Thread t of the warpgroup, lane l of warp w, holds d[N / 2]: of rows r = 16 w + l / 4 and r + 8, two of every eight
// columns, from c = 8 j + 2 (l % 4):
//   d[4 j], d[4 j + 1] = (r, c), (r, c + 1)        d[4 j + 2], d[4 j + 3] = (r + 8, c), (r + 8, c + 1)
// An operand a in registers is held alike, two numbers a word: word i of step s packs d[8 s + 2 i], d[8 s + 2 i + 1].
#pragma once

#include <rl_kernels/number.cuh>

namespace rlk {

enum Major { K_MAJOR, MN_MAJOR };

constexpr int MMA_M = 64, MMA_K = 16;
// Bytes of a swizzled row, of the 8 rows after which the swizzle repeats, and of a piece of an MN_MAJOR tile.
constexpr int SWIZZLE = 128, ATOM = 8 * SWIZZLE, PIECE = 64 * SWIZZLE;
// 16-bit numbers in a swizzled row.
constexpr int SPAN = SWIZZLE / 2;

// The wgmma descriptor of an operand's first 16 terms of K. `tile`: its first row, which is row 0 or a multiple of 8 of
// a K_MAJOR tile, or the first byte of a piece of an MN_MAJOR tile. APART: bytes from one piece to the next.
template <Major MAJOR, int APART = PIECE>
__device__ inline u64 operand_at(const void* tile) {
    // In units of 16 bytes: STRIDE from 8 rows of the box to the next 8, LEADING from one piece to the next.
    constexpr u64 STRIDE = ATOM / 16, LEADING = MAJOR == MN_MAJOR ? APART / 16 : 1;
    constexpr u64 SWIZZLE_128 = 1;
    return (shared_address(tile) & 0x3ffffu) >> 4 | LEADING << 16 | STRIDE << 32 | SWIZZLE_128 << 62;
}

// The descriptor moved by `bytes`: a multiple of 1024, or what `advanced` passes. Only the lower word, which holds the
// address, changes.
__device__ inline u64 moved(u64 operand, int bytes) {
    return (operand >> 32 << 32) | (static_cast<u32>(operand) + bytes / 16);
}

// The descriptor moved by `step` times 16 terms of K within its tile.
template <Major MAJOR>
__device__ inline u64 advanced(u64 operand, int step) {
    return moved(operand, step * MMA_K * (MAJOR == MN_MAJOR ? SWIZZLE : 2));
}

// Before the first product, and before the first product after threads have written d.
__device__ inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products. products_done waits for all but the last PENDING groups; until then d must not be
// accessed, and the tiles must not be overwritten. A warp waits only for its own part of the products, so each warp
// releases a stage by itself (give_back in mainloop.cuh).
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Stops the compiler from moving accesses to d across this point: it does not know that products are in flight.
template <int COUNT>
__device__ inline void hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT>
__device__ inline void hold(u32 (&word)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(word[i])::"memory");
}

// Products<N>::add<T, A, B>(d, a, b) issues d[64 x N] += a[64 x 16] b[N x 16]^T, or d = with ADDS false. All threads of
// a warpgroup call it. T: BF16 or FP16. a: a descriptor, or four words in registers, which must not be changed before
// the product is done.
template <int N>
struct Products;

// The accumulators, eight more per line: LIST as operand numbers in the asm text, USED as asm operands.
#define RLK_LIST_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define RLK_LIST_1 RLK_LIST_0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define RLK_LIST_2 RLK_LIST_1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define RLK_LIST_3 RLK_LIST_2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define RLK_LIST_4 RLK_LIST_3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define RLK_LIST_5 RLK_LIST_4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define RLK_LIST_6 RLK_LIST_5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define RLK_LIST_7 RLK_LIST_6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define RLK_LIST_8 RLK_LIST_7 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define RLK_LIST_9 RLK_LIST_8 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define RLK_LIST_10 RLK_LIST_9 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define RLK_LIST_11 RLK_LIST_10 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define RLK_LIST_12 RLK_LIST_11 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define RLK_LIST_13 RLK_LIST_12 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define RLK_LIST_14 RLK_LIST_13 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define RLK_LIST_15 RLK_LIST_14 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define RLK_PAIR(i) "+f"(d[i]), "+f"(d[i + 1])
#define RLK_EIGHT(i) RLK_PAIR(8 * i), RLK_PAIR(8 * i + 2), RLK_PAIR(8 * i + 4), RLK_PAIR(8 * i + 6)
#define RLK_USED_0 RLK_EIGHT(0)
#define RLK_USED_1 RLK_USED_0, RLK_EIGHT(1)
#define RLK_USED_2 RLK_USED_1, RLK_EIGHT(2)
#define RLK_USED_3 RLK_USED_2, RLK_EIGHT(3)
#define RLK_USED_4 RLK_USED_3, RLK_EIGHT(4)
#define RLK_USED_5 RLK_USED_4, RLK_EIGHT(5)
#define RLK_USED_6 RLK_USED_5, RLK_EIGHT(6)
#define RLK_USED_7 RLK_USED_6, RLK_EIGHT(7)
#define RLK_USED_8 RLK_USED_7, RLK_EIGHT(8)
#define RLK_USED_9 RLK_USED_8, RLK_EIGHT(9)
#define RLK_USED_10 RLK_USED_9, RLK_EIGHT(10)
#define RLK_USED_11 RLK_USED_10, RLK_EIGHT(11)
#define RLK_USED_12 RLK_USED_11, RLK_EIGHT(12)
#define RLK_USED_13 RLK_USED_12, RLK_EIGHT(13)
#define RLK_USED_14 RLK_USED_13, RLK_EIGHT(14)
#define RLK_USED_15 RLK_USED_14, RLK_EIGHT(15)

#define RLK_LIST_HALF "%0,%1,%2,%3"
#define RLK_USED_HALF RLK_PAIR(0), RLK_PAIR(2)

// After the accumulators the operand numbers go on, n0 to n6: descriptors or words of a and b, then constants: 1 for
// each MN_MAJOR operand in shared memory, and whether d is added to. The two ones are the scales of a and b: neither is
// negated.
#define RLK_WGMMA(N, TYPE, LAST, n0, n1, n2, n3, n4)                                                              \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #n4 ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RLK_LIST_##LAST "}, %" #n0  \
                 ", %" #n1 ", adds, 1, 1, %" #n2 ", %" #n3 ";\n}"                                                 \
                 : RLK_USED_##LAST                                                                                \
                 : "l"(a), "l"(b), "n"(int(MAJOR_OF_A)), "n"(int(MAJOR_OF_B)), "n"(int(ADDS)))
#define RLK_WGMMA_OF_WORDS(N, TYPE, LAST, n0, n1, n2, n3, n4, n5, n6)                                             \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #n6 ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RLK_LIST_##LAST "}, {%" #n0 \
                 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", adds, 1, 1, %" #n5 ";\n}"                            \
                 : RLK_USED_##LAST                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(MAJOR_OF_B)), "n"(int(ADDS)))

#define RLK_PRODUCTS(N, LAST, n0, n1, n2, n3, n4, n5, n6)                                  \
    template <>                                                                            \
    struct Products<N> {                                                                   \
        template <class T, Major MAJOR_OF_A, Major MAJOR_OF_B, bool ADDS = true>           \
        __device__ static void add(float (&d)[N / 2], u64 a, u64 b) {                      \
            static_assert(T::SIZE == 2, "BF16 or FP16");                                   \
            if constexpr (T::LEAST == BF16::LEAST)                                         \
                RLK_WGMMA(N, "bf16", LAST, n0, n1, n2, n3, n4);                            \
            else                                                                           \
                RLK_WGMMA(N, "f16", LAST, n0, n1, n2, n3, n4);                             \
        }                                                                                  \
        template <class T, Major MAJOR_OF_B, bool ADDS = true>                             \
        __device__ static void add(float (&d)[N / 2], const u32 (&a)[4], u64 b) {          \
            static_assert(T::SIZE == 2, "BF16 or FP16");                                   \
            if constexpr (T::LEAST == BF16::LEAST)                                         \
                RLK_WGMMA_OF_WORDS(N, "bf16", LAST, n0, n1, n2, n3, n4, n5, n6);           \
            else                                                                           \
                RLK_WGMMA_OF_WORDS(N, "f16", LAST, n0, n1, n2, n3, n4, n5, n6);            \
        }                                                                                  \
    };

RLK_PRODUCTS(8, HALF, 4, 5, 6, 7, 8, 9, 10)
RLK_PRODUCTS(16, 0, 8, 9, 10, 11, 12, 13, 14)
RLK_PRODUCTS(32, 1, 16, 17, 18, 19, 20, 21, 22)
RLK_PRODUCTS(64, 3, 32, 33, 34, 35, 36, 37, 38)
RLK_PRODUCTS(80, 4, 40, 41, 42, 43, 44, 45, 46)
RLK_PRODUCTS(128, 7, 64, 65, 66, 67, 68, 69, 70)
RLK_PRODUCTS(160, 9, 80, 81, 82, 83, 84, 85, 86)
RLK_PRODUCTS(192, 11, 96, 97, 98, 99, 100, 101, 102)
RLK_PRODUCTS(256, 15, 128, 129, 130, 131, 132, 133, 134)

#undef RLK_PRODUCTS
#undef RLK_WGMMA
#undef RLK_WGMMA_OF_WORDS

}  // namespace rlk
