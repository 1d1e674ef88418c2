"""The tool that times a GRPO step of TRL, as far as a CPU goes: it runs the real trainer, and counts bits."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from forked import imported

pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

tool, with_engine = imported("trl_step"), imported("trl_vllm_step")
SIZES = {"layers": 1, "hidden": 64, "between": 96, "heads": 4, "kv-heads": 2, "vocab": 300}
SIZES |= {"groups": 2, "samples": 4, "prompt": 12, "tokens": 9, "steps": 3, "rounds": 1}
TINY = [f"--{name}={size}" for name, size in SIZES.items()] + ["--device=cpu", "--dtype=fp32"]


def test_every_way_is_timed_and_held_to_the_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "trl.json"
    assert tool.main([*TINY, "--rounds=2", "--json", str(report)]) == 0
    document = json.loads(report.read_text(encoding="utf-8"))
    assert {"device", "torch", "trl"} <= document["environment"].keys()
    stock, scored, aligned = document["ways"].values()
    assert all(way["rollout_ms"] > 0 < way["update_ms"] and way["largest"] is None for way in (stock, scored, aligned))
    assert stock["differing"] == {}
    assert scored["differing"].keys() == aligned["differing"].keys() == {"TRL", "rl-kernels"}
    (theirs, tokens), (ours, _) = scored["differing"].values()
    assert tokens == 2 * 4 * 9
    assert min(theirs, ours) > 0
    assert aligned["differing"]["rl-kernels"] == [0, tokens]
    assert "rl-kernels, invariant: 0 of 72 tokens differ" in capsys.readouterr().out


def test_a_bit_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tool.WAYS, tool.ALIGNED, {"record": True})
    assert tool.main(TINY) == 1


def test_groups_are_sought_that_fit() -> None:
    taken: list[int] = []

    class Loss:
        def backward(self) -> None:
            pass

    def loss(model: Any, inputs: dict[str, Any]) -> Loss:
        taken.append(len(inputs["prompt_ids"]))
        assert inputs["items"] == 5
        assert inputs["prompt_ids"].tolist() == [i % 3 for i in range(len(inputs["prompt_ids"]))]
        if len(inputs["prompt_ids"]) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Loss()

    watched = object.__new__(tool.Watched)
    watched.batch = {"prompt_ids": torch.arange(3), "items": 5}
    watched.device, watched._loss = torch.device("cpu"), loss
    watched.trainer = type("Trainer", (), {"model_wrapped": None})()
    fits: Callable[[int], bool] = lambda groups: watched.fits(groups, 4)  # noqa: E731
    assert tool.largest(fits) == 5
    assert taken.count(20) == 2


def test_ways_with_an_engine_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does a step while the others wait, and results are kept after each turn."""
    order: list[str] = []
    kept: list[dict[str, int]] = []

    def train(way: str, args: Any, calls: Any) -> None:
        steps = args.steps if way == with_engine.OURS else args.turns
        for step in range(steps):
            calls.send((step, False))
            calls.recv()
            order.append(way)
        calls.send((steps, True))

    class Process(threading.Thread):
        def kill(self) -> None:
            self.join(10)

    class Pipe(NamedTuple):
        """An end that its process does not close, because a thread shares it."""

        send: Callable[[Any], None]
        recv: Callable[[], Any]
        close: Callable[[], None] = lambda: None

    def pipe() -> tuple[Pipe, Pipe]:
        one, other = queue.Queue[Any](), queue.Queue[Any]()
        return Pipe(one.put, other.get), Pipe(other.put, one.get)

    monkeypatch.setattr(with_engine, "train", train)
    context = SimpleNamespace(Pipe=pipe, Process=Process)
    monkeypatch.setattr(with_engine.multiprocessing, "get_context", lambda name: context)
    args = with_engine.parser().parse_args(["--steps", "5", "--turns", "3"])
    assert with_engine.measured(args, kept.append) == {"stock": 3, "batch-invariant": 3, "rl-kernels": 5}
    assert order == list(with_engine.WAYS) * 3 + ["rl-kernels"] * 2
    assert [each["rl-kernels"] for each in kept] == [1, 2, 3, 4, 5]
