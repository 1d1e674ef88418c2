"""Run the tests on a mutant, one stage after the other, each in a fresh process, until one fails."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rl_kernels.lab.mutate.edits import Edit

CAUGHT, TIMEOUT, SURVIVED, INVALID = "caught", "timeout", "survived", "invalid"
CRASHES = ("TypeError", "NameError", "UnboundLocalError", "SyntaxError", "AttributeError", "ImportError")
CRASHED = re.compile(rf"\b(?:raised|got) (?:InterpreterError: )?(?:{'|'.join(CRASHES)})\b")
"""Matches the message of a check whose implementation crashed."""
NOTHING_SELECTED = 5
PATIENCE = 8
"""Wall-clock limit of a stage, as a multiple of its limit of CPU time."""


class Stage(NamedTuple):
    """Tests that run together: arguments of pytest, variables of the environment, and seconds of a core's time."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    seconds: int


class Verdict(NamedTuple):
    """The outcome of a mutant, and the test that caught it."""

    state: str
    where: str = ""
    said: str = ""


def judged(module: str, edit: Edit | None, stages: Sequence[Stage]) -> Verdict:
    """Return the verdict of the first stage that fails, with ``edit`` in the module; without one, nothing is changed.

    A crash (``TypeError`` and the like, or the end of the process) is no failure of a check: any call would show it.
    """
    for stage in stages:
        verdict = _run_stage(module, edit, stage)
        if verdict.state != SURVIVED:
            return verdict
    return Verdict(SURVIVED)


def _run_stage(module: str, edit: Edit | None, stage: Stage) -> Verdict:
    mutant = json.dumps(None if edit is None else {"module": module, "edit": list(edit)})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "rl_kernels.lab.mutate.child", mutant, str(out), *stage.arguments]
        environment = {**os.environ, **stage.environment}
        # Limit CPU time, because other processes may use the cores too; a process that only waits uses none.
        limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (stage.seconds, stage.seconds))
        options: dict[str, Any] = {"env": environment, "capture_output": True, "timeout": PATIENCE * stage.seconds}
        try:
            done = subprocess.run(command, check=False, preexec_fn=limit, **options)
        except subprocess.TimeoutExpired:
            return Verdict(TIMEOUT, said="it waits")
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Verdict(TIMEOUT, said=f"{stage.seconds} s")
        if not out.exists():
            return Verdict(INVALID, said=f"the process ended with {done.returncode}")
        ended = json.loads(out.read_text(encoding="utf-8"))
    if ended["status"] in (0, NOTHING_SELECTED):
        return Verdict(SURVIVED)
    first = ended["first"] or {"where": "", "type": "", "message": f"pytest ended with {ended['status']}"}
    crashed = first["type"] in CRASHES or CRASHED.search(first["message"])
    return Verdict(INVALID if crashed else CAUGHT, first["where"], f"{first['type']}: {first['message'][:160]}")
