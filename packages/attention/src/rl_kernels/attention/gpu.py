"""Host code shared by the GPU backends: layouts that kernels read, outputs, and calls that are planned once."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.checks import MULTIPLE
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.torchlib.observed import are_plain


class Plan(Protocol):
    """The launches for one set of sizes and strides, made by ``Passes``.

    Attributes:
        kv_heads: number of KV heads.
        group: query heads of a KV head.
        is_empty: whether there is no row at all, and so nothing to launch.
    """

    kv_heads: int
    group: int
    is_empty: bool


class Saved(NamedTuple):
    """The tensors of the backward pass beside the inputs.

    Attributes:
        out: output of the forward pass.
        lse: logsumexp of the forward pass.
        lses: scratch for the lse of each row in base 2, ``[..., KV heads, queries, group]``.
        deltas: scratch for the sum of out times its gradient, in the same shape.
        grad: gradient of out.
    """

    out: torch.Tensor
    lse: torch.Tensor
    lses: torch.Tensor
    deltas: torch.Tensor
    grad: torch.Tensor


class Passes(Protocol):
    """The passes of a backend, on tensors in a layout that its kernels read.

    Attributes:
        WRITES_ALL: whether the kernels also write rows and keys of packed tensors that are in no sequence; there may be
            some without validation.
    """

    WRITES_ALL: bool

    def plan_for(self, inputs: Inputs) -> Any:
        """Return the ``Plan`` for the sizes and strides of a call."""

    def launch_forward(self, plan: Any, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write out, and lse unless it is None, for the rows in a sequence; with ``WRITES_ALL`` for all rows."""

    def launch_backward(self, plan: Any, inputs: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
        """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""


@functools.lru_cache(maxsize=4096)
def has_aligned_strides(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Say whether the last dim is contiguous and every other stride is a multiple of 8 elements."""
    *outer, last = zip(strides, shape, strict=True)
    return last[0] == 1 and all(stride % MULTIPLE == 0 for stride, size in outer if size > 1)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with contiguous heads at 16-byte aligned addresses: ``x`` itself, or a copy.

    The layout of a kernel's loads then depends on sizes alone.
    """
    return readable(x, has_aligned_strides(x.shape, x.stride()) and x.data_ptr() % ALIGNED == 0)


def _readable_inputs(inputs: Inputs) -> Inputs:
    """Return the arguments in layouts that the kernels read, copied where needed."""
    operands = map(_aligned, inputs.operands)
    optional_tensors = (None if x is None else x.contiguous() for x in inputs.optional_tensors)
    return Inputs(*operands, *optional_tensors, *inputs.numbers)  # type: ignore[arg-type]


def _new_output(like: torch.Tensor, *, written: bool) -> torch.Tensor:
    """Return a contiguous output: zeros, unless kernels write all of it."""
    return like.new_empty(like.shape) if written else like.new_zeros(like.shape)


class RawOps:
    """The raw ops of a backend, for tensors of any layout: those that its kernels cannot read are copied."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def forward(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) for the arguments of ``Inputs``."""
        inputs = _readable_inputs(Inputs(*arguments))  # type: ignore[arg-type]
        plan = self._passes.plan_for(inputs)
        out = inputs.q.new_empty((*inputs.q.shape[:-1], inputs.v.shape[-1]))
        lse = inputs.q.new_empty(inputs.lse_shape(), dtype=torch.float32)
        if inputs.cu_seqlens_q is not None and (plan.is_empty or not self._passes.WRITES_ALL):
            out.zero_()
            lse.fill_(-torch.inf)
        if not plan.is_empty:
            self._passes.launch_forward(plan, inputs, out, lse)
        return out, lse

    def backward(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, out's gradient and ``needs_keys``."""
        *fields, out, lse, grad, needs_keys = arguments
        inputs = Inputs(*fields)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        assert isinstance(grad, torch.Tensor)
        if needs_keys and inputs.block_table is not None:
            raise ValueError("block_table: expected None, keys on pages have no gradients")
        readable_inputs = _readable_inputs(inputs)
        plan = self._passes.plan_for(readable_inputs)
        writes_all = self._passes.WRITES_ALL and not plan.is_empty
        dq = _new_output(inputs.q, written=inputs.cu_seqlens_q is None or writes_all)
        # Padding, and keys without a query, get zeros.
        written = inputs.k_start is None and (inputs.cu_seqlens_k is None or writes_all) and not plan.is_empty
        dk, dv = (_new_output(x, written=written) if needs_keys else x.new_empty(0) for x in (inputs.k, inputs.v))
        *lead, _, queries = lse.shape
        lses, deltas = (lse.new_empty((*lead, plan.kv_heads, queries, plan.group)) for _ in range(2))
        if not plan.is_empty:
            saved = Saved(_aligned(out.contiguous()), lse.contiguous(), lses, deltas, _aligned(grad))
            with device_of(inputs.q):
                self._passes.launch_backward(
                    plan, readable_inputs, saved, (dq, dk, dv) if needs_keys else (dq, None, None)
                )
        dsinks = _sinks_gradient(inputs.sinks, lse, deltas)
        return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks

    def planned(self, inputs: Inputs) -> Planned | None:
        """Return the plan of calls like this one; None if tensors would have to be copied or nothing is launched."""
        are_contiguous = all(x is None or x.is_contiguous() for x in inputs.optional_tensors)
        are_aligned = all(has_aligned_strides(x.shape, x.stride()) for x in inputs.operands)
        if (
            are_contiguous
            and are_aligned
            and inputs.cu_seqlens_q is None
            and not self._passes.plan_for(inputs).is_empty
        ):
            return Planned(inputs, self._passes)
        return None


class Planned:
    """det_attention for tensors with one layout, in padded or paged batches: the fast path on the host.

    Each method returns None for tensors that it has not planned for; the caller then takes the general path.
    """

    def __init__(self, inputs: Inputs, passes: Passes) -> None:
        self._passes = passes
        self._plan, self._has_padding = passes.plan_for(inputs), inputs.k_start is not None
        self._out_shape, self._lse_shape = (*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.lse_shape()
        self._row_shape = (*self._lse_shape[:-2], self._plan.kv_heads, self._lse_shape[-1], self._plan.group)
        self._layouts, self._optional_dtypes = _layouts(inputs), _optional_dtypes(inputs)
        self._saved_dtypes = inputs.q.dtype, torch.float32, inputs.q.dtype

    def forward(self, inputs: Inputs, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return (out, lse); lse is None unless ``with_lse``."""
        q = inputs.q
        if (q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) % ALIGNED:
            return None
        out, lse = q.new_empty(self._out_shape), q.new_empty(self._lse_shape, dtype=torch.float32) if with_lse else None
        self._passes.launch_forward(self._plan, inputs, out, lse)
        return out, lse

    def backward(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, needs_keys: bool
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return (dq, dk, dv, dsinks); a gradient that is not needed is None."""
        if not self._are_planned(inputs, out, lse, grad):
            return None
        dq, dk, dv = _new_output(inputs.q, written=True), None, None
        if needs_keys:
            # The kernels do not write keys of padding: their gradients are zero.
            dk, dv = (_new_output(x, written=not self._has_padding) for x in (inputs.k, inputs.v))
        lses, deltas = lse.new_empty(self._row_shape), lse.new_empty(self._row_shape)
        with device_of(inputs.q):
            self._passes.launch_backward(self._plan, inputs, Saved(out, lse, lses, deltas, grad), (dq, dk, dv))
        return dq, dk, dv, _sinks_gradient(inputs.sinks, lse, deltas)

    def _are_planned(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> bool:
        """Say whether tensors have the planned layout: saved-tensor hooks may swap them; the gradient may have any."""
        # Subclasses such as wrappers may have no address of their own.
        if not are_plain(*inputs.operands, *inputs.optional_tensors, out, lse, grad):
            return False
        if (
            _optional_dtypes(inputs) != self._optional_dtypes
            or (out.dtype, lse.dtype, grad.dtype) != self._saved_dtypes
        ):
            return False
        are_contiguous = all([x.is_contiguous() for x in (out, lse, *inputs.optional_tensors) if x is not None])
        if (
            not are_contiguous
            or _layouts(inputs) != self._layouts
            or not has_aligned_strides(grad.shape, grad.stride())
        ):
            return False
        addresses = [x.data_ptr() for x in (*inputs.operands, out, grad)]
        return all([address % ALIGNED == 0 for address in addresses])


def _sinks_gradient(sinks: torch.Tensor | None, lse: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of sinks, or None without sinks, from the ``deltas`` that ``launch_backward`` wrote."""
    return None if sinks is None else sink.gradient(sinks, lse, deltas.mT.flatten(-3, -2))


def _layouts(inputs: Inputs) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(x.shape, x.stride(), x.dtype) for x in inputs.operands]


def _optional_dtypes(inputs: Inputs) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in inputs.optional_tensors]
