"""A real client: what TRL's GRPOTrainer sampled has the bits of its training, with ``invariant=True``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

from small_trainer import EXPERTS, HYBRID  # noqa: E402

from rl_kernels.models.clients import trl as trl_client  # noqa: E402
from rl_kernels.models.clients.trl import continuous, head, rollout  # noqa: E402

Made = Callable[..., Any]


def _differing(trainer: Any) -> list[tuple[int, int]]:
    """Train; return how many tokens of each first pass differ from what was recorded, and of how many."""
    counts, ours = [], trainer._compute_loss

    def counted(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        mask = inputs["completion_mask"].bool()
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, attention, mask.shape[1])
        recorded = inputs["sampling_per_token_logps"]
        counts.append((int((logps != recorded)[mask].sum()), int(mask.sum())))
        assert torch.allclose(logps[mask], recorded[mask], atol=1e-5)
        return ours(model, inputs)

    trainer._compute_loss = counted
    trainer.train()
    return counts


SAMPLED = {"num_iterations": 1, "temperature": 0.9, "beta": 0.05}
BATCHES = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 12},
}
"""Batches of fewer tokens than the prompts have: they come in chunks, beside tokens of others."""
MIXED = {"beta": 0.0, "bf16": True}
"""Wrappers bring autocast to training alone, and a cache is of the widest dtype that it is given."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints": {"gradient_checkpointing": True},
    "batches": BATCHES,
    "adapter": {"beta": 0.0},
    "adapter, batches": {"beta": 0.0, **BATCHES},
    **{f"mixed{name}": MIXED for name in ("", ", adapter")},
    **{f"mixed{name}, batches": MIXED | BATCHES for name in ("", ", adapter")},
}


def _adapter() -> Any:
    """Return an adapter whose B is drawn: otherwise it would add nothing at first."""
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


@pytest.mark.parametrize("name", CASES)
def test_what_was_sampled_has_the_bits_of_training(trainer_of: Made, name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, _adapter() if "adapter" in name else None, **SAMPLED | CASES[name])
    trl_client.use_in(trainer, invariant=True)
    if "mixed" in name:
        trainer.train()
    else:
        counts = _differing(trainer)
        assert sum(tokens for _, tokens in counts) > 100
        assert sum(differing for differing, _ in counts) == 0
    for number in ("max", "mean"):
        key = f"sampling/sampling_logp_difference/{number}"
        logged = [each[key] for each in trainer.state.log_history if key in each]
        assert logged == [0.0] * trainer.args.max_steps


def test_the_difference_is_that_of_the_first_pass(trainer_of: Made, tmp_path: Path) -> None:
    """It is of training, though the old log-probs are the rollout's, and of no pass by later weights."""
    trainer = trainer_of(tmp_path, **SAMPLED | {"num_iterations": 2})
    trl_client.use_in(trainer, invariant=True)
    sample = trainer._generate_single_turn

    def moved(*args: Any) -> Any:
        ids, logps = sample(*args)
        return ids, [[value + 0.25 for value in values] for values in logps]

    trainer._generate_single_turn = moved
    with pytest.warns(UserWarning, match="have other log-probs in training than in the rollout, by up to 0.25"):
        trainer.train()
    for number in ("max", "mean"):
        key = f"sampling/sampling_logp_difference/{number}"
        logged = [each.get(key) for each in trainer.state.log_history if "loss" in each]
        assert logged == [pytest.approx(0.25, abs=1e-3), None] * (trainer.args.max_steps // 2)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 0.05}, BATCHES], ids=["", "reference", "batches"])
@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapter"])
def test_old_log_probs_are_those_of_the_rollout(
    trainer_of: Made, adapted: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """They have the bits of TRL's own pass, which is left out; that of a reference model is not."""
    trainer = trainer_of(tmp_path, _adapter() if adapted else None, **SAMPLED | {"num_iterations": 2} | options)
    trl_client.use_in(trainer, invariant=True)
    score, produce, checked = head.Head.scores, trainer._generate_and_score_completions, []
    scored: list[Any] = []

    def counted(self: Any, *args: Any) -> Any:
        scored.append(self)
        return score(self, *args)

    def compared(*args: Any) -> Any:
        scored.clear()
        found = produce(*args)
        # The reference takes two passes, of four sequences each; two more would be the old log-probabilities'.
        assert len(scored) == (2 if trainer.beta else 0)
        mask, kept = found["completion_mask"].bool(), found["completion_ids"].shape[1]
        ids = torch.cat((found["prompt_ids"], found["completion_ids"]), 1)
        attention = torch.cat((found["prompt_mask"], found["completion_mask"]), 1)
        with torch.no_grad():
            own, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, kept)
        assert found["old_per_token_logps"].shape == own.shape
        checked.append((int((found["old_per_token_logps"] != own)[mask].sum()), int(mask.sum())))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head.Head, "scores", counted)
        trainer._generate_and_score_completions = compared
        trainer.train()
    assert sum(tokens for _, tokens in checked) > 50
    assert sum(differing for differing, _ in checked) == 0


