"""``audit_rollouts``: sample completions, score them as training does, and count the tokens that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.models.logits import in_mode
from rl_kernels.models.pretrained import is_pretrained
from rl_kernels.models.rollouts.counts import BOUNDS, CLIP, Mismatch, mismatch
from rl_kernels.models.rollouts.samples import Batch, Sample, batches, padded
from rl_kernels.models.rollouts.ways import Invariant, Stock
from rl_kernels.models.swap import replaced
from rl_kernels.models.trace import chosen_experts

Counts = Mapping[str, Mapping[str, Mismatch]]
"""Way to compute -> way to batch the training pass -> counts."""


@dataclass(frozen=True)
class RolloutAudit:
    """Result of ``audit_rollouts``.

    Attributes:
        samples: number of completions.
        is_recorded: whether the log-probs of the rollout were given, not sampled here.
        counts: ``stock`` and ``invariant`` -> ``padded``, ``micro-batches``, ``packed`` -> the differences between
            rollout and such a training pass.
    """

    samples: int
    is_recorded: bool
    counts: Counts

    @property
    def passed(self) -> bool:
        """Whether under ``invariant`` no log-prob of training differs from the rollout's."""
        return not any(each.differ for each in self.counts[Invariant.name].values())


@torch.no_grad()
def audit_rollouts(
    model: Any,
    rollout: Sequence[torch.Tensor] | Sequence[Sample],
    *,
    tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    bounds: tuple[float, float] = BOUNDS,
    clip: float = CLIP,
    progress: Callable[[str], None] = lambda text: None,
) -> RolloutAudit:
    """Compare the log-probs of a rollout with those of training passes, of the stock model and under ``invariant``.

    ``generate`` samples a completion of each prompt, all prompts in one batch that is padded on the left, once as the
    model comes and once under ``invariant``. Then training passes with the same weights score the completions: in one
    padded batch, in padded micro-batches, and packed. The model runs in eval mode and without gradients; afterwards it
    is as it was.

    Args:
        model: a causal language model of transformers, without wrappers.
        rollout: prompts, 1-D tensors of token ids; or recorded samples, of which nothing is sampled.
        tokens: most tokens of a completion; an end token of the model ends it too.
        temperature: divides the logits, in sampling and in scoring.
        seed: seed of PyTorch's generators for sampling.
        bounds, clip: of the ratios that are counted, as in ``mismatch``.
        progress: is told what was done.

    Returns:
        the counts.

    Raises:
        TypeError, ValueError: the model is none of these, a prompt is no 1-D tensor of ids in its vocabulary, its head
            cannot be scored, or another argument is out of range; the message says which.
    """
    check_model(model)
    check.number("temperature", temperature, above=0)
    check.integer("tokens", tokens, least=1)
    recorded = [each for each in rollout if isinstance(each, Sample)]
    prompts = [each for each in rollout if isinstance(each, torch.Tensor)]
    if not rollout or len(rollout) not in (len(recorded), len(prompts)):
        raise TypeError("rollout: expected prompts, 1-D tensors of token ids, or samples; at least one")
    _check_ids(model, [each.tokens for each in recorded] or prompts)
    counts: dict[str, dict[str, Mismatch]] = {}
    with in_mode(model, training=False):
        for kind in (Stock, Invariant):
            way = kind(model, temperature)
            with way.active():
                samples = recorded or _sampled(model, way, prompts, tokens, seed)
                progress(f"{way.name}: {sum(len(each.logps) for each in samples):,} tokens of rollouts")
                counts[way.name] = {}
                for name, parts in batches(samples).items():
                    scored = _scored(model, way, samples, parts)
                    counts[way.name][name] = _compared(samples, scored, bounds, clip)
                    progress(f"{way.name}: scored {name}")
    return RolloutAudit(len(rollout), bool(recorded), counts)


