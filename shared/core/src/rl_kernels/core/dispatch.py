"""Choose a backend for a call, or say why not; force one; record what was chosen.

The choice is the first backend, in the operator's order of priority, that can run the call and keeps the promises of
the operator. State is in module variables, because torch.compile guards those and cannot trace a ContextVar; so a
forced backend applies to all threads of the process. The environment is read once, at import.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import TypeVar

import torch

from rl_kernels.core import canary
from rl_kernels.core.calls import Memory, forget, kind_of
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import PUBLISHED, kernel_registry, published_operator
from rl_kernels.core.torchlib.observed import ops_are_observed

T = TypeVar("T")
AUTO = "auto"


class BackendUnavailable(ValueError):
    """The requested backend, or every backend, cannot run this call; the message says why."""


class EnvironmentMistake(ValueError):
    """An environment variable has an invalid value; the one-line message names the variable."""


@dataclass(frozen=True)
class Choice:
    """One dispatch: which backend ran which operator, and whether it was forced."""

    operator: str
    backend: str
    device: str
    forced: bool


@dataclass(frozen=True)
class Verdict:
    """One line of ``explain``: a backend that is chosen, maybe with a note, or the reason why it is not."""

    backend: str
    reason: str | None
    chosen: bool
    note: str | None = None

    def __str__(self) -> str:
        chosen = f"chosen; {self.note}" if self.note else "chosen"
        return f"{self.backend}: {chosen if self.chosen else self.reason or 'can run, comes after the chosen one'}"


def _canonical(operator: str, where: str) -> str:
    name = published_operator(operator)
    if name is not None:
        return name
    if operator in kernel_registry.names():
        return operator
    known = ", ".join(sorted({*PUBLISHED, *kernel_registry.names()}))
    raise ValueError(f"{where}: {operator!r} is not an operator; known: {known}")


def parse_forced(text: str) -> dict[str, str]:
    """Parse ``linear_logp=triton,grpo_loss=native``, the form of ``RL_KERNELS_BACKEND``."""
    forced = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, backend = item.partition("=")
        if not equals or not name or not backend:
            raise ValueError(f"RL_KERNELS_BACKEND: expected operator=backend[,operator=backend], got {text!r}")
        forced[_canonical(name.strip(), "RL_KERNELS_BACKEND")] = backend.strip()
    return forced


def _read_environment() -> tuple[dict[str, str], str | None]:
    """Return the forced backends, and an error message or None: raising at import would give commands a traceback."""
    try:
        canary.action, canary.records_of_user = canary.read_environment()
        return parse_forced(os.environ.get("RL_KERNELS_BACKEND", "")), None
    except ValueError as error:
        return {}, str(error)


_environment, _mistake = _read_environment()
_blocks: tuple[Mapping[str, str], ...] = ()
"""Backends that each active ``use_backend`` forces, oldest first; replaced as a whole, so that readers need no lock."""
_entering = Lock()
_strict: bool = os.environ.get("RL_KERNELS_STRICT", "0") not in ("", "0")
_logs: list[list[Choice]] = []
"""Logs of every call: no choice is remembered while there is one."""
_logs_of_choices: list[list[Choice]] = []
"""Logs of new choices; a choice that is remembered from an earlier call is not logged."""


class use_backend:
    """Force backends inside a ``with`` block; ``auto`` cancels an outer block.

    ``use_backend(linear_logp="triton", grpo_loss="native")``. An explicit ``backend=`` on a call takes precedence. A
    block applies to the whole process: while it is active, it also forces calls in other threads, such as the thread of
    a backward pass. If several active blocks name an operator, the one entered last decides.

    Raises:
        ValueError: a keyword is not an operator.
    """

    def __init__(self, **backends: str) -> None:
        self._backends = {_canonical(name, "use_backend"): backend for name, backend in backends.items()}

    def __enter__(self) -> None:
        """Force the backends."""
        global _blocks
        with _entering:
            _blocks = (*_blocks, self._backends)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove this block, even if other threads have entered or left blocks in between."""
        global _blocks
        with _entering:
            last = max(place for place, block in enumerate(_blocks) if block is self._backends)
            _blocks = (*_blocks[:last], *_blocks[last + 1 :])


def check_environment() -> None:
    """Raise ``EnvironmentMistake`` if ``RL_KERNELS_BACKEND`` or a variable of ``canary`` is malformed."""
    if _mistake is not None:
        raise EnvironmentMistake(_mistake)


@contextmanager
def record_dispatch(*, every_call: bool = True) -> Iterator[list[Choice]]:
    """Collect every choice made inside the block, oldest first.

    With ``every_call=False`` calls keep using choices that they remember, which are not collected again: the calls then
    run as they do outside of the block.
    """
    log: list[Choice] = []
    logs = _logs if every_call else _logs_of_choices
    logs.append(log)
    try:
        yield log
    finally:
        logs[:] = [other for other in logs if other is not log]


