"""The definition of fused_logp in plain PyTorch; with FP64 inputs it is the gold result."""

from __future__ import annotations

import torch

from rl_kernels.core.outputs import LogpStats


def fused_logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    min_logit: torch.Tensor | None = None,
    ignore_index: int | None = None,
    row_indices: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_stats: bool = False,
) -> torch.Tensor | LogpStats:
    """Return ``z[id] - logsumexp(z)`` with ``z = logits / temperature``; shapes as in the public function.

    Computed in FP32, or FP64 for FP64 logits. The log-probability is cast to ``out_dtype``; logsumexp and entropy
    stay in the compute dtype, or are FP64 if ``out_dtype`` is. Logits below ``min_logit`` count as -inf.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    active = torch.ones_like(target_ids, dtype=torch.bool)
    if row_indices is not None:
        active = torch.zeros_like(active).flatten().index_fill(0, row_indices.long(), True).view(target_ids.shape)
    if ignore_index is not None:
        active = active & (target_ids != ignore_index)
    scale = torch.as_tensor(temperature, dtype=dtype, device=logits.device)
    z = torch.where(active[..., None], logits, 0).to(dtype) / (scale[..., None] if scale.ndim else scale)
    ids = torch.where(active, target_ids, 0).long()
    is_below = torch.zeros_like(active)
    if min_logit is not None:
        below = z < min_logit[..., None]
        # If nothing is kept, all results are NaN.
        is_below = below.gather(-1, ids[..., None]).squeeze(-1) & ~below.all(-1)
        z = z.masked_fill(below, -torch.inf)

    log_p = torch.log_softmax(z, -1)
    logp = torch.where(active, log_p.gather(-1, ids[..., None]).squeeze(-1).masked_fill(is_below, -torch.inf), 0)
    logp = logp if out_dtype is None else logp.to(out_dtype)
    if not return_stats:
        return logp
    entropy = -(log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p)).sum(-1)
    # Rows of -inf, or with +inf, are no distribution: log_softmax gives NaN, so an infinite logsumexp becomes NaN too.
    lse = z.logsumexp(-1)
    lse = lse * torch.where(lse.isinf(), torch.nan, 1.0)
    wide = torch.float64 if out_dtype == torch.float64 else dtype
    return LogpStats(logp, *(torch.where(active, value, 0).to(wide) for value in (lse, entropy)))
