"""The backward pass of det_attention by itself, for hooks whose autograd is somebody else's."""

from __future__ import annotations

import torch

from rl_kernels.attention import checks
from rl_kernels.attention.api import Window, _chosen, _factor, _most
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.attention.op import ops
from rl_kernels.core import validate as check
from rl_kernels.core.torchlib import first_order, no_lost_derivatives


def det_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    validate: bool = True,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, with the bits that ``det_attention`` gives them through autograd.

    For dense and packed calls without padding, cache, soft cap or sinks. The backend is chosen anew, from the same
    tensors: where one was forced for the forward pass, it must be forced here too.

    Args:
        grad: of ``out``, in its shape and dtype.
        q: as in the forward pass, and so are k, v and the options.
        k: as q.
        v: as q.
        out: what ``det_attention(..., return_lse=True)`` returned.
        lse: the same: FP32, ``[B, H, T]``, or ``[H, total]`` of packed queries.
        causal: as in the forward pass.
        scale: as in the forward pass.
        window: as in the forward pass.
        cu_seqlens_q: ``[B + 1]``, int32 or int64: the sequences of packed queries.
        cu_seqlens_k: the same of packed keys.
        max_seqlen_q: no less than the longest sequence of queries; without it the device is asked, which syncs.
        max_seqlen_k: the same of keys.
        validate: check the values of the integers, which syncs with a GPU.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        (dq, dk, dv), contiguous, each in the shape and dtype of its operand.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    where = (cu_seqlens_q, cu_seqlens_k, None, None, None, None)
    left, right = checks.window(window, causal=causal, unlimited=UNLIMITED)
    chosen, _ = _chosen(q, k, v, None, *where, scale, left, right, 0.0, True, backend)
    if validate:
        checks.lengths(q, k, *where, windowed=left != UNLIMITED)
    most_q, most_k = _most(q, k, cu_seqlens_q, cu_seqlens_k, None)
    longest = (
        checks.longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q, most_q, values=validate),
        checks.longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k, most_k, values=validate),
    )
    given = Inputs(q, k, v, None, *where, *longest, _factor(q, scale), left, right, 0.0)
    _check_saved(given, out, lse, grad)
    no_lost_derivatives("det_attention", q, k, v, grad)
    dq, dk, dv, _ = first_order(ops["backward"], *given, out, lse, grad, True, chosen)
    return dq, dk, dv


def _check_saved(given: Inputs, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor) -> None:
    """Require what the forward pass gave, and a gradient of that."""
    shape = (*given.q.shape[:-1], given.v.shape[-1])
    for name, value in (("out", out), ("grad", grad)):
        check.tensor(name, value, (given.q.dtype,))
        check.shape(name, value, shape, "that of q, with the head size of v")
    check.tensor("lse", lse, (torch.float32,))
    check.shape("lse", lse, given.lse_shape(), "heads, then queries of q")
    check.same_device(q=given.q, out=out, lse=lse, grad=grad)
