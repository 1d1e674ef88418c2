"""The command rl-kernels audit: what it prints, and its exit status."""

import json
import re

import pytest

from rl_kernels.models import cli


def run(capsys, *argv):
    status = cli.main([str(word) for word in argv])
    return status, capsys.readouterr()


SCRIPT = """
import torch
from torch import nn

class Shift(nn.Module):
    def forward(self, x):
        return x * (1 + 2.0**-20 * (len(x) - 1))

def clean():
    return nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), torch.rand(4, 3)

def planted():
    return nn.Sequential(nn.ReLU(), Shift()), torch.rand(4, 3) + 1

def bad():
    return 3
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "models_for_the_audit.py"
    file.write_text(SCRIPT)
    return file


def test_command_on_a_function(script, capsys):
    status, printed = run(capsys, f"{script}:clean", "--invariant", "--device", "cpu")
    assert status == 0
    assert "batched: bitwise identical to alone\n" in printed.out
    assert printed.out.splitlines()[-1].startswith("PASSED: ")
    assert printed.out.splitlines()[-2] == "not tried: sequences in chunks, with a cache"
    status, printed = run(capsys, f"{script}:planted", "--device", "cpu")
    assert status == 1
    assert printed.out.splitlines()[-1] == "FAILED: the first module whose rows differ is 1 (Shift)"
    status, printed = run(capsys, f"{script}:planted", "--device", "cpu", "--json")
    assert status == 1
    assert json.loads(printed.out)["culprit"]["module"] == "1"


def test_command_on_bad_arguments(script, capsys):
    for argv, message in (
        ([f"{script}:absent"], "has no callable 'absent'"),
        ([f"{script}:bad"], "to return a model and its inputs"),
        ([f"{script}:clean", "--device", "nowhere"], "nowhere"),
        (["nothing:there"], "cannot import nothing"),
        (["./no/such/folder"], "expected an existing folder|transformers is not installed"),
    ):
        status, printed = run(capsys, *argv)
        assert status == 2
        assert re.search(message, printed.err)
        assert printed.err.count("\n") == 1
        assert not printed.out


def test_command_parses_before_it_loads(capsys):
    for argv in (["x", "--layers", "2"], ["x", "--prompts", "1"], []):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 2


def test_command_on_a_folder(tiny, tmp_path, capsys):
    tiny().config.save_pretrained(tmp_path)
    options = ["--random-weights", "--layers", 1, "--device", "cpu"]
    status, printed = run(capsys, tmp_path, *options, "--invariant", "--prompts", 3)
    assert status == 0, printed.err
    assert "in chunks of 5, the rest token by token: bitwise identical to alone" in printed.out
