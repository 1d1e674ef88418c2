"""The canonical chain on Hopper: wgmma of either operand form and mma.sync give the same bits."""

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program, compile_program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.testing.resources import resources_of, warnings_of

MISSING = toolchain.why_no_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CHAINS = """
#include <rl_kernels/mainloop.cuh>
#include <rl_kernels/products.cuh>
using namespace rlk;
#if DTYPE == 1
using T = BF16;
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
using T = FP16;
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
__device__ u32 two(const char* tile, int row, int column) {
    return *(const u32*)(tile + swizzled<128>(row * SWIZZLE + 2 * column));
}
// One warpgroup, for 64 rows of a, 64 of b and 64 terms: out[0] with both in shared memory, out[1] with a in registers,
// out[2] by mma.sync, 16 rows and 8 columns at a time.
extern "C" __global__ void __launch_bounds__(128, 1)
    chains(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* out) {
    extern __shared__ char raw[];
    __shared__ Barrier full;
    char *a = raw + (-shared_address(raw) & 1023), *b = a + PIECE;
    if (threadIdx.x == 0) {
        full.init(1), fence_init();
        full.arrive_expecting(2 * PIECE);
        load_box(a, map_a, 0, 0, full);
        load_box(b, map_b, 0, 0, full);
    }
    __syncthreads();
    full.wait(0);
    const Fragment mine;
    u32 words[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
            words[step][i] = two(a, mine.row + i % 2 * 8, 16 * step + mine.column + i / 2 * 8);
    float d[3][32] = {};
    issue_rows<T, 64, 64, 64>(a, b, d[0]);
    products_done<0>();
    hold(d[0]), hold(d[1]);
    fence_products();
    for (int step = 0; step < 4; ++step)
        Products<64>::add<T, K_MAJOR>(d[1], words[step], advanced<K_MAJOR>(operand_at<K_MAJOR>(b), step));
    commit_products();
    products_done<0>();
    hold(d[1]), keep(words);
    for (int j = 0; j < 8; ++j)
        for (int step = 0; step < 4; ++step) {
            float* x = d[2] + 4 * j;
            const int row = 8 * j + threadIdx.x % 32 / 4, column = 16 * step + mine.column;
            asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                         : "r"(words[step][0]), "r"(words[step][1]), "r"(words[step][2]), "r"(words[step][3]),
                           "r"(two(b, row, column)), "r"(two(b, row, column + 8)));
        }
    for (int way = 0; way < 3; ++way)
        for (int i = 0; i < 32; ++i)
            out[way * 4096 + (mine.row + i / 2 % 2 * 8) * 64 + mine.column + i / 4 * 8 + i % 2] = d[way][i];
}
"""
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def sources(make_sources):
    make_sources("toy_chains", chains__cu=CHAINS)


def program(dtype):
    return Program("toy_chains", "chains.cu", "sm_90a", (("DTYPE", 1 + HALVES.index(dtype)),))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_it_compiles_without_a_warning_or_a_spill(dtype):
    compiled = compile_program(program(dtype))
    assert not warnings_of(compiled.log)
    assert sum(used.spills for used in resources_of(compiled.log)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_ways_give_the_bits_of_one_chain(dtype):
    if torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    # Sizes far apart: another order of the sum would give other bits.
    sizes = torch.exp2(torch.randint(-6, 7, (2, 64, 64), device="cuda").float())
    a, b = (torch.randn(2, 64, 64, device="cuda") * sizes).to(dtype)
    out = torch.full((3, 64, 64), torch.nan, device="cuda")
    maps = [tensor_map(x, (64, 64), swizzle=128) for x in (a, b)]
    kernel(program(dtype), "chains", "TTP", torch.device("cuda", 0)).launch(1, 128, *maps, out, shared=3 * 8192)
    both, registers, warps = out.view(torch.int32)
    assert torch.equal(both, registers)
    assert torch.equal(both, warps)
    backwards = a.flip(1).float() @ b.flip(1).float().t()
    torch.testing.assert_close(out[0], backwards, rtol=1e-3, atol=1e-2)
