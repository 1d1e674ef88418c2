"""New keys and values in the pages of a cache; and elements far apart, by offsets of more than 32 bits."""

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


def test_rotary(draw):
    for count in (2, 3):
        heads, angles = [draw.normal(count, count, count, 8) for _ in range(4)], draw.normal(count, count, 8)
        q, k, of_q, of_k = heads
        expected = rotated(q, k, angles, angles, of_q, of_k)
        for dim in range(3):
            turn = far(angles, max(dim - 1, 0))
            q, k, of_q, of_k = (far(x, dim) for x in heads)
            assert all(map(torch.equal, rotated(q, k, turn, turn, of_q, of_k), expected)), f"dim {dim}"


def test_rows_of_a_cache(draw):
    for count in (2, 3):
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


def test_reductions(draw):
    for count in (2, 3):
        x = draw.normal(count, count)
        for moved in (far(x, 0), far(x, 1)):
            assert torch.equal(reductions.log_softmax(moved, 1), reductions.log_softmax(x, 1))
            assert torch.equal(reductions.mean(moved, 1, False), reductions.mean(x, 1, False))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_go_to_their_places(device):
    """Rows apart, as parts of one product, and rows behind the last slot."""
    for heads in (1, 3):
        draw = Draw(torch.bfloat16, device, seed=3)
        rows = draw.normal(7, 2 * heads + 4, 16)
        key, value = rows[:, 4 : 4 + heads], rows[:, 4 + heads :]
        cache = draw.normal(5, 2, 8, heads, 16)
        expected = cache.clone()
        slots = [9, 39, 8, 23, 16]
        for row, slot in enumerate(slots):
            expected[slot // 8, 0, slot % 8], expected[slot // 8, 1, slot % 8] = key[row], value[row]
        store(key, value, cache, torch.tensor(slots, device=device))
        assert torch.equal(cache, expected), heads


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_a_slot_changes_no_page_of_others(device):
    draw = Draw(torch.bfloat16, device, seed=4)
    key, value, cache = draw.normal(3, 2, 8), draw.normal(3, 2, 8), draw.normal(4, 2, 8, 2, 8)
    expected = cache.clone()
    expected[2, 0, 1], expected[2, 1, 1] = key[1], value[1]
    store(key, value, cache, torch.tensor([-1, 17, -1], device=device))
    # The place of page 0 that rows without a slot may take.
    assert torch.equal(cache[1:], expected[1:])
