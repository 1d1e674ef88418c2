"""The candidate's process: loads the candidate, calls it on request, and answers with tensors.

Nothing is compared here, because a candidate may change any function of this process. Before the candidate is loaded,
public functions of other packages are recorded; on request the process reports which ones the candidate replaced.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any, BinaryIO

import torch

from rl_kernels.core.loading import Loaded, Unusable, load
from rl_kernels.core.testing.grouped import grouped
from rl_kernels.core.testing.spec import Inputs
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.guard import Misbehaved, Results, misbehaved
from rl_kernels.lab.check.isolation import wire
from rl_kernels.lab.check.many import call_in_threads, call_often
from rl_kernels.lab.check.run import Run
from rl_kernels.lab.check.surroundings import Surroundings

WATCHED = ("torch", "torch.nn.functional", "torch.autograd", "torch.linalg", "torch.testing", "torch.random", "numpy")
"""Modules whose public functions a candidate must not replace; so too for this project, builtins and math."""


class Host:
    """Holds the candidate and its calls by number, and answers the checker's requests."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None
        self._runs: dict[int, Run] = {}
        self._before: dict[str, Any] = {}
        self._groups: dict[str, type] = {}

    def forget(self, numbers: list[int]) -> None:
        """Free calls that no request will ask about again."""
        for number in numbers:
            self._runs.pop(number, None)

    def answer(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a request."""
        return getattr(self, f"_do_{kind}")(**arguments)

    def _do_load(self, target: str, arguments: list[str], groups: dict[str, tuple[str, str]]) -> dict[str, Any]:
        sys.argv[:] = arguments
        self._before = _functions()
        try:
            self._loaded = load(target)
        except (KeyboardInterrupt, GeneratorExit) as error:  # Nobody pressed Ctrl-C here: the module raised it.
            raise Unusable(f"cannot import {target}: {type(error).__name__}: {error}") from error
        if isinstance(self._loaded.function, type):
            raise Unusable(f"{self._loaded.name} is a class; name an instance of it, or a function")
        taken_groups = {name: kind for name, kind in groups.items() if name in (self._loaded.takes or ())}
        self._groups = {
            name: getattr(importlib.import_module(module), kind) for name, (module, kind) in taken_groups.items()
        }
        return self._loaded.described()

    def _do_run(
        self,
        number: int,
        seed: int | None,
        inputs: Inputs,
        leaves: list[str],
        output: str,
        around: dict[str, Any],
    ) -> dict[str, Any]:
        if seed is not None:
            torch.manual_seed(seed)
        run = Run(self._call, output, inputs, leaves, Surroundings(**around))
        self._runs[number] = run
        return {"outputs": _plain_copies(run.outputs), "attached": sorted(run.attached)}

    def _call(self, inputs: Inputs) -> Any:
        assert self._loaded is not None
        return self._loaded.function(**grouped(self._loaded.takes or frozenset(), self._groups, inputs))

    def _do_gradients(self, number: int, upstream: Results, again: bool) -> Results:
        return _plain_copies(self._runs[number].gradients(upstream, again=again))

    def _do_spoil(self, number: int) -> None:
        self._runs[number].spoil()

    def _do_scribbled(self, number: int, upstream: Results) -> Results:
        return _plain_copies(self._runs[number].scribbled(upstream))

    def _do_two_at_once(self, number: int, upstream: Results) -> Results:
        return _plain_copies(self._runs[number].two_at_once(upstream))

    def _do_renewed(self, number: int, upstream: Results) -> Results:
        return _plain_copies(self._runs[number].renewed(upstream))

    def _do_written(self, number: int, name: str, value: torch.Tensor, upstream: Results) -> Results | str:
        result = self._runs[number].written(name, value, upstream)
        return result if isinstance(result, str) else _plain_copies(result)

    def _do_updated(self, number: int, inputs: Inputs, upstream: Results, silently: bool) -> Results:
        return _plain_copies(self._runs[number].updated(inputs, upstream, silently=silently))

    def _do_kept(self, number: int) -> Results:
        return _plain_copies(self._runs[number].kept)

    def _do_inputs(self, number: int) -> Inputs:
        return self._runs[number].inputs

    def _do_second_order(self, number: int, upstream: Results) -> Results | str:
        result = self._runs[number].second_order(upstream)
        return result if isinstance(result, str) else _plain_copies(result)

    def _do_forward_mode(self, number: int) -> Results | str:
        result = self._runs[number].forward_mode()
        return result if isinstance(result, str) else _plain_copies(result)

    def _do_many(self, inputs: list[Inputs], output: str, calls: int, seconds: float) -> dict[str, Any]:
        return call_often(self._call, output, inputs, calls, seconds)

    def _do_threads(self, inputs: list[Inputs], output: str, calls: int) -> list[Results]:
        return [_plain_copies(results) for results in call_in_threads(self._call, output, inputs, calls)]

    def _do_patched(self) -> list[str]:
        now = _functions()
        return sorted(name for name, value in self._before.items() if now.get(name) is not value)


CHECKER_ONLY = (compare,)
"""Modules that only the checker uses: a candidate that changes them tries to influence the comparison."""
BY_TORCH = ("torch.manual_seed", "torch.random.manual_seed")
"""Functions that torch's compiler wraps when it is imported."""


def _functions() -> dict[str, Any]:
    """Return the public functions and classes that a candidate must not replace, by full name."""
    own = [name for name in sys.modules if name.startswith(("rl_kernels.core", "rl_kernels.lab"))]
    modules = [sys.modules[name] for name in (*WATCHED, *own) if name in sys.modules]
    # Go from base to subclass: a replaced method hides the one of the base class.
    bases = reversed(torch.Tensor.__mro__)
    functions = {f"torch.Tensor.{name}": value for base in bases for name, value in vars(base).items()}
    for module in (builtins, math, *CHECKER_ONLY, *modules):
        functions |= {
            f"{module.__name__}.{name}": value
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_") and not isinstance(value, ModuleType)
        }
    return {name: value for name, value in functions.items() if name not in BY_TORCH}


def _plain_copies(results: Results) -> Results:
    """Return contiguous copies that are ordinary tensors."""
    copies = {}
    for name, value in results.items():
        if value.layout != torch.strided or value.device.type not in ("cpu", "cuda"):
            raise Misbehaved(f"{name}: expected a strided tensor on the device of the inputs, got {value.layout}")
        whole = value.detach().resolve_conj().resolve_neg()
        copies[name] = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).copy_(whole)
    return copies


def _answer(host: Host, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": host.answer(kind, arguments)}
    except Unusable as error:
        return {"unusable": str(error)}
    except Misbehaved as error:
        return {"misbehaved": str(error), "traceback": error.traceback}
    except BaseException as error:
        failure = misbehaved(kind, error)
        return {"misbehaved": str(failure), "traceback": failure.traceback}


def _end_with_parent(parent: int) -> None:
    """End this process when the checker has ended, whatever the candidate is doing."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _open_channels() -> tuple[BinaryIO, BinaryIO]:
    """Use stdin and stdout for messages; the candidate's prints go to stderr."""
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    # The checker ends this process by a signal, and what is in a buffer would be lost.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return source, target


def main() -> None:
    """Answer requests until the checker closes the connection."""
    source, target = _open_channels()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    host = Host()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            kind, arguments, forgotten = wire.read(source)
            host.forget(forgotten)
            wire.write(target, _answer(host, kind, arguments))


if __name__ == "__main__":
    main()
