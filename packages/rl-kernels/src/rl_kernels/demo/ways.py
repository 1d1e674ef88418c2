"""Ways to sample and score with a policy: stock PyTorch, and the operators. They differ in rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rl_kernels.demo.model import Policy, ordered_attention
from rl_kernels.demo.task import Settings
from rl_kernels.det_gemm import det_gemm
from rl_kernels.grpo_loss import Normalizer, grpo_loss
from rl_kernels.models import head_logp, invariant

IGNORE = -100  # target of a position whose next token is part of the prompt, or padding


class Batch(NamedTuple):
    """Prompts with their sampled answers, padded on the right; a scored batch has the fields with defaults too."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T - 1]: the token that was sampled behind each position, else IGNORE
    logps: Tensor  # [B, T - 1]: its log-probability as the rollout saw it, else 0
    answers: list[tuple[str, str]]  # prompt and sampled text of each row
    rewards: Tensor = torch.empty(0)
    old: Tensor = torch.empty(0)  # [B, T - 1]: log-probabilities in the denominator of the ratio
    reference: Tensor | None = None  # [B, T - 1]: log-probabilities of the initial policy, for the KL penalty

    @property
    def mask(self) -> Tensor:
        """``[B, T - 1]``, bool: where a token was sampled."""
        return self.targets != IGNORE

    def rows(self, rows: slice) -> Batch:
        """Return some of the sequences, with the same padding."""
        return Batch(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stock:
    """Stock PyTorch: the unchanged model in a dtype, and the formulas as they are written."""

    dtype: str = "FP32"
    way, short = "stock PyTorch", "stock"

    @property
    def name(self) -> str:
        """The name in records."""
        return f"{self.way}, {self.dtype}"

    def take(self, model: nn.Module) -> None:
        """Let the model compute in this way from now on."""

    def load(self, model: nn.Module, masters: Sequence[Tensor]) -> None:
        """Give a model the weights of the policy that is trained, rounded to its dtype."""
        torch._foreach_copy_(list(model.parameters()), list(masters))

    def draw(self, head: Any, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens ``[B]``, drawn by unit exponential ``noise[B, V]``, and their log-probabilities, FP32."""
        scores = head(hidden).float().log_softmax(-1)
        # The least time, noise over probability, wins: the host waits for nothing, as it would in torch.multinomial.
        ids = (scores - noise.log()).argmax(-1)
        return ids, scores.gather(-1, ids[:, None])[:, 0]

    def logps(self, head: Any, hidden: Tensor, targets: Tensor) -> Any:
        """Return the log-probabilities of targets, FP32, 0 where they are ``IGNORE``."""
        scores = head(hidden).float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return torch.where(targets == IGNORE, 0.0, scores)

    def loss(self, current: Tensor, batch: Batch, settings: Settings, tokens: Tensor | None) -> Tensor:
        """Return GRPO's clipped loss, divided by the sampled tokens of the batch, or by ``tokens``."""
        assert batch.reference is tokens is None
        groups = batch.rewards.double().view(-1, settings.samples_per_prompt)
        scale = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
        advantages = ((groups - groups.mean(1, keepdim=True)) / scale).float().view(-1, 1)
        ratio = (current - batch.old).exp()
        clipped = ratio.clamp(1 - settings.clip_eps, 1 + settings.clip_eps)
        return -(torch.minimum(ratio * advantages, clipped * advantages) * batch.mask).sum() / batch.mask.sum()


class Ours(Stock):
    """The operators: a batch-invariant model, log-probabilities from hidden states, the fused loss."""

    way, short = "rl-kernels", "ours"

    def take(self, model: nn.Module) -> None:  # noqa: D102
        invariant(model, strict=True)
        if isinstance(model, Policy):
            model.attend = ordered_attention

    def draw(self, head: Any, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        ids = (det_gemm(hidden, head.weight.t(), out_dtype=torch.float32) - noise.log()).argmax(-1)
        return ids, self.logps(head, hidden, ids)

    def logps(self, head: Any, hidden: Tensor, targets: Tensor) -> Any:  # noqa: D102
        return head_logp(head, hidden, targets, ignore_index=IGNORE, validate=False)

    def loss(self, current: Tensor, batch: Batch, settings: Settings, tokens: Tensor | None) -> Tensor:  # noqa: D102
        options: Any = {name: getattr(settings, name) for name in ("samples_per_prompt", "clip_eps", "beta")}
        options["normalizer"] = None if tokens is None else Normalizer(num_tokens=tokens)
        return grpo_loss(current, batch.old, batch.reference, batch.rewards, batch.mask, **options).loss


@torch.no_grad()
def sample(model: Any, prompts: Sequence[str], way: Stock, settings: Settings, draws: Generator, mine: slice) -> Batch:
    """Sample an answer to the prompts ``mine``, with the same draws as among all prompts, on the device of ``draws``.

    The positions that all prompts have go through the model in one pass. The rest of a longer prompt is fed while
    shorter prompts are sampled already, so that no row needs padding and every batch has one shape. Nothing in the loop
    waits for the device.
    """
    # A prompt has an equals sign, an answer an end.
    longest, device = settings.longest + 1, draws.device
    rows = [settings.encode(prompt) for prompt in prompts[mine]]
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    tokens = torch.tensor([row + [settings.end] * (2 * longest - len(row)) for row in rows], device=device)
    after = torch.arange(1, 2 * longest, device=device)
    is_open = (lengths <= after) & (after < lengths + longest)
    targets, logps = torch.full_like(tokens[:, 1:], IGNORE), torch.zeros(is_open.shape, device=device)
    for place, hidden in _decoded(model, tokens, settings):
        noise = torch.empty(len(prompts), settings.end + 1, device=device).exponential_(generator=draws)
        drawn, logp = way.draw(model.head, hidden, noise[mine])
        sampled = is_open[:, place]
        targets[:, place] = torch.where(sampled, drawn, IGNORE)
        logps[:, place] = torch.where(sampled, logp, 0.0)
        tokens[:, place + 1] = torch.where(sampled, drawn, tokens[:, place + 1])
        is_open[:, place + 1 :] &= (targets[:, place] != settings.end)[:, None]
    answers = [settings.decode(row) for row in targets.tolist()]
    return Batch(tokens, targets, logps, list(zip(prompts[mine], answers, strict=True)))


@torch.no_grad()
def decoded_logps(model: Any, batch: Batch, way: Stock, settings: Settings) -> Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens, fed to the model as ``sample`` fed them."""
    places = _decoded(model, batch.tokens, settings)
    logps = [way.logps(model.head, hidden, batch.targets[:, place]) for place, hidden in places]
    return F.pad(torch.stack(logps, 1), (settings.shortest, 0))


def _decoded(model: Any, tokens: Tensor, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """Yield each place from the last of the shortest prompt on, with its hidden states ``[B, D]``."""
    cache, fed = model.cache(), tokens[:, : settings.shortest + 1]
    for place in range(settings.shortest, tokens.shape[1] - 1):
        yield place, model(fed, cache)[:, -1]
        fed = tokens[:, place + 1 : place + 2]


def training_logps(model: Any, batch: Batch, way: Stock) -> Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens by one pass over the whole padded batch."""
    return way.logps(model.head, model(batch.tokens[:, :-1]), batch.targets)
