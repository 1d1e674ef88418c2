"""The checker's side of a candidate's process: starts it, sends requests, and survives its crashes and hangs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from rl_kernels.core.testing.spec import Inputs
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.isolation import wire
from rl_kernels.lab.check.run import PLAIN
from rl_kernels.lab.check.surroundings import Surroundings

TIMEOUT = 60.0
"""Default limit in seconds for an answer; loading the candidate gets at least this. A hang is a failed check."""
LIVES = 3
"""Number of times that a candidate's process may end; after that every check fails at once."""
CHUNK = 1 << 20


class Worker:
    """A candidate's process, started when first needed, and started again when it has ended."""

    def __init__(self, target: str, timeout: float = TIMEOUT, groups: Mapping[str, type] | None = None) -> None:
        self._target, self._timeout = target, timeout
        # Names only: the process imports just the groups that the candidate takes.
        self._groups = {name: (kind.__module__, kind.__qualname__) for name, kind in (groups or {}).items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: list[str] = []
        self._count = 0
        self._forgotten: list[int] = []
        self.seed: int | None = None
        """Seed for torch's generator before the next call; used once."""

    def start(self) -> dict[str, Any]:
        """Start the process and load the candidate; return its name and the arguments that it takes.

        Raises:
            ValueError: the module cannot be imported, or holds no such callable.
            Misbehaved: its process ended or hung.
        """
        code = "from rl_kernels.lab.check.isolation.worker import main; main()"
        command = [sys.executable, "-c", code]
        # The candidate gets this program's search path, and its own session, so that Ctrl-C reaches only the checker.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None
        # A stopped process reads nothing, and no request may block on it forever.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)
        # The process loads its libraries before it answers.
        longest = max(self._timeout, TIMEOUT)
        return self._exchange("load", {"target": self._target, "arguments": sys.argv, "groups": self._groups}, longest)

    def ask(self, kind: str, **arguments: Any) -> Any:
        """Return the candidate's answer.

        Raises:
            Misbehaved: it raised, gave no valid result, or its process ended or hung.
        """
        if len(self._ends) >= LIVES:
            raise Misbehaved(f"not called: its process ended {LIVES} times, the last time with: {self._ends[-1]}")
        if self._process is None:
            self.start()
        return self._exchange(kind, arguments, self._timeout)

    def number(self) -> int:
        """Return a number for a new call."""
        self._count += 1
        return self._count

    def forget(self, number: int) -> None:
        """Free a call in the process with the next request, because this may be called in the middle of one."""
        self._forgotten.append(number)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process = None
            self._end()

    def _exchange(self, kind: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        forgotten, self._forgotten = self._forgotten, []
        request = wire.packed((kind, dict(arguments), forgotten))
        deadline = time.monotonic() + seconds
        try:
            self._send(request, deadline)
            answer = wire.answer(wire.parse(self._read(deadline)))
        except TimeoutError:
            raise self._record_end(f"{kind}: no answer within {seconds:g} s") from None
        except (EOFError, OSError):
            raise self._record_end(f"{kind}: {self._exit_reason()}") from None
        except Exception as error:
            raise self._record_end(f"{kind}: unreadable answer ({type(error).__name__}: {error})") from None
        if "unusable" in answer:
            self.stop()
            raise ValueError(answer["unusable"])
        if "misbehaved" in answer:
            raise Misbehaved(str(answer["misbehaved"]), str(answer.get("traceback", "")))
        return answer["value"]

    def _send(self, request: memoryview, deadline: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        target = self._process.stdin.fileno()
        while request:
            _, ready, _ = select.select([], [target], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            request = request[os.write(target, request[:CHUNK]) :]

    def _read(self, deadline: float) -> bytes:
        (length,) = wire.LENGTH.unpack(self._bytes(wire.LENGTH.size, deadline))
        return self._bytes(length, deadline)

    def _bytes(self, count: int, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        source, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < count:
            ready, _, _ = select.select([source], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            part = os.read(source, min(count - len(parts), CHUNK))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _exit_reason(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        status = self._process.returncode
        if status is None:
            return "its process closed the connection"
        if status < 0:
            known = {member.value: member.name for member in signal.Signals}
            return f"its process was ended by {known.get(-status, f'signal {-status}')}"
        return f"its process exited with status {status}"

    def _record_end(self, reason: str) -> Misbehaved:
        self.stop()
        self._ends.append(reason)
        return Misbehaved(reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    process.wait()


class RemoteRun:
    """One call of a candidate in its process, like ``Run`` in this process."""

    def __init__(
        self,
        worker: Worker,
        output: str,
        inputs: Inputs,
        leaves: list[str],
        around: Surroundings = PLAIN,
    ) -> None:
        self._worker, self._number = worker, worker.number()
        seed, worker.seed = worker.seed, None
        answer = worker.ask(
            "run",
            number=self._number,
            seed=seed,
            inputs=inputs,
            leaves=leaves,
            output=output,
            around=vars(around),
        )
        self.outputs: Results = answer["outputs"]
        self.attached = set(answer["attached"])
        self._has_leaves = bool(leaves)

    def __del__(self) -> None:
        if hasattr(self, "outputs"):
            self._worker.forget(self._number)

    @cached_property
    def inputs(self) -> Inputs:
        """The arguments as they are after the call."""
        return self._ask("inputs")

    @property
    def kept(self) -> Results:
        """Outputs and gradients as they are now, which a later call must not have changed."""
        return self._ask("kept")

    def gradients(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        """Return ``gradient:NAME`` for each differentiable input; ``again`` keeps the graph for a further pass."""
        return self._ask("gradients", upstream=dict(upstream), again=again)

    def spoil(self) -> None:
        """Write into the gradients of the last pass, which are the caller's own."""
        self._ask("spoil")

    def results(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Return outputs and, if there is an upstream gradient, gradients."""
        return {**self.outputs, **(self.gradients(upstream) if upstream and self._has_leaves else {})}

    def updated(self, inputs: Inputs, upstream: Mapping[str, torch.Tensor], *, silently: bool) -> Results:
        """Write other values into the same tensors and call again: its results."""
        return self._ask("updated", inputs=inputs, upstream=dict(upstream), silently=silently)

    def scribbled(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Write into every output and gradient, which are the caller's own, and call again: its results."""
        return self._ask("scribbled", upstream=dict(upstream))

    def two_at_once(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Call twice before the backward pass of either: the gradients after both."""
        return self._ask("two_at_once", upstream=dict(upstream))

    def renewed(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Give each leaf with a buffer ``main_grad`` another one, and call again: the gradients."""
        return self._ask("renewed", upstream=dict(upstream))

    def written(self, name: str, value: torch.Tensor, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Write into an argument before the backward pass: the gradients, or the error that refuses them."""
        return self._ask("written", name=name, value=value, upstream=dict(upstream))

    def second_order(self, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Return the gradients of half the squared norm of the gradients, or the error that refuses them."""
        return self._ask("second_order", upstream=dict(upstream))

    def forward_mode(self) -> Results | str:
        """Return the outputs' tangents for tangents of ones, or the error that refuses them."""
        return self._ask("forward_mode")

    def _ask(self, kind: str, **arguments: Any) -> Any:
        return self._worker.ask(kind, number=self._number, **arguments)
