"""Use the project's tools here, or in copies of this process, which has PyTorch already: importing it takes seconds."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
LIMIT = 600
"""Seconds until a command is ended."""


def imported(name: str) -> ModuleType:
    """Import a module of tools/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        return importlib.import_module(name)


def forked(words: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``rl-kernels ...``, or a Python file with its arguments, in a folder."""
    command = [*map(str, words)]

    def run() -> int:
        os.environ.update(environment)
        return _status_of(command)

    return copied(run, folder)


def copied(run: Callable[[], int], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a function in a copy of this process; what it returns is the exit status, 1 if it raises."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        child = os.fork()
        if not child:
            _end(run, folder, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(run, status, out.read(), err.read())


def _end(run: Callable[[], int], folder: Path, out: int, err: int) -> None:
    """Run a function in this process and end it."""
    status = 1
    try:
        signal.alarm(LIMIT)
        for source, target in ((out, 1), (err, 2)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(command: Sequence[str]) -> int:
    program, *rest = command
    sys.argv = [program, *rest]
    if program == "rl-kernels":
        from rl_kernels.core.commands.cli import main

        return main(rest)
    sys.path.insert(0, str(Path(program).resolve().parent))
    runpy.run_path(program, run_name="__main__")
    return 0
