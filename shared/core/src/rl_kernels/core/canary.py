"""Canaries: at first use, the bits of a few small fixed calls are compared with a record for the architecture.

The order of sums fixes the bits of an operator (its guide). But a driver, compiler or library that adds in another
order, or has another logarithm, would change them silently. So the first eager call for an operator, backend, device
and dtype makes the calls of the operator's module ``canary``, and compares a digest of their results with the JSON
file beside it. What is recorded nowhere, such as a CPU's bits, is not compared. ``rl-kernels doctor --canary``
compares gradients too.

``RL_KERNELS_CANARY`` says what happens on other bits: ``raise`` (the default, also if empty), ``warn``, or ``off``.
``RL_KERNELS_CANARY_RECORD`` names a file that ``rl-kernels doctor --canary --json`` has written: its records come
before the records of the packages.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import torch
from torch._C import _functorch
from torch.utils._python_dispatch import _disable_current_modes

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator

ACTION, RECORD = "RL_KERNELS_CANARY", "RL_KERNELS_CANARY_RECORD"
ACTIONS = ("raise", "warn", "off")
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 20}
"""Bits of the integers that inputs are made of: all that the dtype holds exactly; for FP32, more than TF32 keeps."""
PASSES = ("forward", "backward")
LEVELS = 5
"""Nested keys of a record, from the architecture to the pass."""

Digests = Mapping[str, str]
"""Digest by pass."""
Records = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Digests]]]]
"""Architecture, operator, backend, dtype: digests."""


class CanaryMismatch(RuntimeError):
    """An operator gives other bits than the record for this architecture."""


def read_environment() -> tuple[str, Records]:
    """Return the action on other bits, and the records of the user's file.

    Raises:
        ValueError: a variable is not as the module describes; the one-line message names it.
    """
    requested, path = os.environ.get(ACTION, "") or ACTIONS[0], os.environ.get(RECORD, "")
    if requested not in ACTIONS:
        raise ValueError(f"{ACTION}: expected one of {', '.join(map(repr, ACTIONS))}, got {requested!r}")
    if not path:
        return requested, {}
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
        if not _is_nested(records, LEVELS):
            raise ValueError("not digests by architecture, operator, backend, dtype and pass")
    except (OSError, ValueError) as error:
        raise ValueError(f"{RECORD}: expected a file that `rl-kernels doctor --canary --json` wrote: {error}") from None
    return requested, records


def _is_nested(value: object, levels: int) -> bool:
    if not levels:
        return isinstance(value, str)
    return isinstance(value, dict) and all(_is_nested(item, levels - 1) for item in value.values())


action: str = ACTIONS[0]
records_of_user: Records = {}
_Key = tuple[str, str, torch.device, torch.dtype]
_passed: set[_Key] = set()
_owed: set[_Key] = set()
"""Canaries still to be run: at their first call a CUDA graph was captured, or a torch.func transform was active."""
_one_at_a_time = threading.RLock()
_own = threading.local()
"""``runs``: whether this thread makes the calls of a canary."""
_suspensions: list[None] = []


def is_running() -> bool:
    """Say whether this thread makes the calls of a canary: they are neither compared nor recorded."""
    return getattr(_own, "runs", False)


def is_settled() -> bool:
    """Say whether a choice made now may be cached: not while a canary runs or is still to be run."""
    return not (_owed or is_running())


def is_due(operator: Operator, call: Call, backend: Backend) -> bool:
    """Say whether the canary of a backend has to run before this call."""
    key = (operator.name, backend.name, call.device, call.dtype)
    if key in _passed or action == "off" or not operator.canary or _suspensions or is_running():
        return False
    if expected(operator, call, backend) is None:
        _passed.add(key)
        return False
    if _functorch.maybe_current_level() is not None or _is_captured(call.device):
        _owed.add(key)
        return False
    return True


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def run(operator: Operator, call: Call, backend: Backend) -> None:
    """Make the calls of a canary that is due, and compare their bits with the record.

    Raises:
        CanaryMismatch: the bits differ from the record.
    """
    key = (operator.name, backend.name, call.device, call.dtype)
    with _one_at_a_time:
        # Another thread may have been first.
        if key in _passed:
            return
        _owed.discard(key)
        with _marked_as_canary(), _without_modes(call.device), torch.no_grad():
            actual = digest(_module(operator).results(call.dtype, call.device, backend.name))
        if actual != expected(operator, call, backend):
            message = _message(operator, call, backend, actual)
            if action == "raise":
                raise CanaryMismatch(message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        _passed.add(key)


@contextmanager
def suspended() -> Iterator[None]:
    """Compare nothing inside the block; ``dispatch.without_canaries`` also forgets what was chosen in it."""
    _suspensions.append(None)
    try:
        yield
    finally:
        _suspensions.pop()


def measured(operator: Operator, backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Run a canary and return the digests of both passes, without comparing them with the record.

    Raises:
        BackendUnavailable: the backend cannot run these calls.
    """
    module = _module(operator)
    with _one_at_a_time, _marked_as_canary(), _without_modes(device):
        with torch.no_grad():
            forward = digest(module.results(dtype, device, backend))
        return {"forward": forward, "backward": digest(module.gradients(dtype, device, backend))}


