"""Memory on a CPU that a thread of Python uses again, for numbers that no result keeps.

Fresh memory takes longer: the system maps its pages anew, and other cores' caches do not have them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from rl_kernels.core.torchlib.observed import without_modes

ROOM = 1 << 21
"""Most numbers of one dtype for which a thread keeps memory; more get fresh memory."""


class Scratch(threading.local):
    """Memory for one purpose, as much as the largest call took; a thread's next call overwrites it."""

    def __init__(self) -> None:
        self._rooms: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with arbitrary values on the device of ``like``."""
        count = math.prod(shape)
        if not like.is_cpu or count > ROOM:
            return like.new_empty(shape, dtype=dtype)
        room = self._rooms.get(dtype)
        if room is None or len(room) < count:
            with without_modes():
                room = self._rooms[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return room[:count].view(shape)
