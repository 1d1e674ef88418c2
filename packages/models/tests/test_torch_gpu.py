"""PyTorch's attention under ``activate()`` on a GPU: the bits of det_attention, alone and in a batch."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from rl_kernels.attention import det_attention
from rl_kernels.models.clients.torch import activate

pytestmark = pytest.mark.gpu
LENGTHS = (130, 1, 0, 77)


def drawn(*shape, count=4):
    source = torch.Generator("cuda").manual_seed(2)
    return [torch.randn(shape, generator=source, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def both(call, operands, upstream):
    """Return the result of a call and its gradients."""
    out = call(*operands)
    return out, *torch.autograd.grad(out, operands, upstream[: len(out)])


@pytest.mark.parametrize("size", [64, 60])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_on_a_gpu(causal, size):
    """Heads of 60 come padded to 64, with the scale of 60."""
    *leaves, upstream = drawn(3, 4, 150, size)
    leaves = [x[:, : 2 if place else 4].requires_grad_() for place, x in enumerate(leaves)]

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def ours(q, k, v):
        q, k, v = (torch.nn.functional.pad(x, (0, -size % 8)).transpose(1, 2) for x in (q, k, v))
        return det_attention(q, k, v, causal=causal, scale=size**-0.5).transpose(1, 2)[..., :size]

    with activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = both(sdpa, leaves, upstream)
        alone = both(sdpa, [x[:1] for x in leaves], upstream)
    for value, wanted, one in zip(found, both(ours, leaves, upstream), alone, strict=True):
        assert torch.equal(value, wanted)
        assert torch.equal(value[:1], one)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 0)])
def test_varlen_attn_on_a_gpu(window):
    *leaves, upstream = drawn(sum(LENGTHS), 4, 64)
    leaves = [x.requires_grad_() for x in leaves]
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()

    def packed(q, k, v, where=bounds):
        return varlen.varlen_attn(q, k, v, where, where, max(LENGTHS), max(LENGTHS), window_size=window)

    def ours(q, k, v):
        return det_attention(q, k, v, causal=False, window=window, cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    with activate():
        found = both(packed, leaves, upstream)
        alone = both(lambda q, k, v: packed(q, k, v, bounds[:2]), [x[: LENGTHS[0]] for x in leaves], upstream)
    for value, wanted, one in zip(found, both(ours, leaves, upstream), alone, strict=True):
        assert torch.equal(value, wanted)
        assert torch.equal(value[: LENGTHS[0]], one)


def test_the_example_of_the_guide_runs():
    page = (Path(__file__).parents[1] / "GUIDE.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(from torch\.nn\.attention .*?)^```$", page, re.MULTILINE | re.DOTALL)
    q, k, v, _ = drawn(2, 4, 150, 64)
    found = {"torch": torch, "q": q, "k": k, "v": v}
    exec(block, found)
    expected = det_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    assert torch.equal(found["out"], expected)


def test_compiled_sdpa_on_a_gpu():
    torch.compiler.reset()
    *leaves, upstream = drawn(2, 4, 150, 64)
    leaves = [x.requires_grad_() for x in leaves]

    def call(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found, wanted = torch.compile(call, fullgraph=True)(*leaves), call(*leaves)
        assert torch.equal(found, wanted)
        pairs = (torch.autograd.grad(out, leaves, upstream) for out in (found, wanted))
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
