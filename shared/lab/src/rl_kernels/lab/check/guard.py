"""Turn the outcome of a candidate's call into named results or a clear failure."""

from __future__ import annotations

import traceback
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.lab.check.surroundings import changed

Results = dict[str, torch.Tensor]
STATE_CHANGED = "changed global state"


class Misbehaved(Exception):
    """A candidate did not behave as an operator must; the message says how."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        """Traceback of the exception that the candidate raised, if it did."""


def equal(result: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Return whether a result exists and has the expected numbers; all NaNs are equal."""
    return result is not None and torch.equal(result.nan_to_num(), expected.nan_to_num())


def check_global_state(phase: str, before: dict[str, Any]) -> None:
    """Raise if the global state has changed."""
    names = changed(before)
    if names:
        raise Misbehaved(f"{phase} {STATE_CHANGED}: {', '.join(names)}")


def result_or_error(run: Callable[[], Any]) -> Any:
    """Return the result of ``run``, or the message of its error."""
    try:
        return run()
    except Misbehaved as error:
        return str(error)


def named(result: Any, single: str) -> Results:
    """Name the tensors of a result: the fields of a NamedTuple or of one nested in it; ``single`` for a bare tensor."""
    if isinstance(result, torch.Tensor):
        return {single: result}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        inner = next((field for field in result._fields if hasattr(getattr(result, field), "_fields")), None)
        if inner is not None:
            direct = {field: getattr(result, field) for field in result._fields if field != inner}
            flat = {**named(getattr(result, inner), single), **direct}
            return named(namedtuple(type(result).__name__, flat)(**flat), single)
        wrong = [field for field in result._fields if not isinstance(getattr(result, field), torch.Tensor)]
        if not wrong:
            return dict(zip(result._fields, result, strict=True))
        raise Misbehaved(f"{', '.join(wrong)}: expected a tensor")
    raise Misbehaved(f"expected a tensor or a NamedTuple of tensors, got {type(result).__name__}")


def guarded(phase: str, run: Callable[[], Any]) -> Any:
    """Return the result of ``run``; whatever it raises becomes ``Misbehaved``, with the traceback.

    Two exceptions pass through: ``BackendUnavailable``, because a backend may refuse a call, and Ctrl-C, which is meant
    for the checker. A user's candidate that raises one of them runs in its own process (``worker.py``).
    """
    try:
        return run()
    except (Misbehaved, BackendUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise misbehaved(phase, error) from error


def misbehaved(phase: str, error: BaseException) -> Misbehaved:
    """Describe an exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return Misbehaved(
        f"{phase} raised {type(error).__name__}: {error}{location}", "".join(traceback.format_exception(error))
    )
