"""Plans for calls with tensors of one layout: the fast path on the host."""

from __future__ import annotations

import torch

from rl_kernels.attention.backends.triton.passes import (
    ALIGNED,
    is_apart,
    launch_backward,
    launch_forward,
    of_sinks,
    plan_for,
)
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.gpu import device_of
from rl_kernels.core.torchlib import are_plain


class Planned:
    """det_attention for tensors with the layout of the given ones, in padded or paged batches.

    Each method returns None for tensors that it has not planned for; the caller then takes the general path.
    """

    def __init__(self, given: Inputs) -> None:
        self._plan, self._has_padding = plan_for(given), given.k_start is not None
        self._out, self._lse = (*given.q.shape[:-1], given.v.shape[-1]), given.lse_shape()
        self._lses = (*self._lse[:-2], self._plan.kv_heads, self._lse[-1], self._plan.group)
        self._operands, self._kinds = _lie(given), _kinds(given)
        self._saved = given.q.dtype, torch.float32, given.q.dtype

    def forward(self, given: Inputs, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return (out, lse); lse is None unless ``with_lse``."""
        q = given.q
        if (q.data_ptr() | given.k.data_ptr() | given.v.data_ptr()) % ALIGNED:
            return None
        out, lse = q.new_empty(self._out), q.new_empty(self._lse, dtype=torch.float32) if with_lse else None
        launch_forward(self._plan, given, out, lse)
        return out, lse

    def backward(
        self, given: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, needs_keys: bool
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return (dq, dk, dv, dsinks) from arguments and results of ``forward``; None for each that is not needed."""
        if not self._are_planned(given, out, lse, grad):
            return None
        dq, dk, dv = given.q.new_empty(given.q.shape), None, None
        if needs_keys:
            # The kernels do not write keys of padding: their gradients are zero.
            dk, dv = (x.new_zeros(x.shape) if self._has_padding else x.new_empty(x.shape) for x in (given.k, given.v))
        lses, deltas = lse.new_empty(self._lses), lse.new_empty(self._lses)
        with device_of(given.q):
            launch_backward(self._plan, given, out, lse, lses, deltas, grad, (dq, dk, dv))
        return dq, dk, dv, of_sinks(given.sinks, lse, deltas)

    def _are_planned(self, given: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> bool:
        """Say whether tensors have the planned layout: a saved-tensor hook may swap them, a gradient can have any."""
        # Subclasses such as wrappers may have no address of their own.
        if not are_plain(*given.operands, *given.others, out, lse, grad):
            return False
        if _kinds(given) != self._kinds or (out.dtype, lse.dtype, grad.dtype) != self._saved:
            return False
        whole = all([x.is_contiguous() for x in (out, lse, *given.others) if x is not None])
        if not whole or _lie(given) != self._operands or not is_apart(grad.shape, grad.stride()):
            return False
        addresses = [x.data_ptr() for x in (*given.operands, out, grad)]
        return all([address % ALIGNED == 0 for address in addresses])


def planned(given: Inputs) -> Planned | None:
    """Return the plan of calls like this one; None if tensors would have to be copied or nothing is launched."""
    whole = all(x is None or x.is_contiguous() for x in given.others)
    lie = all(is_apart(x.shape, x.stride()) for x in given.operands)
    return Planned(given) if whole and lie and given.cu_seqlens_q is None and not plan_for(given).is_empty else None


def _lie(given: Inputs) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(x.shape, x.stride(), x.dtype) for x in given.operands]


def _kinds(given: Inputs) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in given.others]
