"""The bits of the models of `model_step.py`: ways to batch prompts, and what differs from the prompts alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from model_continuous import answered
from model_ways import STOCK, Way

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.peers import one_line
from rl_kernels.models import head_logp

SHORTEST, LONGEST = 5, 300
"""Tokens of the shortest and the longest prompt whose bits are compared."""
CHUNK, DECODED = 37, 40
PACKED = (48, 16, 80)
"""Lengths of sequences whose gradients are compared: multiples of the 16 rows of a step of det_gemm's chain."""


def prompts(args: argparse.Namespace) -> list[torch.Tensor]:
    """Draw prompts of many lengths."""
    generator = torch.Generator().manual_seed(args.seed + 3)
    lengths = torch.randint(SHORTEST, args.longest, (args.prompts,), generator=generator).tolist()
    return [torch.randint(1, args.vocab, (n,), generator=generator).to(args.device) for n in lengths]


def padded(prompt_ids: Sequence[torch.Tensor], *, left: bool) -> dict[str, torch.Tensor]:
    """Return a batch of prompts that is padded on one side."""
    width = max(map(len, prompt_ids))
    ids = prompt_ids[0].new_zeros(len(prompt_ids), width)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompt_ids):
        place = slice(width - len(prompt), width) if left else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def packed(prompt_ids: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return prompts concatenated in one row, as DataCollatorWithFlattening does."""
    lengths = torch.tensor([0, *map(len, prompt_ids)], device=prompt_ids[0].device)
    ends = lengths.cumsum(0).int()
    positions = torch.cat([torch.arange(len(prompt), device=prompt.device) for prompt in prompt_ids])
    most = int(lengths.max())
    limits = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": most, "max_length_k": most}
    return {"input_ids": torch.cat(list(prompt_ids))[None], "position_ids": positions[None], **limits}


States = Callable[[Any], torch.Tensor]
"""Takes a body's output; returns its last hidden states, with the ids of the chosen experts behind them."""


@contextmanager
def choices(model: Any) -> Iterator[States]:
    """Yield a function of a body's output: its last hidden states, then the ids of the experts of each layer, sorted.

    Both are in FP32, which holds them; the states of a model without experts come as they are.
    """
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if "router" in type(module).__name__.lower()]
    hooks = [
        module.register_forward_hook(lambda *hook_args: chosen.append(hook_args[-1][2].sort(-1).values))
        for module in routers
    ]

    def states(output: Any) -> torch.Tensor:
        hidden: torch.Tensor = output.last_hidden_state
        ids = [each.view(*hidden.shape[:2], -1).float() for each in chosen[-len(routers) :]]
        chosen.clear()
        return torch.cat((hidden.float(), *ids), -1) if routers else hidden

    yield states
    for hook in hooks:
        hook.remove()


