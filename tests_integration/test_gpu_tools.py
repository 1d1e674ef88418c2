"""The bundle for a GPU machine and the driver of the sanitizer, as far as a CPU goes: a stand-in is the sanitizer."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from forked import TOOLS, forked, imported

ROOT = Path(__file__).parents[1]
gpu_record = imported("gpu_record")
pytestmark = pytest.mark.slow

SANITIZER = """#!{python}
import subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("Compute Sanitizer stand-in version 1"))
tool, start = sys.argv[2], sys.argv.index({python!r})
planted = "a planted fault" in sys.argv
if not planted:
    subprocess.run(sys.argv[start:], check=True)
found = {faults} if planted else {errors} * (tool == "racecheck")
hazards = "RACECHECK SUMMARY: %d hazards displayed (0 errors)"
print("=========", (hazards if tool == "racecheck" else "ERROR SUMMARY: %d errors") % found)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="session")
def bundle(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the bundle and unpack it elsewhere; return its folder."""
    folder = tmp_path_factory.mktemp("gpu machine")
    done = run(TOOLS / "gpu_bundle.py", "--wheels", wheels, "--out", folder / "bundle.tar.gz")
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / "bundle.tar.gz") as archive:
        archive.extractall(folder)
    return folder / "rl-kernels-gpu"


def steps(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {"passed": summary["passed"], **{f"{step['group']} {step['name']}": step for step in summary["steps"]}}


def test_bundle_proves_itself_on_a_fresh_machine(bundle: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--candidate", "native", "--suite", "quick", "--op", "fused_logp", "--dtype", "fp32")
    options += ("--record", "record.json", "--seconds", "600")
    chosen = ("--", "-q", "-k", "test_reference")
    done = run(bundle / "run.py", "--only", "tests", "check", "--out", "results", *options, *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = steps(tmp_path / "results")
    assert found["passed"]
    assert found["tests fused-logp/test_reference"]["counts"]["tests"] > 2
    assert "passed" in (tmp_path / "results" / "tests-fused-logp-test_reference.log").read_text(encoding="utf-8")
    assert found["check fused_logp/native/fp32"]["counts"]["failed"] == 0
    recorded = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert {"device", "torch"} <= recorded["environment"].keys()
    assert {part["state"] for part in recorded["parts"].values()} == {"ran"}
    assert all(part["commit"] for part in recorded["parts"].values())
    assert recorded["parts"]["check fused_logp/native/fp32"]["checks"] > 500


def test_a_record_takes_what_is_left_in_the_next_call(tmp_path: Path) -> None:
    file, log, missing = tmp_path / "record.json", tmp_path / "log", tmp_path / "none.json"
    names = [f"check rms_norm/triton/{dtype}" for dtype in ("bf16", "fp16", "fp32", "fp64")]
    first = gpu_record.Record(file, {"device": "H200", "date": "today"}, "1a2b")
    assert first.unfinished(names) == names
    log.write_text("first\nrms_norm cannot run it here\n", encoding="utf-8")
    (tmp_path / "tests.xml").write_text("<testsuite><testcase name='a'/></testsuite>", encoding="utf-8")
    first.add(names[0], gpu_record.part_of(0, 1.0, tmp_path / "tests.xml", log))
    first.add(names[1], gpu_record.part_of(gpu_record.TIMED_OUT, 60.0, missing, log))
    first.add(names[2], gpu_record.part_of(2, 1.0, missing, log))
    refused = {"state": "refused", "seconds": 1.0, "reason": "rms_norm cannot run it here", "commit": "1a2b"}
    assert first.parts[names[2]] == refused
    again = gpu_record.Record(file, {"device": "H200", "date": "tomorrow"}, "3c4d")
    assert again.unfinished(list(reversed(names))) == [names[1], names[3]]
    with pytest.raises(ValueError, match="was made with another device; name another file"):
        gpu_record.Record(file, {"device": "H100", "date": "today"}, "1a2b")


def test_bundle_holds_the_tests_of_every_package(bundle: Path) -> None:
    folders = [*ROOT.glob("packages/*/tests"), *ROOT.glob("shared/*/tests")]
    shared = [*ROOT.glob("packages/conftest.py"), *ROOT.glob("shared/conftest.py")]
    for file in (*shared, *(file for folder in folders for file in folder.glob("*.py"))):
        assert (bundle / file.relative_to(ROOT)).read_bytes() == file.read_bytes()
    assert len([*bundle.glob("wheels/*.whl")]) == len(folders)
    with tarfile.open(bundle.parent / "bundle.tar.gz") as archive:
        assert not [name for name in archive.getnames() if "__pycache__" in name]


def test_a_step_that_fails_stops_no_other(bundle: Path, tmp_path: Path) -> None:
    missing = ("no_such", "nor_this")
    options = ("--device", "cpu", "--only", "check", "--dtype", "fp32", "--jobs", "1", "--op", *missing)
    assert run(bundle / "run.py", *options, "--out", tmp_path).returncode == 1
    found = steps(tmp_path)
    assert not found["passed"]
    assert [found[f"check {name}/triton/fp32"]["exit"] for name in missing] == [2, 2]
    assert "no_such" in (tmp_path / "check-no_such-triton-fp32.log").read_text(encoding="utf-8")


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    started = "import subprocess, sys; print(1, flush=True); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    late = f"import pathlib, time; time.sleep(4); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    code = (
        "import os, sys, time; from limited import limited\n"
        f"command = [sys.executable, '-c', {started!r}, {late!r}]\n"
        "status = limited(command, os.environ, 2, sys.stdout); time.sleep(4); sys.exit(status)"
    )
    done = run("-c", code, cwd=TOOLS)
    assert (done.returncode, done.stdout) == (124, "1\n")
    assert not (tmp_path / "late").exists()


def test_no_gpu_is_said_at_once(bundle: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(bundle / "run.py", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("--device: torch sees no GPU here\n")
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("option", "message"), [("--wheels", "run `nox -s build`"), ("--extra-wheels", "there is no wheel in")]
)
def test_bundle_of_no_wheels(option: str, message: str, wheels: Path, tmp_path: Path) -> None:
    folders = {"--wheels": wheels, option: tmp_path}
    arguments = [word for name, folder in folders.items() for word in (name, folder)]
    done = run(TOOLS / "gpu_bundle.py", *arguments, "--out", tmp_path / "bundle.tar.gz")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "bundle.tar.gz").exists()


def sanitized(folder: Path, *options: str, faults: int = 1) -> tuple[int, list[dict[str, Any]]]:
    """Run the driver with a stand-in that reports 3 errors as racecheck; return its exit status and results."""
    program, report = folder / "sanitizer", folder / "report.json"
    program.write_text(SANITIZER.format(python=sys.executable, errors=3, faults=faults), encoding="utf-8")
    program.chmod(0o755)
    here = ("--device", "cpu", "--backend", "native", "--dtype", "fp32", "--sanitizer", program, "--json", report)
    done = forked((TOOLS / "sanitize.py", *here, *options), ROOT)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(report.read_text(encoding="utf-8"))["results"]


def test_sanitizer_goes_over_the_cases_and_what_it_reports_fails(tmp_path: Path) -> None:
    status, results = sanitized(tmp_path, "--op", "fused_logp", "--tool", "memcheck", "racecheck", "--parts", "2")
    assert status == 1
    shares = [("fused_logp", 0), ("fused_logp", 1), ("a planted fault", 0)]
    assert [(found["tool"], found["operator"], found["part"]) for found in results] == [
        (tool, *share) for share in shares for tool in ("memcheck", "racecheck")
    ]
    verdicts = [(True, 0), (False, 3)]
    assert [(found["passed"], found["errors"]) for found in results] == [*verdicts, *verdicts, (True, 1), (True, 1)]
    assert all(found["calls"] > 100 for found in results if found["operator"] != "a planted fault")


@pytest.mark.parametrize("faults", [0, 1])
def test_a_planted_fault_that_is_not_reported_fails(faults: int, tmp_path: Path) -> None:
    status, results = sanitized(tmp_path, "--self-test", faults=faults)
    assert status == 1 - faults
    assert [found["passed"] for found in results] == [bool(faults)] * 3
