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


def with_options(**changed: Any) -> Callable[..., Any]:
    """Return a fault: the function is called with other options."""
    return lambda function: lambda *args, **options: function(*args, **{**options, **changed})


def with_operand(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a fault: the function is called with another operand."""

    def fault(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            changed = [*args]
            changed[place] = change(changed[place])
            return function(*changed, **options)

        return call

    return fault


FAULTS = {
    "cooler": ("linear_logp", with_options(temperature=1.001)),
    "no gradient of the weight": ("linear_logp", with_operand(1, torch.Tensor.detach)),
    "one token more": ("grpo_loss", with_operand(-1, lambda mask: mask | mask.roll(1, 1))),
    "another beta": ("grpo_loss", with_options(beta=0.041)),
    "not a number": ("grpo_loss", with_operand(0, lambda logps: logps * torch.nan)),
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


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 64, 100])
def test_largest_that_fits(room: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= room

    assert tool.largest(fits) == room
    assert len(asked) == len(set(asked)) <= 2 * room.bit_length() + 1


def test_a_step_that_runs_out_of_memory_does_not_fit() -> None:
    made, taken = policy.Policy(tool.arguments(TINY)), []

    def step(batch: Any) -> torch.Tensor:
        taken.append(len(batch.ids))
        if len(taken) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made.ours(batch)

    assert tool.fits(made, step, 1)
    assert not tool.fits(made, step, 2)
    assert taken == [4, 4, 8, 8]


def test_both_ways_are_searched_under_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        device = torch.device("cuda")
        batch = staticmethod(int)

        def eager(self, prompts: int, room: int = 3) -> None:
            if prompts > room:
                raise torch.OutOfMemoryError("CUDA out of memory")

        def ours(self, prompts: int) -> None:
            self.eager(prompts, 21)

    fractions: list[float] = []
    card = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert tool.sequences(Stub(), tool.arguments(TINY)) == {"eager": 3 * 4, "rl-kernels": 21 * 4}
    assert fractions == [0.5, 1.0]


@pytest.mark.gpu
def test_memory_and_the_largest_batch_on_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "step.json"
    options = ("--device", "cuda", "--dtype", "bf16", "--vocab", "32000", "--tokens", "512", "--limit-gib", "2")
    assert tool.main([*TINY, *options, "--json", str(report)]) == 0
    steps = json.loads(report.read_text(encoding="utf-8"))["steps"]
    eager, ours = steps["eager"], steps["rl-kernels"]
    assert ours["extra_mib"] < eager["extra_mib"]
    assert ours["largest"] > eager["largest"] > 0
