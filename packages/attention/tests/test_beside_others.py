"""On a GPU, beside the attention of others: theirs changes bits where ours must not, and errs no less than ours."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from rl_kernels.attention import det_attention
from rl_kernels.core.testing import Draw

# Dynamo reads .grad of what is no leaf.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")]

CHUNK = 129
"""Queries of the last chunk, that is taken alone; one of them is a whole call of its own."""


def flash(q, k, v, rows):
    return sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, rows)


def cudnn(q, k, v, rows):
    return sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, rows)


def sdpa(backend, q, k, v, rows):
    """Return the outputs of the last rows: all of them, or one, which sees every key."""
    with sdpa_kernel(backend):
        x = (x.transpose(1, 2) for x in (q[:, -rows:], k, v))
        return scaled_dot_product_attention(*x, is_causal=rows > 1, enable_gqa=True).transpose(1, 2)


def flex(q, k, v, rows):
    shift = k.shape[1] - rows
    mask = create_block_mask(lambda b, h, t, s: t + shift >= s, None, None, rows, k.shape[1], device=q.device)
    x = (x.transpose(1, 2) for x in (q[:, -rows:], k, v))
    return torch.compile(flex_attention, dynamic=False)(*x, block_mask=mask, enable_gqa=True).transpose(1, 2)


def ours(q, k, v, rows):
    return det_attention(q[:, -rows:], k, v, backend="triton")


def drawn(batch, tokens, heads, kv_heads, head, seed=0):
    draw = Draw(torch.bfloat16, "cuda", seed)
    shapes = [(batch, tokens, n, head) for n in (heads, kv_heads, kv_heads, heads)]
    return [draw.normal(*shape) for shape in shapes]


def gradients(attention, q, k, v, upstream):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, q.shape[1]), leaves, upstream)


def differing(attention, chunks):
    """Count numbers of one sequence that differ: alone, as a prompt and its last token, and in the gradients."""
    q, k, v, upstream = drawn(4, 1500, 16, 4, 128)
    whole = attention(q, k, v, 1500)
    alone = attention(q[1:2], k[1:2], v[1:2], 1500)
    found = {"alone": [(whole[1:2], alone)]}
    found["last token"] = [
        (whole[:, -1:], attention(q, k, v, 1)),
        (whole[2:3, -1:], attention(q[2:3], k[2:3], v[2:3], 1)),
    ]
    if chunks:
        found["last chunk"] = [(whole[:, -CHUNK:], attention(q, k, v, CHUNK))]
    of_all = gradients(attention, q, k, v, upstream)
    of_one = gradients(attention, q[1:2], k[1:2], v[1:2], upstream[1:2])
    found["gradients"] = [(a[1:2], b) for a, b in zip(of_all, of_one, strict=True)]
    return {name: sum(int((a != b).sum()) for a, b in pairs) for name, pairs in found.items()}


@pytest.mark.parametrize(
    ("other", "chunks"), [(flash, False), (cudnn, False), (flex, True)], ids=["flash", "cudnn", "flex"]
)
def test_others_change_bits_where_ours_do_not(other, chunks):
    found = {"ours": differing(ours, True), other.__name__: differing(other, chunks)}
    print(found)
    assert not any(found["ours"].values()), found
    assert found[other.__name__]["last token"], found


def test_the_error_is_no_worse_than_that_of_others():
    """Root mean square of what FP64 says; out, dq, dk and dv."""
    operands = drawn(2, 1024, 8, 8, 128)
    gold = [x.double() for x in operands]
    exact = [gold_attention(*gold[:3]), *gradients(lambda q, k, v, _: gold_attention(q, k, v), *gold)]
    errors = {}
    for attention in (ours, flash, cudnn):
        found = [attention(*operands[:3], 1024), *gradients(attention, *operands)]
        off = [
            (a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()
            for a, b in zip(found, exact, strict=True)
        ]
        errors[attention.__name__] = [round(float(x), 7) for x in off]
    print(errors)
    for mine, *others in zip(*errors.values(), strict=True):
        assert mine <= max(others) * 1.005, errors


def gold_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
