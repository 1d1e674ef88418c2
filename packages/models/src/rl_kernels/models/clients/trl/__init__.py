"""TRL's GRPOTrainer on our operators: ``use_in(trainer)``, once, before ``trainer.train()``.

The model, the sampling, the rewards and the advantages stay TRL's. Log-probabilities of the update, the old and the
reference pass come from hidden states through ``linear_logp``, and the loss is ``grpo_loss``. What TRL divides by is
passed on as an explicit normaliser, so that micro-batches add up as they do there. Read off TRL 1.16; trl itself is not
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rl_kernels.models import invariance
from rl_kernels.models.clients.trl import continuous
from rl_kernels.models.clients.trl.head import Head, score_with
from rl_kernels.models.clients.trl.loss import compute_loss, normaliser, objective, rollout_ratio
from rl_kernels.models.clients.trl.rollout import check_rollout, recorded

__all__ = ["compute_loss", "normaliser", "objective", "rollout_ratio", "use_in"]

KNOWN = "1.16"
"""The version of TRL whose hooks these are."""


def use_in(trainer: Any, *, invariant: bool = False, record: bool | None = None, **options: Any) -> None:
    """Let a GRPOTrainer score tokens by ``linear_logp`` and take its loss from ``grpo_loss``; metrics keep TRL's names.

    Args:
        trainer: before ``train()``.
        invariant: make its models ``invariant``, strictly: what was sampled then has the bits of the first training
            pass. Tokens behind padding then stand where ``generate`` lets them.
        record: record the log-probability of each token that ``generate``, or ``generate_batch`` of continuous
            batching, samples: ``linear_logp`` on the hidden state that it came from. Batches bring them as
            ``sampling_per_token_logps``; the metrics ``sampling/sampling_logp_difference`` tell how far those of the
            first training pass are from them. By default as ``invariant``.
        options: ``backend`` and ``validate`` of the loss.

    Raises:
        ValueError: the trainer adds terms to its loss that ours does not have; or tokens to record are sampled
            elsewhere; or a model cannot be made invariant. The message names what.
        TypeError: the trainer has not the hooks of TRL 1.16, or its continuous batching not those of transformers 5.17
            to 5.24, or the head of its model is none that ``head_logp`` takes.
    """
    beyond = {
        "top_entropy_quantile": trainer.top_entropy_quantile < 1,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "entropy_coef": trainer._entropy_bonus_enabled,
        "router_aux_loss_coef": trainer.aux_loss_enabled,
    }
    for name, is_set in beyond.items():
        if is_set:
            raise ValueError(f"{name}: expected a trainer without it, the loss has no such term")
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    bases = [model.get_base_model() if hasattr(model, "get_base_model") else model for model in models]
    hooked = hasattr(trainer, "_get_per_token_logps_and_entropies") and all("forward" in vars(base) for base in bases)
    if not hooked:
        raise TypeError(f"trainer: expected TRL's GRPOTrainer with a fused head on its models, as TRL {KNOWN} has it")
    record, in_batches = invariant if record is None else record, trainer.use_transformers_continuous_batching
    if record:
        check_rollout(trainer)
        if in_batches:
            continuous.check_settings(trainer)
    if invariant:
        _make_invariant(bases)
    in_fp32 = trainer.args.cast_lm_head_to_fp32
    heads = [Head(base, trainer.temperature, in_fp32=in_fp32, entropy=base is bases[0]) for base in bases]
    for base, head in zip(bases, heads, strict=True):
        score_with(base, head, places=invariant)
    if record:
        # Wrappers bring autocast to the passes of training alone.
        given = (trainer._generate_single_turn, heads[0], bases[0], trainer.accelerator.autocast)
        config = trainer.continuous_batching_config
        trainer._generate_single_turn = continuous.recorded(*given, config) if in_batches else recorded(*given)
    trainer._compute_loss = partial(compute_loss, trainer, **options)


def _make_invariant(models: Sequence[Any]) -> None:
    """Make all of them invariant, or none."""
    handles: list[invariance.Invariance] = []
    try:
        for model in models:
            handles.append(invariance.invariant(model, strict=True))
    except BaseException:
        for handle in handles:
            handle.undo()
        raise
