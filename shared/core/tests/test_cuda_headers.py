"""The device headers of core, each by a small kernel: on a GPU for real; that they compile, without one."""

import math

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program, compile_program
from rl_kernels.core.cuda.resources import resources_of, warnings_of
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of

MISSING = toolchain.why_no_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CHOOSE = """
using namespace rlk;
#if DTYPE == 0
using T = FP32;
#elif DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif
"""
NUMBERS = (
    "#include <rl_kernels/number.cuh>\n"
    + CHOOSE
    + """
extern "C" __global__ void numbers(const u32* a, const u32* b, float* wide, u32* back, u32* larger, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        T::unpack(a[i], wide + i * PER_WORD<T>);
        back[i] = T::pack(wide + i * PER_WORD<T>);
        larger[i] = T::larger(a[i], b[i]);
        for (int k = 0; k < PER_WORD<T>; ++k)
            if (T::read((const char*)(a + i) + k * T::SIZE) != wide[i * PER_WORD<T> + k]) back[i] = 1;
    }
}
"""
)
STATES = """
#include <rl_kernels/softmax.cuh>
using namespace rlk;
// One warp: 128 values to each of two stretches, merged.
extern "C" __global__ void states(const float* x, float* out, float inv, int selected) {
    const float c = __fmul_rn(inv, LOG2E);
    State whole = empty();
    for (int part = 0; part < 2; ++part) {
        u32 words[4];
        for (int k = 0; k < 4; ++k) words[k] = __float_as_uint(x[part * 128 + threadIdx.x * 4 + k]);
        State s = empty();
        add<true, FP32>(s, words, c);
        whole = merged<true>(whole, over_warp<true>(s, c), c);
    }
    const Statistics found = finished<true>(whole, x[selected], inv, c);
    if (threadIdx.x == 0) out[0] = found.logp, out[1] = found.lse, out[2] = found.entropy;
}
"""
SOFTCAP = """
#include <rl_kernels/softcap.cuh>
using namespace rlk;
extern "C" __global__ void softcap(const float* x, float* capped, float* slope, float cap, float scale, int count) {
    const Softcap softcap = {cap, __fdiv_rn(scale, cap), __frcp_rn(cap), scale};
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        capped[i] = softcap.at(x[i]);
        slope[i] = softcap.slope(capped[i]);
    }
}
"""
SOURCES = {
    "numbers": (NUMBERS, "PPPPPi"),
    "states": (STATES, "PPfi"),
    "softcap": (SOFTCAP, "PPPffi"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def sources(make_sources):
    make_sources("toy_kernels", **{f"{name}__cu": text for name, (text, _) in SOURCES.items()})


def program(name, dtype, arch):
    return Program("toy_kernels", f"{name}.cu", arch, (("DTYPE", DTYPES.index(dtype)),))


def load(name, dtype=torch.float32):
    made = program(name, dtype, target_of(arch_of("cuda", 0), exact=False))
    return kernel(made, name, SOURCES[name][1], torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "dtype"), [*(("numbers", dtype) for dtype in DTYPES), ("states", DTYPES[0]), ("softcap", DTYPES[0])]
)
def test_the_headers_compile_without_a_warning_or_a_spill(name, dtype):
    compiled = compile_program(program(name, dtype, "sm_90"))
    assert not warnings_of(compiled.log)
    assert sum(used.spills for used in resources_of(compiled.log)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_torch(dtype):
    if dtype == torch.float32:
        a = torch.randn(1 << 16, device="cuda")
    else:
        a = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
        a = a[~a.isnan()][: (1 << 15) + (1 << 14)]
    b = a.flip(0).contiguous()
    words = a.numel() * a.itemsize // 4
    wide, back, larger = torch.empty(a.numel(), device="cuda"), torch.empty_like(a), torch.empty_like(a)
    load("numbers", dtype).launch(1, 256, a, b, wide, back, larger, words)
    assert torch.equal(wide, a.float())
    assert torch.equal(back, a)
    assert torch.equal(larger, torch.maximum(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 1.0, 80.0])
@pytest.mark.parametrize("inv", [1.0, 0.37])
def test_states_are_those_of_a_softmax(scale, inv):
    x = torch.randn(256, device="cuda") * scale
    x[3], x[200] = -math.inf, -math.inf
    out = torch.empty(3, device="cuda")
    load("states").launch(1, 32, x, out, inv, 77)
    z = x.double() * inv
    logs = z.log_softmax(0)
    entropy = -(logs.exp() * logs).nan_to_num(0.0).sum()
    expected = torch.stack((logs[77], z.logsumexp(0), entropy))
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("far", [1e6, 1e10, 3e38])
@pytest.mark.parametrize("inv", [1.0, 0.37])
def test_states_of_values_far_from_0(far, inv):
    x = torch.full((256,), -far, device="cuda")
    x[3], x[77], x[100], x[200] = far, far, -math.inf, far
    out = torch.empty(3, device="cuda")
    load("states").launch(1, 32, x, out, inv, 77)
    three = math.log(3.0)
    expected = torch.tensor([-three, far * inv + three, three])
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("cap", "scale"), [(30.0, 1.0), (4.0, 3.0), (50.0, 0.0625)])
def test_capped_logits_and_their_slope(cap, scale):
    sizes = torch.logspace(-8, 4, 5000, device="cuda")
    x = torch.cat((sizes, -sizes, torch.tensor([0.0, -math.inf, math.inf, math.nan], device="cuda")))
    capped, slope = torch.empty_like(x), torch.empty_like(x)
    load("softcap").launch(1, 256, x, capped, slope, cap, scale, len(x))
    t = (x.double() * scale / cap).tanh()
    torch.testing.assert_close(capped.double(), cap * t, rtol=5e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(slope.double(), scale * (1 - t.square()), rtol=0, atol=5e-7 * scale, equal_nan=True)
