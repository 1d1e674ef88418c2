"""The public function causal_conv1d: validation, dispatch, autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, no_lost_derivatives
from rl_kernels.gated_delta.conv_inputs import ConvInputs, check_inputs
from rl_kernels.gated_delta.conv_op import OPERATOR, describe, ops
from rl_kernels.gated_delta.layouts import check_bounds
from rl_kernels.gated_delta.results import Convolved

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class ConvKeywords(TypedDict, total=False):
        """Keyword arguments of ``causal_conv1d`` on which its return type does not depend."""

        activation: Literal["silu"] | None
        state: torch.Tensor | None
        cu_seqlens: torch.Tensor | None
        start: torch.Tensor | None
        validate: bool
        backend: str | None


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[ConvKeywords],
) -> torch.Tensor: ...


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_state: Literal[True],
    **options: Unpack[ConvKeywords],
) -> Convolved: ...


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_state: bool,
    **options: Unpack[ConvKeywords],
) -> torch.Tensor | Convolved: ...


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Literal["silu"] | None = "silu",
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    return_state: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | Convolved:
    """Return ``silu(bias + w_0 x_(t-3) + w_1 x_(t-2) + w_2 x_(t-1) + w_3 x_t)`` for each token t and channel.

    A token's bits depend on that token and the three before it in its sequence: they are the same whole, in pieces at
    any cut and token by token with a state, alone, padded or packed; so is its gradient, given the gradients of the
    three tokens behind it. The gradients of weight and bias are sums over the tokens in a fixed order: they depend on
    the sequences and their order, not on padding, packing or empty sequences. Everything is computed in FP32 (FP64 for
    FP64) and rounded once.

    Args:
        x: ``[B, T, D]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        weight: ``[D, 4]`` in any of these dtypes (FP64 only if x is FP64), the oldest input first: the ``weight[:, 0]``
            of a depthwise ``nn.Conv1d``; differentiable.
        bias: ``[D]``, in the dtypes of a weight; None is 0; differentiable.
        activation: ``silu``, or None for no activation.
        state: ``[sequences, 3, D]`` in the dtype of x: the three inputs before each sequence, the oldest first; None is
            zeros; differentiable.
        cu_seqlens: ``[sequences + 1]``, int32 or int64, with B = 1: sequence s has the tokens from ``cu_seqlens[s]`` up
            to, but not including, ``cu_seqlens[s + 1]``.
        start: ``[B]``, int32 or int64: the first token of each sequence; tokens before it are padding, which is not
            read, and whose output is 0.
        return_state: return ``Convolved(out, state)``, whose state continues each sequence.
        validate: check the values of cu_seqlens and start, which syncs with a GPU; skipped under torch.compile and
            while a CUDA graph is captured. Without the check nothing is read or written out of bounds.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[B, T, D]`` in the dtype of x, or with ``return_state`` a ``Convolved``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported.
    """
    tensors = (x, weight, bias, state)
    ready = _prepare(*tensors, cu_seqlens, start, activation, return_state, backend)
    silu = activation == "silu"
    check.flag("validate", validate)
    if validate and not (cu_seqlens is start is None):
        check_bounds("x", x, cu_seqlens, start)
    no_lost_derivatives("causal_conv1d", *tensors)
    if torch.is_grad_enabled() and any([value is not None and value.requires_grad for value in tensors]):
        settings = _Settings(cu_seqlens, start, silu, return_state, ready)
        out, last = apply_of(_CausalConv1d, ready)(*tensors, settings)
    else:
        out, last = ops["forward"].call(ready, *tensors, cu_seqlens, start, silu, return_state)
    return Convolved(out, last) if return_state else out


@remembered
def _prepare(*args: Any) -> Ready:
    """Check the arguments, choose a backend, and prepare its launches."""
    *tensors, activation, return_state, backend = args
    check.choice("activation", activation, ("silu", None))
    check.flag("return_state", return_state)
    call = ConvInputs._make((*tensors, activation == "silu"))
    check_inputs(call)
    check.backend_name(backend)
    return ops["forward"].ready(*call, return_state, choose(OPERATOR, describe(call.x), backend).name)


class _Settings(NamedTuple):
    """What a call needs besides its operands; one tuple, because autograd inspects every argument."""

    cu_seqlens: torch.Tensor | None
    start: torch.Tensor | None
    silu: bool
    return_state: bool
    ready: Ready


class _CausalConv1d(torch.autograd.Function):
    """Saves the operands; backward computes the convolution again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, settings = arguments
        cu_seqlens, start, silu, return_state, ready = settings
        out, last = ops["forward"].call(ready, *tensors, cu_seqlens, start, silu, return_state)
        save(ctx, *tensors, cu_seqlens, start)
        ctx.silu, ctx.return_state, ctx.backend = silu, return_state, ready.backend
        ctx.dtypes = [None if value is None else value.dtype for value in tensors]
        if not return_state:
            ctx.mark_non_differentiable(last)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad
        if grad is None and grad_state is None:
            return (None,) * len(needed)
        tensors = ctx.saved_tensors
        # Under torch.compile an empty state has a gradient too.
        grad_state = grad_state if ctx.return_state else None
        if grad is None:
            grad = torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
        results = first_order(ops["backward"], *tensors, ctx.silu, grad, grad_state, *needed[1:3], ctx.backend)
        typed = zip(results, needed, ctx.dtypes, strict=False)
        return *[value.to(dtype) if is_needed else None for value, is_needed, dtype in typed], None
