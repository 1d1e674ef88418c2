"""TRL's GRPOTrainer on our operators: call ``use_in(trainer)`` once, before ``trainer.train()``.

The model, sampling, rewards and advantages stay TRL's. The log-probabilities of the update, old and reference passes
come from hidden states by ``linear_logp``, and the loss is ``grpo_loss``. The divisor of TRL's loss is passed on as an
explicit normalizer, so that micro-batches add up as in TRL. Written for TRL 1.16; does not import trl.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from rl_kernels.linear_logp import Memory
from rl_kernels.models import invariance
from rl_kernels.models.clients.trl import continuous
from rl_kernels.models.clients.trl.checks import KNOWN, check_invariant, check_trainer
from rl_kernels.models.clients.trl.engine import ask_for_min_logit, check_engine, drops_tokens
from rl_kernels.models.clients.trl.head import Head, score_with
from rl_kernels.models.clients.trl.kept import Carried, refusal_of, reuses_batches
from rl_kernels.models.clients.trl.loss import compute_loss, normalizer, objective, rollout_ratio
from rl_kernels.models.clients.trl.old import replace_old_pass
from rl_kernels.models.clients.trl.precision import check_compute_dtype, compute_in, dtype_of_passes
from rl_kernels.models.clients.trl.rollout import check_rollout, recorded
from rl_kernels.models.clients.trl.watch import Watch
from rl_kernels.models.logits import check_logits
from rl_kernels.models.merged_adapters import merge_adapters

__all__ = ["compute_loss", "normalizer", "objective", "rollout_ratio", "use_in"]


def use_in(
    trainer: Any,
    *,
    invariant: bool = False,
    record: bool | None = None,
    compute_dtype: torch.dtype | None = None,
    memory: Literal["lean", "fast"] | Memory = "lean",
    backend: str | None = None,
    validate: bool = True,
) -> None:
    """Let a GRPOTrainer score tokens by ``linear_logp`` and get its loss from ``grpo_loss``; metrics keep their names.

    Args:
        trainer: TRL's GRPOTrainer, before ``train()``.
        invariant: apply ``invariant(model, strict=True)`` to its models: recorded log-probabilities then have the bits
            of the first training pass, as have vLLM's with its plugin (``clients.vllm``). Tokens after padding get the
            same positions as in ``generate``. With vLLM, LoRA layers compute with merged weights, as vLLM does.
        record: record the log-probability of each token sampled by ``generate``, or by ``generate_batch`` of continuous
            batching: ``linear_logp`` on the hidden state that the token was sampled from. Batches hold them as
            ``sampling_per_token_logps``; the metrics ``sampling/sampling_logp_difference`` are their distance to the
            first training pass. By default the value of ``invariant``. With both, and with a vLLM in this process,
            they are also the old log-probabilities where TRL needs such: its pass for these is skipped.
        compute_dtype: BF16 or FP16: the models' FP32 weights are cast to it, for training, for sampling and for an
            engine that gets them, and the optimizer updates FP32 copies (``MasterWeights``). With FSDP2, FP32 shards
            are gathered in this dtype, and gradients are reduced in FP32. None leaves the weights as they are;
            learning rates of RL are lost in weights of 16 bits.
        memory: how much of it scoring takes: ``"fast"`` keeps logits from forward to backward, as in ``linear_logp``.
        backend: backend of the loss, as in ``grpo_loss``.
        validate: whether the loss checks the values of its arguments.

    Raises:
        ValueError: the trainer's loss has terms that ``grpo_loss`` lacks; or ``use_in`` was called before; or tokens to
            record are sampled elsewhere; or a model cannot be made invariant, or has dropout. The message says which.
        TypeError: the trainer does not have the hooks of TRL 1.16, or its continuous batching not the hooks of
            transformers 5.17 to 5.24; or ``head_logp`` does not take the head of a model; or the logits do not come
            from the head alone.
    """
    check_trainer(trainer)
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    models = [trainer.accelerator.unwrap_model(model) for model in models]
    bases = [model.get_base_model() if hasattr(model, "get_base_model") else model for model in models]
    if not all("forward" in vars(base) for base in bases):
        raise TypeError(f"trainer: expected TRL's GRPOTrainer with a fused head on its models, as TRL {KNOWN} has it")
    if compute_dtype is not None:
        check_compute_dtype(trainer, compute_dtype)
    record, in_batches = invariant if record is None else record, trainer.use_transformers_continuous_batching
    refusal = refusal_of(trainer, bases[0], invariant=invariant)
    if record:
        check_rollout(trainer, bases[0], refusal)
        if in_batches:
            continuous.check_settings(trainer)
    in_fp32 = trainer.args.cast_lm_head_to_fp32
    if invariant:
        dtype = dtype_of_passes(trainer, bases[0].dtype, compute_dtype)
        if trainer.use_vllm:
            check_engine(trainer, dtype, refusal)
    if compute_dtype is not None:
        compute_in(trainer, bases, compute_dtype)
    heads = [
        Head(base, trainer.temperature, in_fp32=in_fp32, entropy=base is bases[0], memory=memory) for base in bases
    ]
    # A model of several dtypes may run only under autocast.
    with trainer.accelerator.autocast():
        for base, head in zip(bases, heads, strict=True):
            check_logits(base, head.logps, trainer.temperature)
        if invariant:
            check_invariant(trainer, bases)
    if invariant:
        _make_invariant(bases)
        if trainer.use_vllm and hasattr(trainer.model, "peft_config"):
            merge_adapters(bases[0])
    for base, head in zip(bases, heads, strict=True):
        score_with(base, head, places=invariant, around=trainer.accelerator.autocast)
    if record:
        # Wrappers apply autocast only to training passes.
        recording = (trainer._generate_single_turn, heads[0], bases[0], trainer.accelerator.autocast)
        if in_batches:
            sampled = continuous.recorded(*recording, trainer.continuous_batching_config, refusal)
        else:
            sampled = recorded(*recording, refusal, by_ids=reuses_batches(trainer))
        trainer._generate_single_turn = sampled
    if invariant:
        if trainer.use_vllm and drops_tokens(trainer):
            ask_for_min_logit(trainer.vllm_generation)
        # The bits of a server's log-probs are not known before the first batch.
        is_recorded = record or (trainer.use_vllm and trainer.vllm_mode == "colocate")
        replace_old_pass(trainer, Carried(trainer), is_recorded=is_recorded)
    watch = Watch(trainer) if invariant else None
    trainer._compute_loss = partial(compute_loss, trainer, watch=watch, backend=backend, validate=validate)


def _make_invariant(models: Sequence[Any]) -> None:
    """Make all models invariant, or none."""
    handles: list[invariance.Invariance] = []
    try:
        for model in models:
            handles.append(invariance.invariant(model, strict=True))
    except BaseException:
        for handle in handles:
            handle.undo()
        raise
