"""Arguments that the project's commands share."""

import argparse
import subprocess
import sys

import pytest

from rl_kernels.core.command import count, location, writable


def test_count():
    assert count(1)("7") == 7
    for text in ("0", "-1", "1.5", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected an integer >= 1, got"):
            count(1)(text)
    for text in (str(2**31), str(2**70)):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected an integer below 2\^31, got"):
            count(1, 31)(text)
    assert count(1, 31)(str(2**31 - 1)) == 2**31 - 1


def test_a_tilde_is_the_home_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location("~/out") == tmp_path / "out"
    assert writable("~/file.json") == tmp_path / "file.json"
    with pytest.raises(argparse.ArgumentTypeError, match="expected a path, got '~no-such-user/x'"):
        location("~no-such-user/x")


def test_a_reader_that_has_enough_ends_a_command_without_a_traceback():
    main = (
        "import sys; from rl_kernels.core import cli\n"
        "cli._commands = lambda: {'say': ('', lambda: lambda rest: print('x' * 10**6) or 0)}\n"
        "sys.exit(cli.main(['say']))"
    )
    with subprocess.Popen([sys.executable, "-c", main], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
