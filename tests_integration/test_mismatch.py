"""The tool that trains with and without a mismatch between rollout and training: tiny runs of every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked import TOOLS, imported

pytest.importorskip("matplotlib")

tool = imported("mismatch")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mismatch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "STRETCH", 2)
        patch.setattr(tool, "EVALUATED", 16)
        patch.setattr(tool, "SETTINGS", tool.Settings(prompts=2, samples_per_prompt=8, warmup_steps=1))
        options = ["--steps=3", "--seeds=1", f"--json={out / 'runs.json'}", f"--plot={out / 'runs.png'}"]
        assert tool.main(options) == 0
    return out


def test_each_way_shows_its_mismatch(finished: Path) -> None:
    document = json.loads((finished / "runs.json").read_text(encoding="utf-8"))
    assert document["settings"]["steps"] == 3
    assert {"torch", "rl-kernels", "date"} <= document["environment"].keys()
    runs = {run["way"]: run for run in document["runs"]}
    assert list(runs) == list(tool.WAYS)
    for run in runs.values():
        assert run["steps"] == [2, 3]
        assert all(len(run[measure]) == 2 for measure in tool.MEASURES)
        assert 0 <= run["evaluated"] <= 1
    aligned, fp32, bf16, fp8, recomputed = runs.values()
    assert aligned["kl"] == aligned["largest"] == aligned["clipped_at_once"] == [0, 0]
    for measure in ("kl", "largest"):
        assert 0 < fp32[measure][0] < bf16[measure][0] < min(fp8[measure][0], recomputed[measure][0])
    assert recomputed["clipped_at_once"] == [0, 0]


def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "WAYS", {name: tool.WAYS[name] for name in ("plain FP32", "FP8 rollout")})
    monkeypatch.syspath_prepend(str(TOOLS))  # as the processes are told
    settings = tool.Settings(steps=1, prompts=2, samples_per_prompt=4)
    console = tool.Console(quiet=True)
    one, two = (tool.run(settings, 2, jobs, console) for jobs in (1, 2))
    for runs in (one, two):
        assert [(run["way"], run["seed"]) for run in runs] == [(name, seed) for name in tool.WAYS for seed in (0, 1)]
        for run in runs:
            del run["seconds"]
    assert one == two


@torch.no_grad()
def test_fp8_rounds_the_weights_of_the_layers_alone() -> None:
    policy, rounded = (tool.make(tool.Settings(), torch.device("cpu"), dtype) for dtype in ("FP32", "BF16"))
    tool.Fp8().load(rounded, list(policy.parameters()))
    found = dict(rounded.named_parameters())
    for name, weight in policy.named_parameters():
        off = float((found[name].float() - weight).abs().max() / weight.abs().max())
        assert found[name].dtype == torch.bfloat16
        # Three bits behind the first, where BF16 has seven.
        assert (2**-8 < off < 2**-3) if name.startswith("blocks.") and weight.ndim == 2 else off <= 2**-8, name
