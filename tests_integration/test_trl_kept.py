"""A real client: TRL samples from a part of the vocabulary; log-probs of rollout and training are over that part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
peft = pytest.importorskip("peft")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

import small_trainer  # noqa: E402

from rl_kernels.models.clients import trl as trl_client  # noqa: E402
from rl_kernels.models.clients.trl import kept  # noqa: E402
from rl_kernels.models.clients.trl.kept import IDS_IN_BATCH, IN_BATCH, KeptLogp  # noqa: E402

Made = Callable[..., Any]
SIZES = small_trainer.SIZES | {"initializer_range": 0.3}
"""Weights that make some words much more probable than others."""
CUT = {"top_p": 0.9, "top_k": 50, "temperature": 0.7}
BATCHES = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 12},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_p": 1.0, "top_k": 3, "temperature": 1.0},
    "min_p": {"top_p": 1.0, "top_k": 0, "min_p": 0.05, "temperature": 1.3},
    "reference": {"beta": 0.05},
    # Batches are shuffled and split.
    "steps": {"gradient_accumulation_steps": 4, "steps_per_generation": 4},
    "batches": BATCHES,
    "batches, min_p": BATCHES | {"min_p": 0.1},
    "adapter, checkpoints": {"beta": 0.05, "gradient_checkpointing": True},
    "mixed": {"bf16": True},
    # Batches are used after an update, with the ids that were kept.
    "again": {"num_iterations": 2, "learning_rate": 0.05},
    "again, top_k 4": {"num_iterations": 2, "learning_rate": 0.05, "top_p": 1.0, "top_k": 4, "beta": 0.05},
    "again, top_p": {"num_iterations": 2, "learning_rate": 0.05, "top_k": 0},
    "again, min_p": {"num_iterations": 2, "learning_rate": 0.05, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "again, steps": {"steps_per_generation": 4, "learning_rate": 0.05, "min_p": 0.05},
}


@pytest.fixture
def made(trainer_of: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a function that makes a trainer with a vocabulary of 200."""
    monkeypatch.setattr(small_trainer, "WORDS", 200)

    def make(adapter: Any = None, **options: Any) -> Any:
        return trainer_of(tmp_path, adapter, SIZES, **{"num_iterations": 1, "beta": 0.0, **CUT, **options})

    return make


