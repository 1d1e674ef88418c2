"""The definition of linear_logp in plain PyTorch; with FP64 inputs it is the gold result."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_kernels.core.outputs import LogpStats


def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    min_logit: torch.Tensor | None = None,
    kept_ids: torch.Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: bool = False,
) -> torch.Tensor | LogpStats:
    """Return ``z[id] - logsumexp(z)``, ``z = (hidden @ W^T + bias) / temperature``; shapes as in the public function.

    With a softcap, ``z = softcap tanh(logit_scale (hidden @ W^T + bias) / softcap) / temperature``. Logits z below
    ``min_logit``, and those of ids that are not in ``kept_ids``, count as -inf.

    Computed in FP32, or FP64 for FP64 inputs, and holds all logits. The gradient of the logits is rounded to the dtype
    of the inputs, as autograd of a product in that dtype does.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    active = torch.ones_like(target_ids, dtype=torch.bool)
    if ignore_index is not None:
        active = target_ids != ignore_index
    logits = torch.where(active[..., None], hidden, 0).to(dtype) @ lm_head_weight.to(dtype).T
    if logits.requires_grad and hidden.dtype != dtype:
        logits.register_hook(lambda grad: grad.to(hidden.dtype).to(grad.dtype))
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    scale = torch.as_tensor(temperature, dtype=dtype, device=hidden.device)
    z = logits / (scale[..., None] if scale.ndim else scale)
    ids = torch.where(active, target_ids, 0).long()
    is_below = torch.zeros_like(active)
    if min_logit is not None or kept_ids is not None:
        below = torch.zeros_like(z, dtype=torch.bool)
        if min_logit is not None:
            below = z < min_logit[..., None]
        if kept_ids is not None:
            # The last column is that of -1.
            columns = torch.where(kept_ids < 0, z.shape[-1], kept_ids.long())
            below = torch.ones_like(F.pad(below, [0, 1])).scatter(-1, columns, False)[..., :-1]
        # If nothing is kept, all results are NaN.
        is_below = below.gather(-1, ids[..., None]).squeeze(-1) & ~below.all(-1)
        z = z.masked_fill(below, -torch.inf)

    log_p = torch.log_softmax(z, -1)
    logp = torch.where(active, log_p.gather(-1, ids[..., None]).squeeze(-1).masked_fill(is_below, -torch.inf), 0)
    if not return_stats:
        return logp
    # -inf is replaced in the second factor: 0 * -inf would make the entropy and its gradient NaN.
    entropy = -(log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p)).sum(-1)
    # Rows of -inf, or with +inf, are no distribution: log_softmax gives NaN, so an infinite logsumexp becomes NaN too.
    lse = z.logsumexp(-1)
    lse = lse * torch.where(lse.isinf(), torch.nan, 1.0)
    return LogpStats(logp, torch.where(active, lse, 0), torch.where(active, entropy, 0))
