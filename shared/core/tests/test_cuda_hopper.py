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

BOXES = """
#include <rl_kernels/tma.cuh>
using namespace rlk;
// A box of 64 x 64 comes, is read by all, and leaves with another first number.
extern "C" __global__ void boxes(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to,
                                 unsigned short* plain, int row, int column) {
    extern __shared__ char raw[];
    __shared__ Barrier full;
    char* box = raw + (-shared_address(raw) & 1023);
    if (threadIdx.x == 0) {
        full.init(1);
        fence_init();
        full.arrive_expecting(8192);
        load_box(box, from, row, column, full);
    }
    __syncthreads();
    full.wait(0);
    for (int i = threadIdx.x; i < 4096; i += blockDim.x)
        plain[i] = *(const unsigned short*)(box + swizzled<128>(2 * i));
    __syncthreads();
    if (threadIdx.x == 0) {
        *(unsigned short*)box = 0x4200;
        fence_copies();
        store_box(to, row, column, box);
        commit_stores();
        stores_read<0>();
    }
}
"""
PRODUCTS = """
#include <rl_kernels/tma.cuh>
#include <rl_kernels/warpgroup.cuh>
#include <rl_kernels/wgmma.cuh>
using namespace rlk;
#if DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif
constexpr Major A = LEFT ? MN_MAJOR : K_MAJOR, B = RIGHT ? MN_MAJOR : K_MAJOR;
// One warpgroup adds the product of two tiles of 64 rows and 64 terms to what out holds; the other one gives registers.
extern "C" __global__ void __launch_bounds__(256, 1)
    products(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* out) {
    extern __shared__ char raw[];
    __shared__ Barrier full;
    char *a = raw + (-shared_address(raw) & 1023), *b = a + PIECE;
    if (threadIdx.x == 0) full.init(1), fence_init();
    __syncthreads();
    if (warp_index() >= 4) {
        give_registers<40>();
        if (warp_index() == 4 && elected()) {
            full.arrive_expecting(2 * PIECE);
            load_box(a, map_a, 0, 0, full);
            load_box(b, map_b, 0, 0, full);
        }
    } else {
        take_registers<160>();
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        float d[32];
        for (int i = 0; i < 32; ++i) d[i] = out[(row + i / 2 % 2 * 8) * 64 + column + i / 4 * 8 + i % 2];
        full.wait(0);
        hold(d);
        fence_products();
        for (int step = 0; step < 4; ++step)
            Products<64>::add<T, A, B>(d, advanced<A>(operand_at<A>(a), step), advanced<B>(operand_at<B>(b), step));
        commit_products();
        hold(d);
        products_done<0>();
        hold(d);
        sync_threads(1, WARPGROUP);
        for (int i = 0; i < 32; ++i) out[(row + i / 2 % 2 * 8) * 64 + column + i / 4 * 8 + i % 2] = d[i];
    }
}
"""
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
    "boxes": (BOXES, "TTPii"),
    "products": (PRODUCTS, "TTP"),
    "mainloop": (MAINLOOP, "TTPi"),
    "relay": (RELAY, "PP"),
}
HALVES = (torch.bfloat16, torch.float16)
ROOM = 3 * 8192
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
TILES = [("products", HALVES[sum(both) % 2], *both) for both in MAJORS]
TILES += [("mainloop", HALVES[1 - sum(both) % 2], *both) for both in MAJORS]


@pytest.mark.parametrize("constants", [("boxes",), ("relay",), *TILES], ids=str)
def test_the_headers_compile_without_a_warning_or_a_spill(constants):
    compiled = compile_program(program(*constants))
    assert not warnings_of(compiled.log)
    assert sum(used.spills for used in resources_of(compiled.log)) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("row", "column"), [(0, 0), (64, 40), (100, 136)])
def test_boxes_in_and_out_again(row, column):
    x = torch.randn(150, 168, device="cuda", dtype=torch.float16)
    out, plain = torch.full_like(x, torch.nan), torch.empty(64, 64, device="cuda", dtype=torch.float16)
    maps = (tensor_map(value, (64, 64), swizzle=128) for value in (x, out))
    load("boxes").launch(1, 128, *maps, plain, row, column, shared=ROOM)
    expected = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    part = x[row : row + 64, column : column + 64]
    expected[: part.shape[0], : part.shape[1]] = part
    assert torch.equal(plain, expected)
    changed = torch.full_like(x, torch.nan)
    changed[row : row + 64, column : column + 64] = part
    changed[row, column] = 3.0
    assert torch.equal(out.nan_to_num(7.0), changed.nan_to_num(7.0))


def lying(operands, majors):
    """Return the operands, turned where their major says so. A map holds an address: keep them until the launch."""
    return [x.t().contiguous() if major else x for x, major in zip(operands, majors, strict=True)]


def maps_of(operands):
    # A map has no empty matrix; none of its boxes is copied then.
    return [tensor_map(x if x.numel() else x.new_zeros(64, 64), (64, 64), swizzle=128) for x in operands]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("majors", MAJORS)
def test_products_of_tiles_that_lie_either_way(dtype, majors):
    # Small integers: every sum is exact, whatever its order.
    a, b, start = (torch.randint(-8, 9, (64, 64), device="cuda").to(dtype) for _ in range(3))
    out, turned = start.float(), lying((a, b), majors)
    load("products", dtype, *majors).launch(1, 256, *maps_of(turned), out, shared=ROOM)
    assert torch.equal(out, start.float() + a.float() @ b.float().t())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("majors", MAJORS)
def test_mainloop_of_two_consumers_in_turn(dtype, majors):
    # Small integers, as above. The stages of a tile go round the ring several times, not at all, or end within one.
    for inner in (0, 64, 128, 200, 1024):
        a, b = (torch.randint(-8, 9, (rows, inner), device="cuda").to(dtype) for rows in (128, 64))
        out, turned = torch.full((128, 64), torch.nan, device="cuda"), lying((a, b), majors)
        load("mainloop", dtype, *majors).launch(1, 384, *maps_of(turned), out, inner, shared=9 * 8192)
        assert torch.equal(out, a.float() @ b.float().t()), inner


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
