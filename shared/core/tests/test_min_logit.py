"""The smallest raw value that counts is exactly where its rounded quotient by the temperature reaches ``min_logit``."""

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.min_logit import check_targets
from rl_kernels.core.operator import Call, arch_of
from rl_kernels.core.triton_lib.launch import triton_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = triton_backend("toy").why_not(Call.of(torch.zeros(1, device=DEVICE)))
MISSING = toolchain.why_no_compiler()
COUNT, LARGEST = 1 << 16, torch.finfo(torch.float32).max
INF = torch.inf

if REASON is None:
    import triton
    import triton.language as tl

    from rl_kernels.core.triton_lib import min_logit

    @triton.jit
    def _least(m, t, out, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + rows, min_logit.least_kept(m, t, rows, rows >= 0, PER_ROW, True))


CUDA = """
#include <rl_kernels/min_logit.cuh>
extern "C" __global__ void least(const float* m, const float* t, float* out, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = rlk::least_kept(m[i], t[i]);
}
"""
KINDS = pytest.mark.parametrize("kind", ["one", "near", "any"])


def drawn(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return thresholds of any bits but NaN, some of them quotients, and temperatures."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (COUNT,), generator=generator).to(torch.int32)
    m = bits.view(torch.float32).nan_to_num(1.0, INF, -INF)
    near = torch.rand(COUNT, generator=generator)
    t = {"one": torch.ones(COUNT), "near": 0.3 + near, "any": 10 ** (60 * near - 30)}[kind]
    m[::2] = torch.randn(COUNT // 2, generator=generator) * 8 / t[::2]
    ends = torch.tensor([0.0, -0.0, INF, -INF, LARGEST, -LARGEST, 1e-45, -1e-45])
    return torch.cat((ends, m[8:])).to(DEVICE), t.float().to(DEVICE)


def check(least: torch.Tensor, m: torch.Tensor, t: torch.Tensor) -> None:
    assert not least.isnan().any()
    before = least.nextafter(torch.full_like(least, -INF))
    # No number reaches some thresholds.
    assert bool(((least / t >= m) | (least == INF)).all())
    assert bool(((before / t < m) | (least == -INF)).all())
    assert torch.equal(least == -INF, m == -INF)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@KINDS
def test_triton_finds_the_smallest_value(kind):
    m, t = drawn(kind)
    least, number = torch.empty_like(m), float(t[0])
    _least[(COUNT // 1024,)](m, t, least, PER_ROW=True, BLOCK=1024)
    check(least, m, t)
    _least[(COUNT // 1024,)](m, number, least, PER_ROW=False, BLOCK=1024)
    check(least, m, torch.full_like(t, number))
    _least[(1,)](m.new_full((1024,), torch.nan), t, least, PER_ROW=True, BLOCK=1024)
    assert bool((least[:1024] == INF).all())


@pytest.mark.gpu
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@KINDS
def test_cuda_finds_the_smallest_value(kind, make_sources):
    make_sources("toy_kernels", least__cu=CUDA)
    program = Program("toy_kernels", "least.cu", target_of(arch_of("cuda", 0), exact=False), ())
    (m, t), number = drawn(kind), torch.full((3,), torch.nan, device="cuda")
    least = torch.empty_like(m)
    launch = kernel(program, "least", "PPPi", m.device).launch
    launch(1, 256, m, t, least, len(m))
    check(least, m, t)
    launch(1, 256, number, t, least, len(number))
    assert bool((least[:3] == INF).all())


def test_targets_below_their_threshold_raise():
    m = torch.tensor([0.0, -INF, 1.0, 2.0])
    logp = torch.tensor([-1.0, -INF, torch.nan, -INF])
    with pytest.raises(ValueError, match="target_ids: expected tokens whose logit is at least min_logit, 1 of 4 are"):
        check_targets(logp, m, lambda: logp)
    with pytest.raises(ValueError, match="2 of 4 are below it"):
        check_targets(logp, m, lambda: torch.zeros(4))
    check_targets(logp[:3], m[:3], lambda: logp[:3])
    check_targets(logp[:2], m[:2], lambda: 1 / 0)
