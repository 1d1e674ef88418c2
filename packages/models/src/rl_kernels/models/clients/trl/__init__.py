"""TRL's GRPOTrainer on our operators: ``use_in(trainer)``, once, before ``trainer.train()``.

The model, the sampling, the rewards and the advantages stay TRL's. Log-probabilities of the update, the old and the
reference pass come from hidden states through ``linear_logp``, and the loss is ``grpo_loss``. What TRL divides by is
passed on as an explicit normaliser, so that micro-batches add up as they do there. Read off TRL 1.16; trl itself is not
imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rl_kernels.models.clients.trl.head import score_with
from rl_kernels.models.clients.trl.loss import compute_loss, normaliser, objective, rollout_ratio

__all__ = ["compute_loss", "normaliser", "objective", "rollout_ratio", "use_in"]

KNOWN = "1.16"
"""The version of TRL whose hooks these are."""


def use_in(trainer: Any, **options: Any) -> None:
    """Let a GRPOTrainer score tokens by ``linear_logp`` and take its loss from ``grpo_loss``.

    ``options`` (``backend``, ``validate``) are those of the loss. Metrics keep TRL's names.

    Raises:
        ValueError: the trainer adds terms to its loss that ours does not have, or its model does with its logits what
            ``linear_logp`` does not; the message names the setting.
        TypeError: the trainer has not the hooks of TRL 1.16, or the head of its model is none that ``head_logp`` takes.
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
    for base in bases:
        score_with(base, trainer.temperature, in_fp32=trainer.args.cast_lm_head_to_fp32, entropy=base is bases[0])
    trainer._compute_loss = partial(compute_loss, trainer, **options)
