"""On a GPU, beside the attention of others: theirs changes bits where ours must not, and errs no less than ours."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rl_kernels.attention import det_attention
from rl_kernels.core.testing import Draw

pytestmark = pytest.mark.gpu
OTHERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "exact": SDPBackend.MATH}


def attend(name, q, k, v):
    """Return causal attention; one query sees every key."""
    if name == "ours":
        return det_attention(q, k, v, causal=True, backend="triton")
    with sdpa_kernel(OTHERS[name]):
        x = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*x, is_causal=q.shape[1] > 1, enable_gqa=True).transpose(1, 2)


def drawn(batch, tokens, heads, kv_heads):
    draw = Draw(torch.bfloat16, "cuda", 0)
    return [draw.normal(batch, tokens, n, 128) for n in (heads, kv_heads, kv_heads, heads)]


def results(name, q, k, v, upstream):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(name, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def differing(name):
    """Count numbers of one sequence that differ: alone, and of its last token alone, in the batch and alone."""
    operands = drawn(4, 1500, 16, 4)
    whole = results(name, *operands)
    q, k, v = operands[:3]
    alone = zip((x[1:2] for x in whole), results(name, *(x[1:2] for x in operands)), strict=True)
    tokens = [(whole[0][:, -1:], attend(name, q[:, -1:], k, v))]
    tokens += [(whole[0][2:3, -1:], attend(name, q[2:3, -1:], k[2:3], v[2:3]))]
    return [sum(int((a != b).sum()) for a, b in pairs) for pairs in (alone, tokens)]


def test_others_change_bits_where_ours_do_not():
    assert differing("ours") == [0, 0]
    assert min(differing(name)[1] for name in ("flash", "cudnn")) > 0


def test_the_error_is_no_worse_than_that_of_others():
    """Root mean square of what FP64 says; out, dq, dk and dv."""
    operands = drawn(2, 1024, 8, 8)
    exact, errors = results("exact", *(x.double() for x in operands)), []
    for name in ("ours", "flash", "cudnn"):
        pairs = zip(results(name, *operands), exact, strict=True)
        errors.append([float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs])
    for mine, *others in zip(*errors, strict=True):
        assert mine <= max(others) * 1.005, errors
