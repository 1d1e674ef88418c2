"""The tool that times calls of PyTorch's names through the clients, as far as a CPU goes: products, bits and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import imported

from rl_kernels.models.clients import batch_invariant_ops

tool = imported("client_calls")
TINY = ["--rows=5", "--inner=48", "--vocab=70", "--rounds=1", "--device=cpu", "--parts", "products"]


def test_every_call_is_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "calls.json"
    assert tool.main([*TINY, "--json", str(report)]) == 0
    calls = json.loads(report.read_text(encoding="utf-8"))["calls"]["products"]
    assert len(calls) == 10
    for label, ways in calls.items():
        assert ways.keys() == {"PyTorch", "rl-kernels"}
        assert all(way["us"] > 0 and way["error"] < (1e-6 if "FP32" in label else 2e-2) for way in ways.values())
        assert ways["rl-kernels"]["differing"][0] == 0 < ways["rl-kernels"]["differing"][1]
    assert calls["mm 5x48x48, FP32"]["rl-kernels"]["differing"] == [0, 48]
    printed = capsys.readouterr().out
    assert "0 of 48" in printed
    assert not batch_invariant_ops.is_batch_invariant_mode_enabled()


def test_the_original_takes_its_turn_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "batch_invariant_ops.py").write_text("from rl_kernels.models.clients.batch_invariant_ops import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = tmp_path / "calls.json"
    try:
        assert tool.main([*TINY, "--json", str(report)]) == 0
    finally:
        sys.modules.pop("batch_invariant_ops", None)
    calls = json.loads(report.read_text(encoding="utf-8"))["calls"]["products"]
    assert all(ways.keys() == {"PyTorch", "batch_invariant_ops", "rl-kernels"} for ways in calls.values())
    # It stands for the original here, so it is as far from FP64.
    assert all(ways["batch_invariant_ops"]["error"] == ways["rl-kernels"]["error"] for ways in calls.values())


def test_a_bit_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(_: object) -> Iterator[object]:
        x = torch.ones(3, 2)
        yield tool.Call("changes", lambda: [x], lambda: [x[:1].nextafter(torch.tensor(2.0))])

    monkeypatch.setitem(tool.PARTS, "products", products)
    assert tool.main(TINY) == 1
