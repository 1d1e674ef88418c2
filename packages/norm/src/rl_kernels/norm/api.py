"""The public functions of the package: validation, dispatch, and the one autograd.Function behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, is_asked_for, no_lost_derivatives
from rl_kernels.core.torchlib.ops import Op
from rl_kernels.norm.op import OPERATOR, describe, ops
from rl_kernels.norm.results import NormAndSum

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class LayerNormKeywords(TypedDict, total=False):
        """Keyword arguments of ``layer_norm`` on which its return type does not depend."""

        eps: float
        backend: str | None

    class RMSNormKeywords(LayerNormKeywords, total=False):
        """Keyword arguments of ``rms_norm`` on which its return type does not depend."""

        offset: float
        cast_first: bool


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    residual: None = None,
    gate: torch.Tensor | None = None,
    **options: Unpack[RMSNormKeywords],
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    **options: Unpack[RMSNormKeywords],
) -> NormAndSum: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None,
    **options: Unpack[RMSNormKeywords],
) -> torch.Tensor | NormAndSum: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    offset: float = 0.0,
    cast_first: bool = True,
    backend: str | None = None,
) -> torch.Tensor | NormAndSum:
    """Return the RMSNorm of each row: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``.

    A row of the result depends on that row and the weight alone, bit for bit, and so does its gradient. The gradient of
    the weight is a sum over the rows in a fixed order: appending rows with zero gradient changes no bit. If
    ``weight.main_grad`` exists (FP32, ``[D]``), backward continues that sum in it, in place, and the weight gets no
    ``.grad``. Splitting the rows over several backward passes then changes no bit of it, if the split is at a multiple
    of 16 rows; of 128 rows if D <= 512 (such rows are heads, many to a token).

    The formula is that of https://arxiv.org/abs/1910.07467, computed in FP32 (FP64 for FP64).

    Args:
        x: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides, any number of leading dims; differentiable.
        weight: ``[D]``, in any of these dtypes (FP64 only if x is FP64); None is 1; differentiable.
        eps: added to the mean of squares, >= 0.
        residual: in the shape and dtype and on the device of x; differentiable. ``x + residual``, rounded to the dtype
            of x, is then normalized, and is returned too. The bits are the same as in two separate steps.
        gate: in the shape and dtype and on the device of x; differentiable. The norm is multiplied by ``silu(gate)``,
            as in Qwen3-Next and Qwen3.5, with the sigmoid and the product in FP32 and a result in the dtype of x;
            with ``cast_first`` the product of row and weight is rounded before. Not together with a residual.
        offset: added to the weight: 1 for weights stored as a difference from 1, as in Gemma.
        cast_first: round the row to the dtype of x before multiplying it by the weight, as Llama and Qwen do; False
            rounds once at the end, as ``torch.nn.RMSNorm``, Gemma and gpt-oss do.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[..., D]`` in the dtype of x; with ``cast_first`` and a weight, and no gate, in the dtype that x and the
        weight promote to. With a residual, ``NormAndSum(output, sum)``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported. In the backward
            pass: ``weight.grad`` was set before a pass that adds to both it and ``main_grad``.
    """
    check.number("offset", offset)
    check.flag("cast_first", cast_first)
    if gate is not None and residual is not None:
        raise ValueError("gate: expected None with a residual: add the residual before, or multiply by the gate after")
    options = _Options(False, float(offset), cast_first)
    return _norm("rms_norm", x, weight, None, residual, gate, eps, options, backend)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: None = None,
    **options: Unpack[LayerNormKeywords],
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    **options: Unpack[LayerNormKeywords],
) -> NormAndSum: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None,
    **options: Unpack[LayerNormKeywords],
) -> torch.Tensor | NormAndSum: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | NormAndSum:
    """Return the LayerNorm of each row: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    The promises and the backends are those of ``rms_norm``, and a backend that is forced for one is forced for both.
    The formula is that of https://arxiv.org/abs/1607.06450 and ``F.layer_norm``: the variance is the mean of squared
    distances from the mean. It is computed in FP32 (FP64 for FP64).

    Args:
        x: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides, any number of leading dims; differentiable.
        weight: ``[D]``, in any of these dtypes (FP64 only if x is FP64); None is 1; differentiable.
        bias: ``[D]``, in the dtypes of a weight; None is 0; differentiable.
        eps: added to the variance, >= 0.
        residual: as in ``rms_norm``.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[..., D]`` in the dtype of x, rounded once. With a residual, ``NormAndSum(output, sum)``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported. In the backward
            pass: ``weight.grad`` was set before a pass that adds to both it and ``main_grad``.
    """
    return _norm("layer_norm", x, weight, bias, residual, None, eps, _Options(True, 0.0, False), backend)


class _Options(NamedTuple):
    """The options of a norm, in the order of the raw ops."""

    centered: bool
    offset: float
    cast_first: bool


class _Settings(NamedTuple):
    """What a norm computes with besides its tensors; one tuple, because autograd inspects every argument."""

    main_grad: torch.Tensor | None
    eps: float
    options: _Options
    ready: Ready


def _norm(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    options: _Options,
    backend: str | None,
) -> torch.Tensor | NormAndSum:
    ready = _prepare(x, weight, bias, residual, gate, eps, options, backend)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        assert weight is not None
        check.main_grad("weight.main_grad", main_grad, weight)
    no_lost_derivatives(name, x, weight, bias, residual, gate)
    inputs = (x, residual, gate, weight, bias)
    if torch.is_grad_enabled() and any([value is not None and value.requires_grad for value in inputs]):
        outputs = apply_of(_Norm, ready)(*inputs, _Settings(main_grad, float(eps), options, ready))
        if main_grad is not None and weight is not None and weight.requires_grad:
            fold_grad_into_main_grad("weight", weight, outputs[0])
    else:
        op, args = _raw(*inputs, float(eps), options)
        outputs = [_shaped(value, x) for value in op.call(ready, *args)[:-1]]
    return outputs[0] if residual is None else NormAndSum(*outputs)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1 if x.numel() else 0, x.shape[-1])


def _shaped(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    # Not a view: autograd would forbid in-place changes of a view. vLLM 0.26 unpacks a torch.Size in a traced graph.
    return rows if x.ndim == 2 else torch.ops.aten._unsafe_view.default(rows, [*x.shape])


def _raw(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    options: _Options,
) -> tuple[Op, tuple[Any, ...]]:
    """Return the raw op that computes a norm, and its arguments without the backend."""
    rest = (weight, bias, eps, *options)
    if gate is not None:
        return ops["forward_gated"], (_rows(x), _rows(gate), *rest)
    if residual is None:
        return ops["forward"], (_rows(x), *rest)
    return ops["forward_sum"], (_rows(x), _rows(residual), *rest)


@remembered
def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    options: _Options,
    backend: str | None,
) -> Ready:
    """Check the arguments of both functions, and choose a backend."""
    check.tensor("x", x, check.FLOATS, least=1)
    if not x.shape[-1]:
        raise ValueError(f"x: expected a last dim of at least 1, got shape {tuple(x.shape)}")
    allowed = check.FLOATS if x.dtype == torch.float64 else check.HALF_AND_FLOAT
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check.tensor(name, value, allowed, ndim=1)
            check.shape(name, value, x.shape[-1:], "the last dim of x")
    for name, value in (("residual", residual), ("gate", gate)):
        if value is not None:
            check.tensor(name, value, check.FLOATS)
            check.shape(name, value, x.shape, "that of x")
            check.same_dtype(**{"x": x, name: value})
    check.same_device(x=x, weight=weight, bias=bias, residual=residual, gate=gate)
    check.number("eps", eps, least=0)
    check.backend_name(backend)
    op, args = _raw(x, residual, gate, weight, bias, float(eps), options)
    return op.ready(*args, choose(OPERATOR, describe(x), backend).name)


class _Norm(torch.autograd.Function):
    """A norm of rows, maybe gated, or the norm of a sum and the sum; backward adds to ``main_grad`` if it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        gate: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: _Settings,
    ) -> Any:
        op, args = _raw(x, residual, gate, weight, bias, settings.eps, settings.options)
        *outputs, stats = op.call(settings.ready, *args)
        outputs = [_shaped(value, x) for value in outputs]
        total = x if residual is None else outputs[1]
        # Autograd counts only the tensors.
        present = [value is not None for value in (x, residual, gate, weight, bias)]
        ctx.places = [sum(present[:number]) for number in range(len(present))]
        # A sum that nobody uses has no gradient to read.
        ctx.set_materialize_grads(False)
        save(ctx, total, gate, weight, stats)
        # Not saved for backward: main_grad may change in place between this call and its backward pass.
        ctx.settings = settings
        ctx.dtypes = None if weight is None else weight.dtype, None if bias is None else bias.dtype
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_sum: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        total, gate, weight, stats = ctx.saved_tensors
        main_grad, _, (centered, offset, _), ready = ctx.settings
        grad = torch.zeros_like(total) if grad is None else grad
        inputs = zip(ctx.needs_input_grad, ctx.places, strict=False)
        needed = [is_needed and is_asked_for(ctx, place) for is_needed, place in inputs]
        rows_of_grad_sum = None if grad_sum is None else _rows(grad_sum)
        name, gates = ("backward", ()) if gate is None else ("backward_gated", (_rows(gate),))
        arguments = (*gates, _rows(grad), rows_of_grad_sum, _rows(total), weight, stats, centered, offset)
        dweight = None
        if needed[3] and main_grad is not None:
            no_lost_derivatives("rms_norm", *arguments)
            dx, *dgate, dbias = ops[f"{name}_into"](*arguments, main_grad, needed[4], ready.backend)
        else:
            dx, *dgate, dweight, dbias = first_order(ops[name], *arguments, needed[3], needed[4], ready.backend)
            dweight = dweight.to(ctx.dtypes[0]) if needed[3] else None
        dbias = dbias.to(ctx.dtypes[1]) if needed[4] else None
        dx = dx.view(total.shape)
        of_gate = dgate[0].view(total.shape) if needed[2] else None
        # The same tensor twice, as of an addition: of two leaves that keep it, autograd gives one a copy.
        return dx if needed[0] else None, dx if needed[1] else None, of_gate, dweight, dbias, None
