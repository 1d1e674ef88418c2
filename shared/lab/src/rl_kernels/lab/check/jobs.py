"""Share a run among processes: each makes the same plan, and takes the next task when it has finished its last."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Connection, wait

import torch

from rl_kernels.lab.check.plan import Plan, Task
from rl_kernels.lab.check.result import Outcome
from rl_kernels.lab.check.suite import Stopped

Outcomes = list[Outcome]


class _Process:
    def __init__(self, plan_of: Callable[[], Plan], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, plan_of, threads), daemon=False)
        self._process.start()
        other.close()
        self.number: int | None = None

    def take(self, number: int) -> None:
        self.number = number
        self.connection.send(number)

    def receive(self, task: Task) -> Outcomes | Stopped:
        """Return the records of its task, or how the process ended during it."""
        self.number = None
        try:
            answer: Outcomes = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            return Stopped(f"a process {ending} at {task.name}")
        return answer

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


@contextmanager
def shared(plan_of: Callable[[], Plan], count: int) -> Iterator[Callable[[Plan], Iterator[tuple[str, Outcomes]]]]:
    """Start processes, yield the argument ``results`` of ``suite.run``, and end the processes.

    Args:
        plan_of: makes the plan in each process; it can be pickled.
        count: number of processes; they share the cores.

    Raises:
        Stopped: while results are read, a process ended in the middle of a task.
    """
    threads = max(1, (os.cpu_count() or 1) // count)
    processes = [_Process(plan_of, threads) for _ in range(count)]
    try:
        yield lambda plan: _results(processes, list(plan.tasks()))
    finally:
        for process in processes:
            process.end()


def _results(processes: list[_Process], tasks: list[Task]) -> Iterator[tuple[str, Outcomes]]:
    waiting = iter(range(len(tasks)))
    known: dict[int, Outcomes | Stopped] = {}
    for process in processes:
        _take_next(process, waiting)
    for number, task in enumerate(tasks):
        while number not in known:
            busy = {process.connection: process for process in processes if process.number is not None}
            for connection in wait(list(busy)):
                process = busy[connection]  # type: ignore[index]
                done = process.number
                assert done is not None
                known[done] = outcomes = process.receive(tasks[done])
                if not isinstance(outcomes, Stopped):
                    _take_next(process, waiting)
        # In the plan's order, so that all results before a stop are reported.
        result = known.pop(number)
        if isinstance(result, Stopped):
            raise result
        yield task.name, result


def _take_next(process: _Process, waiting: Iterator[int]) -> None:
    number = next(waiting, None)
    if number is not None:
        process.take(number)


def _work(connection: Connection, plan_of: Callable[[], Plan], threads: int) -> None:
    # Only the reporting process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    with redirect_stdout(sys.stderr):
        plan = plan_of()
        try:
            tasks = list(plan.tasks())
            while True:
                connection.send(list(tasks[connection.recv()].run()))
        except (EOFError, BrokenPipeError):
            pass
        finally:
            plan.stop()
