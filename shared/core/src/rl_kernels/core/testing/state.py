"""State of torch that a test changes and then restores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let operators on the CPU use ``count`` threads inside the block; ``ValueError`` below 1."""
    if count < 1:
        raise ValueError(f"count: expected an integer >= 1, got {count}")
    with set_to(count, torch.get_num_threads(), torch.set_num_threads):
        yield


@contextmanager
def set_to(value: T, before: T, put: Callable[[T], Any]) -> Iterator[None]:
    """Set a value inside the block, and restore the previous one at its end."""
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill the memory of ``torch.empty`` and its like with NaN (integers: the largest) inside the block.

    An output that a kernel does not fully write then shows up. PyTorch fills memory only in its deterministic mode, so
    that is on too; its warnings about its own operators without such a mode are silenced.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use_deterministic_algorithms", UserWarning)
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
