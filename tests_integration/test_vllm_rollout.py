"""The tool that compares rollouts in vLLM with training, with engines that a model of transformers stands for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
TOOLS = Path(__file__).parents[1] / "tools"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = ("--device", "cpu", "--layers", "1", "--prompts", "5", "--tokens", "4", "--rounds", "2", "--sequences", "1", "3")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield importlib.import_module("vllm_rollout")


class Process:
    """Makes the model in this process."""

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self.start = lambda: target(*args)

    def join(self) -> None:
        pass


@pytest.fixture
def engines(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Answer as the model under `invariant` does, but for one number of the stock engine; return the calls."""
    calls: list[tuple[str, int, int]] = []

    class Engines:
        def __init__(self, folder: str, given: Any) -> None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

        def answer(self, way: str, ids: list[list[int]], tokens: int) -> Any:
            from rl_kernels.models import invariant

            calls.append((way, len(ids), tokens))
            answers = [[7, 8, 9, 10][:tokens] for _ in ids]
            sequences = [one + two for one, two in zip(ids, answers, strict=True)]
            with torch.no_grad(), invariant(self.model):
                flat = tool.trained(self.model, sequences, [len(of) for of in ids], stock=False).tolist()
            if way == "stock":
                flat[1] = math.nextafter(flat[1], 0.0)
                flat[-1] += 1e-6
            return 2.0, answers, [flat[first : first + tokens] for first in range(0, len(flat), tokens)]

        def close(self) -> None:
            calls.append(("closed", 0, 0))

    small = {name: {**of, **SIZES, "vocab_size": 300} for name, of in tool.MODELS.items()}
    monkeypatch.setattr(tool, "MODELS", small)
    monkeypatch.setattr(tool, "LONGEST", 40)
    monkeypatch.setattr(tool, "Engines", Engines)
    monkeypatch.setattr(tool, "find_spec", lambda name: name)
    monkeypatch.setattr(tool.multiprocessing, "get_context", lambda how: type("Context", (), {"Process": Process}))
    return calls


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_bits_and_speed(
    tool: ModuleType,
    engines: list[tuple[str, int, int]],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "vllm.json"
    assert tool.main([*TINY, "--model", model, "--ways", "stock", "rl-kernels", "--json", str(report)]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    counts = {(each["way"], each["training"]): each["differ"] for each in found["bits"]}
    assert {each["tokens"] for each in found["bits"]} == {5 * 4}
    # One of the two changes is far below FP32's spacing.
    assert counts["stock", "invariant"] == 1
    assert counts["rl-kernels", "invariant"] == 0
    assert min(counts["stock", "stock"], counts["rl-kernels", "stock"]) > 10
    # Tokens of all answers over two seconds, without the first round.
    assert found["speed"] == {
        "1": {way: [1.0, 1.0] for way in ("stock", "rl-kernels")},
        "3": {way: [3.0, 3.0] for way in ("stock", "rl-kernels")},
    }
    assert engines[:2] == [("stock", 5, 4), ("rl-kernels", 5, 4)]
    assert [way for way, *_ in engines[2:8]] == ["stock", "rl-kernels", "rl-kernels", "stock", "stock", "rl-kernels"]
    assert engines[-1][0] == "closed"
    assert "rl-kernels, training invariant: 0 of 20 differ" in capsys.readouterr().out


def test_a_token_of_ours_that_differs_is_an_error(
    tool: ModuleType, engines: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "OURS", "stock")
    assert tool.main([*TINY, "--ways", "stock", "--parts", "bits"]) == 1
    assert len(engines) == 2


def test_prompts_begin_as_others_do(tool: ModuleType) -> None:
    found = tool.prompts(8, 100, 300, 0)
    assert all(16 <= len(ids) <= 100 for ids in found)
    assert all(found[i][:12] == found[i - 1][:12] for i in (3, 7))
    assert tool.prompts(8, 100, 300, 1) != found


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("vllm", TINY, "vllm is not installed"),
        ("", (), "this PyTorch sees no GPU"),
        ("", (*TINY, "--tokens", "0"), "argument --tokens: expected an integer >= 1"),
    ],
)
def test_bad_arguments(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    if not options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(tool, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(SystemExit) as stopped:
        tool.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
