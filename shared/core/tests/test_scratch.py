"""Memory that a thread uses again: the same for each call of a thread, another for each thread, dtype and purpose."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from rl_kernels.core.scratch import ROOM, Scratch

LIKE = torch.empty(0)


def address(scratch: Scratch, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    x = scratch(LIKE, shape, dtype)
    assert x.shape == shape
    assert x.dtype == dtype
    assert x.is_contiguous()
    return x.data_ptr()


def test_calls_of_a_thread_share_memory_and_others_do_not() -> None:
    first, second = Scratch(), Scratch()
    ours = address(first, (ROOM,))
    assert address(first, (3, 5)) == ours
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(address, first, (3, 5)).result()
    others = {theirs, address(second, (3, 5)), address(first, (3, 5), torch.float64)}
    assert len(others) == 3
    assert ours not in others


def test_more_numbers_than_are_kept_get_fresh_memory() -> None:
    scratch = Scratch()
    large = [scratch(LIKE, (ROOM + 1,), torch.float32) for _ in range(2)]
    assert large[0].data_ptr() != large[1].data_ptr()


def test_memory_is_of_the_largest_call() -> None:
    scratch = Scratch()
    for count, kept in ((3, 3), (7, 7), (5, 7)):
        assert scratch(LIKE, (count,), torch.float32).untyped_storage().nbytes() == 4 * kept


def test_memory_of_inference_mode_is_written_outside_of_it() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch(LIKE, (4,), torch.float32).zero_()
    assert scratch(LIKE, (4,), torch.float32).add_(1.0).tolist() == [1.0] * 4
