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


class Sorted(NamedTuple):
    """This rank's routes, sorted by (rank of the expert, token, slot); those without a rank come last.

    Attributes:
        order: the route at each position.
        owner: its rank, or the number of ranks.
        token: its token.
        begins: whether it is the first route of its token and rank.
        row: which token of all that are sent it belongs to.
        starts: ``[ranks + 1]``: the position of each rank's first route.
        starts_of_rows: the same of tokens that are sent.
    """

    order: torch.Tensor
    owner: torch.Tensor
    token: torch.Tensor
    begins: torch.Tensor
    row: torch.Tensor
    starts: torch.Tensor
    starts_of_rows: torch.Tensor


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
    ranks, slots = group_size(group), ids.shape[1]
    mine = _sorted(ids, experts, ranks)
    place, row = torch.arange(ids.numel(), device=ids.device), mine.row
    if max_tokens is None:
        rows, routes = _agreed_sizes(mine, group)
    else:
        rows, routes = (Sizes([size] * ranks, [size] * ranks) for size in (max_tokens, max_tokens * slots))
        numbers, owner = torch.arange(ranks + 1, device=ids.device), mine.owner.long()
        place = place + (numbers * (max_tokens * slots) - mine.starts)[owner]
        row = row + (numbers * max_tokens - mine.starts_of_rows)[owner]
    first = torch.searchsorted(row, torch.arange(sum(rows.sent), device=ids.device))
    tokens = F.pad(mine.token, (0, 1))[first]
    places = torch.empty_like(place)
    places[mine.order] = place
    code = (ids % experts).int().flatten()[mine.order] * 2 + mine.begins
    # Routes without a rank are cut off.
    records = _padding(sum(routes.sent) + ids.numel(), experts, ids)
    records[place] = torch.stack((code, weights.flatten()[mine.order].float().view(torch.int32)), 1)
    received = _padding(_padded(sum(routes.received)), experts, ids)
    _exchanged(records[: sum(routes.sent)], received[: sum(routes.received)], routes, group)
    row_of_route = _rows_of(received[:, 0] & 1, ranks, max_tokens)
    local, bits = (received[:, :1] >> 1).contiguous(), received[:, 1:].contiguous()
    return Plan(
        *(group, rows, routes, tokens, places.view(ids.shape).int(), row_of_route, local), bits.view(torch.float32)
    )


def _sorted(ids: torch.Tensor, experts: int, ranks: int) -> Sorted:
    is_here = (ids >= 0) & (ids < ranks * experts)
    owner = torch.where(is_here, ids // experts, ranks).flatten()
    owner, order = torch.sort(owner.to(torch.uint8 if ranks < SHORT else torch.int32), stable=True)
    token = order // ids.shape[1]
    begins = torch.ones_like(owner, dtype=torch.bool)
    begins[1:] = (token[1:] != token[:-1]) | (owner[1:] != owner[:-1])
    count = begins.cumsum(0)
    starts = torch.searchsorted(owner, torch.arange(ranks + 1, device=ids.device).to(owner.dtype))
    return Sorted(order, owner, token, begins, count - 1, starts, F.pad(count, (1, 0))[starts])


def _agreed_sizes(mine: Sorted, group: ProcessGroup) -> tuple[Sizes, Sizes]:
    """Return the sizes of the exchanges of tokens and of routes; the one wait for the device."""
    sent = torch.stack((mine.starts_of_rows.diff(), mine.starts.diff()), 1)
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    sizes = torch.stack((sent, received)).permute(2, 0, 1).tolist()
    return Sizes(*sizes[0]), Sizes(*sizes[1])


def _rows_of(begins: torch.Tensor, ranks: int, max_tokens: int | None) -> torch.Tensor:
    """Return the received row of each received route, by the marks where a new one begins."""
    if max_tokens is None:
        return begins.cumsum(0) - 1
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
