"""Memory of GPUs of one node that all ranks of a group can read and write.

``reductions`` adds parts through it. This is faster than collectives, which move parts through buffers of their own.
Where symmetric memory is missing, on every rank alike, callers use collectives; both give the same bits.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed.groups import SIZES, gather_into, group_size
from rl_kernels.core.gpu import processors, stream_of
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.triton_lib.launch import INSTALLED

VARIABLE = "RL_KERNELS_SYMMETRIC_MEMORY"
"""Name of the variable: ``0`` turns symmetric memory off; set it alike on all ranks."""
ONE_SHOT = 4 << 20
"""Largest number of bytes of a part with which each rank adds the whole sum; above, a rank adds a slice."""
LARGEST = 1 << 30
"""Bytes of the largest part that goes through symmetric memory."""
ALIGNED = 256
"""Bytes to which areas are rounded up."""
NAME = 64
"""Compared bytes of a description of GPU and node."""
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
        self._stream: int | None = None

    def follow(self) -> None:
        """Let the current stream wait for the stream of the previous call: both use the same flags and areas."""
        stream = stream_of(self.memory.get_device())
        if self._stream not in (None, stream):
            torch.cuda.current_stream(self.memory.device).wait_stream(torch.cuda.ExternalStream(self._stream))
        self._stream = stream

    def slice_of(self, owner: int, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory of any rank for FP32 numbers, from element ``first`` of its area for parts on."""
        # A window that is first used by a rollout in inference mode is written to in training too.
        with torch.inference_mode(False):
            part: torch.Tensor = self.handle.get_buffer(owner, shape, torch.float32, self.parts // 4 + first)
        return part


_windows: WeakKeyDictionary[ProcessGroup, dict[int, Window | None]] = WeakKeyDictionary()
"""Windows by group and GPU; None where a rank has no symmetric memory."""
_outgrown: list[Window | None] = []
"""Smaller windows, which peers and captured graphs may still use."""


def window_of(group: ProcessGroup, like: torch.Tensor, size: int) -> Window | None:
    """Return a window with room for parts of ``size`` bytes on the GPU of a tensor, or None; ranks call it alike."""
    # The kernels add a power of two of parts.
    if not like.is_cuda or torch.compiler.is_compiling() or not 0 < size <= LARGEST or group_size(group) not in SIZES:
        return None
    windows, device = _windows.setdefault(group, {}), like.get_device()
    if device in windows and ((window := windows[device]) is None or window.size >= size):
        return window
    if values_hidden(like):
        # Memory cannot be mapped while a graph is captured.
        return None
    off = os.environ.get(VARIABLE) == "0" or torch.version.hip is not None
    if off or not INSTALLED or distributed.get_backend(group) != "nccl":
        windows[device] = None
        return None
    size = max(LEAST, 1 << (size - 1).bit_length())
    _outgrown.append(windows.get(device))
    windows[device] = _mapped(group, like.device, size)
    return windows[device]


def _mapped(group: ProcessGroup, device: torch.device, size: int) -> Window | None:
    """Return a window if every rank could map one; by its exchanges, all flags are cleared before one is set."""
    window: Window | None = None
    if _share_node_and_size(group, device):
        try:
            window = Window(group, device, size)
        except RuntimeError:  # no access between these GPUs
            window = None
    is_mapped = torch.full((1,), int(window is not None), device=device)
    all_mapped = is_mapped.new_empty(group_size(group))
    gather_into(all_mapped, is_mapped, group)
    return window if bool(all_mapped.all()) else None


def _share_node_and_size(group: ProcessGroup, device: torch.device) -> bool:
    """Say whether the GPUs are in one node, and launch the same numbers of programs."""
    name = f"{processors(device.index)} {os.uname().nodename}".encode()[:NAME].ljust(NAME)
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    names = mine.new_empty(group_size(group) * NAME)
    gather_into(names, mine, group)
    return bool((names.view(-1, NAME) == mine).all())
