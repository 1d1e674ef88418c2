"""The device headers of core, each by a small kernel: on a GPU for real; that they compile, without one."""

import math

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program, compile_program
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.testing.resources import resources_of, warnings_of

MISSING = toolchain.why_no_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NUMBERS = """
#include <rl_kernels/number.cuh>
using namespace rlk;
#if DTYPE == 0
using T = FP32;
#elif DTYPE == 1
using T = BF16;
#else
using T = FP16;
#endif
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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def sources(make_sources):
    make_sources("toy_kernels", numbers__cu=NUMBERS, softcap__cu=SOFTCAP)


def program(name, dtype, arch):
    return Program("toy_kernels", f"{name}.cu", arch, (("DTYPE", DTYPES.index(dtype)),))


def load(name, signature, dtype=torch.float32):
    made = program(name, dtype, target_of(arch_of("cuda", 0), exact=False))
    return kernel(made, name, signature, torch.device("cuda", 0))


@pytest.mark.parametrize(("name", "dtype"), [*(("numbers", dtype) for dtype in DTYPES), ("softcap", DTYPES[0])])
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
    load("numbers", "PPPPPi", dtype).launch(1, 256, a, b, wide, back, larger, words)
    assert torch.equal(wide, a.float())
    assert torch.equal(back, a)
    assert torch.equal(larger, torch.maximum(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize(("cap", "scale"), [(30.0, 1.0), (4.0, 3.0), (50.0, 0.0625)])
def test_capped_logits_and_their_slope(cap, scale):
    sizes = torch.logspace(-8, 4, 5000, device="cuda")
    x = torch.cat((sizes, -sizes, torch.tensor([0.0, -math.inf, math.inf, math.nan], device="cuda")))
    capped, slope = torch.empty_like(x), torch.empty_like(x)
    load("softcap", "PPPffi").launch(1, 256, x, capped, slope, cap, scale, len(x))
    t = (x.double() * scale / cap).tanh()
    torch.testing.assert_close(capped.double(), cap * t, rtol=5e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(slope.double(), scale * (1 - t.square()), rtol=0, atol=5e-7 * scale, equal_nan=True)
