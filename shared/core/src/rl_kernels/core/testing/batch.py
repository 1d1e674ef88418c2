"""A synthetic RL batch, shaped like real ones: grouped samples, left-padded prompts, right-padded completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from rl_kernels.core.testing.draw import Draw

PADDING_ID = 0
"""The id at masked positions of ``input_ids`` and ``token_ids``: a valid one, so that it can be looked up."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class RLBatch:
    """One batch of B = num_prompts * samples_per_prompt sequences, the samples of a prompt side by side.

    P is the prompt length, T the completion length. Floats are in the requested dtype, ids int64, masks bool (True is
    a real token). Masked positions hold id 0 and log-probability 0.

    Attributes:
        input_ids: ``[B, P + T]``, prompt and completion.
        attention_mask: ``[B, P + T]``, the prompt mask followed by the completion mask.
        prompt_mask: ``[B, P]``, padded on the left, the same for all samples of a prompt.
        completion_mask: ``[B, T]``, padded on the right; a row may be fully masked.
        token_ids: ``[B, T]``, the completions.
        rewards: ``[B]``.
        advantages: ``[B]``, (r - mean) / max(std, 1e-6) over the samples of a prompt, population std, computed in FP64.
        old_logps: ``[B, T]``, <= 0, of the policy that sampled.
        ref_logps: ``[B, T]``, <= 0, of the reference policy, close to ``old_logps``.
        valid_indices: ``[R]`` int64, ascending: where the flattened completion mask is True.
        metadata: the arguments that made the batch (dtype and device by name), and ``valid_tokens``, which is R.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt_mask: torch.Tensor
    completion_mask: torch.Tensor
    token_ids: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    old_logps: torch.Tensor
    ref_logps: torch.Tensor
    valid_indices: torch.Tensor
    metadata: Mapping[str, int | float | str]

    def per_token(self) -> dict[str, torch.Tensor]:
        """Return the ``[B, T]`` tensors by name, as the layout helpers take them."""
        return {name: getattr(self, name) for name in ("token_ids", "completion_mask", "old_logps", "ref_logps")}


def make_synthetic_rl_kernel_batch(
    num_prompts: int = 2,
    samples_per_prompt: int = 4,
    prompt_len: int = 8,
    completion_len: int = 16,
    vocab_size: int = 257,
    valid_density: float = 0.75,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> RLBatch:
    """Draw a batch; the same arguments give the same values, on every device.

    Args:
        num_prompts: >= 1.
        samples_per_prompt: >= 1.
        prompt_len: longest prompt, >= 1; each is at least half as long.
        completion_len: longest completion, >= 1.
        vocab_size: ids are in ``[0, vocab_size)``; >= 1.
        valid_density: expected share of completion positions that hold a token, in [0, 1]; lengths are spread evenly
            around it, as widely as they can be. 0 masks everything, 1 nothing.
        dtype: dtype of the floating tensors: FP32, BF16, FP16 or FP64.
        device: device of the batch; it is drawn on the CPU.
        seed: >= 0.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    arguments = dict(locals())
    _validate(arguments)
    draw = Draw(dtype, seed=seed)
    count = num_prompts * samples_per_prompt
    lengths = draw.ids(prompt_len - prompt_len // 2, num_prompts) + prompt_len // 2 + 1
    prompt_mask = torch.arange(prompt_len) >= prompt_len - lengths[:, None]
    prompts = torch.where(prompt_mask, draw.ids(vocab_size, num_prompts, prompt_len), PADDING_ID)
    prompts, prompt_mask = (value.repeat_interleave(samples_per_prompt, 0) for value in (prompts, prompt_mask))

    completion_mask = torch.arange(completion_len) < _lengths(draw, count, completion_len, valid_density)[:, None]
    token_ids = torch.where(completion_mask, draw.ids(vocab_size, count, completion_len), PADDING_ID)
    old = draw.uniform(1e-3, 1.0, count, completion_len, dtype=torch.float64).log()
    ref = (old + draw.normal(count, completion_len, scale=0.1, dtype=torch.float64)).clamp(max=0.0)
    old, ref = (torch.where(completion_mask, value, 0.0).to(dtype) for value in (old, ref))
    rewards = draw.normal(count)
    tensors = {
        "input_ids": torch.cat((prompts, token_ids), 1),
        "attention_mask": torch.cat((prompt_mask, completion_mask), 1),
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask,
        "token_ids": token_ids,
        "rewards": rewards,
        "advantages": _advantages(rewards, samples_per_prompt),
        "old_logps": old,
        "ref_logps": ref,
        "valid_indices": completion_mask.flatten().nonzero()[:, 0],
    }
    named = {"dtype": str(dtype).removeprefix("torch."), "device": str(device)}
    metadata = {**arguments, **named, "valid_tokens": int(completion_mask.sum())}
    return RLBatch(**{name: value.to(device) for name, value in tensors.items()}, metadata=MappingProxyType(metadata))


def _lengths(draw: Draw, count: int, longest: int, density: float) -> torch.Tensor:
    low = round(max(0.0, 2 * density - 1) * longest)
    high = round(min(1.0, 2 * density) * longest)
    return low + draw.ids(high - low + 1, count)


def _advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    grouped = rewards.double().view(-1, group)
    spread = grouped.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    return ((grouped - grouped.mean(1, keepdim=True)) / spread).flatten().to(rewards.dtype)


def _validate(arguments: Mapping[str, Any]) -> None:
    counts = ("num_prompts", "samples_per_prompt", "prompt_len", "completion_len", "vocab_size")
    for name, least in {**dict.fromkeys(counts, 1), "seed": 0}.items():
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    density = arguments["valid_density"]
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 <= density <= 1:
        raise ValueError(f"valid_density: expected a number in [0, 1], got {density!r}")
    if arguments["dtype"] not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"dtype: expected one of {known}, got {arguments['dtype']!r}")
    device = arguments["device"]
    try:
        torch.empty(0, device=device)
    # A malformed name, a missing device and a build without CUDA raise different errors.
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"device: expected one that torch can use here, got {device!r}: {error}") from error
