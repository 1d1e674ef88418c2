"""The device headers of core for Hopper, each by a small kernel: on a GPU for real; that they compile, without one."""

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program, compile_program
from rl_kernels.core.cuda.resources import resources_of, warnings_of
from rl_kernels.core.cuda.tensor_map import tensor_map

MISSING = toolchain.why_no_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

MAINLOOP = """
#include <rl_kernels/mainloop.cuh>
using namespace rlk;
#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif
using Ring = RingOf<T, LEFT ? MN_MAJOR : K_MAJOR, RIGHT ? MN_MAJOR : K_MAJOR, 64, 64, 2, 2>;
// Two consumers take turns with a tile of 64 x 64 each, in a ring of two stages.
extern "C" __global__ void __launch_bounds__(384, 1)
    mainloop(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* out, int inner) {
    const Ring ring;
    ring.open(1, 1);
    const int stages = Ring::stages_of(inner);
    Ring::Slot slot;
    if (warp_index() < WARPS_OF_GROUP) {
        if (warp_index() == 0 && elected())
            for (int row = 0; row < 128; row += 64)
                ring.produce(slot, stages, [&](int stage, int k) { ring.copy(stage, k, map_a, row, map_b, 0); });
    } else {
        const int group = warp_index() / WARPS_OF_GROUP - 1;
        const Fragment mine;
        Turns turns(ring.turns, group);
        slot.skip(stages * group);
        float d[32] = {};
        turns.wait();
        ring.mainloop<true>(slot, stages, 0, turns, d);
        float* at = out + (64 * group + mine.row) * 64 + mine.column;
        for (int i = 0; i < 32; ++i) at[i / 2 % 2 * 8 * 64 + i / 4 * 8 + i % 2] = d[i];
    }
}
"""
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
RELAY = """
#include <rl_kernels/ptx.cuh>
using namespace rlk;
// Every block takes what other blocks of the launch before have written, and comes late with its own.
extern "C" __global__ void relay(const int* from, int* to) {
    wait_for_prerequisites();
    launch_dependents();
    const int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    const int taken = *(volatile const int*)(from + (i + 7 * blockDim.x + 13) % n);
    const long long began = clock64();
    while (clock64() - began < 2000 * (blockIdx.x % 8)) {}
    to[i] = taken + 1;
}
"""
SOURCES = {
    "mainloop": (MAINLOOP, "TTPi"),
    "chains": (CHAINS, "TTP"),
    "relay": (RELAY, "PP"),
}
HALVES = (torch.bfloat16, torch.float16)
MAJORS = [(left, right) for left in (0, 1) for right in (0, 1)]


@pytest.fixture(autouse=True)
def sources(make_sources):
    make_sources("toy_hopper", **{f"{name}__cu": text for name, (text, _) in SOURCES.items()})


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")


def program(name, dtype=torch.float16, left=0, right=0):
    defines = (("DTYPE", 1 + HALVES.index(dtype)), ("LEFT", left), ("RIGHT", right))
    return Program("toy_hopper", f"{name}.cu", "sm_90a", defines)


def load(name, *constants):
    return kernel(program(name, *constants), name, SOURCES[name][1], torch.device("cuda", 0))


# BF16 and FP16 differ in the name of an instruction alone, so each is compiled for half of the layouts.
TILES = [("mainloop", HALVES[sum(both) % 2], *both) for both in MAJORS]


@pytest.mark.parametrize("constants", [("relay",), *(("chains", dtype) for dtype in HALVES), *TILES], ids=str)
def test_the_headers_compile_without_a_warning_or_a_spill(constants):
    compiled = compile_program(program(*constants))
    assert not warnings_of(compiled.log)
    assert sum(used.spills for used in resources_of(compiled.log)) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("majors", MAJORS)
def test_mainloop_of_two_consumers_in_turn(dtype, majors):
    # Sums of small integers are exact. Stages of a tile go round the ring several times, not at all, or end within one.
    for inner in (0, 64, 128, 200, 1024):
        a, b = (torch.randint(-8, 9, (rows, inner), device="cuda").to(dtype) for rows in (128, 64))
        out = torch.full((128, 64), torch.nan, device="cuda")
        # A map holds an address: the operands are kept until the launch.
        operands = [x.t().contiguous() if major else x for x, major in zip((a, b), majors, strict=True)]
        # A map has no empty matrix; none of its boxes is copied then.
        described = (x if x.numel() else x.new_zeros(64, 64) for x in operands)
        maps = [tensor_map(x, (64, 64), swizzle=128) for x in described]
        load("mainloop", dtype, *majors).launch(1, 384, *maps, out, inner, shared=9 * 8192)
        assert torch.equal(out, a.float() @ b.float().t()), inner


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_wgmma_of_either_form_and_mma_sync_give_the_bits_of_one_chain(dtype):
    # Sizes far apart: another order of the sum would give other bits.
    sizes = torch.exp2(torch.randint(-6, 7, (2, 64, 64), device="cuda").float())
    a, b = (torch.randn(2, 64, 64, device="cuda") * sizes).to(dtype)
    out = torch.full((3, 64, 64), torch.nan, device="cuda")
    maps = [tensor_map(x, (64, 64), swizzle=128) for x in (a, b)]
    load("chains", dtype).launch(1, 128, *maps, out, shared=3 * 8192)
    both, registers, warps = out.view(torch.int32)
    assert torch.equal(both, registers)
    assert torch.equal(both, warps)
    backwards = a.flip(1).float() @ b.flip(1).float().t()
    torch.testing.assert_close(out[0], backwards, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_dependent_launches_see_all_that_was_written_before():
    relay, rounds, size = load("relay"), 200, 132 * 256
    start = torch.randint(1000, (size,), device="cuda", dtype=torch.int32)
    one, other = start.clone(), torch.zeros_like(start)

    def run():
        for _ in range(rounds // 2):
            relay.launch(132, 256, one, other, pdl=True)
            relay.launch(132, 256, other, one, pdl=True)

    run()
    expected = start.roll(-rounds * (7 * 256 + 13)) + rounds
    assert torch.equal(one, expected)
    one.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert torch.equal(one, expected)
