"""The attention of invariant(): what it computes, what it reads, and in what order."""

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.models import sums
from rl_kernels.models.ops import attention


def inputs(seen=0.6, dtype=torch.float32):
    draw = Draw(dtype, seed=5)
    q, k, v = draw.normal(2, 6, 21, 8), draw.normal(2, 3, 37, 8), draw.normal(2, 3, 37, 5)
    visible = torch.rand(2, 21, 37, generator=torch.Generator().manual_seed(6)) < seen
    visible[0, 3] = False
    return q, k, v, visible


def reference(q, k, v, visible, scale, softcap):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num()
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_values_and_gradients(softcap):
    *tensors, visible = inputs()
    upstream, results = torch.randn(2, 21, 6, 5, generator=torch.Generator().manual_seed(7)), []
    for function, dtype in ((attention, torch.float32), (reference, torch.float64)):
        leaves = [value.to(dtype).requires_grad_() for value in tensors]
        out = function(*leaves, visible, 0.3, softcap)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for value, gold in zip(*results, strict=True):
        torch.testing.assert_close(value.double(), gold, rtol=1e-5, atol=1e-6)


def test_what_is_not_seen_is_not_read():
    q, k, v, visible = inputs()
    visible[:, :, 9] = False
    expected = attention(q, k, v, visible, 0.3)
    for tensor in (k, v):
        tensor[:, :, 9] = torch.nan
    q[0, :, 3] = torch.nan
    assert torch.equal(attention(q, k, v, visible, 0.3), expected)
    assert bool((expected[0, 3] == 0).all())


@pytest.mark.parametrize("tile", [1, 1 << 12])
def test_tiles_change_no_bit(monkeypatch, tile):
    *tensors, visible = inputs()

    def run():
        leaves = [value.clone().requires_grad_() for value in tensors]
        out = attention(*leaves, visible, 0.3)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    whole = run()
    monkeypatch.setitem(sums.TILE, "cpu", tile)
    assert all(torch.equal(value, other) for value, other in zip(run(), whole, strict=True))


def test_gradients_of_rows_follow_no_padding():
    q, k, v, visible = inputs()
    upstream = torch.randn(2, 21, 6, 5, generator=torch.Generator().manual_seed(8))

    def run(q, k, v, visible, upstream):
        leaves = [value.clone().requires_grad_() for value in (q, k, v)]
        return torch.autograd.grad(attention(*leaves, visible, 0.3), leaves, upstream)

    alone = run(*(value[1:] for value in (q, k, v, visible, upstream)))
    more = torch.nn.functional.pad
    wide = [more(value[1:], (0, 0, 5, 0)) for value in (q, k, v)]
    wide += [more(visible[1:], (5, 0, 5, 0)), more(upstream[1:], (0, 0, 0, 0, 5, 0))]
    for value, other in zip(run(*wide), alone, strict=True):
        assert torch.equal(value[:, :, 5:], other)


def test_as_an_op():
    args = *inputs(), 0.3, 2.0, "native"
    torch.library.opcheck(torch.ops.rl_kernels.det_gemm_model_attention.default, args)
    upstream = torch.randn(2, 21, 6, 5, generator=torch.Generator().manual_seed(9))
    torch.library.opcheck(torch.ops.rl_kernels.det_gemm_model_attention_backward.default, (upstream, *args))


def test_no_keys_and_no_queries():
    empty = torch.zeros(2, 4, 0, 8)
    some = torch.ones(2, 4, 3, 8)
    assert torch.equal(
        attention(some, empty, empty, torch.ones(2, 3, 0, dtype=torch.bool), 1.0), torch.zeros(2, 3, 4, 8)
    )
    assert attention(empty, some, some, torch.ones(2, 0, 3, dtype=torch.bool), 1.0).shape == (2, 0, 4, 8)


def test_double_backward_raises():
    *tensors, visible = inputs()
    leaves = [value.requires_grad_() for value in tensors]
    (grad, *_) = torch.autograd.grad(attention(*leaves, visible, 0.3).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()
