"""The backward pass of det_attention as a function, for code that does autograd itself."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.attention import checks
from rl_kernels.attention.choice import choose_backend
from rl_kernels.attention.inputs import UNLIMITED, Inputs, Window
from rl_kernels.attention.op import ops
from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import remembered
from rl_kernels.core.torchlib.derivatives import first_order, no_lost_derivatives


def det_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    validate: bool = True,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, bitwise identical to those of ``det_attention`` through autograd.

    Takes dense and packed calls without padding, cache, soft cap or sinks. The backend is chosen again from the same
    tensors: if you force one in the forward pass, force it here too.

    Args:
        grad: the gradient of ``out``, in its shape and dtype.
        q: ``[B, T, H, D]``, or ``[total, H, D]`` with ``cu_seqlens_q``; FP32, BF16 or FP16. Tensors and options are
            those of the forward pass.
        k: ``[B, S, Hkv, D]``, or ``[total, Hkv, D]`` with ``cu_seqlens_k``, in the dtype of q.
        v: as k, with its own head size Dv.
        out: from ``det_attention(..., return_lse=True)``: ``[B, T, H, Dv]`` or ``[total, H, Dv]``.
        lse: from the same call: FP32, ``[B, H, T]``, or ``[H, total]`` for packed queries.
        causal: as in the forward pass.
        scale: as in the forward pass.
        window: as in the forward pass.
        cu_seqlens_q: ``[B + 1]``, int32 or int64: the sequences of packed queries.
        cu_seqlens_k: the same for packed keys.
        max_seqlen_q: at least the length of the longest sequence of queries; None reads it from the device, which
            syncs.
        max_seqlen_k: the same for keys.
        validate: check the values of the integer tensors, which syncs with a GPU.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        (dq, dk, dv), contiguous, each in the shape and dtype of its operand.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported.
    """
    left, right = checks.window(window, causal=causal, unlimited=UNLIMITED)
    tensors = (q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, None, None, None)
    call = Inputs._make((*tensors, max_seqlen_q, max_seqlen_k, scale, left, right, 0.0))
    name, numbers = _prepare(grad, out, lse, backend, *checks.with_longest(call))
    if validate:
        checks.lengths(call)
    no_lost_derivatives("det_attention", q, k, v, grad)
    dq, dk, dv, _ = first_order(ops["backward"], *tensors, *numbers, out, lse, grad, True, True, name)
    return dq, dk, dv


@remembered
def _prepare(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, backend: str | None, *fields: Any
) -> tuple[str, tuple[float, ...]]:
    """Check a call; return the name of a backend and the numbers of ``Inputs``."""
    name, inputs = choose_backend(Inputs._make(fields), backend)
    _check_saved(inputs, out, lse, grad)
    return name, inputs.numbers


def _check_saved(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> None:
    """Check the results of the forward pass and the gradient of out."""
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    for name, value in (("out", out), ("grad", grad)):
        check.tensor(name, value, (inputs.q.dtype,))
        check.shape(name, value, shape, "that of q, with the head size of v")
    check.tensor("lse", lse, (torch.float32,))
    check.shape("lse", lse, inputs.lse_shape(), "heads, then queries of q")
    check.same_device(q=inputs.q, out=out, lse=lse, grad=grad)
