"""A real client: TRL trains FP32 weights at a small learning rate, while rollout and training compute in BF16."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from rl_kernels.models.clients import trl as trl_client  # noqa: E402
from rl_kernels.models.clients.trl.watch import Watch  # noqa: E402

Made = Callable[..., Any]
SMALL = 1e-6
"""A learning rate that BF16 weights lose."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast, checkpoints": {"bf16": True, "gradient_checkpointing": True},
    "8 bits of bitsandbytes": {"optim": "adamw_bnb_8bit", "gradient_checkpointing": True},
    "8 bits of torchao": {"optim": "adamw_torch_8bit"},
    "reference, continuous batching": {
        "beta": 0.05,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 12},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_fp32_weights_move_and_no_log_prob_differs(trainer_of: Made, name: str, tmp_path: Path) -> None:
    if name.startswith("8 bits"):
        pytest.importorskip(name.split()[-1])
    trainer = trainer_of(tmp_path, **{"num_iterations": 1} | CASES[name])
    trainer.args.learning_rate = SMALL
    before = [weight.clone() for weight in trainer.model.parameters()]
    trl_client.use_in(trainer, invariant=True, compute_dtype=torch.bfloat16)
    trainer.train()
    groups = trainer.optimizer.param_groups
    masters = {weight.shape: [] for weight in before}
    for group in groups:
        for weight in group["params"]:
            masters[weight.shape].append(weight)
    assert all(weight.dtype == torch.bfloat16 for weight in trainer.model.parameters())
    moved = total = 0
    for old, rounded in zip(before, trainer.model.parameters(), strict=True):
        (new,) = [weight for weight in masters[old.shape] if torch.equal(weight.to(torch.bfloat16), rounded)][:1]
        moved, total = moved + int((new != old).sum()), total + old.numel()
    assert moved > 0.9 * total
    key = "sampling/sampling_logp_difference/max"
    assert [each[key] for each in trainer.state.log_history if key in each] == [0.0] * trainer.args.max_steps


def test_trainers_that_hold_masters_themselves_are_refused(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"^compute_dtype: expected None with is_fsdp_enabled"):
        trl_client.use_in(trainer, compute_dtype=torch.bfloat16)
    trainer.is_fsdp_enabled = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.accelerator.state, "distributed_type", "MULTI_GPU")
        with pytest.raises(ValueError, match=r"^compute_dtype: expected None with several processes"):
            trl_client.use_in(trainer, compute_dtype=torch.bfloat16)
    assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())


def test_adapters_whose_weights_are_sharded_are_refused_with_vllm(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.use_vllm, trainer.is_fsdp_enabled, trainer.model.peft_config = True, True, {}
    told = r"^peft_config: expected none with invariant, use_vllm and is_fsdp_enabled"
    with pytest.raises(ValueError, match=told):
        trl_client.use_in(trainer, invariant=True, record=False)


def test_a_model_that_was_loaded_in_bf16_is_refused(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.model.bfloat16()
    told = r"^compute_dtype: expected a model with weights in FP32, .* got torch\.bfloat16; set model_init_kwargs"
    with pytest.raises(ValueError, match=told):
        trl_client.use_in(trainer, compute_dtype=torch.bfloat16)


def test_the_first_batch_with_other_bits_is_told_with_its_counts(trainer_of: Made, tmp_path: Path) -> None:
    first, sampled = torch.zeros(2, 3), torch.tensor([[0.0, 0.25, 0.0], [0.0, 0.0, 1.0]])
    mask, watch = torch.tensor([[True, True, True], [True, True, False]]), Watch(trainer_of(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.compare(first, None, mask)
        watch.compare(first, torch.where(mask, first, sampled), mask)
    with pytest.warns(UserWarning, match=r"1 of 5 tokens of a batch have other log-probs in training .* by up to 0.25"):
        watch.compare(first, sampled, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.compare(first, sampled, mask)
