"""The public function of the package: validation, dispatch, autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, no_lost_derivatives
from rl_kernels.gated_delta import checks
from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.inputs import Inputs
from rl_kernels.gated_delta.op import OPERATOR, describe, ops
from rl_kernels.gated_delta.results import GatedDelta


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    normalize_qk: bool = True,
    initial_state: torch.Tensor | None = None,
    cache: DeltaCache | None = None,
    cu_seqlens: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    return_state: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | GatedDelta:
    """Return ``scale S_t^T q_t`` of the gated delta rule for each token t and head.

    ``S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - exp(g_t) S_(t-1)^T k_t)^T``, as in
    https://arxiv.org/abs/2412.06464. The bits of a token depend on its own sequence alone, up to that token: they are
    the same whole, in pieces at any cut and token by token with a cache, alone, padded or packed. So are gradients of
    whole sequences, alone, padded or packed. The state and all sums are FP32; the guide says what is rounded to 16
    bits.

    Args:
        q: ``[B, T, Hk, Dk]``, FP32, BF16, FP16 or FP64, any strides; differentiable. Dk is 16, 32, 64, 128 or 256.
        k: shape and dtype of q; differentiable.
        v: ``[B, T, Hv, Dv]`` in the dtype of q; differentiable. Hv is a multiple of Hk, and value head h reads key head
            ``h // (Hv / Hk)``. Dv is one of the sizes of Dk.
        g: ``[B, T, Hv]``, FP32, BF16 or FP16 (FP64 only with FP64 operands): logarithms of the decays, finite and
            at most 0; differentiable.
        beta: ``[B, T, Hv]`` likewise: the strengths of the updates; differentiable.
        scale: multiplies the output; by default ``1 / sqrt(Dk)``.
        normalize_qk: divide each q and k by ``sqrt(sum of squares + 1e-6)``, and round it to its dtype.
        initial_state: ``[sequences, Hv, Dk, Dv]``, FP32 (FP64 for FP64 operands): the states before the first tokens,
            zeros by default; differentiable.
        cache: sequences that go on, and whose cache is written in place, without gradients. There may be any number of
            tokens, none too.
        cu_seqlens: ``[sequences + 1]``, int32 or int64, with B = 1: sequence s has the tokens from ``cu_seqlens[s]`` up
            to, but not including, ``cu_seqlens[s + 1]``.
        start: ``[B]``, int32 or int64: the first token of each sequence; tokens before it are padding, which is not
            read, and whose output is 0.
        return_state: return ``GatedDelta(out, state)``.
        validate: check the values of cu_seqlens, start and the lengths of the cache, which syncs with a GPU; skipped
            under torch.compile and while a CUDA graph is captured.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[B, T, Hv, Dv]`` in the dtype of q, or with ``return_state`` a ``GatedDelta``.

    Raises:
        TypeError, ValueError: an argument is not as above, or a cache has other sequences, heads, sizes or dtypes, or
            comes with a tensor that requires grad; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported.
    """
    call = Inputs(q, k, v, g, beta, initial_state, cu_seqlens, start, scale, normalize_qk)  # type: ignore[arg-type]
    tensors = call.differentiable
    needs_grad = torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in tensors])
    if cache is not None and not isinstance(cache, DeltaCache):
        raise TypeError(f"cache: expected a DeltaCache or None, got {type(cache).__name__}")
    ready, numbers = _prepare(return_state, backend, cache is not None, *call, *(cache or ()))
    if cache is not None:
        checks.no_gradients(call, cache)
    check.flag("validate", validate)
    if validate and (cu_seqlens is not None or start is not None or cache is not None):
        checks.bounds(call, cache)
    no_lost_derivatives("gated_delta_rule", *tensors)
    if cache is not None:
        out: torch.Tensor = ops["continued"].call(ready, *call[:8], *numbers, *cache)
        return out
    if needs_grad:
        out, state = apply_of(_GatedDeltaRule, ready)(
            *tensors, _Settings(cu_seqlens, start, numbers, return_state, ready)
        )
    else:
        out, state = ops["forward"].call(ready, *call[:8], *numbers, return_state)
    return GatedDelta(out, state) if return_state else out


@remembered
def _prepare(
    return_state: bool, backend: str | None, is_cached: bool, *fields: Any
) -> tuple[Ready, tuple[float, bool]]:
    """Check the arguments, choose a backend, and prepare its launches; return the numbers of ``Inputs`` too."""
    call, tensors = Inputs(*fields[: len(Inputs._fields)]), fields[len(Inputs._fields) :]
    check.flag("return_state", return_state)
    check.flag("normalize_qk", call.normalize_qk)
    checks.operands(call)
    checks.layout(call)
    if call.scale is not None:
        check.number("scale", call.scale)
    check.backend_name(backend)
    numbers = float(call.q.shape[3] ** -0.5 if call.scale is None else call.scale), call.normalize_qk
    name = choose(OPERATOR, describe(*call[:3]), backend).name
    if is_cached:
        checks.cache(call, DeltaCache(*tensors), return_state)
        return ops["continued"].ready(*call[:8], *numbers, *tensors, name), numbers
    return ops["forward"].ready(*call[:8], *numbers, return_state, name), numbers


class _Settings(NamedTuple):
    """What a call needs besides its operands; one tuple, because autograd inspects every argument."""

    cu_seqlens: torch.Tensor | None
    start: torch.Tensor | None
    numbers: tuple[float, bool]
    return_state: bool
    ready: Ready


class _GatedDeltaRule(torch.autograd.Function):
    """Saves the operands."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, settings = arguments
        cu_seqlens, start, numbers, return_state, ready = settings
        out, state = ops["forward"].call(ready, *tensors, cu_seqlens, start, *numbers, return_state)
        save(ctx, *tensors, cu_seqlens, start)
        ctx.numbers, ctx.backend, ctx.has_state = numbers, ready.backend, return_state
        if not return_state:
            ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad
        # Under torch.compile it is a tensor of zeros without elements.
        grad_state = grad_state if ctx.has_state else None
        if grad is None and grad_state is None:
            return (None,) * len(needed)
        tensors = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(tensors[2], memory_format=torch.contiguous_format)
        needs_state = tensors[5] is not None
        results = first_order(ops["backward"], *tensors, *ctx.numbers, grad, grad_state, needs_state, ctx.backend)
        return *[value if is_needed else None for value, is_needed in zip(results, needed, strict=False)], None
