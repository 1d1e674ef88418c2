"""The order of the routes: sorted by (expert, token, slot), on the device, without a look at the result."""

from __future__ import annotations

import torch


def sort_routes(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the order of the routes, as ``op`` describes it; routes without an expert come last."""
    keys = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten().int()
    places = torch.sort(keys, stable=True)
    numbers = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    bounds = torch.searchsorted(places.values, numbers, out_int32=True)
    return torch.cat((places.indices.int(), bounds))
