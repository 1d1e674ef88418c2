"""Turn whatever a candidate does into named results or a clear failure."""

from __future__ import annotations

import traceback
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.testing.surroundings import changed

Results = dict[str, torch.Tensor]
LEFT = "did not leave as it found"


class Misbehaved(Exception):
    """A candidate did not answer as an operator must; the message says how."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        """Of the exception that the candidate raised, if it did."""


def equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Say whether a result is there with the numbers that are expected, any NaN being as good as another."""
    return found is not None and torch.equal(found.nan_to_num(), expected.nan_to_num())


def as_found(phase: str, before: dict[str, Any]) -> None:
    """Raise if something of the global state is no longer as it was."""
    names = changed(before)
    if names:
        raise Misbehaved(f"{phase} {LEFT}: {', '.join(names)}")


def or_refused(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or what it says where it refuses."""
    try:
        return run()
    except Misbehaved as error:
        return str(error)


def named(result: Any, single: str) -> Results:
    """Name the tensors of a result: the fields of a NamedTuple, also of one in it, or ``single`` for a bare tensor."""
    if isinstance(result, torch.Tensor):
        return {single: result}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        inner = next((field for field in result._fields if hasattr(getattr(result, field), "_fields")), None)
        if inner is not None:
            others = {field: getattr(result, field) for field in result._fields if field != inner}
            flat = {**named(getattr(result, inner), single), **others}
            return named(namedtuple(type(result).__name__, flat)(**flat), single)
        wrong = [field for field in result._fields if not isinstance(getattr(result, field), torch.Tensor)]
        if not wrong:
            return dict(zip(result._fields, result, strict=True))
        raise Misbehaved(f"{', '.join(wrong)}: expected a tensor")
    raise Misbehaved(f"expected a tensor or a NamedTuple of tensors, got {type(result).__name__}")


def guarded(phase: str, run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns; whatever it raises becomes ``Misbehaved``, with the traceback.

    But ``BackendUnavailable``, because a backend that says beforehand that a call is beyond it has not misbehaved; and
    Ctrl-C, which is for us. A candidate that raises either has a process of its own (``worker.py``).
    """
    try:
        return run()
    except (Misbehaved, BackendUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise misbehaved(phase, error) from error


def misbehaved(phase: str, error: BaseException) -> Misbehaved:
    """Say what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return Misbehaved(
        f"{phase} raised {type(error).__name__}: {error}{where}", "".join(traceback.format_exception(error))
    )
