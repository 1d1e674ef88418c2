"""What tests of core and lab need: modules that exist for one test, and another interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

FORKING = """
import json, os, sys, traceback
import torch


def ended(code):
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["-c", *request["arguments"]]
        for stream in (1, 2):
            os.dup2(os.open(request["streams"][stream - 1], os.O_WRONLY | os.O_CREAT), stream)
        status = ended(request["code"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def make_module(monkeypatch):
    """Return ``make(name, **members)``, which makes a module that can be imported until the test ends."""

    def make(name, **members):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def environment_with(changes):
    """Return the environment without our variables, and with some others."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RL_KERNELS_")}
    return {**clean, **changes}


@pytest.fixture
def run_python():
    """Return ``run(*arguments, **environment)``, which runs a fresh Python and returns what it did."""

    def run(*arguments, **environment):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=environment_with(environment), capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture(scope="session")
def forking():
    """A Python that has imported torch, and nothing of ours, and forks for each request."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_code(forking, tmp_path):
    """Return ``run(code, *arguments, **environment)``: as ``run_python("-c", ...)``, with torch imported already."""

    def run(code, *arguments, **environment):
        streams = [tmp_path / name for name in ("stdout", "stderr")]
        request = {"code": code, "arguments": arguments, "environment": environment_with(environment)}
        print(json.dumps({**request, "streams": [*map(str, streams)]}), file=forking.stdin, flush=True)
        status = int(forking.stdout.readline())
        stdout, stderr = (stream.read_text(encoding="utf-8") for stream in streams)
        for stream in streams:
            stream.unlink()
        return SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)

    return run
