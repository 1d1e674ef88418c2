"""TRL's metrics of a micro-batch, under TRL's names; ratios and clipping are recomputed without gradients."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.models.clients.trl.watch import DIFFERENCES

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types for which TRL logs the share of clipped ratios."""
WEIGHTS = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
"""Suffixes of the settings for the weights of ``vespo``."""


@torch.no_grad()
def log(
    trainer: Any,
    logps: torch.Tensor,
    old: torch.Tensor | None,
    ref: torch.Tensor | None,
    entropy: torch.Tensor,
    inputs: dict[str, Any],
    mask: torch.Tensor,
    first: torch.Tensor | None,
) -> None:
    """Append the metrics of a micro-batch to the trainer's; per-token tensors are ``[B, T]``.

    ``first`` has the log-probs of a training pass by the weights that sampled, to be compared with the rollout's.
    All means come from one sum over the processes, so the host waits once.
    """
    advantages = inputs["advantages"]
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    difference = torch.zeros_like(logps) if old is None else logps - old
    weights = difference
    if trainer.importance_sampling_level == "sequence":
        weights = ((difference * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    ratio = weights.exp()
    means: dict[str, torch.Tensor] = {}
    if trainer.beta:
        assert ref is not None
        distance = ref - logps
        kl = distance.exp() - distance - 1
        means["kl"] = kl * ratio if trainer.args.use_bias_correction_kl else kl
    means["entropy"] = entropy
    sampled = inputs.get("sampling_per_token_logps")
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    # TRL logs none for a rollout_func.
    if sampled is not None and first is not None and getattr(trainer, "rollout_func", None) is None:
        distance = torch.where(mask & ~sampled.isnan(), first - sampled, 0.0).abs()
        mean_name, max_name = DIFFERENCES
        means[mean_name] = distance
        metrics[max_name].append(trainer.accelerator.gather(distance.max()).max().item())
    sequences: dict[str, torch.Tensor] = {}
    if trainer.loss_type in CLIPPED:
        bounded = ratio if trainer.args.delta is None else ratio.clamp(max=trainer.args.delta)
        low = (bounded < 1 - trainer.epsilon_low) & (advantages < 0)
        high = (bounded > 1 + trainer.epsilon_high) & (advantages > 0)
        shares = {"low": low.float(), "high": high.float(), "region": (low | high).float()}
        means |= {f"clip_ratio/{name}_mean": share for name, share in shares.items()}
        sequences = {"clip_ratio/low_min": shares["low"], "clip_ratio/high_max": shares["high"]}
    elif trainer.loss_type == "cispo":
        means["cispo_clip_ratio"] = ((ratio > trainer.epsilon_high) & (advantages > 0)).float()
    elif trainer.loss_type == "vespo":
        means["vespo/phi_seq_mean"] = trainer.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=difference,
            mask=mask,
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            **{name: getattr(trainer.args, f"vespo_{name}") for name in WEIGHTS},
        )
    sums = trainer.accelerator.reduce(torch.stack([_sum(x, mask) for x in means.values()]), reduction="sum")
    for name, mean in zip(means, (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist(), strict=True):
        metrics[name].append(mean)
    for name, share in sequences.items():
        values = trainer.accelerator.gather(
            share[:, 0] if share.shape[1] == 1 else (share * mask).sum(-1) / mask.sum(-1)
        )
        values = values[~values.isnan()]
        extreme = torch.min if name.endswith("min") else torch.max
        metrics[name].append(extreme(values).item() if values.numel() else float("nan"))


def _sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (sum, count) over the tokens, or over the sequences if there is one value per sequence."""
    if x.shape[1] == 1:
        return torch.stack((x.sum(), x.new_tensor(float(x.shape[0]))))
    return torch.stack(((x * mask).sum(), mask.sum().to(x.dtype)))
