"""The public functions of the package; checks are in ``arguments``, gradients in ``autograd``."""

from __future__ import annotations

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.main_grad import fold_grad_into_main_grad, refuse_checkpoint
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import apply_of, no_lost_derivatives
from rl_kernels.det_gemm.arguments import prepare_dw, prepare_gemm, prepare_linear
from rl_kernels.det_gemm.autograd import Product, Settings, needs_graph, output, raw_product
from rl_kernels.det_gemm.op import ops


def det_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    k_segments: int = 1,
    dx_segments: int = 1,
    backend: str | None = None,
) -> torch.Tensor:
    """Return ``a @ b``; each row depends on that row of ``a`` and on ``b`` alone, bit for bit.

    Products of the operands are accumulated in FP32 or better, without TF32, in an order that depends on K alone, and
    rounded once to ``out_dtype``. The gradient of ``a`` keeps the same promise. The gradient of ``b`` is a sum over the
    rows with the same bits in every run: a chain of 16 rows per step, so appending rows with zero gradient changes no
    bit.

    Args:
        a: ``[M, K]``, FP32, BF16 or FP16, any strides; differentiable.
        b: ``[K, N]`` in the dtype of ``a``, any strides; differentiable.
        out_dtype: FP32, BF16 or FP16; by default that of the operands. An upstream gradient in another dtype is rounded
            to the dtype of the operands before the two products of the backward pass.
        k_segments: 1, or 2, 4 or 8: the segments into which the sum over K is cut, for layers that split K over up to
            that many ranks.
        dx_segments: 1, or 2, 4 or 8: the same for the sum over N of the gradient of ``a``.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
    """
    ready = prepare_gemm(a, b, out_dtype, backend, k_segments, dx_segments)
    no_lost_derivatives("det_gemm", a, b)
    settings = Settings(ready, out_dtype or a.dtype, k_segments, dx_segments, is_linear=False)
    multiply = Product.apply if needs_graph(a, b) else output
    result: torch.Tensor = multiply(a, b, None, settings)
    return result


def det_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    k_segments: int = 1,
    dx_segments: int = 1,
    join_tokens: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``; each row depends on that row of ``x`` and the parameters alone, bit for bit.

    The product is that of ``det_gemm``; the bias is added in FP32, before the one rounding to the operands' dtype. The
    weight is read in place, never copied or transposed. If ``weight.main_grad`` exists (FP32, shape of the weight, any
    strides), backward continues the chain of sums in it, in place, and the weight gets no ``.grad``: splitting the rows
    over several backward passes at multiples of 16 then changes no bit of it. If another op puts a gradient into
    ``.grad`` in the same pass, such as an embedding that shares the weight, it is added to ``main_grad`` at the end
    (eager only).

    Args:
        x: ``[..., K]``, FP32, BF16 or FP16, any strides, any number of leading dims, none included; differentiable.
        weight: ``[N, K]`` in the dtype of ``x``; differentiable.
        bias: ``[N]`` in the dtype of ``x``, or None; differentiable.
        k_segments: 1, or 2, 4 or 8: the segments into which the sum over K is cut, for layers that split K over up to
            that many ranks.
        dx_segments: 1, or 2, 4 or 8: the same for the sum over N of the gradient of ``x``.
        join_tokens: None, or a multiple of 16: the gradients of weight and bias are then sums of chains of that many
            rows, with rounding adds, and splits of a batch keep their bits at multiples of it. Sums over 100,000 rows
            and more are more exact so (GUIDE.md).
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Under ``torch.autocast`` all three are first cast to the autocast dtype, as in ``F.linear``. On a GPU with gradients
    off, the cast of a parameter is cached, as there: a parameter that changes inside the outermost block keeps its old
    cast until the block ends.

    Returns:
        ``[..., N]`` in the dtype of the operands.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported. In the backward
            pass: ``weight.grad`` was set before a pass that adds to both it and ``main_grad``.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
    """
    operand, matrix, bias = autocast_linear(x, weight, bias)
    ready = prepare_linear(operand, matrix, bias, backend, k_segments, dx_segments, join_tokens)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        check.main_grad("weight.main_grad", main_grad, weight)
    no_lost_derivatives("det_linear", operand, matrix, bias)
    out: torch.Tensor
    if needs_graph(operand, matrix, bias):
        settings = Settings(ready, operand.dtype, k_segments, dx_segments, join_tokens, main_grad)
        out = apply_of(Product, ready)(operand, matrix, bias, settings)
    else:
        op, args = raw_product(operand, matrix, bias, operand.dtype, k_segments)
        out = op.call(ready, *args)
    if main_grad is not None and weight.requires_grad:
        fold_grad_into_main_grad("weight", weight, out)
    return out


def det_gemm_dw(
    a: torch.Tensor,
    dc: torch.Tensor,
    *,
    accumulate_into: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    join_tokens: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return ``a^T @ dc``, the gradient of ``b`` in ``det_gemm(a, b)``, or continue its sum in a buffer.

    The sum over the M rows is a chain of 16 rows per step, in FP32. With ``accumulate_into`` the chain continues from
    the values in the buffer: a batch split at multiples of 16 rows gives a gradient bitwise identical to the whole's.

    Args:
        a: ``[M, K]``, FP32, BF16 or FP16, any strides.
        dc: ``[M, N]`` in the dtype of ``a``, any strides.
        accumulate_into: ``[K, N]``, FP32, any strides; updated in place and returned.
        out_dtype: FP32, BF16 or FP16; by default that of the operands. With ``accumulate_into``: None or FP32.
        join_tokens: None, or a multiple of 16, as in ``det_linear``.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[K, N]`` in ``out_dtype``, or ``accumulate_into``. It carries no gradient.

    Raises:
        TypeError, ValueError: an argument is not as above, or requires grad with grad mode on, or ``accumulate_into``
            is given inside ``torch.utils.checkpoint``, which runs the call twice; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD or a gradient of ``torch.func``: not supported.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
    """
    ready = prepare_dw(a, dc, accumulate_into, out_dtype, join_tokens, backend)
    if accumulate_into is not None:
        check.writable("accumulate_into", accumulate_into)
        refuse_checkpoint(
            "accumulate_into", "det_gemm_dw", "call it outside, or in the backward of an autograd Function"
        )
    _validate_no_grad(a=a, dc=dc, accumulate_into=accumulate_into)
    no_lost_derivatives("det_gemm_dw", a, dc, accumulate_into)
    if join_tokens is not None:
        total = accumulate_into
        if total is None:
            total = a.new_zeros((a.shape[1], dc.shape[1]), dtype=torch.float32)
        ops["joined_into"](a, dc, total, join_tokens, ready.backend)
        return total if accumulate_into is not None else total.to(out_dtype or a.dtype)
    if accumulate_into is not None:
        ops["weight_gradient_into"](a, dc, accumulate_into, ready.backend)
        return accumulate_into
    result: torch.Tensor = ops["weight_gradient"].call(ready, a, dc, out_dtype or a.dtype)
    return result


def _validate_no_grad(**tensors: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad: det_gemm_dw has no gradient")
