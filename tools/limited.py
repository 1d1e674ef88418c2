"""Run a command with a time limit; then end it with all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

TIMED_OUT = 124
"""Exit status of a command that ran into the limit, as of timeout(1)."""


def limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    output: IO[str],
    errors: IO[str] | int = subprocess.STDOUT,
) -> int:
    """Run a command, write its stdout to ``output`` and its stderr to ``errors``, and return its exit status."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
