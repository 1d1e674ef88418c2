"""Candidates that harm their process, or would harm ours: a failed check with a report, and nothing is harmed."""

import builtins
import json
import shlex
import time
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.loading import load
from rl_kernels.lab.check import cli, compare, launches
from rl_kernels.lab.check.isolation import remote
from rl_kernels.lab.check.isolation.remote import Worker


@pytest.fixture(autouse=True)
def toy(install, double_operator, doubled):
    install(cli, double_operator, replace(doubled, transforms={}), double=lambda x, *, backend=None: 2 * x)


@pytest.fixture
def check(capfd):
    """Return ``check(candidate, *flags)``: the exit status and the messages of what failed, by item."""

    def run(target, *flags):
        status = cli.main(["--op", "double", "--candidate", target, "--device", "cpu", "--json", *flags])
        return status, {each["output"]: each["message"] for each in entries(capfd) if not each["passed"]}

    return run


def entries(captured):
    report = json.loads(captured.readouterr().out, parse_constant=pytest.fail)
    return [entry for each in report["candidates"] for entry in each["outputs"]]


CAUGHT = {
    "exits": ("os._exit(0)", "run: its process exited with status 0"),
    "exits with a status": ("os._exit(3)", "run: its process exited with status 3"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "run: its process was ended by SIGKILL"),
    "ends by a signal without a name": ("os.kill(os.getpid(), 40)", "run: its process was ended by signal 40"),
    "Ctrl-C": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "SystemExit": ("sys.exit(0)", "forward raised SystemExit"),
    "GeneratorExit": ("raise GeneratorExit", "forward raised GeneratorExit"),
    "sparse": ("return (2 * x).to_sparse()", "expected a strided tensor"),
    "meta": ("return (2 * x).to('meta')", "expected a strided tensor"),
    "a subclass that says it is equal": ("return (3 * x).as_subclass(Lies)", "outside the contract's fence"),
}


@pytest.mark.parametrize("how", CAUGHT)
def test_a_candidate_that_ends_or_raises_fails(how, candidate, check):
    body, message = CAUGHT[how]
    status, failed = check(candidate(body), "--relation", "accuracy")
    assert status == 1
    assert message in next(iter(failed.values()))


@pytest.mark.usefixtures("real_processes")
def test_a_candidate_that_hangs_fails(candidate, check):
    start = time.monotonic()
    status, failed = check(candidate("time.sleep(600)"), "--relation", "accuracy", "--timeout", "2")
    assert (status, failed) == (1, {"forward": "run: no answer within 2 s"})
    assert time.monotonic() - start < 60


def test_a_candidate_that_dies_at_import_fails_and_is_started_a_few_times_only(candidate, check):
    status, failed = check(candidate(first="os._exit(5)"))
    assert status == 1
    assert failed["forward"] == "load: its process exited with status 5"
    assert any(f"not called: its process ended {remote.LIVES} times" in message for message in failed.values())


def test_a_module_that_cannot_be_imported_ends_in_two(candidate, capsys):
    for error in ("KeyboardInterrupt", "GeneratorExit"):
        target = candidate(first=f"raise {error}('no')")
        assert cli.main(["--op", "double", "--candidate", target, "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert "cannot import" in err
        assert f"{error}: no" in err


PATCHES = {
    "torch.equal": "torch.equal = lambda *_: True",
    "rl_kernels.lab.check.compare.bits": "compare.bits = lambda *_: compare.Comparison(True)",
    "builtins.ascii": "builtins.ascii = repr",
    "torch.Tensor.equal": "torch.Tensor.equal = lambda *_: True",
}


@pytest.mark.usefixtures("real_processes")
def test_what_a_candidate_replaces_is_named_and_stays_in_its_process(candidate, check):
    before = torch.equal, compare.bits, builtins.ascii, torch.Tensor.equal
    status, failed = check(candidate("return 3 * x", first="\n".join(PATCHES.values())))
    assert (torch.equal, compare.bits, builtins.ascii, torch.Tensor.equal) == before
    assert status == 1
    # A wrong result stays wrong.
    assert "outside the contract's fence" in failed["output"]
    assert failed["functions of others"].startswith("replaced: ")
    assert all(name in failed["functions of others"] for name in PATCHES)


def test_ctrl_c_prints_what_is_known_and_ends_the_process(candidate, capsys, monkeypatch):
    held = []

    def interrupted(cell, relation):
        if held:
            raise KeyboardInterrupt
        held.append(cell)
        return original(cell, relation)

    original = launches.check_relation
    monkeypatch.setattr(launches, "check_relation", interrupted)
    argv = ["--op", "double", "--candidate", candidate(), "--device", "cpu", "--json"]
    assert cli.main(argv) == 130
    assert {entry["relation"] for entry in entries(capsys)} == {"accuracy"}
    assert held[0].candidate.worker._process is None


def test_ctrl_c_before_anything_ran_is_said_in_one_line(candidate, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "start", interrupted)
    assert cli.main(["--op", "double", "--candidate", candidate(), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "rl-kernels check: stopped before anything ran\n"


NOISY = "print('called'); return 2 * x * (1 + torch.rand(()))"
"""It prints, and draws from torch's global generator."""


@pytest.mark.parametrize(
    "flags",
    [
        ["--check-grad"],
        ["--dtype", "bf16", "--seed", "7", "--grad-seed", "8", "--batch", "5", "--suite", "full"],
        ["--input-mode", "constant", "--constant-value=-1e-05", "--arch-key", "sm90"],
    ],
)
def test_a_replay_says_what_the_run_said(flags, candidate, capsys):
    assert cli.main(["--candidate", candidate(NOISY), "--op", "double", "--json", "--device", "cpu", *flags]) == 1
    found = entries(capsys)
    commands = {entry["case_id"]: entry["replay"] for entry in found if not entry["passed"]}
    assert len(commands) >= 3
    for case_id, command in list(commands.items())[:3]:
        assert ("--arch-key sm90" in command) is ("sm90" in flags)
        torch.manual_seed(len(case_id))
        assert cli.main([*shlex.split(command)[2:], "--json"]) == 1
        assert entries(capsys) == [entry for entry in found if entry["case_id"] == case_id]


@pytest.mark.usefixtures("real_processes")
def test_what_a_candidate_prints_mixes_neither_with_the_report_nor_with_the_list(candidate, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    target = candidate("print('called'); return 2 * x", first="print('imported')")
    assert cli.main(["--candidate", target, "--json", "--device", "cpu", "--check-grad"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["passed"]
    assert {"imported", "called"} == set(err.splitlines())
    assert cli.main(["--list", "--candidate", target, "--device", "cpu"]) == 0
    assert all(line.startswith("double/") for line in capfd.readouterr().out.splitlines())


MODULE = """
import functools, torch

class Nested:
    @staticmethod
    def inner(x): return 2 * x

class Callable:
    def __call__(self, x): return 2 * x

class Module(torch.nn.Module):
    def forward(self, x): return 2 * x

class Adapter:
    def forward(self, x): return 2 * x

plain = Nested.inner
partial = functools.partial(plain)
instance, module, adapter = Callable(), Module(), Adapter()
"""


@pytest.mark.parametrize("path", ["plain", "Nested.inner", "partial", "instance", "module", "adapter"])
def test_a_callable_of_a_module(check, path, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert check(f"my_module:{path}", "--relation", "accuracy") == (0, {})
    # An instance goes by what it is called, others by their names.
    assert load(f"my_module:{path}").name == {"plain": "inner", "Nested.inner": "inner"}.get(path, path)
