"""``rl-kernels check``: mistakes end in exit status 2 with one line; files of reports."""

import errno
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from rl_kernels.lab.check import cli

CONTRACT = files("rl_kernels.core").joinpath("tolerance_contract.json").read_text("utf-8")
NO_CONTRACT = "is not a tolerance contract"
ON_CPU = ["--device", "cpu"]
REPLAY = ["--replay", "double/auto/fp32/accuracy/plain"]


@pytest.fixture(autouse=True)
def toy(install, double_operator, doubled):
    install(cli, double_operator, doubled, double=lambda x, *, backend=None: 2 * x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu(refused):
    assert "--candidate cuda: runs on a GPU" in refused(cli.main, ["--candidate", "cuda"])
    assert "cannot run it here: cuda-sm90: runs on cuda" in refused(cli.main, ["--candidate", "cuda-sm90"])
    assert "--device: cuda does not exist" in refused(cli.main, ["--device", "cuda"])


@pytest.mark.smoke
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
        (["--batch", "0"], "argument --batch: expected an integer >= 1, got '0'"),
        (["--grad-seed", "99999999999999999999"], "argument --grad-seed: expected an integer below 2^31"),
        (["--seed", "-1"], "argument --seed: expected an integer >= 0, got '-1'"),
        (["--constant-value", "nan"], "argument --constant-value: expected a finite number"),
        (["--timeout", "0"], "argument --timeout: expected a finite number > 0, got '0'"),
        (["--timeout", "inf"], "argument --timeout: expected a finite number > 0, got 'inf'"),
        (["--width", "x"], "argument --width: expected an integer >= 1, got 'x'"),
        (["--vocab", "3"], "unrecognized arguments: --vocab 3"),
        (["--width", str(2**70)], "argument --width: expected an integer below 2^31, got"),
    ],
)
def test_usage(argv, message, refused):
    assert message in refused(cli.main, argv)


def test_help_says_what_every_argument_is(double_operator):
    actions = cli.parser([double_operator])._actions
    assert not [action.dest for action in actions if not action.help]


@pytest.mark.parametrize(
    ("case_id", "message"),
    [
        ("double/auto/fp32", "--replay: expected OPERATOR/CANDIDATE/DTYPE/RELATION/CASE, got"),
        ("double//fp32/accuracy/plain", "--replay: expected OPERATOR/CANDIDATE"),
        ("double/auto/fp8/accuracy/plain", "--replay: expected one of fp32, bf16, fp16, got 'fp8'"),
        ("double/auto/fp32/luck/plain", "--replay: expected one of accuracy, "),
        ("double/auto/fp32/accuracy/none", "--replay: double has no case 'none'"),
        ("double/auto/fp32/accuracy/plain, constant", "without --input-mode constant"),
        ("triple/auto/fp32/accuracy/plain", "unknown operator 'triple'; installed: double"),
        ("double/other/fp32/accuracy/plain", "double has no such backend"),
        ("double/no_such:f/fp32/accuracy/plain", "cannot import no_such"),
    ],
)
def test_usage_of_replay(case_id, message, refused):
    assert message in refused(cli.main, ["--replay", case_id, *ON_CPU])


def test_a_replay_chooses_what_runs(refused):
    chosen = {"op": "double", "candidate": "auto", "dtype": "fp32", "relation": "accuracy", "suite": "quick"}
    for flags in (*([f"--{name}", value] for name, value in chosen.items()), ["--check-grad"], ["--list"]):
        assert f"--replay: cannot be combined with {flags[0]}" in refused(cli.main, [*REPLAY, *flags, *ON_CPU])


def test_nothing_ran_is_no_pass():
    assert cli.main(["--relation", "parity", *ON_CPU]) == 1
    assert cli.main(["--relation", "accuracy", "--device", "cpu:0"]) == 0


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
def test_a_contract_with_a_mistake(change, message, tmp_path, refused):
    document = json.loads(CONTRACT)
    change(document)
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(document))
    assert message in refused(cli.main, [*ON_CPU, "--contract", str(path)])


def test_a_file_that_is_no_contract_or_report(tmp_path, refused):
    path = tmp_path / "mine.json"
    assert f"--contract: {path} cannot be read" in refused(cli.main, [*ON_CPU, "--contract", str(path)])
    for text, more in (("{", ""), ("[" * 100_000, ""), ("[]", ": the tolerance contract: expected an object, got []")):
        path.write_text(text)
        assert f"--contract: {path} {NO_CONTRACT}{more}" in refused(cli.main, [*ON_CPU, "--contract", str(path)])
    path.write_text("{}")
    assert f"--against: {path} is not a report" in refused(cli.main, [*ON_CPU, "--against", str(path)])


def test_reports_are_written_beside_the_text_in_a_path_that_may_begin_at_home(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main([*ON_CPU, "--junit", "~/report.xml", "--html", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("PASS ")
    assert (tmp_path / "report.xml").read_text().startswith("<?xml")
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("flag", "writer"), [("--junit", "write_junit"), ("--html", "write_html")])
def test_a_report_that_cannot_be_written(flag, writer, tmp_path, capsys, monkeypatch, refused):
    with monkeypatch.context() as patch:
        patch.setattr(cli, "run", lambda *_: pytest.fail("ran"))
        for place in (tmp_path / "none" / "report", tmp_path):
            message = f"argument {flag}: expected a file that can be written"
            assert message in refused(cli.main, [flag, str(place), *ON_CPU])
    if Path("/dev/full").exists():
        assert full_disk([*ON_CPU, flag, "/dev/full"], capsys).startswith(f"rl-kernels check: {flag}: /dev/full cannot")

    def full(report, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, writer, full)
    path = tmp_path / "report"
    said = full_disk([*ON_CPU, flag, str(path)], capsys)
    assert said == f"rl-kernels check: {flag}: {path} cannot be written: No space left on device\n"


def full_disk(argv, capsys):
    """Return what is said of a full disk, which costs the file and not the report."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out.startswith("PASS ")
    assert len(err.splitlines()) == 1
    return err


def test_a_malformed_environment_is_said_in_one_line(run_code):
    code = "import runpy; runpy.run_module('rl_kernels.lab.check', run_name='__main__')"
    done = run_code(code, "--list", RL_KERNELS_BACKEND="fused_logp=")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rl-kernels check: RL_KERNELS_BACKEND: ")
