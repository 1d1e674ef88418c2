"""``rl-kernels check``: arguments, exit status, text and JSON, on a toy operator."""

import errno
import json
import shlex
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry
from rl_kernels.core.testing import Case, IllegalCall, RowLayout, Spec, given
from rl_kernels.lab.check import cli, compare
from rl_kernels.lab.check.cell import Cell


def double(x, *, backend=None):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
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
    illegal=(IllegalCall("text", given(x="1"), TypeError, "x: expected a tensor"),),
    exempt={"torch": "a toy, which registers no op"},
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
    make_module("toy_pkg.spec.cases", SPEC=SPEC)
    registry = KernelRegistry({"double": EntryPoint("double", "toy_pkg.op:OPERATOR", GROUP)})
    monkeypatch.setattr(cli, "kernel_registry", registry)


def strict(text):
    def refuse(token):
        raise AssertionError(f"not strict JSON: {token}")

    return json.loads(text, parse_constant=refuse)


def test_green(capsys):
    assert cli.main(["--check-grad", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    candidate, *skipped, verdict = out.splitlines()
    assert candidate.startswith("PASS double auto: ")
    assert all(line.startswith("skipped double auto ") for line in skipped)
    assert verdict.startswith("PASS rl-kernels quick fp32 cpu: ")
    assert not err


def test_verbose_shows_what_holds(capsys):
    assert cli.main(["--check-grad", "--device", "cpu", "-v"]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("PASS double auto: ")
    assert any("gradient:x [3x4] fp32 max_abs=" in line for line in lines)
    assert last.startswith("PASS rl-kernels quick fp32 cpu: ")


def test_a_terminal_sees_the_verdict_in_colour(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("\x1b[32mPASS\x1b[0m double auto")


def test_help_says_what_every_argument_is():
    actions = cli.parser([OPERATOR])._actions
    assert not [action.dest for action in actions if not action.help]


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
    assert {"operator", "name", "passed", "ran", "outputs"} == report["candidates"][0].keys()


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
    shapes = {tuple(entry["shape"]) for entry in report["candidates"][0]["outputs"] if entry["shape"]}
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


def test_gradients_that_are_asked_for_run_beside_other_relations(capsys):
    assert cli.main(["--relation", "accuracy", "--check-grad", "--json", "--device", "cpu:0"]) == 0
    report = strict(capsys.readouterr().out)
    assert {entry["relation"] for entry in report["candidates"][0]["outputs"]} == {"accuracy", "gradients"}


@pytest.mark.parametrize("arch", ["rocm", "cdna3", "gfx942"])
def test_the_rows_of_another_architecture(arch, capsys):
    assert cli.main(["--relation", "accuracy", "--arch-key", arch, "--json", "--device", "cpu"]) == 0
    assert strict(capsys.readouterr().out)["environment"]["arch_key"] == arch


@pytest.fixture
def own_contract(tmp_path):
    """Return ``own_contract(change)``: the path of a copy of the contract that a function has changed."""

    def write(change):
        document = json.loads(files("rl_kernels.core").joinpath("tolerance_contract.json").read_text("utf-8"))
        change(document)
        path = tmp_path / "contract.json"
        path.write_text(json.dumps(document))
        return str(path)

    return write


def test_a_contract_of_ones_own(own_contract, capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", 2.0 + 2e-6)

    def tighten(document):
        document["version"] = "mine"
        for row in document["rows"]:
            row |= {"atol": 0, "rtol": 0}

    path = own_contract(tighten)
    # The fence adds half of what rounding may do.
    monkeypatch.setattr(compare, "FACTORS", {"forward": 1e9, "gradient": 1e9})
    monkeypatch.setattr(compare, "ROUNDING", 0.0)
    flags = ["--relation", "accuracy", "--json", "--device", "cpu"]
    assert cli.main([*flags, "--contract", path]) == 1
    report = strict(capsys.readouterr().out)
    assert report["contract_version"] == "mine"
    assert report["chosen"] == {"contract_file": path}
    assert f"--contract {path}" in report["candidates"][0]["outputs"][0]["replay"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document["rows"].pop(0), "has no row for accuracy / elementwise / fp32 / forward"),
        (lambda document: document["rows"].clear(), "and 127 others"),
        (lambda document: document["rows"][0].update(atol=-1), "atol: expected a finite number >= 0, got -1"),
        (lambda document: document["rows"][0].update(rtol="1"), "rtol: expected a finite number >= 0, got '1'"),
        (lambda document: document["rows"][0].update(dtype="fp8"), "dtype: expected one of fp32"),
        (lambda document: document["rows"][0].pop("relation"), "row 1: no relation"),
        (lambda document: document["rows"].insert(0, 3), "row 1: expected an object, got 3"),
        (lambda document: document.update(rows=None), "rows: expected a list, got None"),
        (lambda document: document["arch_overrides"].update(cpu={}), "arch_overrides: cpu: expected a list, got {}"),
        (lambda document: document.pop("version"), "the tolerance contract: no version"),
        (lambda document: document["arch_overrides"].pop("cpu"), "'cpu' of cpu is not in the tolerance contract"),
    ],
)
def test_a_contract_with_a_mistake_ends_in_two(change, message, own_contract, capsys):
    assert cli.main(["--device", "cpu", "--contract", own_contract(change)]) == 2
    assert message in one_line(capsys)


NO_CONTRACT = "is not a tolerance contract"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", NO_CONTRACT),
        ("[" * 100_000, NO_CONTRACT),
        ("[]", f"{NO_CONTRACT}: the tolerance contract: expected an object, got []"),
        (None, "cannot be read"),
    ],
    ids=["cut off", "too deep", "a list", "no file"],
)
def test_a_file_that_is_no_contract_ends_in_two(text, message, tmp_path, capsys):
    path = tmp_path / "contract.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["--device", "cpu", "--contract", str(path)]) == 2
    assert f"--contract: {path} {message}" in one_line(capsys)


def test_a_regression_against_an_earlier_report_ends_in_one(tmp_path, capsys, monkeypatch):
    old = tmp_path / "old.json"
    flags = ["--device", "cpu", "--relation", "accuracy"]
    assert cli.main([*flags, "--json", "--suite", "full"]) == 0
    old.write_text(capsys.readouterr().out)
    assert cli.main([*flags, "--against", str(old), "--suite", "full"]) == 0
    assert "PASS against the earlier report: no changes" in capsys.readouterr().out
    # All that runs passes, but the case "large" does not run.
    assert cli.main([*flags, "--against", str(old), "--json"]) == 1
    report = strict(capsys.readouterr().out)
    assert report["passed"]
    assert cli.main([*flags, "--against", str(old)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAIL")
    assert last.endswith(", worse than the earlier report")
    assert report["against"]["vanished"] == [
        f"double/auto/fp32/accuracy/large: output{label}" for label in ("", " other values")
    ]
    old.write_text("{}")
    assert cli.main([*flags, "--against", str(old)]) == 2
    assert f"--against: {old} is not a report" in one_line(capsys)


def test_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", 3.0)
    assert cli.main(["--list", "--candidate", "pytorch", "--device", "cpu", "--check-grad"]) == 0
    names = ["double/pytorch/fp32/accuracy/plain", "double/pytorch/fp32/gradients/plain"]
    assert capsys.readouterr().out.splitlines() == names


def test_nothing_ran_is_no_pass():
    assert cli.main(["--relation", "parity", "--device", "cpu"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--candidate", "cuda"], "--candidate cuda: runs on a GPU"),
        (["--candidate", "cuda-sm90"], "cannot run it here: cuda-sm90: runs on cuda"),
        (["--device", "cuda"], "--device: cuda does not exist"),
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
        (["--device", "tpu"], "--device: expected auto or a device of PyTorch such as cpu or cuda:1, got 'tpu'"),
        (["--device", "cuda:x"], "--device: expected auto or a device of PyTorch"),
        (["--device", ""], "--device: expected auto or a device of PyTorch"),
        (["--device", "cpu:1"], "--device: cpu:1 does not exist"),
        *(
            (["--device", name], f"no backend of double runs on {name.split(':')[0]}; backends run on cuda, cpu")
            for name in ("xpu", "xpu:1", "mps", "meta", "hpu")
        ),
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
        (["--grad-seed", "99999999999999999999"], "argument --grad-seed: expected an integer below 2^31"),
        (["--seed", "-1"], "argument --seed: expected an integer >= 0, got '-1'"),
        (
            ["--input-mode", "constant", "--constant-value", "nan"],
            "argument --constant-value: expected a finite number",
        ),
        (["--timeout", "0"], "argument --timeout: expected a finite number > 0, got '0'"),
        (["--timeout", "inf"], "argument --timeout: expected a finite number > 0, got 'inf'"),
        (["--width", "x"], "argument --width: expected an integer >= 1, got 'x'"),
        (["--width", str(2**70)], "argument --width: expected an integer below 2^31, got"),
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--replay", "double/auto/fp32"], "--replay: expected OPERATOR/CANDIDATE/DTYPE/RELATION/CASE, got"),
        (["--replay", "double//fp32/accuracy/plain"], "--replay: expected OPERATOR/CANDIDATE"),
        (["--replay", "double/auto/fp8/accuracy/plain"], "--replay: expected one of fp32, bf16, fp16, got 'fp8'"),
        (["--replay", "double/auto/fp32/luck/plain"], "--replay: expected one of accuracy, "),
        (["--replay", "double/auto/fp32/accuracy/none"], "--replay: double has no case 'none'"),
        (["--replay", "double/auto/fp32/accuracy/plain, constant"], "without --input-mode constant"),
        (["--replay", "triple/auto/fp32/accuracy/plain"], "unknown operator 'triple'; installed: double"),
        (["--replay", "double/other/fp32/accuracy/plain"], "double has no such backend"),
        (["--replay", "double/no_such:f/fp32/accuracy/plain"], "cannot import no_such"),
        *(
            (["--replay", "double/auto/fp32/accuracy/plain", *flags], f"--replay: cannot be combined with {flags[0]}")
            for flags in (
                ["--op", "double"],
                ["--candidate", "auto"],
                ["--dtype", "fp32"],
                ["--relation", "accuracy"],
                ["--suite", "quick"],
                ["--check-grad"],
                ["--list"],
            )
        ),
    ],
)
def test_usage_of_replay(argv, message, capsys):
    assert cli.main([*argv, "--device", "cpu"]) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize("flag", ["--junit", "--html"])
@pytest.mark.parametrize("place", ["none/report", ""])
def test_a_report_that_cannot_be_written_is_said_before_anything_runs(flag, place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as exit_:
        cli.main([flag, str(tmp_path / place), "--device", "cpu"])
    assert exit_.value.code == 2
    assert f"argument {flag}: expected a file that can be written" in one_line(capsys)


def test_reports_are_written_beside_the_text(tmp_path, capsys):
    junit, html = tmp_path / "report.xml", tmp_path / "report.html"
    assert cli.main(["--device", "cpu", "--junit", str(junit), "--html", str(html)]) == 0
    assert capsys.readouterr().out.startswith("PASS ")
    assert junit.read_text().startswith("<?xml")
    assert "<html" in html.read_text()


@pytest.mark.parametrize(("flag", "writer"), [("--junit", "write_junit"), ("--html", "write_html")])
def test_a_full_disk_costs_the_file_and_not_the_report(flag, writer, tmp_path, capsys, monkeypatch):
    def full(report, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, writer, full)
    path = tmp_path / "report"
    assert cli.main(["--device", "cpu", flag, str(path)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("PASS ")
    assert err == f"rl-kernels check: {flag}: {path} cannot be written: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flag", ["--junit", "--html"])
def test_a_device_that_is_full_costs_the_file_and_not_the_report(flag, capsys):
    assert cli.main(["--device", "cpu", flag, "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("PASS ")
    assert len(err.splitlines()) == 1
    assert f"{flag}: /dev/full cannot be written" in err


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["--device", "cpu", "--junit", "~/report.xml"]) == 0
    assert (tmp_path / "report.xml").read_text().startswith("<?xml")


TOY_PACKAGE = """
import sys
from importlib.metadata import EntryPoint
sys.path.insert(0, {tests!r})
import test_check_cli as here
from types import ModuleType
CASE = here.Case("größe ≥ 1", {{"batch": 3, "width": 4}})
for name, members in (
    ("toy_pkg", {{"double": here.double}}),
    ("toy_pkg.op", {{"OPERATOR": here.OPERATOR}}),
    ("toy_pkg.spec.cases", {{"SPEC": here.replace(here.SPEC, cases=(CASE,))}}),
):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)
point = EntryPoint("double", "toy_pkg.op:OPERATOR", here.GROUP)
here.cli.kernel_registry = here.KernelRegistry({{"double": point}})
sys.exit(here.cli.main(["--device", "cpu", "--relation", "accuracy", "-v"]))
"""


def test_a_terminal_that_knows_ascii_alone_still_shows_the_report(run_python):
    done = run_python("-c", TOY_PACKAGE.format(tests=str(Path(__file__).parent)), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS ")
    assert "gr\\xf6\\xdfe \\u2265 1" in done.stdout


def test_a_malformed_environment_is_said_in_one_line(run_python):
    done = run_python("-m", "rl_kernels.lab.check", "--list", RL_KERNELS_BACKEND="fused_logp=")
    assert done.returncode == 2
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rl-kernels check: RL_KERNELS_BACKEND: ")


def test_the_first_failure_may_end_the_run(capsys, monkeypatch):
    monkeypatch.setattr(double, "factor", 2.001)
    assert cli.main(["--fail-fast", "--json", "--suite", "full", "--device", "cpu"]) == 1
    report = strict(capsys.readouterr().out)
    assert [entry["passed"] for entry in all_entries(report)] == [False]


@pytest.fixture
def a_case_that_cannot_be_drawn(make_module):
    def inputs(case, draw):
        if case.name == "odd":
            raise IndexError("no such row")
        return SPEC.inputs(case, draw)

    cases = (*SPEC.cases, Case("odd", {"batch": 3, "width": 4}))
    make_module("toy_pkg.spec.cases", SPEC=replace(SPEC, cases=cases, inputs=inputs))


def test_a_case_that_cannot_be_drawn_is_a_failed_check(a_case_that_cannot_be_drawn, capsys):
    assert cli.main(["--json", "--relation", "accuracy", "--device", "cpu"]) == 1
    found = {entry["case"]: entry for entry in all_entries(strict(capsys.readouterr().out))}
    assert found["plain"]["passed"]
    assert found["odd"]["message"] == "IndexError: no such row"


def test_a_case_that_cannot_be_drawn_is_listed(a_case_that_cannot_be_drawn, capsys):
    assert cli.main(["--list", "--relation", "accuracy", "--device", "cpu"]) == 0
    names = ["double/auto/fp32/accuracy/plain", "double/auto/fp32/accuracy/odd"]
    assert capsys.readouterr().out.splitlines() == names


def test_a_token_beyond_a_vocabulary_is_taken_modulo_it(make_module, capsys):
    def picked(x, ids, *, backend=None):
        return x.gather(1, ids[:, None])[:, 0]

    def inputs(case, draw):
        rows, vocab = case.sizes["rows"], case.sizes["vocab"]
        return {"x": draw.normal(rows, vocab), "ids": draw.ids(vocab, rows)}

    cases = (Case("small", {"rows": 2, "vocab": 5}), Case("large", {"rows": 2, "vocab": 70}))
    classes = {"output": "elementwise", "gradient:x": "elementwise"}
    own = {"cases": cases, "inputs": inputs, "references": {"": picked}, "classes": classes, "ids": ("ids",)}
    spec = replace(SPEC, transforms={}, illegal=(), **own)
    make_module("toy_pkg", double=picked)
    make_module("toy_pkg.spec.cases", SPEC=spec)
    seen = []
    flags = ["--input-mode", "constant", "--token-value", "67", "--relation", "accuracy", "--device", "cpu"]
    original = Cell.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cell, "run", lambda self, *a, **k: seen.append(self) or original(self, *a, **k))
        cli.main([*flags, "--json"])
    report = strict(capsys.readouterr().out)
    assert {int(cell.inputs["ids"][0]) for cell in seen if cell.case.name == "small, constant"} == {2}
    assert {int(cell.inputs["ids"][0]) for cell in seen if cell.case.name == "large, constant"} == {67}
    assert not [entry["message"] for entry in all_entries(report) if "raised" in entry["message"]]


def test_every_dtype_asked_for_is_checked_once(capsys):
    assert cli.main(["--dtype", "fp32", "bf16", "fp32", "--json", "--device", "cpu"]) == 0
    found = [entry["dtype"] for entry in all_entries(strict(capsys.readouterr().out))]
    assert set(found) == {"fp32", "bf16"}
    assert found.count("fp32") == found.count("bf16")


def all_entries(report):
    return [entry for candidate in report["candidates"] for entry in candidate["outputs"]]


def test_every_listed_id_can_be_replayed(capsys):
    assert cli.main(["--list", "--candidate", "all", "--suite", "full", "--device", "cpu"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(set(listed)) > 20
    for case_id in listed:
        status = cli.main(["--replay", case_id, "--json", "--device", "cpu"])
        report = strict(capsys.readouterr().out)
        # Parity has nobody to stand beside here, and illegal calls start from the plain case: no pass if nothing ran.
        nothing = "/parity/" in case_id or case_id.endswith("/robustness/large")
        assert status == int(nothing), case_id
        assert {entry["case_id"] for entry in all_entries(report)} == (set() if nothing else {case_id})


NOISY = """
import torch

print("imported")

def noisy(x):
    print("called")
    return 2 * x * (1 + torch.rand(()))
"""


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    """A candidate that prints, and draws from torch's global generator."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return f"{path}:noisy"


@pytest.mark.parametrize(
    "flags",
    [
        ["--check-grad"],
        ["--dtype", "bf16", "--seed", "7", "--grad-seed", "8", "--batch", "5", "--suite", "full"],
        ["--input-mode", "constant", "--constant-value=-1e-05", "--arch-key", "sm90"],
    ],
)
def test_a_replay_says_what_the_run_said(flags, noisy, capsys):
    assert cli.main(["--candidate", noisy, "--op", "double", "--json", "--device", "cpu", *flags]) == 1
    entries = all_entries(strict(capsys.readouterr().out))
    commands = {entry["case_id"]: entry["replay"] for entry in entries if not entry["passed"]}
    assert len(commands) >= 3
    for case_id, command in list(commands.items())[:3]:
        assert ("--arch-key sm90" in command) is ("sm90" in flags)
        torch.manual_seed(len(case_id))
        assert cli.main([*shlex.split(command)[2:], "--json"]) == 1
        replayed = all_entries(strict(capsys.readouterr().out))
        assert replayed == [entry for entry in entries if entry["case_id"] == case_id]


def test_what_a_candidate_prints_does_not_mix_with_the_report(noisy, capfd):
    assert cli.main(["--candidate", noisy, "--json", "--device", "cpu"]) == 1
    out, err = capfd.readouterr()
    assert strict(out)["passed"] is False
    assert {"imported", "called"} == set(err.splitlines())


def test_what_a_candidate_prints_does_not_mix_with_the_list(noisy, capfd):
    assert cli.main(["--list", "--candidate", noisy, "--device", "cpu"]) == 0
    assert all(line.startswith("double/") for line in capfd.readouterr().out.splitlines())


@pytest.mark.parametrize("wide", [True, False])
def test_progress_is_shown_on_a_terminal_only(wide, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: wide, raising=False)
    assert cli.main(["--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("PASS ")
    assert bool(err) is wide
