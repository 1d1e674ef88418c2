"""Casts as autocast makes them for ``F.linear``."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.torchlib.observed import PLAIN, values_hidden
from rl_kernels.core.torchlib.ops import DEVICES

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that autocast casts from."""


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype to which autocast casts the operands of ``F.linear`` on the device of ``x``, or None."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return None
    # Asking torch.amp which devices have autocast breaks the graph under torch.compile before torch 2.13.
    if not isinstance(x, torch.Tensor) or x.device.type not in DEVICES.values():
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def autocast_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast the operands of a linear layer as autocast does for ``F.linear``: differentiably, all but FP64.

    With gradients off, autocast caches its cast of a parameter until its outermost block ends. Operands of dtypes that
    autocast does not cast stay as they are.
    """
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias

    def cast(value: Any, *, may_cache: bool) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype == dtype or value.dtype not in CASTABLE:
            return value
        if value.layout != torch.strided:
            return value
        # The cached cast has no gradient, and is freed before a CUDA graph that was captured meanwhile.
        if may_cache and type(value) in PLAIN and not torch.is_grad_enabled() and not values_hidden(value):
            # The one op that autocast casts for and that returns its argument; autocast on the CPU does not know it.
            cached = torch.ops.aten.einsum.default("...", [value])
            if cached.dtype == dtype:
                return cached
        return value.to(dtype)

    return cast(x, may_cache=False), cast(weight, may_cache=True), cast(bias, may_cache=True)
