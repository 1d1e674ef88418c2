"""Conditions under which a fused kernel can replace PyTorch's ops with no visible difference but time."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from rl_kernels.core.torchlib.observed import is_traced
from rl_kernels.core.triton_lib.launch import INSTALLED, INTERPRETED
from rl_kernels.core.validate import HALF_AND_FLOAT

PLAIN = (torch.Tensor, torch.nn.Parameter)


def fits(*tensors: Any) -> bool:
    """Say whether a Triton kernel can take these tensors: one dtype and device, in plain eager mode.

    Under torch.compile the compiler does the fusing.
    """
    first = tensors[0]
    if not INSTALLED or torch.compiler.is_compiling() or not isinstance(first, torch.Tensor):
        return False
    if not (first.is_cuda or INTERPRETED) or first.dtype not in HALF_AND_FLOAT:
        return False
    if is_traced() or forward_ad._current_level >= 0:
        return False
    # A loop, because a generator takes longer. A lazily negated tensor, such as the imaginary part of a conjugate, has
    # the other sign in memory.
    for x in tensors:
        if type(x) not in PLAIN or x.dtype != first.dtype or x.device != first.device or x.is_neg():
            return False
    return True
