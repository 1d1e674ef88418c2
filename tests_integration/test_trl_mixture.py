"""The tool that trains a mixture from nothing with TRL, and compares the update of every token with its rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import imported

pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

tool = imported("trl_mixture")
SIZES = {"layers": 2, "hidden": 32, "between": 24, "vocab": 12, "groups": 2, "samples": 4, "micro-batches": 2}
TINY = [f"--{name}={size}" for name, size in {**SIZES, "prompt": 5, "tokens": 5, "steps": 3}.items()]


def test_updates_have_the_bits_and_the_experts_of_the_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "mixture.json"
    assert tool.main([*TINY, "--json", str(report)]) == 0
    document = json.loads(report.read_text(encoding="utf-8"))
    stock, replayed, aligned = document["ways"].values()
    assert stock["differing"] > 0
    assert stock["largest_ratio"] > 1
    assert replayed["differing"] > 0 == replayed["rerouted"]
    assert (aligned["differing"], aligned["rerouted"], aligned["largest_ratio"]) == (0, 0, 1.0)
    assert all(60 <= way["tokens"] <= 3 * 2 * 4 * 5 and len(way["reward"]) == 1 for way in (stock, replayed, aligned))
    assert f"| 0 of {aligned['tokens']:,} |" in capsys.readouterr().out


def test_a_token_of_other_bits_or_experts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "WAYS", {tool.ALIGNED: {"record": True}})
    assert tool.main(TINY) == 1


def test_experts_of_another_token_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    generated = tool.Run._generated

    def shifted(run: Any, *args: Any, **options: Any) -> Any:
        sequences = generated(run, *args, **options)
        run._routes = run._routes.roll(1, 1)
        return sequences

    monkeypatch.setattr(tool.Run, "_generated", shifted)
    result = tool.trained(tool.parser().parse_args(TINY), tool.ALIGNED)
    assert result["differing"] == 0 < result["rerouted"] < result["tokens"]
