"""Score sampled tokens as in training: ``linear_logp`` on the hidden states from which they were sampled.

The head returns its logits unrounded meanwhile, so tokens are drawn from what is scored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_kernels.models.clients.trl.head import MIN_LOGIT, Head
from rl_kernels.models.clients.trl.kept import KeptLogp, record_kept, watched
from rl_kernels.models.head import inputs_of, unrounded
from rl_kernels.models.swap import replaced

Sampled = tuple[list[list[int]], list[list[float]]]
"""The tokens of each completion, and the log-probability of each token, a ``KeptLogp`` where tokens were dropped."""
Around = Callable[[], AbstractContextManager[object]]
"""Makes a context for a computation, such as autocast."""


def check_rollout(trainer: Any, model: Any, refusal: str | None) -> None:
    """Refuse rollouts whose hidden states cannot be recorded; the model's settings are the trainer's defaults.

    Raises:
        ValueError: tokens are sampled elsewhere than in transformers, by more than one pass, from other logits, or from
            a part of the vocabulary that training cannot find.
    """
    if trainer.use_vllm:
        raise ValueError(
            "use_vllm: expected a trainer without it, to record what transformers samples; for vLLM's own log-probs "
            "set RL_KERNELS_VLLM=1 before the trainer is made, and call use_in(trainer, invariant=True, record=False)"
        )
    beyond = {
        "rollout_func": trainer.rollout_func is not None,
        # TRL replaces the forward of the head, whose logits then depend on the batch.
        "cast_lm_head_to_fp32": trainer.args.cast_lm_head_to_fp32,
    }
    for name, is_set in beyond.items():
        if is_set:
            raise ValueError(f"{name}: expected a trainer without it, to record what transformers samples")
    config = copy.copy(trainer.generation_config)
    for name, value in vars(model.generation_config).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise ValueError("generation_kwargs: expected no prefill_chunk_size, a prompt must take one pass")
    if getattr(config, "guidance_scale", None) not in (None, 1):
        raise ValueError("generation_kwargs: expected no guidance_scale, a token must take one pass")
    mode = config.get_generation_mode().value
    if mode not in ("sample", "greedy_search"):
        raise ValueError(f"generation_kwargs: expected one pass for each token, as in sampling, got {mode}")
    if config.do_sample and (config.temperature or 1.0) != trainer.temperature:
        got = f"{config.temperature} where training has {trainer.temperature}"
        raise ValueError(f"generation_kwargs: expected no temperature but GRPOConfig's, got {got}")
    # TRL suppresses a vision model's image token.
    if config.suppress_tokens and config.suppress_tokens != [getattr(model.config, "image_token_id", None)]:
        raise ValueError(
            f"generation_kwargs: expected no suppress_tokens, which log-probs count, got {config.suppress_tokens}"
        )
    # What generate sets itself, for processors that hide the end of a sequence.
    config._eos_token_tensor = torch.zeros(1, dtype=torch.int64, device="cpu")
    watched(model._get_logits_processor(config, input_ids_seq_length=1, device="cpu"), [], refusal)


def recorded(
    sample: Callable[..., Any],
    head: Head,
    model: Any,
    around: Around,
    refusal: str | None = None,
    *,
    by_ids: bool = False,
) -> Callable[..., Sampled]:
    """Return ``GRPOTrainer._generate_single_turn``, by ``generate``, with the log-probability of each sampled token.

    Args:
        sample: TRL's method.
        head: the head of the model.
        model: the model that generates, without wrappers.
        around: context of training passes, such as autocast, which otherwise only a wrapper applies.
        refusal: why the sampler may not drop tokens, or None.
        by_ids: record which ids were kept, in place of the smallest kept logit.
    """

    def sampled(*args: Any, **options: Any) -> Sampled:
        logps: list[list[float]] = []

        def generate(*args: Any, **options: Any) -> torch.Tensor:
            with (
                inputs_of(head.module, lambda hidden: hidden[:, -1].clone()) as rows,
                unrounded(head.module),
                record_kept(model, refusal, by_ids=by_ids) as kept,
            ):
                sequences: torch.Tensor = original(*args, **options)
            # Score before generate returns: weights gathered for the call are released after it.
            logps.extend(_logps(head, rows, sequences[:, options["input_ids"].shape[1] :], kept))
            return sequences

        original = model.generate
        with around(), replaced(model, "generate", generate):
            ids, _ = sample(*args, **options)
        return ids, [values[: len(tokens)] for values, tokens in zip(logps, ids, strict=True)]

    return sampled


@torch.no_grad()
def _logps(
    head: Head, rows: Sequence[torch.Tensor], ids: torch.Tensor, kept: Sequence[torch.Tensor]
) -> list[list[float]]:
    """Return the log-probabilities of tokens ``[B, T]``, sampled in T passes; kept is empty or has one of each."""
    count = ids.shape[1]
    if len(rows) < count:
        raise RuntimeError(f"rollout: expected a pass for each of {count} tokens, saw {len(rows)}")
    hidden = torch.stack(list(rows[:count]), 1)
    if kept and not kept[0].is_floating_point():
        return [_over_ids(head, *row) for row in zip(hidden, ids, zip(*kept[:count], strict=True), strict=True)]
    smallest = torch.stack(list(kept[:count]), 1) if kept else None
    options = {} if smallest is None else {MIN_LOGIT: smallest.flatten()}
    scored: list[list[float]] = head.logps(hidden.flatten(0, 1), ids.flatten(), **options).view(ids.shape).tolist()
    if smallest is None:
        return scored
    return [list(map(KeptLogp, *pair)) for pair in zip(scored, smallest.tolist(), strict=True)]


def _over_ids(head: Head, hidden: torch.Tensor, ids: torch.Tensor, kept: Sequence[torch.Tensor]) -> list[float]:
    """Score one completion ``[T]``, since a token may keep much of the vocabulary; ``kept`` has the ids of each."""
    kept_ids = pad_sequence(list(kept), batch_first=True, padding_value=-1)
    lengths = (kept_ids >= 0).sum(-1).tolist()
    kept_ids = kept_ids[:, : max(lengths)]
    logps = head.logps(hidden, ids, kept_ids=kept_ids).tolist()
    rows = zip(logps, kept_ids.cpu(), lengths, strict=True)
    return [KeptLogp(logp, row[:length].tolist()) for logp, row, length in rows]