def recorded(operator: Operator, arch: str, backend: str, dtype: torch.dtype) -> Digests | None:
    """Return the recorded digests of a backend, or None."""
    name = next((name for name, other in DTYPES.items() if other == dtype), "")
    of_user = records_of_user.get(arch, {}).get(operator.name, {}).get(backend, {}).get(name)
    return of_user or records_of(operator.canary).get(arch, {}).get(backend, {}).get(name)


def expected(operator: Operator, call: Call, backend: Backend) -> str | None:
    """Return the recorded digest of a forward pass; None if there is no record, or the backend promises no bits."""
    if not backend.promises.get(call.device.type, frozenset()) >= INVARIANT:
        return None
    return (recorded(operator, call.arch, backend.name, call.dtype) or {}).get("forward")


@functools.cache
def records_of(canary: str) -> Mapping[str, Mapping[str, Mapping[str, Digests]]]:
    """Return the records of an operator's canary: digests by architecture, backend and dtype; none before the first."""
    file = file_of(canary)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def file_of(canary: str) -> Path:
    """Return the file with the records of a canary, beside its module."""
    package, _, name = canary.rpartition(".")
    return Path(str(files(package) / f"{name}.json"))


def digest(results: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the bits of tensors."""
    hasher = hashlib.sha256()
    for result in results:
        hasher.update(result.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def numbers(*shape: int, salt: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Return fixed numbers: integers times powers of two, of mixed sizes, below ``scale``.

    Only integer arithmetic makes them, so that no random generator matters.

    Args:
        shape: sizes of the tensor.
        salt: another salt gives other numbers.
        dtype: BF16, FP16 or FP32.
        device: where the tensor lies.
        scale: a power of two.
    """
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device="cpu") + salt * 1_000_003
    mixed = (index * 2_654_435_761) & 0xFFFF_FFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFF_FFFF
    size = BITS[dtype]
    whole = (mixed & ((1 << size) - 1)) - (1 << (size - 1))
    exponent = -((mixed >> 22) & 7) - size + 1
    return (torch.ldexp(whole.double(), exponent) * scale).to(dtype).view(shape).to(device)


def integers(*shape: int, below: int, salt: int, device: torch.device) -> torch.Tensor:
    """Return fixed int64 from 0 to ``below - 1``."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device="cpu") + salt * 1_000_003
    return (((index * 2_654_435_761) & 0xFFFF_FFFF) % below).view(shape).to(device)


@contextmanager
def _marked_as_canary() -> Iterator[None]:
    """Mark the calls of this thread as calls of a canary."""
    outer, _own.runs = is_running(), True
    try:
        yield
    finally:
        _own.runs = outer


@contextmanager
def _without_modes(device: torch.device) -> Iterator[None]:
    """Leave autocast, inference mode and dispatch modes of the caller, and let the host wait for the device."""
    warned = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False), _disable_current_modes():
        if warned:
            torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            if warned:
                torch.cuda.set_sync_debug_mode(warned)


def _module(operator: Operator) -> ModuleType:
    return importlib.import_module(operator.canary)


def _message(operator: Operator, call: Call, backend: Backend, actual: str) -> str:
    dtype = next(name for name, other in DTYPES.items() if other == call.dtype)
    return (
        f"canary: {backend.name} of {operator.name} on {call.device} gives other bits than recorded for {dtype} "
        f"({actual[:12]}, expected {(expected(operator, call, backend) or '')[:12]}): a driver, compiler or library "
        f"computes otherwise ({_versions()}). To test if rows are batch-invariant, run `rl-kernels check --op "
        f"{operator.name} --relation invariance`; {ACTION}=warn only warns"
    )


def _versions() -> str:
    """Return the versions that may affect the bits."""
    triton = sys.modules.get("triton")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return versions if triton is None else f"{versions}, triton {triton.__version__}"
