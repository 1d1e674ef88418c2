"""Log-probabilities in a few lines of PyTorch, for tests that record the launches of their kernels.

A stand-in for a kernel reads the arguments of its launch, and computes the results with these functions in FP64. The
call of the host code is then compared with ``gold``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rl_kernels.core.testing.storage import with_layout

LEAST = -1e9
"""Replaces -inf, whose product with a power of 0 would be NaN."""
State = Sequence[torch.Tensor]
"""Softmax states ``[N]``: top, total, and the sum of ``e^(z - top) (z - top)``."""
Upstream = Sequence[torch.Tensor | None]
"""The upstream gradients of logp, logsumexp and entropy."""


def state(z: torch.Tensor) -> torch.Tensor:
    """Return the softmax states ``[3, N]`` of logits ``[N, V]`` after the temperature."""
    top = z.amax(1)
    # Of a part that is all -inf nothing counts.
    shifted = (z - top.clamp(min=LEAST)[:, None]).clamp(min=LEAST)
    return torch.stack((top, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1)))


def merged(parts: torch.Tensor) -> torch.Tensor:
    """Return the state ``[3, N]`` of all of ``parts[k, 3, N]``."""
    tops, totals, weighted = parts.double().unbind(1)
    top = tops.amax(0)
    shift = (tops - top.clamp(min=LEAST)).clamp(min=LEAST)
    scale = shift.exp()
    return torch.stack((top, (totals * scale).sum(0), ((weighted + totals * shift) * scale).sum(0)))


def write_statistics(
    launch: Any, state: State, chosen: torch.Tensor, temperature: torch.Tensor, active: torch.Tensor, *, entropy: bool
) -> None:
    """Write the statistics of rows to a launch's logp, norm, lse and entropy; ``chosen`` is before the temperature."""
    top, total, weighted = state
    lse = top + total.log()
    results = {"logp": chosen / temperature - lse, "norm": torch.stack((top * temperature, total.log()), 1)}
    if entropy:
        results |= {"lse": lse, "entropy": total.log() - weighted / total}
    for name, value in results.items():
        assert launch[name].shape == value.shape
        assert launch[name].is_contiguous()
        launch[name].copy_(torch.where(active.view(-1, *[1] * (value.ndim - 1)), value, 0.0))


