"""Arguments that the project's commands share."""

import argparse
import json

import pytest
import torch

from rl_kernels.core.command import count, install_hint, json_rows, location, writable
from rl_kernels.core.commands import cli
from rl_kernels.core.operator import INVARIANT, Backend, Operator
from rl_kernels.core.registry import kernel_registry


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


def test_json_has_a_record_a_line():
    records = [{"a": [1, [2]], "b": ""}, {"a": None, "b": {"c": 0.1}}]
    value = {"version": 1, "where": {"device": "x"}, "records": records, "us": {"8x4": {"1": [0.5]}}, "none": []}
    text = json_rows(value)
    assert json.loads(text) == value
    assert [line.strip() for line in text.splitlines()] == [
        *("{", '"version": 1,', '"where": {"device": "x"},'),
        *('"records": [', '{"a": [1, [2]], "b": ""},', '{"a": null, "b": {"c": 0.1}}', "],"),
        *('"us": {', '"8x4": {', '"1": [0.5]', "}", "},", '"none": []', "}"),
    ]
    with pytest.raises(ValueError, match="JSON compliant"):
        json_rows({"a": [float("nan")]})


def test_a_reader_that_has_enough_ends_a_command_without_a_traceback(run_code):
    main = """
import os, sys
from rl_kernels.core.commands import cli
read, write = os.pipe()
os.dup2(write, 1), os.close(read), os.close(write)
cli.installed = lambda: {'say': ('', lambda: lambda rest: print('x' * 10**6) or 0)}
sys.exit(cli.main(['say']))
"""
    done = run_code(main)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.parametrize(
    ("distribution", "paths"),
    [
        ("rl-kernels-lab", "./shared/lab"),
        ("rl-kernels-norm", "./packages/norm"),
        ("rl-kernels-models", "./shared/core ./shared/lab ./packages/*"),
        ("rl-kernels", "./shared/core ./shared/lab ./packages/*"),
    ],
)
def test_a_hint_begins_with_what_works_before_a_release(distribution, paths):
    assert install_hint(distribution).startswith(f"from a clone: pip install {paths}; ")


def test_what_needs_no_torch_does_not_import_it_and_its_absence_is_said_in_one_line(run_python):
    main = """
import sys
from rl_kernels.core.commands import cli
cli.main(['--version']), cli.main(['--help'])
assert 'torch' not in sys.modules
sys.modules['torch'] = None
sys.exit(cli.main(['list']))
"""
    done = run_python("-c", main)
    assert (done.returncode, done.stderr) == (2, "rl-kernels list: torch is not installed: pip install torch\n")


@pytest.fixture
def toy(monkeypatch):
    """An operator with one backend that looks at D, in a registry of its own."""

    def limits(call):
        return "D is odd" if call.traits.get("D", 0) % 2 else None

    backend = Backend("native", "nowhere", {"cpu": INVARIANT}, limits)
    operator = Operator("toy", "toy", "a toy", ("N", "D"), frozenset({"N"}), {}, {}, (backend,), lambda **_: None)
    monkeypatch.setattr(kernel_registry, "names", lambda: ["toy"])
    monkeypatch.setattr(kernel_registry, "load", lambda name: operator)
    return ["explain", "toy", "--device", "cpu"]


def test_explain_asks_for_a_size_that_a_backend_looks_at(toy, capsys):
    assert cli.main(toy) == 2
    assert capsys.readouterr().err == "rl-kernels explain: --shape: expected NxD: the answer depends on D\n"
    assert cli.main([*toy, "--shape", "8x3"]) == 0
    assert capsys.readouterr().out == "native: D is odd\n"


def test_explain_answers_for_all_operators_and_a_gpu_that_is_not_there(toy, capsys):
    assert cli.main(["explain", "--arch", "sm_89"]) == 0
    head, line = (text.split() for text in capsys.readouterr().out.splitlines())
    assert head == ["operator", "backend", "bf16", "on", "sm89"]
    assert line[:2] == ["toy", "native"]
    assert cli.main(["explain", "--arch", "cpu", "--dtype", "fp32", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["operators"] == {"toy": [{"backend": "native", "chosen": True, "reason": None, "note": None}]}
    assert (explained["device"], explained["arch"], explained["dtype"]) == ("cpu", "cpu", "fp32")
    assert cli.main(["explain", "--shape", "8x4"]) == 2
    assert capsys.readouterr().err == "rl-kernels explain: --shape: expected only with an operator\n"
    assert cli.main(["explain", "--arch", "sm_1"]) == 2
    assert capsys.readouterr().err.startswith("rl-kernels explain: --arch: expected one of cpu, sm80, ")


def test_answers_in_json(toy, capsys):
    assert cli.main([*toy, "--shape", "8x4", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["sizes"] == {"D": 4}
    assert explained["backends"] == [{"backend": "native", "chosen": True, "reason": None, "note": None}]
    assert cli.main(["list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["operator"], listed["backends"], listed["shape"]) == ("toy", ["native"], ["N", "D"])
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["found"]["python, torch"].endswith(torch.__version__)
    assert found["operators"]["toy"][0]["backend"] == "native"


def test_every_command_says_what_it_does(capsys):
    for command in ("list", "explain", "doctor"):
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([command, "--help"])
        assert capsys.readouterr().out.split("\n\n")[1].endswith(".")