@pytest.mark.parametrize("options", [{}, BATCHES, {"bf16": True, "beta": 0.0}], ids=["", "batches", "mixed"])
def test_a_mixture_of_experts_samples_what_it_trains(trainer_of: Made, options: dict[str, Any], tmp_path: Path) -> None:
    """And its experts change by the training: more than its router and its attention."""
    trainer = trainer_of(tmp_path, None, EXPERTS, "Qwen3Moe", router_aux_loss_coef=0.0, **SAMPLED | options)
    experts = trainer.model.model.layers[0].mlp.experts.gate_up_proj
    before = experts.detach().clone()
    trl_client.use_in(trainer, invariant=True)
    if options.get("bf16"):
        trainer.train()
    else:
        counts = _differing(trainer)
        assert [differing for differing, _ in counts] == [0] * len(counts)
        assert sum(tokens for _, tokens in counts) > 100
    logged = [each["sampling/sampling_logp_difference/max"] for each in trainer.state.log_history if "loss" in each]
    assert logged == [0.0] * trainer.args.max_steps
    assert not torch.equal(experts, before)


@pytest.mark.parametrize("options", [{}, {"bf16": True, "beta": 0.0}], ids=["", "mixed"])
def test_a_hybrid_samples_what_it_trains(trainer_of: Made, options: dict[str, Any], tmp_path: Path) -> None:
    """And the parameters of its gates and of its convolution change; continuous batching is refused by name."""
    trainer = trainer_of(tmp_path, None, HYBRID, "Qwen3_5Text", **SAMPLED | BATCHES)
    with pytest.raises(ValueError, match=r"^use_transformers_continuous_batching: expected False for a hybrid"):
        trl_client.use_in(trainer, invariant=True)
    trainer = trainer_of(tmp_path, None, HYBRID, "Qwen3_5Text", **SAMPLED | options)
    layer = trainer.model.model.layers[0].linear_attn
    values = layer.A_log, layer.dt_bias, layer.conv1d.weight
    before = [value.detach().clone() for value in values]
    trl_client.use_in(trainer, invariant=True)
    if options:
        trainer.train()
    else:
        counts = _differing(trainer)
        assert [differing for differing, _ in counts] == [0] * len(counts)
        assert sum(tokens for _, tokens in counts) > 100
    logged = [each["sampling/sampling_logp_difference/max"] for each in trainer.state.log_history if "loss" in each]
    assert logged == [0.0] * trainer.args.max_steps
    assert not any(map(torch.equal, values, before))


@pytest.mark.parametrize("family", [(), (EXPERTS, "Qwen3Moe")], ids=["Llama", "Qwen3Moe"])
def test_without_invariance_they_differ(trainer_of: Made, family: tuple[Any, ...], tmp_path: Path) -> None:
    for options in ({}, BATCHES):
        trainer = trainer_of(tmp_path, None, *family, router_aux_loss_coef=0.0, **SAMPLED, **options)
        trl_client.use_in(trainer, record=True)
        assert sum(differing for differing, _ in _differing(trainer)) > 0


