"""The tool that times a whole model, stock and under invariant(): what it counts, and what fails, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import imported
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

tool, made, decode = imported("model_step"), imported("model_ways"), imported("model_decode")
bits = imported("model_bits")
SIZES = {"layers": 2, "hidden": 64, "between": 96, "heads": 4, "kv-heads": 2, "vocab": 300, "prompts": 4}
SIZES |= {"longest": 60, "decoded": 2, "keys": 24, "generated": 3, "rounds": 1}
TINY = [*(f"--{name}={size}" for name, size in SIZES.items()), "--device=cpu", "--dtype=fp32", "--sizes=2x16"]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "SECONDS", 0.001)


WIDTHS = ["--experts=16", "--chosen=4", "--head=16"]


@pytest.mark.parametrize(
    "family", [[], ["--family=Qwen3Moe", *WIDTHS], ["--family=GptOss", *WIDTHS]], ids=tool.FAMILIES[:3]
)
def test_everything_is_timed_and_compared(
    family: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "step.json"
    assert tool.main([*TINY, *family, "--json", str(report)]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert not found["failed"]
    assert len(found["ms"]) == 5
    assert all({"stock", "invariant"} <= row.keys() and min(row.values()) > 0 for row in found["ms"].values())
    ours, stock = found["bits"]["invariant"], found["bits"]["stock"]
    assert len(ours["prompts"]) == 6
    assert all(counts["logits"] == counts["logps"] == 0 for counts in ours["prompts"].values())
    assert all(counts["of_logits"] == 300 * counts["of_logps"] > 0 for counts in ours["prompts"].values())
    assert all(counts["experts"] == 0 for counts in ours["prompts"].values())
    assert all((counts["of_tokens"] > 0) == bool(family) for counts in ours["prompts"].values())
    if family:
        zero = {"mean": 0.0, "largest": 0.0}
        assert all(set(map(str, counts["moves"].values())) == {str(zero)} for counts in ours["prompts"].values())
        moves = [each for counts in stock["prompts"].values() for each in counts["moves"].values()]
        assert all(0 <= each["mean"] <= each["largest"] for each in moves)
        assert max(each["largest"] for each in moves) > 0
    assert ours["gradients"]["differ"] == 0 < ours["gradients"]["elements"]
    assert sum(counts["logits"] for counts in stock["prompts"].values()) > 0
    # Those of the stock model differ on some CPUs only.
    assert stock["gradients"]["elements"] == ours["gradients"]["elements"]
    assert "forward + backward 2x16" in capsys.readouterr().out


@pytest.mark.parametrize("family", tool.HYBRIDS)
def test_hybrids_have_no_continuous_batching(family: str, tmp_path: Path) -> None:
    """And their stock models refuse packed rows, or mix them, without flash-linear-attention."""
    report = tmp_path / "step.json"
    assert tool.main([*TINY, f"--family={family}", *WIDTHS, "--layers=4", "--json", str(report)]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert not found["failed"]
    assert len(found["ms"]) == 4
    ours, stock = found["bits"]["invariant"], found["bits"]["stock"]
    assert len(ours["prompts"]) == 5
    assert all(counts["logits"] == counts["logps"] == 0 for counts in ours["prompts"].values())
    assert ours["gradients"]["differ"] == 0 < ours["gradients"]["elements"]
    assert "packed" in stock["refused"] or stock["prompts"]["packed"]["logits"] > 0


def test_gradients_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = bits.packed
    monkeypatch.setattr(bits, "packed", lambda each: packed([ids.flip(0) for ids in each]))
    given = tool.parser().parse_args(TINY)
    with made.ways(given) as found:
        way = next(way for way in found if way.name == tool.OURS)
        with way.active():
            counts = bits.gradients(way, given)
    assert counts["elements"] / 2 < counts["differ"] <= counts["elements"]


def test_a_bit_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = bits.padded

    def changed(each: Any, *, left: bool) -> Any:
        batch = padded(each, left=left)
        batch["position_ids"] = batch["position_ids"] + 1
        return batch

    monkeypatch.setattr(bits, "padded", changed)
    assert tool.main([*TINY, "--parts", "bits"]) == 1


def test_a_way_that_fails_is_named_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = tool.decoding

    def fails(way: Any, *sizes: int) -> Any:
        if way.name == "stock":
            raise RuntimeError("no room")
        return decoding(way, *sizes)

    monkeypatch.setattr(tool, "decoding", fails)
    assert tool.main([*TINY, "--parts", "times"]) == 0
    printed = capsys.readouterr().out
    assert "failed: decode, stock: RuntimeError: no room" in printed
    assert "decode, 2 sequences, 24 keys: invariant" in printed


class Constants(TorchFunctionMode):
    """Counts constants that a call copies from the host to the device, which no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [24, 300], ids=["before the window is full", "full window"])
def test_a_step_of_decoding_with_a_window_can_be_captured(keys: int) -> None:
    given = tool.parser().parse_args([*TINY, "--family=GptOss", *WIDTHS])
    with made.ways(given) as found:
        counts = []
        for way in found:
            with way.active():
                step = decode.decoding(way, 2, keys)
                expected = step()
                with Constants() as constants, decode.Filled():
                    assert torch.equal(step(), expected) or keys > 128
                counts.append(constants.count)
    assert counts == [0, 0]


def test_the_stock_model_keeps_its_rotary_embedding() -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    seen = {}
    with made.ways(tool.parser().parse_args(TINY)) as found:
        for way in found:
            with way.active():
                seen[way.name] = modeling_llama.apply_rotary_pos_emb
    assert seen["stock"] is own
    assert seen["invariant"] is not own
    assert modeling_llama.apply_rotary_pos_emb is own
