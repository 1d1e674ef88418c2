"""Decoding of the models of `model_ways.py`: a step with a static cache, in a CUDA graph, and eager `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from model_ways import Way
from torch.overrides import TorchFunctionMode

from rl_kernels.lab.bench.measure import capture


def decoding(way: Way, batch: int, keys: int) -> Callable[[], Any]:
    """Return a step of decoding with a static cache that holds ``keys - 1`` tokens of each sequence."""
    from transformers import StaticCache

    model = way.model.model
    device = next(model.parameters()).device
    cache = StaticCache(config=model.config, max_cache_len=keys)
    takes = inspect.signature(model.forward).parameters
    ids = torch.randint(1, model.config.vocab_size, (batch, keys), device=device)

    def step(first: int, stop: int) -> Any:
        # Layers of a cache count their tokens; reset the count, so that the step can be repeated. A sliding window
        # counts in an int too, by which it chooses what to do.
        for layer in cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, torch.Tensor):
                length.fill_(first)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = first
        places = torch.arange(first, stop, device=device)
        options = {"position_ids": places[None], "cache_position": places, "past_key_values": cache, "use_cache": True}
        known = {name: value for name, value in options.items() if name in takes}
        return model(ids[:, first:stop], **known).last_hidden_state

    with torch.no_grad():
        for first in range(0, keys - 1, 512):
            step(first, min(first + 512, keys - 1))
    return torch.no_grad()(lambda: step(keys - 1, keys))


class Filled(TorchFunctionMode):
    """Fills constants on the device that the stock code copies from the host, which no CUDA graph can hold.

    In transformers 5.17 these are the last place of a full sliding window and the 0 of an eager mask.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a constant of one element filled on its device, and other results unchanged."""
        options = dict(kwargs or {})
        if func is torch.tensor and isinstance(args[0], int | float | list) and np.size(args[0]) == 1:
            value = np.asarray(args[0])
            return torch.full(value.shape, value.item(), **options)
        return func(*args, **options)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step captured in a CUDA graph; ``RuntimeError`` if it cannot be captured."""
    # A failed capture would leave its own stream as the current one.
    with Filled(), torch.cuda.stream(torch.cuda.current_stream()):
        clock = capture([step])

    # The default argument keeps alive what the step reads, such as its cache: the graph does not.
    def replay(_: Callable[[], Any] = step) -> None:
        clock.play()

    return replay


def generated(way: Way, tokens: int) -> Callable[[], Any]:
    """Return a call of ``generate`` that decodes one prompt greedily, in eager mode."""
    device = next(way.model.parameters()).device
    ids = torch.arange(1, 17, device=device)[None]
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return lambda: way.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