def kept_of(z: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which of ``z[N, V]`` a sampler keeps, in the order of transformers: top_k, then top_p, then min_p."""
    z = z.double()
    if top_k:
        z = z.masked_fill(z < z.topk(min(top_k, z.shape[-1])).values[:, -1:], -torch.inf)
    p, order = z.softmax(-1).sort(-1, descending=True)
    # A token is dropped if those before it have top_p already.
    before = (p.cumsum(-1) - p).gather(-1, order.argsort(-1))
    z = z.masked_fill(before >= top_p, -torch.inf) if top_p < 1 else z
    p = z.softmax(-1)
    return (z > -torch.inf) & (p >= min_p * p.amax(-1, keepdim=True))


def trained(trainer: Any) -> dict[str, Any]:
    """Train; compare each micro-batch of the weights that sampled with its rollout and with the whole vocabulary."""
    ours, produce, steps = trainer._compute_loss, trainer._generate_and_score_completions, [0]
    counts: dict[str, Any] = {"tokens": 0, "differ": 0, "kept": 0, "ratios": [], "full": [], "reference": []}
    counts |= {"later": 0, "moved": 0, "furthest": 0.0, "sets": []}

    def produced(*args: Any, **options: Any) -> Any:
        steps[0] = trainer.state.global_step
        return produce(*args, **options)

    def scores(model: Any, inputs: dict[str, Any], among: torch.Tensor | None) -> torch.Tensor:
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        model, width = kept.with_kept(model, among), inputs["completion_mask"].shape[1]
        # Pieces of one and three rows.
        result, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, attention, width, batch_size=3)
        return result.detach()

    def loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask, recorded = inputs["completion_mask"].bool(), inputs["sampling_per_token_logps"]
        among = inputs[IDS_IN_BATCH if IDS_IN_BATCH in inputs else IN_BATCH]
        with torch.no_grad():
            logps, full = scores(model, inputs, among), scores(model, inputs, None)
            ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
            attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
            places = (attention.cumsum(-1) - 1).clamp(min=0)
            logits = trainer.model(ids, attention_mask=attention, position_ids=places).logits.float()
        z = logits[:, -mask.shape[1] - 1 : -1][mask] / trainer.temperature
        sampler = {name: getattr(trainer, name) or 0 for name in ("top_k", "top_p", "min_p")}
        expected = kept_of(z, **sampler)
        if IDS_IN_BATCH in inputs:
            ids = among[mask].masked_fill(among[mask] < 0, z.shape[-1]).long()
            found = torch.zeros(len(z), z.shape[-1] + 1, dtype=torch.bool).scatter(-1, ids, True)[:, :-1]
        else:
            found = z >= among[mask][:, None] - 1e-5
        dense = z.double().masked_fill(~found, -torch.inf).log_softmax(-1)
        close = dense.gather(-1, inputs["completion_ids"][mask][:, None])[:, 0]
        counts["furthest"] = max(counts["furthest"], float((close - logps[mask]).abs().max()))
        assert bool(logps[mask].isfinite().all())
        if trainer.state.global_step != steps[0]:
            assert trainer.num_iterations == 1 or any(torch.equal(among, each) for each in counts["sets"])
            counts["later"] += int(mask.sum())
            counts["moved"] += int((logps != recorded)[mask].sum())
            assert torch.equal(inputs["old_per_token_logps"][mask], recorded[mask])
            return ours(model, inputs)
        counts["tokens"] += int(mask.sum())
        counts["differ"] += int((logps != recorded)[mask].sum())
        counts["sets"].append(among)
        counts["kept"] += int((found == expected).all(-1).sum())
        counts["ratios"] += (logps - recorded)[mask].exp().tolist()
        counts["full"] += (full - recorded)[mask].exp().tolist()
        if "ref_per_token_logps" in inputs and not trainer.state.global_step:
            counts["reference"].append(float((inputs["ref_per_token_logps"] - full)[mask].abs().max()))
        return ours(model, inputs)

    trainer._compute_loss, trainer._generate_and_score_completions = loss, produced
    trainer.train()
    return counts


@pytest.mark.parametrize("name", CASES)
def test_rollout_and_training_keep_the_same_tokens(made: Made, name: str) -> None:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=True)
    trainer = made(adapter if "adapter" in name else None, **CASES[name])
    trl_client.use_in(trainer, invariant=True)
    counts = trained(trainer)
    tokens, full = counts["tokens"], torch.tensor(counts["full"])
    print(f"{name}: {counts['differ']} of {tokens} differ, mean ratio to the whole vocabulary {float(full.mean()):.3f}")
    assert tokens > 60
    assert counts["differ"] == 0
    assert counts["ratios"] == [1.0] * tokens
    assert 0.3 < float(full.mean()) < 0.98
    assert float(full.max()) < 1 + 1e-5
    difference = "sampling/sampling_logp_difference/max"
    assert {each[difference] for each in trainer.state.log_history if difference in each} == {0.0}
    # Later passes are over the same tokens, with other weights.
    assert ("again" in name) == (counts["moved"] > counts["later"] / 2 > 0)
    if name != "mixed":
        assert counts["kept"] == tokens
        assert counts["furthest"] < 1e-4
    if trainer.beta:
        # The reference starts as the model; its log-probs are of the whole vocabulary.
        assert max(counts["reference"]) == 0


def test_ties_are_kept_whole_and_nothing_dropped_is_not_recorded() -> None:
    """transformers' top_p may split equal logits; and with what drops no token TRL's batches are as without."""
    transformers, smallest = pytest.importorskip("transformers"), []
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, -2.0]])
    top_p, divide = transformers.TopPLogitsWarper(0.8), transformers.TemperatureLogitsWarper(0.5)
    assert int((top_p(None, scores / 0.9) > -torch.inf).sum()) == 2
    processors = kept.watched([transformers.TemperatureLogitsWarper(0.9), top_p], smallest)
    for each in processors:
        scores = each(None, scores)
    assert torch.equal(scores > -torch.inf, torch.tensor([[True, True, True, True, False]]))
    assert torch.equal(smallest[0], torch.tensor([1.0]) / torch.tensor(0.9))
    for plain in ([divide], [divide, transformers.MinPLogitsWarper(0.0)]):
        assert kept.watched(plain, smallest, "none may be") is plain


def test_other_processors_and_other_logits_are_refused(made: Made) -> None:
    cases: list[tuple[dict[str, Any], bool, str]] = [
        (BATCHES | {"num_iterations": 2}, True, "top_k, top_p, min_p: expected none of them with num_iterations 2"),
        (BATCHES | {"steps_per_generation": 4}, True, "top_k, .* with num_iterations 1 and steps_per_generation 4 ov"),
        ({"repetition_penalty": 1.1}, True, r"repetition_penalty: expected .*; RepetitionPenaltyLogitsProcessor"),
        ({"generation_kwargs": {"min_new_tokens": 2}}, True, "generation_kwargs: .*; MinNewTokensLength"),
        ({"generation_kwargs": {"typical_p": 0.5}}, True, "generation_kwargs: .*; TypicalLogitsWarper"),
        ({"generation_kwargs": {"suppress_tokens": [3]}}, True, r"generation_kwargs: .* suppress_tokens, .* got \[3\]"),
        ({"generation_kwargs": {"renormalize_logits": True}}, True, "generation_kwargs: .*; LogitNormalization"),
        ({}, False, r"top_k, top_p, min_p: expected none of them with record alone: .* use_in\(trainer, invariant=Tr"),
    ]
    for options, invariant, message in cases:
        trainer = made(**options)
        with pytest.raises(ValueError, match=f"^{message}"):
            trl_client.use_in(trainer, record=True, invariant=invariant)
        # As TRL has it.
        trl_client.use_in(trainer)
    trainer = made()
    trainer.model.double()
    with pytest.raises(ValueError, match=r"^top_k, top_p, min_p: expected none of them for a model in FP64"):
        trl_client.use_in(trainer, invariant=True)
    trainer.model.float()
    trainer.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"^top_k, top_p, min_p: expected none of them for a model with a softcap"):
        trl_client.use_in(trainer, invariant=True)


@pytest.mark.parametrize("tokens", [0.5, [3, -1]], ids=["threshold", "ids"])
def test_log_probs_are_copied_with_what_was_kept(tokens: Any) -> None:
    value = KeptLogp(-1.0, tokens)
    copies = copy.copy(value), copy.deepcopy([value])[0], *(pickle.loads(pickle.dumps(value, n)) for n in range(6))
    assert [(type(each), float(each), each.kept) for each in copies] == [(KeptLogp, -1.0, tokens)] * 8


def test_ids_are_those_that_are_sampled_from() -> None:
    """As many as the processors keep, with what they keep of equal logits; -1 after fewer."""
    transformers, ids = pytest.importorskip("transformers"), []
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, -2.0], [0.0, 1.0, 2.0, -torch.inf, 9.0]])
    cuts = transformers.TopKLogitsWarper(3), transformers.TopPLogitsWarper(0.85), transformers.MinPLogitsWarper(0.1)
    for cut in cuts:
        result = scores
        for each in kept.watched([cut], ids, by_ids=True):
            result = each(None, result)
        assert torch.equal(result, cut(None, scores))
        places = [[place for place in row if place >= 0] for row in ids.pop().tolist()]
        assert [sorted(row) for row in places] == [(row > -torch.inf).nonzero()[:, 0].tolist() for row in result]


def test_tokens_of_tools_keep_all() -> None:
    """TRL joins turns, with a plain 0 for each token of a tool, and pads completions."""
    rows = [[KeptLogp(-1.0, 0.5), 0.0, KeptLogp(-2.0, 1.5)], [KeptLogp(-3.0, 2.5)]]
    ids = torch.zeros(2, 4, dtype=torch.int64)
    batches: list[dict[str, Any]] = [{"completion_ids": ids}]
    trainer = SimpleNamespace(
        _generate=lambda: (None, None, None, None, rows),
        _generate_and_score_completions=lambda: (trainer._generate(), batches[0])[1],
    )
    kept.Carried(trainer)
    low = -torch.inf
    expected = torch.tensor([[0.5, low, 1.5, low], [2.5, low, low, low]])
    assert torch.equal(trainer._generate_and_score_completions()[IN_BATCH], expected)
    rows[:] = [[KeptLogp(-1.0, [3, 2]), 0.0], [KeptLogp(-3.0, [7])]]
    none = [-1, -1]
    kept_ids = torch.tensor([[[3, 2], none, none, none], [[7, -1], none, none, none]], dtype=torch.int32)
    assert torch.equal(trainer._generate_and_score_completions()[IDS_IN_BATCH], kept_ids)
    rows[:] = [[-1.0], [-2.0]]
    assert trainer._generate_and_score_completions() is batches[0]
