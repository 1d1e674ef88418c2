"""New keys and values in the pages of a cache."""

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.models.fused.cache import store

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
