"""How a policy computes: as PyTorch has it, and through the operators. They differ in rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_kernels.demo.model import Policy, ordered_attention
from rl_kernels.demo.rollout import IGNORE, Batch
from rl_kernels.demo.task import Settings
from rl_kernels.det_gemm import det_gemm
from rl_kernels.grpo_loss import Normaliser, grpo_loss
from rl_kernels.models import head_logp, invariant


def race(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the ids that are drawn from ``softmax(logits[B, V])`` with ``noise[B, V]`` of unit exponential draws.

    The least time, noise over probability, wins: the host waits for nothing, as it would in ``torch.multinomial``.
    """
    return (logits - noise.log()).argmax(-1)


class Stock:
    """Stock PyTorch: the model as it comes, and the formulas as they are written."""

    name, short = "stock PyTorch", "stock"

    def take(self, model: nn.Module) -> None:
        """Let the model compute in this way from now on."""

    def draw(self, head: Any, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens ``[B]`` that are drawn by ``noise[B, V]``, and their log-probabilities, FP32."""
        scores = head(hidden).float().log_softmax(-1)
        ids = race(scores, noise)
        return ids, scores.gather(-1, ids[:, None])[:, 0]

    def logps(self, head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probabilities of targets, FP32, 0 where they are ``IGNORE``."""
        kept = targets != IGNORE
        scores = head(hidden).float().log_softmax(-1)
        return torch.where(kept, scores.gather(-1, torch.where(kept, targets, 0)[..., None])[..., 0], 0.0)

    def loss(self, current: Tensor, old: Tensor, batch: Batch, settings: Settings, tokens: Tensor | None) -> Tensor:
        """Return GRPO's clipped loss, divided by the sampled tokens of the batch, or by ``tokens``."""
        assert batch.reference is None
        assert tokens is None
        groups = batch.rewards.double().view(-1, settings.samples_per_prompt)
        scale = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
        advantages = ((groups - groups.mean(1, keepdim=True)) / scale).float().view(-1, 1)
        ratio = (current - old).exp()
        clipped = ratio.clamp(1 - settings.clip_eps, 1 + settings.clip_eps)
        return -(torch.minimum(ratio * advantages, clipped * advantages) * batch.mask).sum() / batch.mask.sum()


class Ours(Stock):
    """The operators: a batch-invariant model, log-probabilities from hidden states, the fused loss."""

    name, short = "rl-kernels", "ours"

    def take(self, model: nn.Module) -> None:  # noqa: D102
        invariant(model, strict=True)
        if isinstance(model, Policy):
            model.attend = ordered_attention

    def draw(self, head: Any, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        ids = race(det_gemm(hidden, head.weight.t(), out_dtype=torch.float32), noise)
        return ids, self.logps(head, hidden, ids)

    def logps(self, head: Any, hidden: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        found = head_logp(head, hidden, targets, ignore_index=IGNORE, validate=False)
        assert isinstance(found, Tensor)  # statistics come only when asked for
        return found

    def loss(self, current: Tensor, old: Tensor, batch: Batch, settings: Settings, tokens: Tensor | None) -> Tensor:  # noqa: D102
        options: dict[str, Any] = {"samples_per_prompt": settings.samples_per_prompt, "clip_eps": settings.clip_eps}
        options |= {} if batch.reference is None else {"beta": settings.beta}
        options |= {} if tokens is None else {"normaliser": Normaliser(num_tokens=tokens)}
        return grpo_loss(current, old, batch.reference, batch.rewards, batch.mask, **options).loss


OURS, STOCK = Ours(), Stock()


def copy_weights(model: nn.Module, masters: Sequence[Tensor]) -> None:
    """Give a model the weights of the policy that is trained, rounded to its dtype."""
    torch._foreach_copy_(list(model.parameters()), list(masters))


class Numerics(NamedTuple):
    """A way to compute, a dtype, and how a copy of the policy gets its weights."""

    way: Stock
    dtype: str
    load: Callable[[nn.Module, Sequence[Tensor]], None] = copy_weights

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.way.name}, {self.dtype}"
