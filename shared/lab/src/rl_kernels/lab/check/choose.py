"""The candidates of a run, by the names that the command line takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core.dispatch import AUTO, Verdict, explain_call
from rl_kernels.core.operator import Backend, Call, Operator
from rl_kernels.core.testing import Spec, spec_of
from rl_kernels.lab.check.candidate import Candidate, backend_candidate, reference_candidate
from rl_kernels.lab.check.cell import Setting, call_of
from rl_kernels.lab.check.isolation.remote import TIMEOUT
from rl_kernels.lab.check.result import Skip
from rl_kernels.lab.check.user import user_candidate


class CannotRun(ValueError):
    """A requested candidate cannot run here; the message says why."""


def device_of(name: str, operators: Sequence[Operator]) -> torch.device:
    """Return the device of a run: ``auto``, or a device of PyTorch on which backends of these operators run.

    Raises:
        ValueError: there is no such device, or no backend runs on it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"--device: expected auto or a device of PyTorch such as cpu or cuda:1, got {name!r}"
        ) from None
    device_types = dict.fromkeys(
        kind for operator in operators for backend in operator.backends for kind in backend.promises
    )
    if device.type not in device_types:
        named = ", ".join(operator.name for operator in operators)
        raise ValueError(
            f"--device: no backend of {named} runs on {device.type}; backends run on {', '.join(device_types)}"
        )
    if device.type == "cpu" and device.index:
        raise ValueError(f"--device: {name} does not exist; the CPU is cpu or cpu:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: {name} does not exist; this machine has {torch.cuda.device_count()} GPUs")
    # The tensors of cpu:0 are on "cpu".
    return torch.device("cpu") if device.type == "cpu" else device


def candidates_of(
    operator: Operator, names: Sequence[str], setting: Setting, timeout: float = TIMEOUT
) -> tuple[list[Candidate], list[Skip]]:
    """Return the candidates by name; ``all`` takes what can run and skips the rest.

    ``timeout`` is the limit in seconds for each answer of a user's implementation.

    Raises:
        CannotRun: a candidate asked for by name does not exist or cannot run here.
    """
    spec, call = spec_of(operator), call_of(operator, setting)
    candidates: list[Candidate] = []
    skips: list[Skip] = []
    for name in names:
        if name != "all":
            candidates.append(
                _user_candidate(operator, name, timeout) if ":" in name else _candidate(operator, spec, name, call)
            )
            continue
        for known_name in ("pytorch", AUTO, *(backend.name for backend in operator.backends)):
            try:
                candidates.append(_candidate(operator, spec, known_name, call))
            except CannotRun as error:
                skips.append(Skip(operator.name, known_name, "all", "all", setting.dtype, str(error)))
    return candidates, skips


def _candidate(operator: Operator, spec: Spec, name: str, call: Call) -> Candidate:
    if name == "pytorch":
        return reference_candidate(operator, spec)
    if name == AUTO:
        verdicts = explain_call(operator, call)
    elif name == "cuda":
        if call.device.type != "cuda":
            raise CannotRun(f"--candidate cuda: runs on a GPU, but the device is {call.device.type}")
        verdicts = [_verdict(backend, call) for backend in operator.backends if backend.name.startswith("cuda-")]
    else:
        verdicts = [_verdict(backend, call) for backend in operator.backends if backend.name == name]
    if not verdicts:
        known = ", ".join(backend.name for backend in operator.backends)
        raise CannotRun(f"--candidate {name}: {operator.name} has no such backend; it has: {known}")
    for verdict in verdicts:
        if verdict.chosen:
            return backend_candidate(operator, name, AUTO if name == AUTO else verdict.backend, call.device.type)
    reasons = "; ".join(map(str, verdicts))
    raise CannotRun(f"--candidate {name}: {operator.name} cannot run it here: {reasons}")


def _user_candidate(operator: Operator, name: str, timeout: float) -> Candidate:
    try:
        return user_candidate(operator, name, timeout)
    except ValueError as error:
        raise CannotRun(f"--candidate {name}: {error}") from error


def _verdict(backend: Backend, call: Call) -> Verdict:
    reason = backend.why_not(call)
    return Verdict(backend.name, reason, chosen=reason is None)
