"""The tool that times a GRPO step of transformers' Llama, as far as a CPU goes: both ways agree, and must."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import imported

pytest.importorskip("transformers")

tool, policy = imported("grpo_step"), imported("grpo_policy")
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 500, "prompts": 2, "samples": 4, "tokens": 24}
TINY = [f"--{name}={size}" for name, size in SIZES.items()] + ["--device=cpu", "--dtype=fp32"]


@pytest.mark.parametrize("options", [(), ("--checkpointing",), ("--dtype", "bf16"), ("--samples", "2", "--seed", "5")])
def test_both_ways_agree_and_are_timed(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "step.json"
    assert tool.main([*TINY, *options, "--json", str(report)]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    checked = found["checked"]
    assert checked["off"] <= checked["tolerance"] < checked["planted_off"]
    assert checked["backends"] == {"linear_logp": "native", "grpo_loss": "native"}
    assert {"device", "torch", "transformers"} <= found["environment"].keys()
    assert found["settings"]["vocab"] == 500
    assert all(step["ms"] > 0 and step["extra_mib"] is None for step in found["steps"].values())
    assert list(found["steps"]) == [tool.EAGER, tool.OURS, tool.KEPT, tool.CHUNKS, tool.KNOWN]
    head, *rows = capsys.readouterr().out.splitlines()[-6:]
    assert head.rstrip().endswith("/ eager")
    assert "step, ms (wall clock)" in head
    assert all(row.count("not measured") == 2 for row in rows)


def test_batch_has_prompts_completions_and_padding() -> None:
    batch = policy.Policy(tool.arguments(TINY)).batch(2)
    assert torch.equal(batch.mask, batch.targets != -100)
    first = batch.mask.int().argmax(1).view(2, 4)
    assert (first == first[:, :1]).all()
    assert batch.mask.any(1).all()
    assert not batch.mask.all(1).any()
    for group, start in zip(batch.ids.view(2, 4, -1), first[:, 0].tolist(), strict=True):
        assert (group[:, : start + 1] == group[0, : start + 1]).all()


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no gradient of the weight": (
        "linear_logp",
        lambda call: lambda x, w, *rest, **at: call(x, w.detach(), *rest, **at),
    ),
    "another beta": ("grpo_loss", lambda call: lambda *args, **at: call(*args, **{**at, "beta": 0.041})),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_agree_has_no_speed(
    name: str,
    fault: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(policy, name, fault(getattr(policy, name)))
    assert tool.main([*TINY, "--json", str(tmp_path / "step.json")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("WRONG, no speed: ")
    assert not (tmp_path / "step.json").exists()


def test_a_comparison_that_sees_no_fault_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tool.TOLERANCE, "fp32", 10.0)
    assert tool.main(TINY) == 1
    assert "a planted temperature of 1.05 was not seen" in capsys.readouterr().err


@pytest.mark.parametrize("rooms", [(3, 21), (0, 64), (1, 100)])
def test_both_ways_are_searched_under_the_limit(rooms: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    class Stub:
        device = torch.device("cuda")
        batch = staticmethod(int)

        def eager(self, prompts: int, room: int = rooms[0]) -> None:
            taken.append((room, prompts))
            if prompts > room:
                raise torch.OutOfMemoryError("CUDA out of memory")

        def ours(self, prompts: int) -> None:
            self.eager(prompts, rooms[1])

    fractions: list[float] = []
    card = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert tool.sequences(Stub(), tool.arguments(TINY)) == {"eager": rooms[0] * 4, "rl-kernels": rooms[1] * 4}
    assert fractions == [0.5, 1.0]
    # What fits is taken twice in a row; nothing is asked for again.
    assert all(taken.count(call) == 1 + (call[1] <= call[0]) for call in taken)
    assert len({*taken}) <= sum(2 * room.bit_length() + 1 for room in rooms)


@pytest.mark.gpu
def test_memory_and_the_largest_batch_on_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "step.json"
    options = ("--device", "cuda", "--dtype", "bf16", "--vocab", "32000", "--tokens", "512", "--limit-gib", "2")
    assert tool.main([*TINY, *options, "--json", str(report)]) == 0
    steps = json.loads(report.read_text(encoding="utf-8"))["steps"]
    eager, ours = steps["eager"], steps["rl-kernels"]
    assert ours["extra_mib"] < eager["extra_mib"]
    assert ours["largest"] > eager["largest"] > 0
