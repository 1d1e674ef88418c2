"""The tool that narrows the contract's rows for a GPU to twice what was measured there."""

import json

import pytest
from forked import imported

from rl_kernels.core.contract import contract, parse

tool = imported("calibrate_gpu")
ROW = ("accuracy", "reduction", "bf16", "forward")
ENVIRONMENT = {"arch_key": "sm90", "device": "NVIDIA H200", "torch": "2.13", "cuda": "13.0", "triton": "3.7.1"}


def report(*shares, row=ROW, **environment):
    checks = [
        {"row": row and " / ".join(row), "share": share, "case_id": f"op/native/bf16/accuracy/{number}", "output": "y"}
        for number, share in enumerate(shares)
    ]
    return {"candidates": [{"outputs": checks}], "environment": {**ENVIRONMENT, **environment}, "date": "2026-01-02"}


@pytest.mark.parametrize(
    ("shares", "narrowed"),
    [
        # The row is 0.05 / 0.02, the numbers are rounded up to one digit.
        ((0.1, 0.21, 0.0), (0.03, 0.01)),
        ((0.0,), (0.03, 0.01)),
        ((0.3,), (0.03, 0.02)),
        # Rounded up, it is as wide as before.
        ((0.49,), None),
        ((1.5,), None),
        # Not finite.
        ((0.1, None), None),
    ],
)
def test_a_row_allows_twice_the_largest_share(shares, narrowed):
    found = tool.rows([report(*shares), report(0.0)], contract())
    if narrowed is None:
        assert not found
        return
    (row,) = found
    assert (row["atol"], row["rtol"]) == narrowed
    assert f"{len(shares) + 1} results need at most {max(shares):.2g} of the row" in row["provenance"]
    assert "Measured on NVIDIA H200, torch 2.13, cuda 13.0, triton 3.7.1, 2026-01-02." in row["provenance"]


def test_other_checks_count_for_no_row_and_numbers_are_rounded_up():
    assert tool.rows([report(0.1, row=None)], contract()) == []
    rounded = {0.0: 0.0, 0.1: 0.1, 0.11: 0.2, 0.099: 0.1, 3e-5: 3e-5, 3.1e-5: 4e-5}
    assert [tool.rounded_up(value) for value in rounded] == pytest.approx([*rounded.values()], rel=1e-12)


def test_write_replaces_the_rows_of_this_architecture_alone(monkeypatch, tmp_path, capsys):
    file, old = tmp_path / "contract.json", tmp_path / "report.json"
    before = tool.FILE.read_text("utf-8")
    file.write_text(before, "utf-8")
    old.write_text(json.dumps(report(0.1)))
    monkeypatch.setattr(tool, "FILE", file)
    assert tool.main([str(old)]) == 0
    assert "0.1  " in capsys.readouterr().out
    assert file.read_text("utf-8") == before
    assert tool.main([str(old), "--write"]) == 0
    found = parse(json.loads(file.read_text("utf-8")))
    assert found.rows == contract().rows
    major, minor = contract().version.split(".")
    assert found.version == f"{major}.{int(minor) + 1}"
    assert found.overrides.keys() == contract().overrides.keys()
    assert [(key, row.atol) for key, row in found.overrides["sm90"].items()] == [(ROW, 0.03)]
    others = {arch: rows for arch, rows in found.overrides.items() if arch != "sm90"}
    assert others == {arch: rows for arch, rows in contract().overrides.items() if arch != "sm90"}


@pytest.mark.parametrize("archs", [("sm90", "sm80"), ("sm91",)])
def test_reports_of_one_known_architecture_are_needed(archs):
    with pytest.raises(ValueError, match="expected reports of one architecture"):
        tool.arch_of([report(0.1, arch_key=arch) for arch in archs])