def surroundings(
    way: Way, prompt_ids: Sequence[torch.Tensor], states: States
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return calls that compute the last hidden states of each prompt alone, padded, packed, in chunks, and decoded."""
    from transformers import DynamicCache

    body = way.model.model

    def hidden(**inputs: Any) -> torch.Tensor:
        return states(body(**inputs))

    def alone() -> list[torch.Tensor]:
        return [hidden(input_ids=ids[None], use_cache=False)[0] for ids in prompt_ids]

    def in_batch(left: bool) -> list[torch.Tensor]:
        batch = padded(prompt_ids, left=left)
        out = hidden(**batch, use_cache=False)
        return [row[mask.bool()] for row, mask in zip(out, batch["attention_mask"], strict=True)]

    def in_one_row() -> list[torch.Tensor]:
        return list(hidden(**packed(prompt_ids), use_cache=False)[0].split([len(ids) for ids in prompt_ids]))

    def in_chunks() -> list[torch.Tensor]:
        chunks = []
        for ids in prompt_ids:
            cache = DynamicCache(config=body.config)
            parts = [hidden(input_ids=x[None], past_key_values=cache, use_cache=True)[0] for x in ids.split(CHUNK)]
            chunks.append(torch.cat(parts))
        return chunks

    return {
        "alone": alone,
        "padded on the left": partial(in_batch, left=True),
        "padded on the right": partial(in_batch, left=False),
        "packed": in_one_row,
        f"in chunks of {CHUNK}, cached": in_chunks,
        "token by token, together, cached": lambda: _decoded(hidden, DynamicCache(config=body.config), prompt_ids),
    }


def _decoded(hidden: Callable[..., torch.Tensor], cache: Any, prompt_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    batch = padded(prompt_ids, left=False)["input_ids"][:, : max(DECODED, SHORTEST)]
    out = [hidden(input_ids=batch[:, :SHORTEST], past_key_values=cache, use_cache=True)]
    out += [
        hidden(input_ids=batch[:, at : at + 1], past_key_values=cache, use_cache=True)
        for at in range(SHORTEST, batch.shape[1])
    ]
    return [row[: len(ids)] for row, ids in zip(torch.cat(out, 1), prompt_ids, strict=True)]


@torch.no_grad()
def scores(
    way: Way, prompt_ids: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """Return the logits of each prompt, the log-probabilities of its own tokens, and the ids of their experts."""
    head = way.model.lm_head
    sizes = [len(states) for states in hidden]
    rows, experts = torch.cat(list(hidden)).tensor_split([head.in_features], -1)
    rows = rows.to(head.weight.dtype)
    targets = torch.cat([ids.roll(-1)[:size] for ids, size in zip(prompt_ids, sizes, strict=True)])
    parts = (head(rows), head_logp(head, rows, targets), experts)
    return list(zip(*(part.split(sizes) for part in parts), strict=True))


@torch.no_grad()
def differing(
    way: Way, prompt_ids: Sequence[torch.Tensor], *, continuous: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Count, for each way of batching, elements of logits and log-probabilities that differ from the prompts alone.

    Of a mixture also the tokens with other experts in any layer, and by how much the log-probabilities of these tokens
    and of the rest differ. With ``continuous`` also transformers' continuous batching.

    Returns:
        The counts, and the errors of batches that the stock model refuses.
    """
    counts, refused, alone = {}, {}, []
    with choices(way.model) as states:
        for name, run in surroundings(way, prompt_ids, states).items():
            try:
                scored = scores(way, prompt_ids, run())
            except (RuntimeError, ValueError) as error:
                if way.name != STOCK:
                    raise
                refused[name] = one_line(error)
                continue
            if name == "alone":
                alone = scored
            else:
                counts[name] = _counted(scored, alone)
        if continuous:
            whole, hidden = answered(way.model, prompt_ids, states)
            expected = surroundings(way, whole, states)["alone"]()
            counts["continuous batching"] = _counted(scores(way, whole, hidden), scores(way, whole, expected))
    return counts, refused


def _counted(scored: Sequence[tuple[torch.Tensor, ...]], alone: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, Any]:
    counts: dict[str, Any] = dict.fromkeys(("logits", "of_logits", "logps", "of_logps", "experts", "of_tokens"), 0)
    moves, rerouted = [], []
    for mine, expected in zip(scored, alone, strict=True):
        logits, logps, experts = (
            bits_of(value) != bits_of(other[: len(value)]) for value, other in zip(mine, expected, strict=True)
        )
        counts["logits"] += int(logits.sum())
        counts["logps"] += int(logps.sum())
        counts["experts"] += int(experts.any(-1).sum())
        counts["of_logits"] += logits.numel()
        counts["of_logps"] += logps.numel()
        counts["of_tokens"] += len(experts) if experts.numel() else 0
        moves.append((mine[1] - expected[1][: len(logps)]).abs())
        rerouted.append(experts.any(-1))
    if counts["of_tokens"]:
        moved, is_other = torch.cat(moves), torch.cat(rerouted)
        counts["moves"] = {"other experts": extent(moved[is_other]), "the same experts": extent(moved[~is_other])}
    return counts


def extent(moves: torch.Tensor) -> dict[str, float]:
    """Return the mean and the largest of absolute differences, 0 if there are none."""
    moves = moves if len(moves) else moves.new_zeros(1)
    return {"mean": float(moves.mean()), "largest": float(moves.max())}


def gradients(way: Way, args: argparse.Namespace) -> dict[str, int]:
    """Count the elements of parameters' gradients that differ between a packed and a padded batch."""
    generator = torch.Generator().manual_seed(args.seed + 5)
    sequences = [torch.randint(1, args.vocab, (n,), generator=generator).to(args.device) for n in PACKED]
    above = [torch.randn(n, args.hidden, generator=generator).to(args.device, DTYPES[args.dtype]) for n in PACKED]
    batch = padded(sequences, left=False)
    upstream = torch.zeros(*batch["input_ids"].shape, args.hidden, device=args.device, dtype=DTYPES[args.dtype])
    for row, part in enumerate(above):
        upstream[row, : len(part)] = part
    gradients_by_batch = []
    for inputs, grad in ((packed(sequences), torch.cat(above)[None]), (batch, upstream)):
        way.model.zero_grad(set_to_none=True)
        way.model.model(**inputs, use_cache=False).last_hidden_state.backward(grad)
        # Leave out the embedding, whose gradient is PyTorch's own, and experts: padding has routes too, and moves
        # others to another step of their sum.
        named = [each for each in way.model.model.layers.named_parameters() if ".experts." not in each[0]]
        gradients_by_batch.append({name: value.grad.clone() for name, value in named if value.grad is not None})
    pairs = [(value, gradients_by_batch[1][name]) for name, value in gradients_by_batch[0].items()]
    differ = sum(int((bits_of(value) != bits_of(other)).sum()) for value, other in pairs)
    return {"differ": differ, "elements": sum(value.numel() for value, _ in pairs)}
