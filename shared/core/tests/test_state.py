import itertools
import warnings

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty, torch_threads


def deterministic_state():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads(), deterministic_state()
    yield
    assert (torch.get_num_threads(), deterministic_state()) == before


def test_torch_threads_are_restored():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        with pytest.raises(KeyError), torch_threads(1):
            raise KeyError(torch.get_num_threads())
        assert torch.get_num_threads() == before + 1
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"count: expected an integer >= 1, got {count}"), torch_threads(count):
            pass


def test_empty_memory_is_poisoned(device):
    with poisoned_empty():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            ones = torch.ones(3, dtype=dtype, device=device)
            for made in (torch.empty(3, dtype=dtype, device=device), ones.new_empty(2, 2), torch.empty_like(ones)):
                assert made.isnan().all()
        assert (torch.empty(3, dtype=torch.int64, device=device) == torch.iinfo(torch.int64).max).all()
        # What is written stays.
        assert torch.equal(torch.zeros(3) + torch.ones(3), torch.ones(3))
        out = torch.empty(2, 3)
        out[:, 1:] = 5
        assert out.isnan().sum() == 2


def test_only_what_torch_says_of_that_mode_is_silenced():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
        finally:
            torch.use_deterministic_algorithms(False)
    assert ["put_" in str(warning.message) for warning in said] == [True]
    with poisoned_empty():
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", UserWarning, stacklevel=1)


def test_poisoned_empty_restores_what_was_set():
    try:
        for warn_only, fill in itertools.product((False, True), repeat=2):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            with pytest.raises(KeyError), poisoned_empty():
                raise KeyError
            assert deterministic_state() == (True, warn_only, fill)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
