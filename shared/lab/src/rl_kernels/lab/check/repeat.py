"""Run one call many times while the device has other work, and count the elements whose bits change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from rl_kernels.core.testing import bits_of
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.guard import Results

SIZE = 4096
"""Rows and columns of the products on the other stream: one product fills any GPU."""
ATTEMPTS = 3
"""Limit of the attempted runs, as a multiple of the runs that must overlap other work."""


class OtherStream:
    """A second stream of a GPU, with products queued on it; on a CPU there is none, and it counts as busy."""

    def __init__(self, device: torch.device) -> None:
        self._ends: list[torch.cuda.Event] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            # Its own generator, so that numbers drawn elsewhere do not depend on it.
            source = torch.Generator(device).manual_seed(0)
            self._factor = torch.randn(SIZE, SIZE, generator=source, device=device, dtype=torch.bfloat16)
            self._product = torch.empty_like(self._factor)
            torch.cuda.synchronize(device)

    def top_up(self, products: int) -> None:
        """Queue products until this many are pending."""
        if self._stream is None:
            return
        self._ends = [end for end in self._ends if not end.query()]
        with torch.cuda.stream(self._stream):
            while len(self._ends) < products:
                torch.mm(self._factor, self._factor, out=self._product)
                self._ends.append(self._stream.record_event())

    @property
    def is_busy(self) -> bool:
        """Whether queued work is pending."""
        return self._stream is None or not all(end.query() for end in self._ends)


@cache
def other_stream(device: torch.device) -> OtherStream:
    """Return the other stream of a device, created at first use."""
    return OtherStream(device)


def differing(run: Callable[[], Results], runs: int, other: OtherStream) -> dict[str, int]:
    """Return, for each result, how many elements of later runs differ in bits from the first run.

    A run counts only if the other stream was still busy when it ended. A result that is missing in a run, or has
    another shape or dtype, differs in all its elements. The counts stay on the device until the end.

    Raises:
        RuntimeError: the other stream could not be kept busy.
    """
    first = run()
    counts = {name: torch.zeros((), dtype=torch.int64, device=value.device) for name, value in first.items()}
    counted, products = 1, 8
    for _ in range(ATTEMPTS * runs):
        if counted == runs:
            return {name: int(count) for name, count in counts.items()}
        other.top_up(products)
        again = run()
        for name, value in first.items():
            counts[name] += _count_unlike(again.get(name), value)
        _wait(first)
        if other.is_busy:
            counted += 1
        else:
            products *= 2
    raise RuntimeError(f"the other stream was still busy at the end of only {counted} runs, expected {runs}")


def _count_unlike(result: torch.Tensor | None, expected: torch.Tensor) -> torch.Tensor | int:
    if result is None or (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return max(expected.numel(), 1)
    return (bits_of(result) != bits_of(expected)).sum()


def _wait(results: Results) -> None:
    """Wait for the stream that makes the results, and for no other."""
    for device in {value.device for value in results.values() if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def differing_runs(cell: Cell, runs: int) -> dict[str, int]:
    """Return the counts of ``differing`` for forward and backward of a candidate on the inputs of a case."""
    upstream = cell.upstream(cell.run())
    return differing(lambda: cell.run().results(upstream), runs, other_stream(cell.setting.device))
