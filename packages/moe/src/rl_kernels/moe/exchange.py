"""The exchange of routes between ranks: tokens to the ranks of their experts, results back, by ``torch.distributed``.

A rank sends each of its tokens once to each rank that has any of its experts, in token order, and for each route two
numbers: the expert with a mark where a new token begins, and the weight. What arrives is then in the order of
(source rank, token, slot), which is that of one process with the tokens of all ranks. Results travel back route by
route: their sum goes slot by slot, whatever rank has the expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import group_size

SHORT = 256
"""Numbers of ranks up to which they are sorted as bytes."""
STEPS = 32
"""Least number of steps in which the received routes are counted: they are padded by less than one part in it."""


class Sizes(NamedTuple):
    """Rows that this rank sends to each rank, and those that it receives from each."""

    sent: list[int]
    received: list[int]


class Plan(NamedTuple):
    """The routes of one call over ranks.

    Attributes:
        group: the ranks.
        rows: tokens that are exchanged.
        routes: routes that are exchanged.
        tokens: the token of each row that is sent.
        places: ``[T, k]``, int32: where the result of each route of this rank's tokens comes back.
        row_of_route: ``[P]``: the received row of each received route, padded so that few values of P occur.
        ids: ``[P, 1]``, int32: the expert of each received route, counted from this rank's first; padding has none.
        weights: ``[P, 1]``, FP32: its weight.
    """

    group: ProcessGroup
    rows: Sizes
    routes: Sizes
    tokens: torch.Tensor
    places: torch.Tensor
    row_of_route: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def send_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the received rows of ``x[T, D]``, which ``row_of_route`` turns into those of routes."""
        rows = (x if len(x) else x.new_zeros((1, *x.shape[1:])))[self.tokens]
        return _exchanged(rows, x.new_empty((sum(self.rows.received), *x.shape[1:])), self.rows, self.group)

    def send_back(self, y: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``y[P, N]`` that belong to routes of this rank's tokens, at their ``places``."""
        sent, back = sum(self.routes.received), sum(self.routes.sent)
        # As large in each call with as many tokens, because launches are prepared for a shape.
        returned = y.new_empty((max(back, self.places.numel()), y.shape[1]))
        _exchanged(y[:sent], returned[:back], Sizes(self.routes.received, self.routes.sent), self.group)
        return returned


def plan_of(
    ids: torch.Tensor, weights: torch.Tensor, experts: int, group: ProcessGroup, max_tokens: int | None
) -> Plan:
    """Exchange the routes of all ranks; return the plan of the rows' exchange.

    Args:
        ids: ``[T, k]``; an id outside of all experts has no rank.
        weights: ``[T, k]``.
        experts: number of experts of each rank.
        group: the ranks.
        max_tokens: None: the ranks tell each other how many rows they send, which this host waits for. A number of
            tokens that no rank exceeds: each exchange has its largest size, and nothing waits.
    """
    ranks, (tokens, slots) = group_size(group), ids.shape
    known = (ids >= 0) & (ids < ranks * experts)
    owner = torch.where(known, ids // experts, ranks).flatten()
    owner, order = torch.sort(owner.to(torch.uint8 if ranks < SHORT else torch.int32), stable=True)
    token = order // slots
    begins = torch.ones_like(owner, dtype=torch.bool)
    begins[1:] = (token[1:] != token[:-1]) | (owner[1:] != owner[:-1])
    count = begins.cumsum(0)
    numbers = torch.arange(ranks + 1, device=ids.device)
    ends = torch.searchsorted(owner, numbers.to(owner.dtype))
    ends_of_rows = F.pad(count, (1, 0))[ends]
    place, row = torch.arange(len(order), device=ids.device), count - 1
    if max_tokens is None:
        rows, routes = _agreed_sizes(ends_of_rows.diff(), ends.diff(), group)
    else:
        rows, routes = (Sizes([size] * ranks, [size] * ranks) for size in (max_tokens, max_tokens * slots))
        at = owner.long()
        place = place + (numbers * (max_tokens * slots) - ends)[at]
        row = row + (numbers * max_tokens - ends_of_rows)[at]
    first = torch.searchsorted(row, torch.arange(sum(rows.sent), device=ids.device))
    places = torch.empty_like(place)
    places[order] = place
    code = (ids % experts).int().flatten()[order] * 2 + begins
    records = _padding(sum(routes.sent) + len(order), experts, ids)
    # Routes without a rank come last, and are cut off.
    records[place] = torch.stack((code, weights.flatten()[order].float().view(torch.int32)), 1)
    received = _padding(_padded(sum(routes.received)), experts, ids)
    _exchanged(records[: sum(routes.sent)], received[: sum(routes.received)], routes, group)
    index = _rows_of(received[:, 0] & 1, rows, max_tokens)
    local, bits = (received[:, :1] >> 1).contiguous(), received[:, 1:].contiguous()
    tensors = (F.pad(token, (0, 1))[first], places.view(tokens, slots).int(), index, local, bits.view(torch.float32))
    return Plan(group, rows, routes, *tensors)


def _agreed_sizes(rows: torch.Tensor, routes: torch.Tensor, group: ProcessGroup) -> tuple[Sizes, Sizes]:
    """Return the sizes of both exchanges, from the rows and routes for each rank; the one wait for the device."""
    sent = torch.stack((rows, routes), 1)
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    sizes = torch.stack((sent, received)).permute(2, 0, 1).tolist()
    return Sizes(*sizes[0]), Sizes(*sizes[1])


def _rows_of(begins: torch.Tensor, rows: Sizes, max_tokens: int | None) -> torch.Tensor:
    """Return the received row of each received route, by the marks where a new one begins."""
    if max_tokens is None:
        return begins.cumsum(0) - 1
    ranks = len(rows.received)
    first = torch.arange(ranks, device=begins.device) * max_tokens
    return (begins.view(ranks, -1).cumsum(1) - 1 + first[:, None]).clamp(min=0).flatten()


def _padding(count: int, experts: int, like: torch.Tensor) -> torch.Tensor:
    """Return the records of routes without an expert."""
    records = like.new_zeros((count, 2), dtype=torch.int32)
    records[:, 0] = 2 * experts
    return records


def _padded(count: int) -> int:
    step = max(1, (1 << count.bit_length()) // (2 * STEPS))
    return -(-count // step) * step


def _exchanged(x: torch.Tensor, out: torch.Tensor, sizes: Sizes, group: ProcessGroup) -> torch.Tensor:
    distributed.all_to_all_single(out, x.contiguous(), sizes.received, sizes.sent, group=group)
    return out
