"""The kernels that PyTorch's flash attention gets, under the CPU's key: the bits of det_attention."""

import pytest
import torch
from torch.nn.attention import varlen

from rl_kernels.attention import det_attention
from rl_kernels.models.clients.torch import Registered, calls, overloads

aten = torch.ops.aten
BOUNDS_Q, BOUNDS_K = [0, 5, 5, 12, 13], [0, 9, 12, 12, 80]
"""Queries and keys of four sequences: more keys than queries, no query, no key, one query and more than a block."""
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "scaled": {"is_causal": True, "scale": 0.31},
    "left": {"window_size_left": 3, "window_size_right": 0},
    "around": {"window_size_left": 2, "window_size_right": 1},
    "right": {"window_size_left": -1, "window_size_right": 2},
    "causal and left": {"is_causal": True, "window_size_left": 2},
}


@pytest.fixture(autouse=True)
def on_cpu():
    handle = Registered("CPU")
    yield
    handle.remove()


def drawn(*shapes, dtype=torch.float32, grad=False):
    source = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=source).to(dtype).requires_grad_(grad) for shape in shapes]


def bounds(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def ours(options):
    """Return det_attention's options for those of aten."""
    window = tuple(options.get(f"window_size_{side}") for side in ("left", "right"))
    return {"causal": options.get("is_causal", False), "scale": options.get("scale"), "window": window}


def flash(q, k, v, cum_q=None, cum_k=None, max_q=0, max_k=0, **options):
    """Call the op of ``varlen_attn``; what has no default there gets one."""
    causal = options.pop("is_causal", False)
    return aten._flash_attention_forward(q, k, v, cum_q, cum_k, max_q, max_k, 0.0, causal, False, **options)


def gradients(out, leaves, upstream):
    return torch.autograd.grad(out, leaves, upstream)


def equal(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_have_the_bits_of_det_attention(name):
    where, options = [bounds(BOUNDS_Q), bounds(BOUNDS_K)], OPTIONS[name]
    for dtype in (torch.bfloat16, torch.float32):
        leaves = drawn((13, 4, 16), (80, 2, 16), (80, 2, 16), dtype=dtype, grad=True)
        (upstream,) = drawn((13, 4, 16), dtype=dtype)
        out, lse, state, unused, mask = flash(*leaves, *where, 7, 68, **options)
        wanted = det_attention(*leaves, cu_seqlens_q=where[0], cu_seqlens_k=where[1], return_lse=True, **ours(options))
        assert equal((out, lse), wanted)
        assert (lse.dtype, lse.requires_grad, mask.numel(), mask.dtype) == (torch.float32, False, 0, dtype)
        assert lse.is_contiguous()
        assert [(x.dtype, x.tolist()) for x in (state, unused)] == [(torch.uint64, [0, 0]), (torch.uint64, 0)]
        assert equal(gradients(out, leaves, upstream), gradients(wanted.out, leaves, upstream))


def test_dense_sequences_have_the_bits_of_det_attention():
    leaves = drawn((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), grad=True)
    (upstream,) = drawn((2, 5, 4, 16))
    for name, options in OPTIONS.items():
        out, lse, *_ = flash(*leaves, max_q=5, max_k=9, **options)
        wanted = det_attention(*leaves, return_lse=True, **ours(options))
        assert equal((out, lse), wanted), name
        assert lse.shape == (2, 4, 5)
        assert equal(gradients(out, leaves, upstream), gradients(wanted.out, leaves, upstream)), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [5, 9, 70, 3])
def test_sdpa_has_the_bits_of_det_attention(causal, keys):
    """Where T != S a causal mask ends at the last key, as FlashAttention's does and causal_lower_right means."""
    (upstream,) = drawn((2, 4, 5, 16))
    for heads_first in (False, True):
        leaves = drawn((2, 4, 5, 16), (2, 2, keys, 16), (2, 2, keys, 16))
        if not heads_first:
            leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        found = aten._scaled_dot_product_flash_attention(*leaves, 0.0, causal, scale=0.3)
        out, lse, cum_q, cum_k, max_q, max_k, state, unused, mask = found
        wanted = det_attention(*(x.transpose(1, 2) for x in leaves), causal=causal, scale=0.3, return_lse=True)
        assert equal((out, lse), (wanted.out.transpose(1, 2), wanted.lse))
        assert (cum_q, cum_k, max_q, max_k, mask.numel()) == (None, None, 5, keys, 0)
        assert [(x.dtype, x.tolist()) for x in (state, unused)] == [(torch.uint64, [0, 0]), (torch.uint64, 0)]
        got = gradients(out, leaves, upstream)
        assert equal(got, gradients(wanted.out, leaves, upstream.transpose(1, 2)))
        # The compiler takes the strides of empty_like for granted.
        assert [x.stride() for x in (out, *got)] == [torch.empty_like(x).stride() for x in (leaves[0], *leaves)]


def test_sliced_operands_and_an_expanded_gradient():
    """As q, k and v cut out of one product, and the gradient of a sum, whose strides are 0."""
    (whole,) = drawn((2, 5, 3, 4, 16), grad=True)
    out = aten._scaled_dot_product_flash_attention(*(x.transpose(1, 2) for x in whole.unbind(2)), 0.0, True)[0]
    (found,) = gradients(out.sum(), whole, None)
    (wanted,) = gradients(det_attention(*whole.unbind(2), causal=True).sum(), whole, None)
    assert torch.equal(found, wanted)


def test_varlen_attn():
    leaves = drawn((13, 4, 16), (13, 4, 16), (13, 4, 16), grad=True)
    (upstream,) = drawn((13, 4, 16))
    where = bounds(BOUNDS_Q)
    for window in ((-1, -1), (-1, 0), (3, 0), (2, 1)):
        out = varlen.varlen_attn(*leaves, where, where, 7, 7, window_size=window)
        wanted = det_attention(*leaves, causal=False, window=window, cu_seqlens_q=where, cu_seqlens_k=where)
        assert torch.equal(out, wanted)
        assert equal(gradients(out, leaves, upstream), gradients(wanted, leaves, upstream))


def test_the_longest_lengths_are_passed_on(monkeypatch):
    """A GPU's grid follows from them; without them each call would ask the device, and wait."""
    seen = []

    def noted(call):
        def run(*args, **options):
            seen.append((options.get("max_seqlen_q"), options.get("max_seqlen_k"), options["validate"]))
            return call(*args, **options)

        return run

    monkeypatch.setattr(calls, "det_attention", noted(calls.det_attention))
    monkeypatch.setattr(overloads, "det_attention_backward", noted(overloads.det_attention_backward))
    leaves = drawn((13, 4, 16), (80, 2, 16), (80, 2, 16), grad=True)
    where = bounds(BOUNDS_Q), bounds(BOUNDS_K)
    flash(*leaves, *where, 7, 68)[0].sum().backward()
    with torch.no_grad():
        flash(*leaves, *where, 7, 68, seqused_k=bounds([9, 3, 0, 50]))
    assert seen == [(7, 68, False), (7, 68, False), (7, None, False)]


def test_kernels_keep_no_graph_of_their_own():
    """Autograd's is above them; that of a tensor that is written to would be det_attention's."""
    leaves = drawn((2, 5, 4, 16), (2, 9, 4, 16), (2, 9, 4, 16), grad=True)
    out, lse, *_ = overloads.flash_attention_forward(*leaves, None, None, 5, 9, 0.0, True, False)
    assert not out.requires_grad
    found = overloads.flash_attention_backward(out, *leaves, out, lse, None, None, 5, 9, 0.0, True, None, None)
    assert not any(x.requires_grad for x in found)


def test_no_rows_at_all():
    empty, none = torch.zeros(0, 4, 16), bounds([0])
    out, lse, *_ = flash(empty, empty, empty, none, none)
    assert (out.shape, lse.shape) == ((0, 4, 16), (4, 0))
    out, lse, *_ = flash(*(torch.zeros(2, 0, 4, 16) for _ in range(3)))
    assert (out.shape, lse.shape) == ((2, 0, 4, 16), (2, 4, 0))


def test_compiled_sdpa():
    torch.compiler.reset()
    leaves = drawn((2, 4, 5, 16), (2, 4, 5, 16), (2, 4, 5, 16), grad=True)
    (upstream,) = drawn((2, 4, 5, 16))

    def call(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] * 2

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(found, call(*leaves))
    assert equal(gradients(found, leaves, upstream), gradients(call(*leaves), leaves, upstream))
