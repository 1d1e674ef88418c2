"""The candidate of docs/checker.md does what the page says: it passes in FP32, and fails in BF16 with these reasons."""

import json
import re
from pathlib import Path

import pytest

from rl_kernels.fused_logp.spec.cases import SPEC
from rl_kernels.lab.check.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "checker.md").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that gives the exit status and the failed checks of the page's example, maybe edited."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    file = tmp_path / "my_logp.py"

    def check(dtype, old="", new="", relations=()):
        file.write_text(code.replace(old, new) if old else code, encoding="utf-8")
        chosen = ["--relation", *relations] if relations else []
        given = ["--op", "fused_logp", "--candidate", f"{file}:my_logp", "--dtype", dtype, "--check-grad", "--json"]
        status = main([*given, *chosen])
        report = json.loads(capsys.readouterr().out)
        outputs = [entry for candidate in report["candidates"] for entry in candidate["outputs"]]
        return status, {(e["relation"], e["case"], e["output"]): e["message"] for e in outputs if not e["passed"]}

    return check


def test_it_passes_in_fp32(run):
    halves = {case.name for case in SPEC.cases if case.dtype in ("bf16", "fp16")}
    assert {case for _, case, _ in run("fp32")[1]} <= halves


def test_in_bf16_it_fails_as_the_page_says(run):
    status, failed = run("bf16", relations=("accuracy", "invariance"))
    assert status == 1
    for case, reason in (("plain", "worse than 2x"), ("peaked", "outside the contract's fence")):
        assert failed["accuracy", case, "logp"].startswith(reason)
    assert "temperature as a tensor" in failed["invariance", "plain", "temperature"]
    quoted = re.findall(r"got -7.125,\s+expected -7.14374156", PAGE)
    assert quoted
    assert "got -7.125, expected -7.14374156" in failed["accuracy", "plain", "logp"]


def test_the_mend_of_the_page_mends_it(run):
    assert run("bf16", "logits / scale", "logits.float() / scale") == (0, {})
