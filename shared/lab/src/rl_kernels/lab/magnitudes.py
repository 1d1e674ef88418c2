"""Bounds on rounding errors of a softmax: sums of the terms' magnitudes, for the checker."""

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

    Rounding a logit or the logsumexp changes p in proportion to their size, hence the factors in entropy and gradient.
    Adding a constant to the logits does not change the entropy, so it has terms of their size only where the logits are
    rounded.

    Args:
        z: the logits, ``[..., V]`` in FP64.
        size: for each logit, the sum of its terms' magnitudes, ``[..., V]``; 0 for a logit of -inf.
        ids: ids of the selected tokens, ``[...]``, in ``[0, V)``.
        upstream: output name (``logp``, ``logsumexp``, ``entropy``) -> magnitude of its upstream gradient, ``[...]``.
        rounded: ``size`` where the logits are rounded before the entropy, else 0; None if there is no entropy.

    Returns:
        Output name -> magnitudes ``[...]``; and the magnitudes of the logits' gradient, ``[..., V]``.
    """
    lse = z.logsumexp(-1, keepdim=True)
    # The rounding error of a probability below the smallest normal number is as large as for that number.
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
