"""Exchanges of ranks on GPUs of one node through symmetric memory: a kernel reads the parts of its peers and adds them.

This is faster than collectives, which move parts through buffers of their own. Multicast is not used, because its sums
have no fixed order. Where symmetric memory is not to be had, on every rank alike, callers use collectives; both give
the same bits.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed.groups import gather_into, group_rank, group_size
from rl_kernels.core.torchlib import values_hidden
from rl_kernels.core.triton_lib.launch import INSTALLED

VARIABLE = "RL_KERNELS_SYMMETRIC_MEMORY"
"""``0`` turns it off; set it alike on all ranks."""
ONE_SHOT = 4 << 20
"""Up to this many bytes of a part, each rank adds the whole sum; above, a slice of it."""
LARGEST = 1 << 30
"""Bytes of the largest part that goes through symmetric memory."""
ALIGNED = 256
LEAST = 8 << 20
"""Bytes of the smallest window."""


class Window:
    """Symmetric memory of one group and GPU: flags, an area for a small part, one for a large part, one for sums."""

    def __init__(self, group: ProcessGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        from rl_kernels.core.triton_lib import peers

        self.size = size
        self.small = -(-peers.flag_bytes(group_size(group)) // ALIGNED) * ALIGNED
        self.parts = self.small + ONE_SHOT
        self.sums = self.parts + size
        self.memory = symmetric.empty(self.sums + size, dtype=torch.uint8, device=device)
        self.memory[: self.small].zero_()
        self.handle: Any = symmetric.rendezvous(self.memory, group)
        # No rank may set a flag before its owner has cleared it.
        self.handle.barrier()

        self._views: dict[tuple[Any, ...], torch.Tensor] = {}

    def area(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory of this rank for a tensor like another, from a byte on."""
        key = start, like.shape, like.dtype
        found = self._views.get(key)
        if found is None:
            found = self.memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
            self._views[key] = found
        return found


_windows: dict[tuple[str, int], Window | None] = {}
"""By name of the group, and GPU; None where a rank has no symmetric memory."""
_kept: list[Window | None] = []


def window_of(group: ProcessGroup, x: torch.Tensor) -> Window | None:
    """Return a window with room for parts like ``x``, or None; all ranks call it alike."""
    if not x.is_cuda or not INSTALLED or x.nbytes > LARGEST or os.environ.get(VARIABLE) == "0":
        return None
    if torch.compiler.is_compiling() or not x.nbytes or distributed.get_backend(group) != "nccl":
        return None
    key = group.group_name, x.get_device()
    if key in _windows and ((found := _windows[key]) is None or found.size >= x.nbytes):
        return found
    if values_hidden(x):
        # Memory cannot be mapped while a graph is captured.
        return None
    size = max(LEAST, 1 << (x.nbytes - 1).bit_length())
    # Peers and captured graphs may still use a smaller window, so it is kept.
    _kept.append(_windows.get(key))
    _windows[key] = _mapped(group, x.device, size)
    return _windows[key]


def _mapped(group: ProcessGroup, device: torch.device, size: int) -> Window | None:
    """Return a window if every rank could map one."""
    made: Window | None = None
    if _on_one_node(group, device):
        try:
            made = Window(group, device, size)
        except RuntimeError:  # no access between these GPUs
            made = None
    fine = torch.full((1,), int(made is not None), device=device)
    all_fine = fine.new_empty(group_size(group))
    gather_into(all_fine, fine, group)
    return made if bool(all_fine.all()) else None


def _on_one_node(group: ProcessGroup, device: torch.device) -> bool:
    boot = os.uname().nodename.encode()[:64].ljust(64)
    mine = torch.frombuffer(bytearray(boot), dtype=torch.uint8).to(device)
    names = mine.new_empty(group_size(group) * 64)
    gather_into(names, mine, group)
    return bool((names.view(-1, 64) == mine).all())


def all_reduce(
    window: Window, x: torch.Tensor, group: ProcessGroup, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tree sum over the ranks of a contiguous FP32 ``x[..., N]``, plus bias, rounded to ``dtype``."""
    from rl_kernels.core.triton_lib import peers

    out = x.new_empty(x.shape, dtype=dtype)
    size, rank = group_size(group), group_rank(group)
    if x.nbytes <= ONE_SHOT:
        peers.exchange(window.handle, 0, window.small, x, out, bias, rank, size)
        return out
    window.area(window.parts, x).copy_(x)
    sums = window.area(window.sums, out)
    window.handle.barrier()
    each = peers.aligned(-(-x.numel() // size))
    first = min(rank * each, x.numel())
    peers.add_parts(window.handle, window.parts, x.shape, first, min(first + each, x.numel()), sums, bias, size)
    window.handle.barrier()
    peers.copy_slices(window.handle, window.sums, out, each, size)
    return out


def reduce_scatter(
    window: Window, x: torch.Tensor, group: ProcessGroup, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return this rank's slice along dim 0 of what ``all_reduce`` returns."""
    from rl_kernels.core.triton_lib import peers

    size, rank = group_size(group), group_rank(group)
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]), dtype=dtype)
    window.area(window.parts, x).copy_(x)
    window.handle.barrier()
    first = rank * out.numel()
    peers.add_parts(window.handle, window.parts, x.shape, first, first + out.numel(), out, bias, size, at=first)
    window.handle.barrier()
    return out
