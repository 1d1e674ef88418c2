import itertools

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty


def test_empty_memory_is_poisoned(device):
    with poisoned_empty():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            ones = torch.ones(3, dtype=dtype, device=device)
            for made in (torch.empty(3, dtype=dtype, device=device), ones.new_empty(2, 2), torch.empty_like(ones)):
                assert made.isnan().all()
        assert (torch.empty(3, dtype=torch.int64, device=device) == torch.iinfo(torch.int64).max).all()


def test_poisoned_empty_restores_what_was_set():
    memory = torch.utils.deterministic
    try:
        for warn_only, fill in itertools.product((False, True), repeat=2):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            memory.fill_uninitialized_memory = fill
            with pytest.raises(KeyError), poisoned_empty():
                raise KeyError
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
            assert memory.fill_uninitialized_memory is fill
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = True
