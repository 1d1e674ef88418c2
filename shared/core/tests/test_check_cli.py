"""``rl-kernels check``: arguments, exit status, text and JSON, on a toy operator."""

import json
from importlib.metadata import EntryPoint

import pytest
import torch

from rl_kernels.core.check import cli
from rl_kernels.core.check.cell import Cell
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry
from rl_kernels.core.testing import Case, RowLayout, Spec


def double(x, *, backend=None):
    return double.factor * x


double.factor = 2.0

SPEC = Spec(
    cases=(Case("plain", {"batch": 3, "width": 4}), Case("large", {"batch": 9, "width": 4}, suite="full")),
    inputs=lambda case, draw: {"x": draw.normal(case.sizes["batch"], case.sizes["width"])},
    references={"": lambda x: 2 * x},
    classes={"output": "elementwise", "gradient:x": "elementwise"},
    differentiable=("x",),
    magnitudes=lambda case, inputs, upstream: {
        "output": 2 * inputs["x"].abs(),
        "gradient:x": 2 * upstream.get("output", inputs["x"]).abs(),
    },
    transforms=RowLayout({"x": 1}, frozenset({"output", "gradient:x"})).transforms(),
    illegal=(),
)

BACKENDS = (
    Backend("cuda-sm90", "toy_pkg.cuda", {"cuda": INVARIANT}),
    Backend("native", "toy_pkg.native", {"cpu": INVARIANT}),
)
OPERATOR = Operator("double", "toy_pkg", "twice", ("N",), frozenset({"N"}), {}, {}, BACKENDS, lambda x, **_: Call.of(x))


@pytest.fixture(autouse=True)
def toy(make_module, monkeypatch):
    make_module("toy_pkg", double=double)
    make_module("toy_pkg.op", OPERATOR=OPERATOR)
    make_module("toy_pkg.cases", SPEC=SPEC)
    registry = KernelRegistry({"double": EntryPoint("double", "toy_pkg.op:OPERATOR", GROUP)})
    monkeypatch.setattr(cli, "kernel_registry", registry)


def strict(text):
    def refuse(token):
        raise AssertionError(f"not strict JSON: {token}")

    return json.loads(text, parse_constant=refuse)


def test_green(capsys):
    assert cli.main(["--check-grad", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    first, second, *lines = out.splitlines()
    assert first.startswith("PASS rl-kernels quick fp32 cpu: ")
    assert second.startswith("PASS double auto: ")
    assert any("gradient:x [3x4] fp32 max_abs=" in line for line in lines)
    assert not err


def test_a_wrong_operator_ends_in_one(capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", 2.001)
    assert cli.main(["--device", "cpu"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL accuracy" in line]
    assert failed
    assert "seed=" in failed[0]


def test_json_is_strict_and_alone(capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", float("inf"))
    assert cli.main(["--json", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    report = strict(out)
    assert not err
    assert report["passed"] is False
    assert 0 <= report["pass_rate"] < 1
    assert {"suite_name", "candidates", "skipped", "environment", "seeds", "contract_version"} <= report.keys()
    assert {"operator", "name", "passed", "outputs"} == report["candidates"][0].keys()


def test_all_names_what_cannot_run(capsys):
    assert cli.main(["--candidate", "all", "--json", "--device", "cpu"]) == 0
    report = strict(capsys.readouterr().out)
    assert [candidate["name"] for candidate in report["candidates"]] == ["pytorch", "auto", "native"]
    reasons = {skip["candidate"]: skip["reason"] for skip in report["skipped"] if skip["relation"] == "all"}
    assert "runs on cuda" in reasons["cuda-sm90"]


def test_the_definition_is_exempt_from_bits(capsys):
    assert cli.main(["--candidate", "pytorch", "--json", "--device", "cpu"]) == 0
    report = strict(capsys.readouterr().out)
    assert {entry["relation"] for entry in report["candidates"][0]["outputs"]} == {"accuracy"}
    assert {skip["relation"] for skip in report["skipped"]} >= {"invariance", "repeatability"}


def test_shape_flags_replace_the_sizes_of_every_case(capsys):
    assert cli.main(["--batch", "5", "--json", "--suite", "full", "--device", "cpu"]) == 0
    report = strict(capsys.readouterr().out)
    shapes = {tuple(e["shape"]) for e in report["candidates"][0]["outputs"] if e["relation"] != "robustness"}
    assert shapes == {(5, 4)}
    assert {entry["case"] for entry in report["candidates"][0]["outputs"]} == {"plain", "large"}


def test_constant_inputs_are_added(capsys):
    assert cli.main(["--input-mode", "constant", "--constant-value", "0.5", "--json", "--device", "cpu"]) == 0
    report = strict(capsys.readouterr().out)
    assert {entry["case"] for entry in report["candidates"][0]["outputs"]} == {"plain", "plain, constant"}


@pytest.mark.parametrize(("mode", "varies"), [("ones", False), ("random", True)])
def test_grad_mode_reaches_the_upstream(mode, varies, monkeypatch):
    seen = []
    run = Cell.upstream
    monkeypatch.setattr(Cell, "upstream", lambda *args: seen.append(run(*args)) or seen[-1])
    assert cli.main(["--relation", "gradients", "--grad-mode", mode, "--device", "cpu"]) == 0
    assert bool((seen[0]["output"] - 1).abs().max() > 0.01) is varies


def test_one_relation(capsys):
    assert cli.main(["--relation", "invariance", "--json", "--device", "cpu"]) == 0
    report = strict(capsys.readouterr().out)
    assert {entry["relation"] for entry in report["candidates"][0]["outputs"]} == {"invariance"}


def test_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", 3.0)
    assert cli.main(["--list", "--candidate", "pytorch", "--device", "cpu", "--check-grad"]) == 0
    names = ["double/pytorch/fp32/accuracy/plain", "double/pytorch/fp32/gradients/plain"]
    assert capsys.readouterr().out.splitlines() == names


def test_nothing_ran_is_no_pass():
    assert cli.main(["--relation", "robustness", "--device", "cpu"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--candidate", "cuda"], "--candidate cuda: runs on a GPU"),
        (["--candidate", "cuda-sm90"], "cannot run it here: cuda-sm90: runs on cuda"),
        (["--device", "cuda"], "--device: cuda is not there"),
    ],
)
def test_no_gpu(argv, message, capsys):
    assert cli.main(argv) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--op", "no_such"], "unknown operator 'no_such'; installed: double"),
        (["--candidate", "no-such"], "double has no such backend; it has: cuda-sm90, native"),
        (["--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:N"),
        (["--arch-key", "sm1"], "--arch-key: 'sm1' is not in the tolerance contract"),
    ],
)
def test_usage(argv, message, capsys):
    assert cli.main(argv) == 2
    assert message in one_line(capsys)


def one_line(capsys):
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch", "0"], "argument --batch: expected an integer >= 1, got '0'"),
        (["--width", "x"], "argument --width: expected an integer >= 1, got 'x'"),
        (["--vocab", "3"], "unrecognized arguments: --vocab 3"),
        (["--relation", "luck"], "invalid choice: 'luck'"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_usage_of_argparse(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert message in one_line(capsys)
