"""The host side that the GPU backends share: layouts that kernels read, outputs, and calls that are planned once."""

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
    """The launches for one set of sizes and strides, as ``Passes`` makes them.

    Attributes:
        kv_heads: KV heads.
        group: query heads of each.
        is_empty: whether there is no row at all, and so nothing to launch.
    """

    kv_heads: int
    group: int
    is_empty: bool


class Saved(NamedTuple):
    """What the backward pass takes beside the inputs.

    Attributes:
        out: of the forward pass.
        lse: of the forward pass.
        lses: room for the lse of each row in base 2, ``[..., KV heads, queries, group]``.
        deltas: room for the sum of out times its gradient, in the same shape.
        grad: gradient of out.
    """

    out: torch.Tensor
    lse: torch.Tensor
    lses: torch.Tensor
    deltas: torch.Tensor
    grad: torch.Tensor


class Passes(Protocol):
    """What a backend launches, on tensors in a layout that its kernels read.

    Attributes:
        WRITES_ALL: whether the kernels write rows and keys of packed tensors, too, that are in no sequence; without
            validation there may be some.
    """

    WRITES_ALL: bool

    def plan_for(self, given: Inputs) -> Any:
        """Return the ``Plan`` for the sizes and strides of a call."""

    def launch_forward(self, plan: Any, given: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write out, and lse unless it is None, for the rows in a sequence; with ``WRITES_ALL`` for all rows."""

    def launch_backward(self, plan: Any, given: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
        """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""


@functools.lru_cache(maxsize=4096)
def is_apart(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Say whether the last dim is contiguous and every other stride is a multiple of 8 elements."""
    *outer, last = zip(strides, shape, strict=True)
    return last[0] == 1 and all(stride % MULTIPLE == 0 for stride, size in outer if size > 1)


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with contiguous heads at 16-byte aligned addresses: the given one, or a copy.

    The layout of a kernel's loads then depends on sizes alone.
    """
    return readable(x, is_apart(x.shape, x.stride()) and x.data_ptr() % ALIGNED == 0)


def _fitting(given: Inputs) -> Inputs:
    """Return the arguments in layouts that the kernels read, copied where needed."""
    operands = map(_canonical, given.operands)
    others = (None if x is None else x.contiguous() for x in given.others)
    return Inputs(*operands, *others, *given.numbers)  # type: ignore[arg-type]


def _new(like: torch.Tensor, *, written: bool) -> torch.Tensor:
    """Return a contiguous output: zeros, unless kernels write all of it."""
    return like.new_empty(like.shape) if written else like.new_zeros(like.shape)


class General:
    """The raw ops of a backend: any tensors, copied where its kernels cannot read them."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def forward(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) for the arguments of ``Inputs``."""
        given = _fitting(Inputs(*arguments))  # type: ignore[arg-type]
        plan = self._passes.plan_for(given)
        out = given.q.new_empty((*given.q.shape[:-1], given.v.shape[-1]))
        lse = given.q.new_empty(given.lse_shape(), dtype=torch.float32)
        if given.cu_seqlens_q is not None and (plan.is_empty or not self._passes.WRITES_ALL):
            out.zero_()
            lse.fill_(-torch.inf)
        if not plan.is_empty:
            self._passes.launch_forward(plan, given, out, lse)
        return out, lse

    def backward(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, out's gradient and ``needs_keys``."""
        *inputs, out, lse, grad, needs_keys = arguments
        given = Inputs(*inputs)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        assert isinstance(grad, torch.Tensor)
        if needs_keys and given.block_table is not None:
            raise ValueError("block_table: expected None, keys on pages have no gradients")
        fitting = _fitting(given)
        plan = self._passes.plan_for(fitting)
        writes_all = self._passes.WRITES_ALL and not plan.is_empty
        dq = _new(given.q, written=given.cu_seqlens_q is None or writes_all)
        # Padding, and keys without a query, get zeros.
        written = given.k_start is None and (given.cu_seqlens_k is None or writes_all) and not plan.is_empty
        dk, dv = (_new(x, written=written) if needs_keys else x.new_empty(0) for x in (given.k, given.v))
        *lead, _, queries = lse.shape
        lses, deltas = (lse.new_empty((*lead, plan.kv_heads, queries, plan.group)) for _ in range(2))
        if not plan.is_empty:
            saved = Saved(_canonical(out.contiguous()), lse.contiguous(), lses, deltas, _canonical(grad))
            with device_of(given.q):
                self._passes.launch_backward(plan, fitting, saved, (dq, dk, dv) if needs_keys else (dq, None, None))
        dsinks = _of_sinks(given.sinks, lse, deltas)
        return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks

    def planned(self, given: Inputs) -> Planned | None:
        """Return the plan of calls like this one; None if tensors would have to be copied or nothing is launched."""
        whole = all(x is None or x.is_contiguous() for x in given.others)
        lie = all(is_apart(x.shape, x.stride()) for x in given.operands)
        if whole and lie and given.cu_seqlens_q is None and not self._passes.plan_for(given).is_empty:
            return Planned(given, self._passes)
        return None


class Planned:
    """det_attention for tensors with the layout of the given ones, in padded or paged batches: fast on the host.

    Each method returns None for tensors that it has not planned for; the caller then takes the general path.
    """

    def __init__(self, given: Inputs, passes: Passes) -> None:
        self._passes = passes
        self._plan, self._has_padding = passes.plan_for(given), given.k_start is not None
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
        self._passes.launch_forward(self._plan, given, out, lse)
        return out, lse

    def backward(
        self, given: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, needs_keys: bool
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return (dq, dk, dv, dsinks) from arguments and results of ``forward``; None for each that is not needed."""
        if not self._are_planned(given, out, lse, grad):
            return None
        dq, dk, dv = _new(given.q, written=True), None, None
        if needs_keys:
            # The kernels do not write keys of padding: their gradients are zero.
            dk, dv = (_new(x, written=not self._has_padding) for x in (given.k, given.v))
        lses, deltas = lse.new_empty(self._lses), lse.new_empty(self._lses)
        with device_of(given.q):
            self._passes.launch_backward(self._plan, given, Saved(out, lse, lses, deltas, grad), (dq, dk, dv))
        return dq, dk, dv, _of_sinks(given.sinks, lse, deltas)

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


def _of_sinks(sinks: torch.Tensor | None, lse: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of sinks, or None without sinks; ``launch_backward`` wrote ``deltas``."""
    return None if sinks is None else sink.gradient(sinks, lse, deltas.mT.flatten(-3, -2))


def _lie(given: Inputs) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(x.shape, x.stride(), x.dtype) for x in given.operands]


def _kinds(given: Inputs) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in given.others]
