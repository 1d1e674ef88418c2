"""What ``use_in`` refuses before anything is sampled: other trainers, other logits, dropout, other generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

trl = pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

from rl_kernels.models.clients import trl as trl_client  # noqa: E402

Made = Callable[..., Any]


def norm_of(trainer: Any) -> str:
    return type(trainer.model.model.norm).__name__


class Other(trl.GRPOTrainer):  # type: ignore[misc]
    """A subclass that adds nothing."""


@pytest.mark.parametrize("name", ["_compute_loss", "_get_per_token_logps_and_entropies", "_generate_single_turn"])
def test_what_a_subclass_computes_is_not_lost(trainer_of: Made, tmp_path: Path, name: str) -> None:
    trainer = trainer_of(tmp_path)
    trainer.__class__ = type("Mine", (Other,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=rf"^trainer: expected TRL's own {name}, Mine has another"):
        trl_client.use_in(trainer)
    namesake = type("GRPOTrainer", (Other,), {})
    setattr(namesake, name, eval("lambda self: None"))
    getattr(namesake, name).__qualname__ = f"GRPOTrainer.{name}"
    trainer.__class__ = namesake
    with pytest.raises(TypeError, match=rf"^trainer: expected TRL's own {name}, GRPOTrainer has another"):
        trl_client.use_in(trainer)
    trainer.__class__ = Other
    trl_client.use_in(trainer)


def test_memory_reaches_the_head(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match=r"^memory: expected 'lean', 'fast' or .*'faster'"):
        trl_client.use_in(trainer, memory="faster")
    trl_client.use_in(trainer, memory="fast")


def test_other_trainers_are_named(trainer_of: Made, tmp_path: Path) -> None:
    told = r"^trainer: expected the GRPOTrainer of TRL 1\.16, this SimpleNamespace has no _c"
    with pytest.raises(TypeError, match=told):
        trl_client.use_in(SimpleNamespace())
    trainer = trainer_of(tmp_path)
    del trainer._entropy_bonus_enabled
    with pytest.raises(TypeError, match=r"this GRPOTrainer has no _entropy_bonus_enabled"):
        trl_client.use_in(trainer)


def test_a_trainer_is_given_once_and_without_a_sharded_head(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    object.__setattr__(trainer.args, "deepspeed_plugin", SimpleNamespace(zero_stage=3))
    with pytest.raises(ValueError, match=r"^deepspeed: expected ZeRO-2 at most"):
        trl_client.use_in(trainer)
    trainer.args.deepspeed_plugin.zero_stage = 2
    trl_client.use_in(trainer, record=True)
    told = r"^trainer: expected one that was not given to use_in before, its _compute_loss"
    with pytest.raises(ValueError, match=told):
        trl_client.use_in(trainer, record=True)
    del trainer._compute_loss
    with pytest.raises(ValueError, match=r"its _generate_single_turn is replaced"):
        trl_client.use_in(trainer, record=True)


def test_generation_with_other_passes_is_refused(trainer_of: Made, tmp_path: Path) -> None:
    given: list[tuple[dict[str, Any], str]] = [
        ({"guidance_scale": 1.5}, "expected no guidance_scale"),
        ({"num_beams": 2}, "expected one pass for each token, as in sampling, got beam"),
        ({"prompt_lookup_num_tokens": 2}, "got assisted_generation"),
    ]
    for options, message in given:
        trainer = trainer_of(tmp_path, generation_kwargs=options)
        with pytest.raises(ValueError, match=f"^generation_kwargs: .*{message}"):
            trl_client.use_in(trainer, record=True)
        trl_client.use_in(trainer)
    for options in ({"guidance_scale": 1}, {"do_sample": False}):
        trl_client.use_in(trainer_of(tmp_path, generation_kwargs=options), record=True)


def test_settings_of_the_model_count_where_the_trainer_has_none(trainer_of: Made, tmp_path: Path) -> None:
    for name, value in (("guidance_scale", 2.0), ("num_beams", 2), ("prefill_chunk_size", 2)):
        trainer = trainer_of(tmp_path)
        setattr(trainer.model.generation_config, name, value)
        with pytest.raises(ValueError, match=r"^generation_kwargs: expected"):
            trl_client.use_in(trainer, record=True)
        setattr(trainer.generation_config, name, 1)
        if name != "prefill_chunk_size":
            trl_client.use_in(trainer, record=True)


def test_dropout_is_refused_with_invariant(trainer_of: Made, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)
    trainer = trainer_of(tmp_path, adapter)
    trainer.model.eval()
    with pytest.raises(ValueError, match=r"^disable_dropout: expected no dropout .*lora_dropout\.default has 0\.05"):
        trl_client.use_in(trainer, invariant=True)
    assert not any("RowWise" in type(module).__name__ for module in trainer.model.modules())
    trl_client.use_in(trainer, record=True)
    trainer = trainer_of(tmp_path, beta=0.1)
    trainer.ref_model.other = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"^disable_dropout: expected no dropout with invariant, other has 0\.1"):
        trl_client.use_in(trainer, invariant=True)


def test_dropout_that_is_no_module_is_refused_with_invariant(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    mlp = trainer.model.model.layers[0].mlp
    theirs = mlp.forward
    mlp.forward = lambda x: F.dropout(theirs(x), 0.3, training=mlp.training)
    trainer.model.eval()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"^model: expected no dropout with invariant"):
        trl_client.use_in(trainer, invariant=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in trainer.model.modules())
    assert norm_of(trainer) == "LlamaRMSNorm"


def test_bodies_that_cannot_be_compared_are_taken(trainer_of: Made, tmp_path: Path) -> None:
    """One that gives no numbers is not taken for dropout; FSDP leaves an embedding of one dim, or no values."""
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(float("nan"))
    trl_client.use_in(trainer, invariant=True)
    trainer = trainer_of(tmp_path, beta=0.1)
    embedding = trainer.ref_model.model.embed_tokens
    embedding.weight = torch.nn.Parameter(torch.empty(7))
    trainer.ref_model.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    trl_client.use_in(trainer, invariant=True)


def test_dtypes_that_meet_under_autocast_alone(trainer_of: Made, tmp_path: Path) -> None:
    for wide in ("lm_head", "embed_tokens"):
        trainer = trainer_of(tmp_path, bf16=True)
        trainer.model.bfloat16()
        (trainer.model.lm_head if wide == "lm_head" else trainer.model.model.embed_tokens).float()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trl_client.use_in(trainer, invariant=True)


def test_a_learnt_prompt_is_refused_with_invariant(trainer_of: Made, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trainer_of(tmp_path, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"^peft_config: expected no learned prompt with invariant"):
        trl_client.use_in(trainer, invariant=True)
    trl_client.use_in(trainer)


def test_a_model_that_does_more_to_its_logits_is_refused(trainer_of: Made, tmp_path: Path) -> None:
    for name in ("model", "ref_model"):
        trainer = trainer_of(tmp_path, beta=0.1)
        model = getattr(trainer, name)

        def louder(*args: Any, theirs: Any = model.forward, **given: Any) -> Any:
            found = theirs(*args, **given)
            found.logits = found.logits * 1.1
            return found

        model.forward = louder
        told = r"^model: expected logits that follow .* those of LlamaForCausalLM are .* off$"
        with pytest.raises(TypeError, match=told):
            trl_client.use_in(trainer, invariant=True)
        assert norm_of(trainer) == "LlamaRMSNorm"


def test_a_wrapped_reference_is_scored_by_ours(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, beta=0.1)
    inner = trainer.ref_model
    theirs = inner.forward
    trainer.ref_model = torch.nn.DataParallel(inner)
    trl_client.use_in(trainer)
    assert inner.forward is not theirs


def test_a_head_that_is_not_taken_is_refused_at_once(trainer_of: Made, tmp_path: Path) -> None:
    class Packed(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes cannot be multiplied")

    trainer = trainer_of(tmp_path)
    hook = trainer.model.lm_head.register_forward_hook(lambda *given: None)
    with pytest.raises(TypeError, match=r"^head: expected no forward hooks"):
        trl_client.use_in(trainer, invariant=True)
    assert norm_of(trainer) == "LlamaRMSNorm"
    hook.remove()
    head = trainer.model.lm_head = Packed(32, 16)
    head.weight = torch.nn.Parameter(torch.zeros(9, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"^head: expected an nn\.Linear or one with a LoRA adapter, got .*Packed"):
        trl_client.use_in(trainer)
    del head.weight
    with pytest.raises(TypeError, match=r"^head: expected an nn\.Linear or one with a LoRA adapter, got .*Packed"):
        trl_client.use_in(trainer)


def test_what_a_rollout_of_ones_own_brings_is_not_logged(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.model.train()
    logged = []
    for function in (None, lambda *given: None):
        trainer.rollout_func = function
        ids = torch.arange(8).view(2, 4) + 3
        inputs = {f"{part}_ids": ids for part in ("prompt", "completion")}
        inputs |= {f"{part}_mask": torch.ones_like(ids) for part in ("prompt", "completion")}
        inputs |= {"advantages": torch.ones(2), "sampling_per_token_logps": torch.zeros(2, 4)}
        trainer.current_gradient_accumulation_steps = 1
        trl_client.compute_loss(trainer, trainer.model, inputs | {"num_items_in_batch": torch.tensor(8)})
        logged.append("sampling/sampling_logp_difference/mean" in trainer._metrics["train"])
        trainer._metrics["train"].clear()
    assert logged == [True, False]


def test_a_rollout_that_is_not_seen_is_refused(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    for name in ("use_vllm", "rollout_func"):
        before = getattr(trainer, name)
        setattr(trainer, name, True)
        with pytest.raises(ValueError, match=f"^{name}: expected a trainer without it"):
            trl_client.use_in(trainer, invariant=True)
        setattr(trainer, name, before)
    trainer.generation_config.prefill_chunk_size = 2
    with pytest.raises(ValueError, match=r"^generation_kwargs: expected no prefill_chunk_size"):
        trl_client.use_in(trainer, invariant=True)
    trainer.args.cast_lm_head_to_fp32 = True
    for in_batches in (False, True):
        trainer.use_transformers_continuous_batching = in_batches
        with pytest.raises(ValueError, match=r"^cast_lm_head_to_fp32: expected a trainer without it"):
            trl_client.use_in(trainer, invariant=True)
    assert norm_of(trainer) == "LlamaRMSNorm"


def test_all_models_are_made_invariant_or_none(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, beta=0.05)
    trainer.ref_model.other = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match=r"^model: left alone, and may depend on the batch: other"):
        trl_client.use_in(trainer, invariant=True)
    assert norm_of(trainer) == "LlamaRMSNorm"


def test_the_asynchronous_trainer_is_refused_by_name() -> None:
    asynchronous = pytest.importorskip("trl.experimental.async_grpo").AsyncGRPOTrainer
    with pytest.raises(TypeError, match=r"^trainer: expected the GRPOTrainer .*, this AsyncGRPOTrainer has no _"):
        trl_client.use_in(object.__new__(asynchronous))
