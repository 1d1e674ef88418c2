"""``rl-kernels check`` on a toy operator: what runs, exit status, text and JSON."""

import io
import json
import sys
from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from rl_kernels.core.testing import Case, IllegalCall, given
from rl_kernels.lab.check import cli, compare
from rl_kernels.lab.check.cell import Cell


def double(x, *, backend=None):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    return double.factor * x


@pytest.fixture(autouse=True)
def spec(install, double_operator, doubled, monkeypatch):
    """The module of the toy's spec."""
    monkeypatch.setattr(double, "factor", 2.0, raising=False)
    illegal = (IllegalCall("text", given(x="1"), TypeError, "x: expected a tensor"),)
    return install(cli, double_operator, replace(doubled, illegal=illegal), double=double)


@pytest.fixture
def check(capsys):
    """Return ``check(*flags, status)``: the report of a run that ends with that status."""

    def run(*flags, status=0):
        assert cli.main([*flags, "--json", "--device", "cpu"]) == status
        out, err = capsys.readouterr()
        assert not err
        return json.loads(out, parse_constant=pytest.fail)

    return run


def entries_of(report):
    return [entry for candidate in report["candidates"] for entry in candidate["outputs"]]


def each(report, field):
    return {entry[field] for entry in entries_of(report)}


@pytest.mark.smoke
def test_text_of_a_run(capsys, monkeypatch):
    flags = ["--check-grad", "--device", "cpu"]
    assert cli.main(flags) == 0
    out, err = capsys.readouterr()
    candidate, *skipped, verdict = out.splitlines()
    assert candidate.startswith("PASS double auto: ")
    assert all(line.startswith("skipped double auto ") for line in skipped)
    assert verdict.startswith("PASS rl-kernels quick fp32 cpu: ")
    assert not err
    assert cli.main([*flags, "-v"]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (candidate, verdict)
    assert any("gradient:x [3x4] fp32 max_abs=" in line for line in lines)
    monkeypatch.setattr(double, "factor", 2.001)
    assert cli.main(flags) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL accuracy" in line]
    assert failed
    assert "seed=" in failed[0]


@pytest.mark.parametrize("wide", [True, False])
def test_color_and_progress_are_shown_on_a_terminal_only(wide, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    if wide:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: wide, raising=False)
    assert cli.main(["--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("\x1b[32mPASS\x1b[0m double auto" if wide else "PASS double auto")
    assert bool(err) is wide


def test_a_terminal_that_knows_ascii_alone_still_shows_the_report(spec, monkeypatch):
    spec.SPEC = replace(spec.SPEC, cases=(Case("größe ≥ 1", {"batch": 3, "width": 4}),))
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["--device", "cpu", "--relation", "accuracy", "-v"]) == 0
    screen.flush()
    shown = screen.buffer.getvalue().decode("ascii")
    assert shown.startswith("PASS ")
    assert "gr\\xf6\\xdfe \\u2265 1" in shown


def test_json_is_strict_and_alone(check, monkeypatch):
    monkeypatch.setattr(double, "factor", float("inf"))
    report = check(status=1)
    assert report["passed"] is False
    assert 0 <= report["pass_rate"] < 1
    assert {"suite_name", "candidates", "skipped", "environment", "seeds", "contract_version"} <= report.keys()
    assert {"operator", "name", "passed", "ran", "outputs"} == report["candidates"][0].keys()
    report = check("--fail-fast", "--suite", "full", status=1)
    assert [entry["passed"] for entry in entries_of(report)] == [False]


def test_candidates(check):
    report = check("--candidate", "all")
    assert [candidate["name"] for candidate in report["candidates"]] == ["pytorch", "auto", "native"]
    reasons = {skip["candidate"]: skip["reason"] for skip in report["skipped"] if skip["relation"] == "all"}
    assert "runs on cuda" in reasons["cuda-sm90"]
    # The definition is exempt from bits.
    report = check("--candidate", "pytorch")
    assert each(report, "relation") == {"accuracy"}
    assert {skip["relation"] for skip in report["skipped"]} >= {"invariance", "repeatability"}


@pytest.mark.parametrize(
    ("flags", "field", "values"),
    [
        (["--batch", "5", "--suite", "full"], "case", {"plain", "large"}),
        (["--input-mode", "constant", "--constant-value", "0.5"], "case", {"plain", "plain, constant"}),
        (["--relation", "invariance"], "relation", {"invariance"}),
        (["--relation", "accuracy", "--check-grad"], "relation", {"accuracy", "gradients"}),
        (["--dtype", "fp32", "bf16", "fp32"], "dtype", {"fp32", "bf16"}),
    ],
)
def test_flags_choose_what_runs(flags, field, values, check):
    report = check(*flags)
    assert each(report, field) == values
    if "--batch" in flags:
        assert {tuple(entry["shape"]) for entry in entries_of(report) if entry["shape"]} == {(5, 4)}
    if field == "dtype":
        found = [entry["dtype"] for entry in entries_of(report)]
        assert found.count("fp32") == found.count("bf16")


@pytest.mark.parametrize("arch", ["rocm", "cdna3", "gfx942"])
def test_the_rows_of_another_architecture(arch, check):
    assert check("--relation", "accuracy", "--arch-key", arch)["environment"]["arch_key"] == arch


@pytest.mark.parametrize(("mode", "varies"), [("ones", False), ("random", True)])
def test_grad_mode_reaches_the_upstream(mode, varies, check, monkeypatch):
    seen = []
    run = Cell.upstream
    monkeypatch.setattr(Cell, "upstream", lambda *args: seen.append(run(*args)) or seen[-1])
    check("--relation", "gradients", "--grad-mode", mode)
    assert bool((seen[0]["output"] - 1).abs().max() > 0.01) is varies


def test_a_contract_of_ones_own(check, tmp_path, monkeypatch):
    document = json.loads(files("rl_kernels.core").joinpath("tolerance_contract.json").read_text("utf-8"))
    rows = [{**row, "atol": 0, "rtol": 0} for row in document["rows"]]
    path = tmp_path / "contract.json"
    path.write_text(json.dumps({**document, "version": "mine", "rows": rows}))
    monkeypatch.setattr(double, "factor", 2.0 + 2e-6)
    # The fence adds half of what rounding may do.
    monkeypatch.setattr(compare, "FACTORS", {"forward": 1e9, "gradient": 1e9})
    monkeypatch.setattr(compare, "ROUNDING", 0.0)
    report = check("--relation", "accuracy", "--contract", str(path), status=1)
    assert report["contract_version"] == "mine"
    assert report["chosen"] == {"contract_file": str(path)}
    assert f"--contract {path}" in report["candidates"][0]["outputs"][0]["replay"]


def test_a_regression_against_an_earlier_report_ends_in_one(check, tmp_path, capsys):
    old = tmp_path / "old.json"
    flags = ["--device", "cpu", "--relation", "accuracy"]
    old.write_text(json.dumps(check(*flags, "--suite", "full")))
    assert cli.main([*flags, "--against", str(old), "--suite", "full"]) == 0
    assert "PASS against the earlier report: no changes" in capsys.readouterr().out
    # All that runs passes, but the case "large" does not run.
    report = check(*flags, "--against", str(old), status=1)
    assert report["passed"]
    assert report["against"]["vanished"] == [
        f"double/auto/fp32/accuracy/large: output{label}" for label in ("", " other values")
    ]
    assert cli.main([*flags, "--against", str(old)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAIL")
    assert last.endswith(", worse than the earlier report")


def test_a_case_that_cannot_be_drawn_is_listed_and_a_failed_check(spec, check, capsys):
    def inputs(case, draw):
        if case.name == "odd":
            raise IndexError("no such row")
        return drawn(case, draw)

    drawn = spec.SPEC.inputs
    cases = (*spec.SPEC.cases, Case("odd", {"batch": 3, "width": 4}))
    spec.SPEC = replace(spec.SPEC, cases=cases, inputs=inputs)
    found = {entry["case"]: entry for entry in entries_of(check("--relation", "accuracy", status=1))}
    assert found["plain"]["passed"]
    assert found["odd"]["message"] == "IndexError: no such row"
    assert cli.main(["--list", "--relation", "accuracy", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split() == [f"double/auto/fp32/accuracy/{name}" for name in ("plain", "odd")]


def test_a_token_beyond_a_vocabulary_is_taken_modulo_it(spec, make_module, check, monkeypatch):
    def picked(x, ids, *, backend=None):
        return x.gather(1, ids[:, None])[:, 0]

    def inputs(case, draw):
        rows, vocab = case.sizes["rows"], case.sizes["vocab"]
        return {"x": draw.normal(rows, vocab), "ids": draw.ids(vocab, rows)}

    cases = (Case("small", {"rows": 2, "vocab": 5}), Case("large", {"rows": 2, "vocab": 70}))
    own = {"cases": cases, "inputs": inputs, "references": {"": picked}, "ids": ("ids",)}
    make_module("toy_pkg", double=picked)
    spec.SPEC = replace(spec.SPEC, transforms={}, illegal=(), **own)
    seen, original = [], Cell.run
    monkeypatch.setattr(Cell, "run", lambda self, *a, **k: seen.append(self) or original(self, *a, **k))
    flags = ["--input-mode", "constant", "--token-value", "67", "--relation", "accuracy"]
    report = check(*flags, status=1)
    assert {int(cell.inputs["ids"][0]) for cell in seen if cell.case.name == "small, constant"} == {2}
    assert {int(cell.inputs["ids"][0]) for cell in seen if cell.case.name == "large, constant"} == {67}
    assert not [entry["message"] for entry in entries_of(report) if "raised" in entry["message"]]


def test_every_listed_id_can_be_replayed_and_the_list_runs_nothing(check, capsys, monkeypatch):
    flags = ["--list", "--candidate", "all", "--suite", "full", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(double, "factor", 3.0)
        assert cli.main(flags) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(set(listed)) > 20
    of_the_definition = {f"{relation}/{case}" for relation in ("accuracy", "gradients") for case in ("plain", "large")}
    assert {each for each in listed if "/pytorch/" in each} == {f"double/pytorch/fp32/{x}" for x in of_the_definition}
    for case_id in listed:
        # Parity has nobody to stand beside here, and illegal calls start from the plain case: no pass if nothing ran.
        nothing = "/parity/" in case_id or case_id.endswith("/robustness/large")
        report = check("--replay", case_id, status=int(nothing))
        assert each(report, "case_id") == (set() if nothing else {case_id})