def test_continuous_batching_is_left_as_it_was(trainer_of: Made, tmp_path: Path) -> None:
    """Between rollouts, and that of another model while one samples."""
    trainer = trainer_of(tmp_path, **SAMPLED, **BATCHES)
    runner, before = continuous._runner(), vars(continuous._runner())[continuous.METHOD]
    found = []

    def sample(model: Any) -> Any:
        assert vars(runner)[continuous.METHOD] is not before
        config = trainer.continuous_batching_config
        given = {"generation_config": trainer.generation_config, "continuous_batching_config": config}
        found.extend(model.generate_batch([[3, 4, 5]], **given).values())
        return [[each.generated_tokens for each in found], None]

    given = head.Head(trainer.model, 0.9, in_fp32=False, entropy=False), trainer.model
    other = copy.deepcopy(trainer.model)
    # TRL's forward calls that of the original.
    del other.forward
    around = trainer.accelerator.autocast
    sampled = continuous.recorded(lambda _: sample(other), *given, around, trainer.continuous_batching_config)
    with pytest.raises(RuntimeError, match=r"^rollout: continuous batching answered 0 of 1 prompts"):
        sampled([[3, 4, 5]])
    probabilities = other(torch.tensor([[3, 4, 5]])).logits[0, -1].div(0.9).softmax(-1)
    expected = probabilities[found[0].generated_tokens[0]].log().item()
    assert found[0].logprobs[0] == pytest.approx(expected, abs=1e-6)
    assert vars(runner)[continuous.METHOD] is before
    assert "generate_batch" not in vars(trainer.model)
    assert not trainer.continuous_batching_config.return_logprobs


def test_continuous_batching_that_is_not_known_is_refused(
    trainer_of: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, **BATCHES)
    trainer.continuous_batching_config.default_compile_level = 1
    with pytest.raises(ValueError, match=r"^transformers_continuous_batching_config: expected no compilation"):
        trl_client.use_in(trainer, invariant=True)
    trainer.continuous_batching_config.default_compile_level = 0
    for config in (trainer.generation_config, trainer.model.config):
        config.compile_config = object()
        with pytest.raises(ValueError, match=r"^transformers_continuous_batching_config: expected no compilation"):
            trl_client.use_in(trainer, invariant=True)
        config.compile_config = None
    monkeypatch.setattr(continuous._runner(), continuous.METHOD, lambda self, model, batch: None)
    with pytest.raises(TypeError, match=r"^trainer: expected the continuous batching of transformers 5\.17 to 5\.24"):
        trl_client.use_in(trainer, invariant=True)
    assert type(trainer.model.model.norm).__name__ == "LlamaRMSNorm"


def test_a_request_that_failed_is_told() -> None:
    failed = SimpleNamespace(error="out of pages", logprobs=[], generated_tokens=[])
    model = SimpleNamespace(generate_batch=lambda: {"a": failed}, _get_logits_processor=None)
    theirs, config = model.generate_batch, SimpleNamespace(return_logprobs=False)
    given = (SimpleNamespace(module=None), model, nullcontext, config)
    sampled = continuous.recorded(lambda prompts: ([list(model.generate_batch())[1:]], None), *given)
    with pytest.raises(RuntimeError, match=r"^rollout: continuous batching failed: out of pages"):
        sampled([[3]])
    with pytest.raises(RuntimeError, match=r"^rollout: continuous batching answered 1 of 2 prompts"):
        sampled([[3], [4]])
    assert model.generate_batch is theirs
    assert not config.return_logprobs


PLUGIN = {"rl_kernels": True}
"""What the plugin adds to the configuration of an engine."""


def engine_of(added: dict[str, bool], dtype: torch.dtype) -> SimpleNamespace:
    """Return what a trainer holds of an engine in its process."""
    own = SimpleNamespace(dtype=dtype, logprobs_mode="raw_logprobs")
    config = SimpleNamespace(model_config=own, additional_config=added)
    return SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))


