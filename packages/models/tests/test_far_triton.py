"""Tensors whose elements lie far apart in memory: the fused kernels reach them by offsets of more than 32 bits."""

import pytest
import torch

from rl_kernels.core.testing import Draw, far
from rl_kernels.models.clients.batch_invariant_ops import reductions
from rl_kernels.models.fused import rotary
from rl_kernels.models.fused.cache import store


@pytest.fixture
def draw(triton_on):
    return Draw(torch.float16, triton_on, seed=3)


def rotated(q, k, cos, sin, of_q, of_k):
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    assert rotary.takes(*leaves, cos, sin)
    found = rotary.rotary(*leaves, cos, sin)
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, (of_q, of_k))]


@pytest.mark.parametrize("count", [2, 3])
def test_rotary(draw, count):
    heads, angles = [draw.normal(count, count, count, 8) for _ in range(4)], draw.normal(count, count, 8)
    q, k, of_q, of_k = heads
    expected = rotated(q, k, angles, angles, of_q, of_k)
    for dim in range(3):
        turn = far(angles, max(dim - 1, 0))
        q, k, of_q, of_k = (far(x, dim) for x in heads)
        assert all(map(torch.equal, rotated(q, k, turn, turn, of_q, of_k), expected)), f"dim {dim}"


@pytest.mark.parametrize("count", [2, 3])
def test_rows_of_a_cache(draw, count):
    key, value, cache = draw.normal(count, count, 8), draw.normal(count, count, 8), draw.normal(2, 2, 8, count, 8)
    slots, expected = torch.tensor([9, 3, 12][:count], device=cache.device), cache.clone()
    store(key, value, expected, slots)
    for dim in range(2):
        found = cache.clone()
        store(far(key, dim), far(value, dim), found, slots)
        assert torch.equal(found, expected), f"dim {dim}"
    found = cache.clone()
    store(key, value, found, slots.repeat_interleave(2)[::2])
    assert torch.equal(found, expected), "slots apart"


@pytest.mark.parametrize("count", [2, 3])
def test_reductions(draw, count):
    x = draw.normal(count, count)
    for moved in (far(x, 0), far(x, 1)):
        assert torch.equal(reductions.log_softmax(moved, 1), reductions.log_softmax(x, 1))
        assert torch.equal(reductions.mean(moved, 1, False), reductions.mean(x, 1, False))
