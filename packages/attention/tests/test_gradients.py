"""det_attention_backward: the bits that autograd gets, and what is asked of what was saved."""

import pytest
import torch

from rl_kernels.attention import det_attention
from rl_kernels.attention.gradients import det_attention_backward


def drawn(*shapes, dtype=torch.float32):
    source = torch.Generator().manual_seed(6)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


PACKED = {
    "cu_seqlens_q": torch.tensor([0, 3, 3, 9]),
    "cu_seqlens_k": torch.tensor([0, 70, 75, 80]),
    "max_seqlen_q": 6,
    "max_seqlen_k": 70,
}
CASES = {
    "dense": {},
    "not causal": {"causal": False},
    "scaled": {"scale": 0.2},
    "window": {"window": (4, 1), "causal": False},
    "packed": PACKED,
    "packed, asked": {name: PACKED[name] for name in ("cu_seqlens_q", "cu_seqlens_k")},
    "packed window": {**PACKED, "window": (3, None)},
}


@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_autograd(name):
    options = {"causal": True, **CASES[name]}
    for dtype in (torch.float32, torch.float16):
        q, k, v, upstream = drawn((2, 9, 4, 16), (2, 80, 2, 16), (2, 80, 2, 24), (2, 9, 4, 24), dtype=dtype)
        if "cu_seqlens_q" in options:
            q, k, v, upstream = (x[0] for x in (q, k, v, upstream))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = det_attention(*leaves, **options, return_lse=True)
        wanted = torch.autograd.grad(out, leaves, upstream)
        found = det_attention_backward(upstream, q, k, v, out.detach(), lse, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(x.is_contiguous() for x in found)


WRONG = {
    "grad": {"grad": torch.zeros(2, 9, 4, 16)},
    "grad dtype": {"grad": torch.zeros(2, 9, 4, 24, dtype=torch.float16)},
    "out": {"out": torch.zeros(2, 9, 4, 16)},
    "lse": {"lse": torch.zeros(2, 9, 4)},
    "lse dtype": {"lse": torch.zeros(2, 4, 9, dtype=torch.float64)},
    "q": {"q": torch.zeros(9, 4, 16)},
    "max_seqlen_q": {"max_seqlen_q": 3},
    "window": {"window": (-2, 0)},
}


@pytest.mark.smoke
def test_what_is_wrong_is_named():
    q, k, v = drawn((2, 9, 4, 16), (2, 80, 2, 16), (2, 80, 2, 24))
    out, lse = det_attention(q, k, v, causal=True, return_lse=True)
    usual = {"grad": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "causal": True}
    elsewhere = {name: {name: usual[name].to("meta")} for name in ("grad", "k", "v", "out", "lse")}
    for name, change in (*WRONG.items(), *elsewhere.items()):
        with pytest.raises((TypeError, ValueError), match=f"^{name.split()[0]}: "):
            det_attention_backward(**(usual | change))
    q, k, v = drawn((9, 4, 16), (80, 2, 16), (80, 2, 16))
    out, lse = det_attention(q, k, v, **PACKED, causal=True, return_lse=True)
    wild = PACKED | {"cu_seqlens_q": torch.tensor([0, 4, 2, 9])}
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: "):
        det_attention_backward(out, q, k, v, out, lse, causal=True, **wild)


def test_second_derivatives_raise():
    q, k, v = drawn((1, 9, 4, 16), (1, 9, 4, 16), (1, 9, 4, 16))
    out, lse = det_attention(q, k, v, causal=True, return_lse=True)
    dq, *_ = det_attention_backward(out.requires_grad_(), q, k, v, out, lse, causal=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


class Nothing(torch.autograd.Function):
    """Hands no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_of_out_gives_none():
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    out, lse = det_attention(q, k, v, causal=True, return_lse=True)
    assert not lse.requires_grad
    Nothing.apply(out).sum().backward()
    assert (q.grad, k.grad, v.grad) == (None, None, None)