def reason_against(backend: Backend, call: Call) -> str | None:
    """Return why the automatic choice may not take this backend for this call, or None if it may."""
    reason = backend.why_not(call)
    if reason is not None:
        return reason
    if call.device.type in backend.by_name:
        return f"on {call.device.type} it runs only if it is asked for by name"
    if not backend.promises[call.device.type] >= INVARIANT:
        missing = sorted(INVARIANT - backend.promises[call.device.type])
        return f"does not promise {', '.join(missing)} on {call.device.type}; ask for it by name to use it anyway"
    if _strict and backend.name == "native" and call.device.type == "cuda":
        return "RL_KERNELS_STRICT forbids the native backend on a GPU"
    return None


def choose(operator: Operator, call: Call, backend: str | None = None) -> Backend:
    """Return the backend that runs this call, and record it.

    Args:
        operator: the operator that is called.
        call: device, dtype, arch and traits of the tensors.
        backend: a name forces that backend. ``"auto"`` chooses one, ignoring ``use_backend`` and
            ``RL_KERNELS_BACKEND``; None respects them.

    Raises:
        ValueError: no backend has that name.
        EnvironmentMistake: ``RL_KERNELS_BACKEND`` is malformed.
        BackendUnavailable: the forced backend, or every backend, cannot run the call.
        CanaryMismatch: the backend gives other bits than those recorded for this architecture.
    """
    requested = _requested(operator.name) if backend is None else backend
    chosen = _automatic(operator, call) if requested == AUTO else _by_name(operator, call, requested)
    if not torch.compiler.is_compiling() and canary.is_due(operator, call, chosen):
        canary.run(operator, call, chosen)
    for log in _active_logs():
        log.append(Choice(operator.name, chosen.name, call.device.type, requested != AUTO))
    return chosen


def _active_logs() -> list[list[Choice]]:
    # A list that grows between calls would make torch.compile trace again.
    if torch.compiler.is_compiling():
        return _logs
    return [] if canary.is_running() else [*_logs, *_logs_of_choices]


def remembered(check: Callable[..., T]) -> Callable[..., T]:
    """Remember what a function that checks arguments and chooses a backend returns, for all arguments of one kind.

    The function may look only at the kind of its arguments (``calls``). It may raise. It is always called under
    torch.compile (a graph has guards of its own), while choices are recorded, while a backend is forced outside of the
    call, and while a canary is owed; and what it returns while ops are observed is not remembered.
    """
    memories = Memory[T](), Memory[T]()

    @functools.wraps(check)
    def look_up(*args: object) -> T:
        if _blocks or _logs or _environment or _mistake or torch.compiler.is_compiling():
            return check(*args)
        kind, memory = kind_of(args), memories[_strict]
        try:
            result = memory.get(kind)
        except TypeError:
            # An argument without a hash: a list, a symbolic size.
            return check(*args)
        if result is None:
            result = check(*args)
            if kind is not None and canary.is_settled() and not ops_are_observed():
                memory.add(kind, result)
        return result

    return look_up


@contextmanager
def without_canaries() -> Iterator[None]:
    """Compare no canary inside the block: for the checker, whose planted bugs a canary would find first."""
    with canary.suspended():
        try:
            yield
        finally:
            # No canary has checked the choices made here.
            forget()


def _requested(operator: str) -> str:
    """Return the backend that is forced outside of the call, or ``auto``."""
    check_environment()
    for block in reversed(_blocks):
        if operator in block:
            return block[operator]
    return _environment.get(operator, AUTO)


def _by_name(operator: Operator, call: Call, name: str) -> Backend:
    backend = operator.backend(name)
    reason = backend.why_not(call)
    if reason is not None:
        raise BackendUnavailable(f"backend: {operator.name} cannot run on {name!r}: {reason}")
    return backend


def _automatic(operator: Operator, call: Call) -> Backend:
    if call.device.type == "meta":
        hint = "use torch._subclasses.fake_tensor.FakeTensorMode to get shapes"
        raise BackendUnavailable(f"backend: {operator.name}: tensors on meta hold no values; {hint}")
    reasons = []
    for backend in operator.backends:
        reason = reason_against(backend, call)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise BackendUnavailable(f"backend: no backend of {operator.name} can run this call; " + "; ".join(reasons))


def explain_call(operator: Operator, call: Call) -> list[Verdict]:
    """Return a verdict on every backend of an operator for a described call, in order of priority."""
    verdicts: list[Verdict] = []
    is_decided = False
    for backend in operator.backends:
        reason = reason_against(backend, call)
        verdicts.append(Verdict(backend.name, reason, chosen=reason is None and not is_decided))
        is_decided = is_decided or reason is None
    return verdicts


def explain_with_notes(operator: Operator, call: Call) -> list[Verdict]:
    """Return the verdicts of ``explain_call``, with the note of the chosen backend."""
    verdicts = zip(operator.backends, explain_call(operator, call), strict=True)
    return [replace(verdict, note=backend.note(call)) if verdict.chosen else verdict for backend, verdict in verdicts]


def explain(op: str, *args: object, **kwargs: object) -> list[Verdict]:
    """Return a verdict on every backend for a call of the operator ``op`` with these arguments.

    The call does not run; ``native`` tries which products of this size keep a row's bits in the CPU's library.
    """
    operator = kernel_registry.load(op)
    return explain_with_notes(operator, operator.describe(*args, **kwargs))
