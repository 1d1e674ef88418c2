"""The gates of Gated DeltaNet layers in Triton: each token's own bits, and the numbers of PyTorch in FP64."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.models.fused import delta_gates
from rl_kernels.models.hybrids.gates import gates

HEADS = 6


def operands(device, dtype, tokens):
    generator = torch.Generator().manual_seed(0)
    a, b = (4 * torch.randn(2, tokens, HEADS, generator=generator) for _ in range(2))
    a[0, 0], b[0, 0] = torch.tensor([-90.0, 90, -20, -8, 0, 20]), torch.tensor([-90.0, 90, -20, 20, 0, 1])
    a_log, bias = torch.randn(2, HEADS, generator=generator)
    # Parts of wider rows, as Qwen3-Next's are.
    a, b = (F.pad(x, (0, 3))[..., :HEADS] for x in (a, b))
    return [x.to(device, dtype).requires_grad_() for x in (a, b, a_log, bias)]


@pytest.mark.parametrize("tokens", [1, 97])
def test_gates_are_those_of_fp64(triton_on, triton_dtype, tokens):
    leaves = operands(triton_on, triton_dtype, tokens)
    assert delta_gates.takes(*leaves)
    upstream = [torch.randn(2, tokens, HEADS, generator=torch.Generator().manual_seed(n)).to(triton_on) for n in (1, 2)]
    computed = gates(*leaves)
    assert [x.dtype for x in computed] == [torch.float32] * 2
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = -wide[2].exp() * F.softplus(wide[0] + wide[3], threshold=100), wide[1].sigmoid()
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=1e-34)
    mine, theirs = (
        torch.autograd.grad(x, y, u)
        for x, y, u in ((computed, leaves, upstream), (expected, wide, [u.double() for u in upstream]))
    )
    for one, other, leaf in zip(mine, theirs, leaves, strict=True):
        assert one.dtype == leaf.dtype
        eps = max(torch.finfo(triton_dtype).eps, 2e-6)
        assert (one.double() - other).norm() <= eps * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1, 8, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bits_are_those_of_pytorch_on_a_gpu(dtype, scale, monkeypatch):
    """Forward, and the gradients of a and b; sums over tokens are in another order."""
    leaves = [x.detach().requires_grad_() for x in operands("cuda", dtype, 4097)]
    with torch.no_grad():
        leaves[0][:, 1:].mul_(scale)
        leaves[1][:, 1:].mul_(scale)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(leaves[0].shape, generator=generator).cuda() for _ in range(2)]
    assert delta_gates.takes(*leaves)
    fused = gates(*leaves)
    fused += torch.autograd.grad(fused, leaves[:2], upstream)
    monkeypatch.setattr(delta_gates, "takes", lambda *_: False)
    plain = gates(*leaves)
    plain += torch.autograd.grad(plain, leaves[:2], upstream)
    for name, one, other in zip(("decays", "strengths", "a", "b"), fused, plain, strict=True):
        assert torch.equal(one, other), (name, one[one != other][:4], other[one != other][:4])


def test_a_token_and_the_sums_have_their_own_bits(triton_on, triton_dtype):
    """Tokens alone; and sums over tokens, with tokens of no gradient behind them."""
    leaves = operands(triton_on, triton_dtype, 97)
    whole = gates(*leaves)
    alone = gates(leaves[0][1:, 70:71], leaves[1][1:, 70:71], *leaves[2:])
    assert all(torch.equal(x[1:, 70:71], y) for x, y in zip(whole, alone, strict=True))
    short = [x[:1] for x in leaves[:2]]
    padded = [F.pad(x, (0, 0, 0, 5000)) for x in short]
    sums = []
    for a, b in (short, padded):
        upstream = [torch.zeros(1, a.shape[1], HEADS, device=triton_on) for _ in range(2)]
        for value in upstream:
            value[:, :97] = whole[0][:1].detach()
        sums.append(torch.autograd.grad(gates(a, b, *leaves[2:]), leaves[2:], upstream))
    assert all(map(torch.equal, *sums))