def server_of(added: dict[str, bool]) -> SimpleNamespace:
    """Return what a trainer holds of an engine in a server."""
    own = {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs"}
    told = {"model_config": own, "additional_config": added}
    return SimpleNamespace(vllm_client=SimpleNamespace(get_server_info=lambda: told))


def test_an_engine_that_does_not_match_training_is_refused(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.use_vllm, trainer.vllm_generation = True, engine_of(PLUGIN, torch.float32)
    remedy = r"dtype: expected bfloat16 .*; call use_in\(\.\.\., compute_dtype=torch\.bfloat16\)"
    settings: list[tuple[Any, str, Any, str]] = [
        (trainer.args, "cast_lm_head_to_fp32", True, "cast_lm_head_to_fp32: expected False"),
        (trainer, "temperature", 0.7, r"logprobs_mode: expected 'processed_logprobs' .* 0\.7, got 'raw_logprobs'"),
        (trainer, "top_k", 50, "top_k, top_p, min_p: expected none of them with num_iterations 2"),
        (trainer.args, "generation_kwargs", {"temperature": 0.5}, r"temperature: expected 1\.0"),
        (trainer.args, "generation_kwargs", {"presence_penalty": 1.0}, r"presence_penalty: expected 0\.0"),
        (trainer.args, "vllm_structured_outputs_regex", "a*", "structured_outputs: expected None"),
        (trainer.args, "generation_kwargs", {"structured_outputs": {"regex": "a*"}}, "structured_outputs: expected N"),
        (trainer.args, "generation_kwargs", {"logprobs": 5}, "logprobs: expected 0"),
        (trainer.args, "generation_kwargs", {"logprob_token_ids": [3]}, "logprob_token_ids: expected None"),
        (trainer.model, "peft_config", {}, "peft_config: expected LoRA layers"),
        (trainer, "vllm_generation", engine_of({}, torch.float32), "RL_KERNELS_VLLM: expected 1 before the trainer is"),
        (trainer, "vllm_generation", engine_of(PLUGIN, torch.bfloat16), remedy),
        (trainer, "vllm_generation", server_of({}), "RL_KERNELS_VLLM: expected 1 where the server starts"),
        (trainer, "vllm_generation", server_of(PLUGIN), remedy),
        (trainer, "vllm_generation", engine_of(PLUGIN, torch.float16), "dtype: expected float16 as in vLLM's engine"),
        (trainer.accelerator.state, "_mixed_precision", "bf16", r"bf16, fp16: expected passes in float32 .* bfloat16"),
    ]
    for owner, name, value, message in settings:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(ValueError, match=f"^{message}"):
                trl_client.use_in(trainer, invariant=True, record=False)
    # What a server sampled is not taken for old log-probs before it was compared.
    theirs, trainer.vllm_mode = trainer._generate_single_turn, "server"
    trl_client.use_in(trainer, invariant=True, record=False)
    assert trainer._generate_single_turn == theirs


@pytest.mark.parametrize("passes", [3, 4, 6])
def test_each_token_comes_of_its_own_pass(passes: int) -> None:
    """Where processes wait for each other ``generate`` goes on with passes whose tokens nobody takes."""
    module, hidden = torch.nn.Linear(2, 5), torch.rand(6, 2, 3, 2)

    def generate(input_ids: torch.Tensor) -> torch.Tensor:
        model._get_logits_processor()
        for each in hidden[:passes]:
            module(each)
        return torch.cat((input_ids, torch.ones(2, 4, dtype=torch.long)), 1)

    model = SimpleNamespace(generate=generate, _get_logits_processor=list)
    scorer: Any = SimpleNamespace(module=module, logps=lambda rows, ids: rows[:, 0] * ids)

    def sample() -> Any:
        whole, ended = model.generate(input_ids=torch.zeros(2, 3, dtype=torch.long))[:, 3:].tolist()
        return [whole, ended[:2]], None

    sampled = rollout.recorded(sample, scorer, model, nullcontext)
    if passes < 4:
        with pytest.raises(RuntimeError, match=r"^rollout: expected a pass for each of 4 tokens, saw 3"):
            sampled()
    else:
        whole, ended = hidden[:4, :, -1, 0].t().tolist()
        assert sampled()[1] == [whole, ended[:2]]
    assert model.generate is generate
    model._get_logits_processor = None
    model.generate = lambda input_ids: torch.cat((input_ids, input_ids), 1)
    with pytest.raises(RuntimeError, match="expected a call of _get_logits_processor"):
        sampled()
