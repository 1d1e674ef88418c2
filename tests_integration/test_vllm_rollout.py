"""The tool that compares rollouts in vLLM with training, with engines that a model of transformers stands for."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import imported

transformers = pytest.importorskip("transformers")
tool, vllm_engines = imported("vllm_rollout"), imported("vllm_engines")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = ("--device", "cpu", "--layers", "1", "--prompts", "5", "--tokens", "4", "--rounds", "2", "--sequences", "1", "3")


class Process:
    """Makes the model in this process."""

    exitcode = 0

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self.start = lambda: target(*args)

    def join(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Answer as the model under `invariant` does, but for one number of the stock engine; return the calls."""
    calls: list[tuple[str, int, int]] = []
    seen: list[list[list[int]]] = []
    monkeypatch.setattr(tool, "seen", seen, raising=False)

    class Engines:
        ends_at = 0

        def __init__(self, folder: str, args: Any) -> None:
            self.ways = [way for way in args.ways if way != "batch-invariant"]
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

        def ready(self) -> list[str]:
            return self.ways

        def answer(self, way: str, ids: list[list[int]], tokens: int) -> Any:
            if way == "stock" and tokens == 2 and len(ids) == self.ends_at:
                self.ways.remove(way)
                return None
            from rl_kernels.models import invariant

            calls.append((way, len(ids), tokens))
            seen.append(ids)
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


@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen3_moe"])
def test_bits_and_speed(
    engines: list[tuple[str, int, int]],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "vllm.json"
    assert tool.main([*TINY, "--model", model, "--ways", "stock", "rl-kernels", "stock", "--json", str(report)]) == 0
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
    # All ways of a turn get the same prompts, each turn others.
    assert [tool.seen[i] == tool.seen[i + 1] for i in range(2, 7)] == [True, False, True, False, True]
    assert all(each["max"] > 0 for each in found["bits"] if each["way"] == "stock")
    assert "rl-kernels, training invariant: 0 of 20 differ" in capsys.readouterr().out


def test_a_token_of_ours_that_differs_is_an_error(
    engines: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "OURS", "stock")
    assert tool.main([*TINY, "--ways", "stock", "--parts", "bits"]) == 1
    assert len(engines) == 2


def test_a_way_that_cannot_start_is_left_out(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "vllm.json"
    options = [*TINY, "--ways", "stock", "batch-invariant", "--parts", "speed", "--json", str(report)]
    assert tool.main(options) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["settings"]["ways"] == list(found["speed"]["3"]) == ["stock"]
    # And one that ends while it is timed.
    monkeypatch.setattr(tool.Engines, "ends_at", 3)
    assert tool.main([*options, "--ways", "rl-kernels", "stock"]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert [list(found["speed"][number]) for number in "13"] == [["rl-kernels", "stock"], ["rl-kernels"]]
    monkeypatch.setattr(tool, "OURS", "batch-invariant")
    assert tool.main(options) == 2
    assert engines[-1][0] == "closed"


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_training_scores_each_token_after_the_prompt(
    engines: list[tuple[str, int, int]], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PART", 2)
    tool.make(str(tmp_path), model, 1, "cpu")
    # In FP32, so that sums over padded rows are near those of rows alone.
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sequences, starts = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24]], [3, 1, 2]
    for stock in (True, False):
        with torch.no_grad():
            found = tool.trained(made, sequences, starts, stock=stock)
            logits = [made(torch.tensor([ids])).logits[0] for ids in sequences]
        expected = [
            of.log_softmax(-1)[place - 1, ids[place]]
            for of, ids, start in zip(logits, sequences, starts, strict=True)
            for place in range(start, len(ids))
        ]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    # The head's spread: logits of tokens that a softmax tells apart.
    assert 1.0 < torch.cat(logits).std() < 4.0


def test_an_engine_is_driven_over_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            done.append((options, dict(os.environ)))
            self.llm_engine = SimpleNamespace(vllm_config=config)

        def reset_prefix_cache(self) -> None:
            done.append("reset")

        def generate(self, requests: list[Any], how: Any, use_tqdm: bool) -> list[Any]:
            done.append([request["prompt_token_ids"] for request in requests])
            found = SimpleNamespace(token_ids=(8, 9), logprobs=[{3: value(0.5), 8: value(-1.0)}, {9: value(-2.0)}])
            return [SimpleNamespace(outputs=[found])] * len(requests)

    def value(number: float) -> SimpleNamespace:
        return SimpleNamespace(logprob=number)

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        use_v2_model_runner=True,
    )
    stub = SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(os, "environ", {**os.environ})
    here, there = multiprocessing.Pipe()
    here.send(([[1, 2], [3]], 2))
    here.send(None)
    given = SimpleNamespace(runner=2, cache_gib=3, eager=False)
    vllm_engines.engine("rl-kernels", str(tmp_path), given, there)
    assert here.recv() == "ready, runner 2, CUDA graphs FULL, chunked prefill True"
    seconds, tokens, logprobs = here.recv()
    assert seconds >= 0
    assert (tokens, logprobs) == ([[8, 9]] * 2, [[-1.0, -2.0]] * 2)
    (options, environment), *others = done
    assert others == ["reset", [[1, 2], [3]]]
    assert (options["attention_backend"], options["kv_cache_memory_bytes"]) == ("CUSTOM", 3 << 30)
    assert (environment["RL_KERNELS_VLLM"], environment["VLLM_USE_V2_MODEL_RUNNER"]) == ("1", "1")


def fails(way: str, folder: str, given: Any, calls: Any) -> None:
    """Stand for engines of which one cannot start, and one ends at its first call."""
    if way == "stock":
        raise SystemExit(3)
    calls.send("ready")
    if way == "batch-invariant":
        calls.recv()
        raise SystemExit(4)
    assert calls.recv() is None


def test_an_engine_that_cannot_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_engines, "engine", fails)
    engines = vllm_engines.Engines("", SimpleNamespace(ways=["rl-kernels", "stock", "batch-invariant"]))
    assert engines.ready() == ["rl-kernels", "batch-invariant"]
    assert capsys.readouterr().out.splitlines()[:2] == ["rl-kernels: ready", "stock: could not start"]
    assert engines.answer("batch-invariant", [[1]], 2) is None
    assert engines.ways == ["rl-kernels"]
    engines.close()
    assert not multiprocessing.active_children()


def test_prompts_begin_as_others_do() -> None:
    found = tool.prompts(8, 100, 300, 0)
    assert all(16 <= len(ids) <= 100 for ids in found)
    assert all(found[i][:12] == found[i - 1][:12] for i in (3, 7))
    assert tool.prompts(8, 100, 300, 1) != found


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for missing, options, message in (
        ("vllm", TINY, "vllm is not installed"),
        ("", (), "this PyTorch sees no GPU"),
        ("", (*TINY, "--tokens", "0"), "argument --tokens: expected an integer >= 1"),
    ):
        monkeypatch.setattr(tool, "find_spec", lambda name, missing=missing: None if name == missing else name)
        with pytest.raises(SystemExit, match="2"):
            tool.main(options)
        assert message in capsys.readouterr().err