def check_model(model: Any) -> None:
    """Raise ``TypeError`` unless a model is a causal language model of transformers."""
    if not is_pretrained(model) or model.get_output_embeddings() is None:
        raise TypeError(f"model: expected a causal language model of transformers, got {type(model).__name__}")


def _check_ids(model: Any, sequences: Sequence[torch.Tensor]) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    for number, ids in enumerate(sequences):
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
            raise ValueError(f"rollout[{number}]: expected 1-D token ids, got {ids.dtype} of shape {tuple(ids.shape)}")
        least, most = int(ids.min()), int(ids.max())
        if not 0 <= least <= most < size:
            raise ValueError(f"rollout[{number}]: expected token ids in [0, {size}), got {least} to {most}")


def _sampled(model: Any, way: Stock, prompts: Sequence[torch.Tensor], tokens: int, seed: int) -> list[Sample]:
    """Return the completions that ``generate`` samples, with the log-prob of each token."""
    from transformers import GenerationConfig

    nothing = prompts[0].new_zeros(0)
    inputs = {name: value.to(model.device) for name, value in padded([(ids, nothing) for ids in prompts]).items()}
    del inputs["position_ids"]  # generate makes the same
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=0)
    torch.manual_seed(seed)
    # Values that this config leaves open would come from the model's own, such as a penalty of repetitions.
    with (
        replaced(model, "generation_config", GenerationConfig()),
        chosen_experts(model) as chosen,
        way.recording() as recorder,
    ):
        found = model.generate(**inputs, generation_config=config, logits_processor=[recorder])
    logps = recorder.logps(found).cpu()
    completions = found[:, inputs["input_ids"].shape[1] :].cpu()
    # A pass of [B P], then passes of [B].
    experts = torch.stack([ids.unflatten(0, (len(found), -1))[:, -1] for ids in chosen], 1).cpu() if chosen else None
    samples = []
    for row, (ids, length) in enumerate(zip(completions, _lengths(completions, ends), strict=True)):
        mine = None if experts is None else experts[row, :length]
        samples.append(Sample(prompts[row].cpu(), ids[:length], logps[row, :length], mine))
    return samples


def _lengths(completions: torch.Tensor, ends: int | Sequence[int] | None) -> list[int]:
    """Return the number of tokens of each completion, with its end token."""
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    is_end = torch.isin(completions, torch.tensor(ends, dtype=completions.dtype, device=completions.device))
    # Tokens before which none is an end.
    return (is_end.long().cumsum(1) - is_end.long() == 0).sum(1).tolist()


Scored = list[tuple[torch.Tensor, torch.Tensor | None]]
"""For each sample the log-probs ``[T]`` of a training pass, and the experts ``[T, choices]``."""


def _scored(model: Any, way: Stock, samples: Sequence[Sample], parts: Sequence[Batch]) -> Scored:
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for batch in parts:
        inputs = {name: value.to(model.device) for name, value in batch.inputs.items()}
        with chosen_experts(model) as chosen:
            logps = way.score(inputs).cpu()
        experts = chosen[-1].unflatten(0, inputs["input_ids"].shape).cpu() if chosen else None
        for place in batch.places:
            # The position before a token chose it.
            tokens = slice(place.first - 1, place.first - 1 + len(samples[place.sample].completion))
            found[place.sample] = logps[place.row, tokens], None if experts is None else experts[place.row, tokens]
    return [found[index] for index in range(len(samples))]


def _compared(samples: Sequence[Sample], scored: Scored, bounds: tuple[float, float], clip: float) -> Mismatch:
    rollout, training = torch.cat([each.logps for each in samples]), torch.cat([logps for logps, _ in scored])
    then = [each.experts for each in samples if each.experts is not None]
    now = [experts for _, experts in scored if experts is not None]
    both = (torch.cat(then), torch.cat(now)) if then and now else None
    return mismatch(rollout, training, both, bounds=bounds, clip=clip)