def logits_gradient(
    z: torch.Tensor,
    temperature: torch.Tensor,
    norm: torch.Tensor,
    chosen: torch.Tensor,
    upstream: Upstream,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of logits ``[N, V]``; ``z`` is after the temperature ``[N]``, ``chosen`` marks the ids."""
    temperature = temperature.double()[:, None]
    top, log_total = norm.double().split(1, 1)
    log_p = z - top / temperature - log_total
    p = log_p.exp()
    grad_logp, grad_lse, grad_entropy = (0.0 if grad is None else grad.double()[:, None] for grad in upstream)
    gradient = grad_logp * (chosen.double() - p) + grad_lse * p
    if entropy is not None:
        gradient = gradient - grad_entropy * p * (log_p + entropy.double()[:, None])
    return gradient / temperature


def dense(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor that a kernel reads without strides, after a check that it has this shape and none."""
    assert x.shape == shape
    assert x.is_contiguous()
    return x


class Rows(NamedTuple):
    """Arguments of a call for each row besides logits: ids, temperatures, the ignored id, upstream gradients, and what
    ``thresholds`` draws.
    """

    ids: torch.Tensor
    temperature: torch.Tensor
    ignored: int | None
    upstream: list[torch.Tensor | None]
    min_logit: torch.Tensor | None = None

    @property
    def active(self) -> torch.Tensor:
        """The rows that are not ignored."""
        return torch.ones(len(self.ids), dtype=torch.bool) if self.ignored is None else self.ids != self.ignored

    @property
    def scale(self) -> torch.Tensor:
        """The temperature, which divides logits ``[N, V]``."""
        return self.temperature[:, None] if self.temperature.ndim else self.temperature


def rows_of(call: Mapping[str, Any], rows: int, vocab: int) -> Rows:
    """Draw the rows of a call.

    ``ids`` is their dtype or "apart"; ``scale`` "rows", "apart" or absent for one number; ``ignored`` the id of
    ``masked`` rows; ``upstream`` "all", "apart", "expanded" or the only output with a gradient.
    """
    ids, ignored, kind = torch.randint(vocab, (rows,)), call.get("ignored"), call.get("ids", torch.int64)
    if ignored is not None:
        ids[rows // 3 : rows // 3 + call.get("masked", max(rows // 6, 1))] = ignored
    ids = ids.repeat_interleave(2)[::2] if kind == "apart" else ids.to(kind)
    scale, upstream_kind = (torch.rand(2 * rows) + 0.5), call.get("upstream", "all")
    scales = {"rows": scale[:rows], "apart": scale[::2], None: torch.tensor(0.7)}
    grads = [torch.randn(2 * rows)[::2] if upstream_kind == "apart" else torch.randn(rows) for _ in range(3)]
    if upstream_kind == "expanded":
        grads = [torch.tensor(value).expand(rows) for value in (0.5, -2.0, 3.0)]
    named = zip(("logp", "lse", "entropy"), grads, strict=True)
    upstream = [grad if upstream_kind in ("all", "apart", "expanded", name) else None for name, grad in named]
    return Rows(ids, scales[call.get("scale")], ignored, upstream)


def thresholds(logits: torch.Tensor, rows: Rows, kind: str | None) -> Rows:
    """Return rows with a ``min_logit`` between two of their logits, if ``kind`` is "rows" or "apart"; the first row has
    -inf.

    ``logits`` are in FP64, before the temperature. A target below its threshold has no upstream gradient of logp.
    """
    if kind is None:
        return rows
    z = logits.detach() / rows.scale
    least = z[:, 0] - 1
    if z.shape[1] > 1:
        # The widest of the upper gaps: no rounding takes a logit across it.
        top = z.topk(min(z.shape[1], 9)).values
        gap = (top[:, :-1] - top[:, 1:]).argmax(1, keepdim=True)
        least = 0.5 * (top.gather(1, gap) + top.gather(1, gap + 1))[:, 0]
    least[0] = -torch.inf
    is_below = z.gather(1, rows.ids.long().clamp(0)[:, None])[:, 0] < least
    least = least.float().repeat_interleave(2)[::2] if kind == "apart" else least.float()
    grad, *others = rows.upstream
    return rows._replace(min_logit=least, upstream=[None if grad is None else grad.masked_fill(is_below, 0.0), *others])


def below(x: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor | None) -> torch.Tensor:
    """Say which logits ``x[N, V]``, before the temperature ``[N]``, are below a threshold of their row."""
    return torch.zeros_like(x, dtype=torch.bool) if least is None else x / temperature[:, None] < least[:, None]


def laid_out(x: torch.Tensor, layout: str | tuple[int, int]) -> torch.Tensor:
    """Return a matrix in another layout.

    ``layout`` is one of ``with_layout``, "expanded" (every row is the first), or (padding, first column).
    """
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if isinstance(layout, str):
        return with_layout(x, layout)
    more, first = layout
    return x.new_full((len(x), x.shape[1] + more), 1e4)[:, first : first + x.shape[1]].copy_(x)


def gold(logits: torch.Tensor, rows: Rows, active: torch.Tensor) -> list[torch.Tensor]:
    """Return logp, logsumexp, entropy and norm of logits in FP64 before the temperature; 0 in rows not active."""
    z = logits / rows.scale
    if rows.min_logit is not None:
        z = z.masked_fill(z < rows.min_logit[:, None], -torch.inf)
    logs, lse, top = z.log_softmax(-1), z.logsumexp(-1), logits.amax(-1)
    logp = logs.gather(1, rows.ids.long().clamp(0)[:, None])[:, 0]
    results = logp, lse, -(logs.exp() * logs.clamp(min=LEAST)).sum(-1), torch.stack((top, lse - top / rows.temperature))
    return [torch.where(active, value, 0.0).t() for value in results]


def back(stats: Iterable[torch.Tensor], upstream: Upstream) -> None:
    """Run the backward pass of the statistics with these upstream gradients."""
    pairs = zip(stats, upstream, strict=False)
    sum((value * grad.double()).sum() for value, grad in pairs if grad is not None).backward()  # type: ignore[union-attr]
