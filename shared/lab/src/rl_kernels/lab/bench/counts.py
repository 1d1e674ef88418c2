"""Count the launches of a call, and its waits for the device: the cost of small shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

WAITS = "synchronizing CUDA operation"
"""Text of PyTorch's warning about a wait."""


class Counts(NamedTuple):
    """Counts of one call: kernels, copies and fills on the device; waits of the host for the device."""

    launches: int
    waits: int


def counts(run: Callable[[], Any]) -> Counts:
    """Count launches and waits of one call; the caller has made the same call before.

    A profiler that was attached once may slow down every later launch of the process a little.
    """
    torch.cuda.synchronize()
    with _waits() as waits:
        run()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # It is about profiling cycles, and there is only one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counts(len(launched), len(waits))


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Collect PyTorch's warnings of waits."""
    messages: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield messages
        finally:
            torch.cuda.set_sync_debug_mode(before)
            messages += [str(warning.message) for warning in caught if WAITS in str(warning.message)]
