"""The dtype of a trainer's passes: FP32 weights for its optimizer, and a copy in 16 bits for the rest.

In one process ``MasterWeights`` keeps both. Over processes FSDP2 does: each rank has FP32 shards, and the policy of its
mixed precision says in which dtype they are gathered. accelerate shards the model when training begins, so that the
policy can still be set before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.models.master_weights import MasterWeights


def check_compute_dtype(trainer: Any, dtype: torch.dtype) -> None:
    """Refuse trainers without FP32 weights, and those whose wrappers hold, or reduce, the weights themselves.

    Raises:
        ValueError: the message names the setting.
    """
    sharded = _is_sharded(trainer)
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        if getattr(trainer, name, False) and not sharded:
            raise ValueError(
                f"compute_dtype: expected None with {name}, which has master weights of its own; over processes use "
                'FSDP2: fsdp=True, fsdp_config={"version": 2}'
            )
    # A launcher that starts one process as the first of several has a model wrapped by DDP too.
    if trainer.accelerator.distributed_type.startswith("MULTI_"):
        raise ValueError(
            "compute_dtype: expected None with several processes, DDP adds up 16-bit gradients of 16-bit weights, not "
            'FP32 ones; use FSDP2 there: fsdp=True, fsdp_config={"version": 2} in GRPOConfig'
        )
    if sharded and getattr(trainer, "ref_model", None) is not None:
        raise ValueError("beta: expected 0 with compute_dtype and FSDP2, TRL has sharded the reference model already")
    if trainer.args.fp16:
        raise ValueError("fp16: expected False with compute_dtype, gradients are not scaled")
    trained = {value.dtype for value in trainer.model.parameters() if value.requires_grad}
    if torch.float32 not in trained:
        raise ValueError(
            f"compute_dtype: expected a model with weights in FP32, which are rounded to {dtype} for each pass, got "
            f'{", ".join(map(str, trained))}; set model_init_kwargs={{"dtype": "float32"}} in GRPOConfig'
        )


def dtype_of_passes(trainer: Any, weights: torch.dtype, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a model with such weights computes, for ``invariant``.

    Raises:
        ValueError: FSDP2's mixed precision would round the log-probabilities too.
    """
    if compute_dtype is not None and weights == torch.float32:
        return compute_dtype
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy if _is_sharded(trainer) else None
    if policy is None:
        return weights
    if policy.output_dtype not in (None, torch.float32):
        raise ValueError(
            f"compute_dtype: expected {policy.param_dtype} with invariant, FSDP2 and mixed precision, for which "
            f"accelerate rounds log-probs to {policy.output_dtype}"
        )
    return policy.param_dtype or weights


def compute_in(trainer: Any, models: Sequence[Any], dtype: torch.dtype) -> None:
    """Let the models of a trainer, the trained one first, compute in a dtype, and its optimizer update FP32 weights."""
    if _is_sharded(trainer):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        return
    masters = [MasterWeights(model, dtype) for model in models]
    _keep_masters(trainer, masters[0])


def _is_sharded(trainer: Any) -> bool:
    """Say whether FSDP2 will shard the model."""
    return bool(getattr(trainer, "is_fsdp_enabled", False)) and trainer.accelerator.is_fsdp2


def _keep_masters(trainer: Any, masters: MasterWeights) -> None:
    """Let the trainer's optimizer, which is made when training begins, update the FP32 weights of its model."""
    create = trainer.create_optimizer

    def created(*args: Any, **options: Any) -> Any:
        is_new = trainer.optimizer is None
        optimizer = create(*args, **options)
        if is_new:
            masters.update_by(optimizer)
        return optimizer

    if trainer.optimizer is not None:
        masters.update_by(trainer.optimizer)
    trainer.create_optimizer = created
