"""Replay of recorded routes: tokens go to the experts that an engine chose, and differences from the model are counted.

A pass runs the sequences whose routes are set, in their order, in any padding or packing. Padding, and tokens without a
recorded route, go where the model's own router sends them. Layers that gradient checkpointing recomputes take the
routes of the last pass: run backward before the next pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rl_kernels.core import validate as check

LAYER = "_rl_kernels_replay"
"""Attribute of a router whose routes are replayed."""
MISSING = -1
"""Id of a route that was not recorded."""


class Replay:
    """The recorded routes of the sequences that a model runs next."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._routers = len(routers)
        self._routes: torch.Tensor | None = None
        self._ids: torch.Tensor | None = None
        self._other: torch.Tensor | None = None
        self._counts: list[torch.Tensor] = []
        self.layers = [_Layer(self, place) for place in range(len(routers))]

    def set(self, routes: Sequence[torch.Tensor] | None) -> None:
        """Set the routes of the sequences of the next passes, each ``[T, layers, k]``; None replays nothing."""
        if routes is not None:
            for number, each in enumerate(routes):
                check.tensor(f"routes[{number}]", each, check.INTEGERS, ndim=3)
                expected = (len(each), self._routers, routes[0].shape[2])
                check.shape(f"routes[{number}]", each, expected, "tokens, layers with experts, experts of a token")
            self._routes = torch.cat([each.detach() for each in routes])
        else:
            self._routes = None
        self._finish()

    def begin(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Lay the routes out for a pass over ``tokens[B, T, ...]``, whose padding is 0 in ``mask[B, T]``."""
        self._finish()
        if self._routes is None:
            return
        if mask is not None and mask.ndim != len("BT"):
            raise ValueError(f"attention_mask: expected [B, T] while routes are replayed, got {tuple(mask.shape)}")
        routes, count = self._routes.to(tokens.device), tokens.shape[0] * tokens.shape[1]
        real = routes.new_ones(count, dtype=torch.bool) if mask is None else mask.flatten() != 0
        # One look at the mask per pass.
        total = count if mask is None else int(real.sum())
        if len(real) != count or total != len(routes):
            raise ValueError(f"routes: expected those of the {total} tokens of the pass, got {len(routes)}")
        place = (real.cumsum(0) - 1).clamp(min=0)
        self._ids = torch.where(real[:, None, None], routes[place], MISSING)
        self._other = real.new_zeros(count)

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the ids ``[T, k]`` to route by, from those that the router itself chose."""
        if self._ids is None:
            return own
        ids = self._ids[:, layer]
        if ids.shape != own.shape:
            raise ValueError(f"routes: expected ids {tuple(own.shape)} in a layer, got {tuple(ids.shape)}")
        known = (ids != MISSING).all(-1, keepdim=True)
        ids = torch.where(known, ids, own).to(own.dtype)
        # Or, so that a layer that is recomputed counts once.
        assert self._other is not None
        self._other |= (ids.sort(-1).values != own.sort(-1).values).any(-1)
        return ids

    def counts(self) -> tuple[int, int]:
        """Return the tokens that the model would have sent to other experts in any layer, and all tokens replayed."""
        both = [*self._counts, *self._last()]
        other, known = sum(both).tolist() if both else (0, 0)  # type: ignore[union-attr]
        return other, known

    def _last(self) -> list[torch.Tensor]:
        """Return the counts of the last pass, on its device."""
        if self._ids is None or self._other is None:
            return []
        return [torch.stack((self._other.sum(), (self._ids != MISSING).all(-1).all(-1).sum()))]

    def _finish(self) -> None:
        """Add the last pass to the counts."""
        last = self._last()
        self._counts = [sum(self._counts, start=last[0])] if last else self._counts
        self._ids = self._other = None


class _Layer:
    """The routes of one router; a copy of the router has none."""

    def __init__(self, replay: Replay, place: int) -> None:
        self._replay, self._place = replay, place

    def choose(self, own: torch.Tensor) -> torch.Tensor:
        return self._replay.choose(self._place, own)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def watch(model: nn.Module, replay: Replay) -> Callable[[], None]:
    """Lay routes out before each pass of a model; return a function that stops it."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = arguments.get("input_ids")
        tokens = arguments["inputs_embeds"] if tokens is None else tokens
        replay.begin(tokens, arguments.get("attention_mask"))

    # Before invariant's own hook, which passes another mask on.
    return model.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove
