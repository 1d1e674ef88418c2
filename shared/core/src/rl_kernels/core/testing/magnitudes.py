"""How far rounding alone can move what a softmax of logits gives: sums of the terms' magnitudes, for the checker."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def of_log_softmax(
    z: torch.Tensor,
    size: torch.Tensor,
    ids: torch.Tensor,
    upstream: Mapping[str, torch.Tensor],
    rounded: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Bound log-probabilities, logsumexp and entropy of rows, and the gradient of the logits.

    Rounding a logit or logsumexp moves p by a share of their sizes: hence the factors in entropy and gradient. No
    constant added to the logits changes the entropy, so that it has terms of their size only where they are rounded.

    Args:
        z: the logits, ``[..., V]`` in FP64.
        size: sum of the magnitudes of the terms of each, ``[..., V]``; 0 for one of -inf.
        ids: of the selected tokens, ``[...]``, in the range of V.
        upstream: output name (``logp``, ``logsumexp``, ``entropy``) -> magnitude of its upstream gradient, ``[...]``.
        rounded: those of ``size`` that are rounded before the entropy, or 0; None if there is no entropy.

    Returns:
        By output name the magnitudes ``[...]``, and those of the logits' gradient ``[..., V]``.
    """
    lse = z.logsumexp(-1, keepdim=True)
    # A probability below the smallest normal number is rounded as coarsely as that.
    p = (z - lse).exp().clamp(min=torch.finfo(z.dtype).tiny)
    top = size.amax(-1) + lse.abs().squeeze(-1)
    share = p * (1 + size + lse.abs())
    selected, total = (upstream.get(name, torch.zeros_like(top))[..., None] for name in ("logp", "logsumexp"))
    dlogits = share * (selected + total)
    dlogits.scatter_add_(-1, ids.long()[..., None], selected)
    terms = {"logp": 2 * top, "logsumexp": top}
    if rounded is None:
        return terms, dlogits
    surprise = torch.where(z == -torch.inf, 0.0, lse - z)
    spread = (surprise - (p * surprise).sum(-1, keepdim=True)).abs()
    entropy = (p * (surprise + 1 + spread * rounded)).sum(-1)
    if "entropy" in upstream:
        dlogits += upstream["entropy"][..., None] * ((1 + spread) * share + p * entropy[..., None])
    return {**terms, "entropy": entropy}, dlogits
