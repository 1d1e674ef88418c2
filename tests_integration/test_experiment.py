"""The tool that trains with a real model: tiny models with random weights, on the CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import imported

pytest.importorskip("transformers")

tool, policy, tasks = (imported(name) for name in ("experiment", "experiment_policy", "experiment_tasks"))
table = imported("sections.experiment")
SIZES = {"prompts": 4, "samples": 4, "tokens": 12, "rows": 8, "warm-up": 8, "rate": 0.05, "stale": 2}
SMALL = ["--device=cpu", *(f"--{name}={size}" for name, size in SIZES.items())]


@pytest.fixture(autouse=True)
def reward_without_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this size answer nothing right; this reward gives gradients to them, too."""
    monkeypatch.setattr(tool, "reward", lambda task, text: len(set(text)) / 12)


def trained(log: Path, *options: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the steps of a log without times, and the run that wrote it."""
    run = tool.run(tool.arguments([str(log), *SMALL, *options]), tell=lambda text: None)
    first, *steps = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    assert {"settings", "environment"} == first.keys()
    return [{name: value for name, value in step.items() if "seconds" not in name} for step in steps], run


@pytest.mark.parametrize("options", [("--arm=aligned", "--model=tiny-mixture"), ("--arm=fp8", "--model=tiny")])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(options: tuple[str, ...], tmp_path: Path) -> None:
    steps, unbroken = trained(tmp_path / "unbroken.jsonl", *options, "--loss=tis", "--steps=4")
    # The checkpoint is older than the log, as of a run that was ended.
    trained(tmp_path / "resumed.jsonl", *options, "--loss=tis", "--steps=2")
    before = (tmp_path / "resumed.pt").read_bytes()
    trained(tmp_path / "resumed.jsonl", *options, "--loss=tis", "--steps=3")
    (tmp_path / "resumed.pt").write_bytes(before)
    again, resumed = trained(tmp_path / "resumed.jsonl", *options, "--loss=tis", "--steps=4")
    assert again == steps
    assert any(step["grad_norm"] for step in steps)
    for one, other in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="other settings"):
        trained(tmp_path / "resumed.jsonl", *options, "--loss=clip", "--steps=5")


def test_only_the_aligned_sampler_has_no_mismatch(tmp_path: Path) -> None:
    for arm in policy.ARMS:
        steps, _ = trained(tmp_path / f"{arm}.jsonl", "--model=tiny-mixture", f"--arm={arm}", "--steps=4")
        for step in steps:
            sampler, update = step["sampler"], step["update"]
            found = [sampler[name] for name in ("differ", "outside", "clipped", "largest", "k3", "rerouted")]
            assert any(found) == (arm != "aligned"), found
            # The first rollouts of a stale run are trained on by other weights but for the first.
            assert (step["step"] == 1) == (update["largest"] == sampler["largest"]), (arm, step["step"])
    rows = table.section(table.read(tmp_path)).split("\n\n")[0].splitlines()
    zeros = [[x.split(" of ")[0] for x in row.strip(" |").split(" | ")[1:]] for row in rows if row.startswith("| tiny")]
    zeros = [row == ["0"] * 6 for row in zeros]
    assert zeros == [True, False, False]  # by name: aligned, fp8, stock
    trained(tmp_path / "faster.jsonl", "--model=tiny-mixture", "--arm=stock", "--steps=1", "--rate=0.1")
    with pytest.raises(ValueError, match=r"^logs of tiny-mixture, stock, 2, clip: expected settings"):
        table.section(table.read(tmp_path))


@torch.no_grad()
def test_fp8_has_a_scale_for_each_channel() -> None:
    model, _ = policy.load("tiny-mixture", 0, torch.device("cpu"))
    rounded, _ = policy.load("tiny-mixture", 1, torch.device("cpu"))
    policy.round_weights(rounded, model)
    for (name, value), source in zip(rounded.named_parameters(), model.parameters(), strict=True):
        off = (value.float() - source.float()).abs().amax(-1) / source.float().abs().amax(-1).clamp(min=1e-9)
        # Three bits behind the first.
        assert 0 < off.max() < 2**-4 + 2**-8 if ".layers." in name and value.ndim > 1 else not off.any(), name


def test_tasks_are_answered_by_their_answers_alone() -> None:
    source = random.Random(0)
    for _ in range(200):
        task = tasks.draw(source)
        text = " ".join(map(str, task.answer))
        assert tasks.reward(task, f"9 8 7: {text}") == 1
        assert tasks.reward(task, "none") == 0
        assert tasks.reward(task, " ".join(str(number + 1) for number in task.answer)) == 0
    sum_of = tasks.Task("Compute 3 - 5", (-2,))
    assert (tasks.reward(sum_of, "-2"), tasks.reward(sum_of, "2")) == (1, 0)
    assert tasks.reward(tasks.Task("", (1, 2, 4)), "1 3 4") == pytest.approx(2 / 3)
