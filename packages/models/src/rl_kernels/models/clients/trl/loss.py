"""TRL's GRPO loss by ``grpo_loss``: a trainer's objective, its normalizer, and its metrics."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.grpo_loss import Extras, Normalizer, Objective, grpo_loss_from_advantages
from rl_kernels.models.clients.trl.kept import IDS_IN_BATCH, IN_BATCH, with_kept
from rl_kernels.models.clients.trl.metrics import WEIGHTS, log
from rl_kernels.models.clients.trl.watch import Watch

IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Inputs of vision models beside tokens, by TRL's names."""


def compute_loss(
    trainer: Any, model: Any, inputs: dict[str, Any], *, watch: Watch | None = None, **options: Any
) -> torch.Tensor:
    """Return the loss of one micro-batch as ``GRPOTrainer._compute_loss`` does, and log its metrics.

    Args:
        trainer: after ``use_in``.
        model: the model to train, wrappers included.
        inputs: TRL's batch: ids and masks ``[B, T]`` of prompts and completions, advantages, and what it recorded.
        watch: compares the batch's log-probs with those of its rollout; None does not.
        options: ``backend`` and ``validate`` of ``grpo_loss``.

    Returns:
        the loss, a scalar to differentiate.
    """
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    completion_length = inputs["completion_ids"].shape[1]
    image_inputs = {name: inputs[name] for name in IMAGES if name in inputs}
    model = with_kept(model, inputs.get(IN_BATCH, inputs.get(IDS_IN_BATCH)))
    logps, entropy, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, attention, completion_length, compute_entropy=True, **image_inputs
    )
    mask = inputs["completion_mask"]
    mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
    old, ref = inputs.get("old_per_token_logps"), inputs.get("ref_per_token_logps")
    first = (logps.detach() if old is None else old) if watch is None else watch.first(logps.detach())
    if watch is not None:
        watch.compare(first, inputs.get("sampling_per_token_logps"), mask)
    output = grpo_loss_from_advantages(
        logps,
        old,
        ref,
        inputs["advantages"],
        mask,
        objective=objective(trainer),
        extras=Extras(rollout_ratio=rollout_ratio(trainer, inputs)),
        normalizer=normalizer(trainer, inputs, mask),
        # The mask is bool and the counts are valid; checking their values would sync with the GPU.
        **{"validate": False, **options},
    )
    # TRL logs its own distance to the rollout for vLLM, which a watch drops.
    first = None if watch is None and trainer.use_vllm else first
    log(trainer, logps.detach(), old, ref, entropy.detach(), inputs, mask, first)
    return output.loss


def objective(trainer: Any) -> Objective:
    """Return the objective of a trainer's configuration; the advantages stay TRL's."""
    args, loss_type = trainer.args, trainer.loss_type
    settings: dict[str, Any] = {
        "loss_type": loss_type,
        "beta": trainer.beta,
        "clip_low": trainer.epsilon_low,
        "clip_high": trainer.epsilon_high,
        "importance_level": trainer.importance_sampling_level,
        "kl_correction": bool(args.use_bias_correction_kl),
    }
    if loss_type == "cispo":
        settings["cispo_cap"] = trainer.epsilon_high
    if loss_type == "sapo":
        settings |= {f"sapo_temperature_{sign}": getattr(args, f"sapo_temperature_{sign}") for sign in ("pos", "neg")}
    elif loss_type == "vespo":
        settings |= {f"vespo_{name}": getattr(args, f"vespo_{name}") for name in WEIGHTS}
    elif loss_type != "cispo" and args.delta is not None:
        settings["delta"] = args.delta
    return Objective(**settings)


def normalizer(trainer: Any, inputs: dict[str, Any], mask: torch.Tensor) -> Normalizer:
    """Return the divisor of TRL's sum over a micro-batch; ``mask`` is ``[B, T]``, bool."""
    steps = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    if trainer.loss_type == "bnpo":
        return Normalizer(num_tokens=mask.sum().clamp(min=1) * steps)
    if trainer.loss_type in ("grpo", "sapo", "luspo"):
        return Normalizer(num_sequences=len(mask) * steps)
    if trainer.loss_type == "dr_grpo":
        return Normalizer(num_sequences=len(mask) * steps, max_completion_length=trainer.max_completion_length)
    # num_items_in_batch counts the tokens of a whole generation batch, on all processes.
    share = steps / trainer.args.steps_per_generation if trainer.model.training else 1
    count = inputs["num_items_in_batch"].clamp(min=1)
    return Normalizer(num_tokens=count * (share / trainer.accelerator.num_processes))


def rollout_ratio(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return the rollout ratio, ``[B]`` or ``[B, T]``, as TRL truncated or masked it; None without a correction."""
    ratio = inputs.get("importance_sampling_ratio")
    is_used = trainer.loss_type == "vespo" or (trainer.use_vllm and trainer.vllm_importance_sampling_correction)
    if ratio is None or not is_used:
        return None
    return ratio[:, 0] if ratio.shape[1] == 1 else ratio
