"""The public function ``fused_logp``: validation, dispatch, autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from rl_kernels.core import min_logit as thresholds
from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.saved import are_hooked, save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, no_lost_derivatives
from rl_kernels.core.torchlib.ops import Op
from rl_kernels.core.torchlib.scalars import scalar_or_rows
from rl_kernels.fused_logp.op import OPERATOR, describe, ops

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Keywords(TypedDict, total=False):
        """Keyword arguments that the type of the result does not depend on."""

        temperature: float | torch.Tensor
        min_logit: torch.Tensor | None
        ignore_index: int | None
        row_indices: torch.Tensor | None
        out: torch.Tensor | None
        out_dtype: torch.dtype
        inplace_backward: bool
        validate: bool
        backend: str | None


@overload
def fused_logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[Keywords],
) -> torch.Tensor: ...


@overload
def fused_logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    return_stats: Literal[True],
    **options: Unpack[Keywords],
) -> LogpStats: ...


@overload
def fused_logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    return_stats: bool,
    **options: Unpack[Keywords],
) -> torch.Tensor | LogpStats: ...


def fused_logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    min_logit: torch.Tensor | None = None,
    ignore_index: int | None = None,
    row_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    return_stats: bool = False,
    inplace_backward: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | LogpStats:
    """Return the log-probability of each selected token: ``z[id] - logsumexp(z)`` with ``z = logits / temperature``.

    Computed in FP32 for logits of any dtype (in FP64 for FP64 logits). With p = softmax(z), the entropy is
    ``-sum(p log p)``, in nats. No rounding takes a log-probability above 0 or an entropy below 0. A row's result and
    its row of the gradient depend on that row alone, bit for bit. An entry of ``-inf`` is masked: its probability is 0.
    A row that is all ``-inf``, or holds NaN or ``+inf``, gives NaN; no other row is affected.

    Args:
        logits: ``[..., V]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        target_ids: ``[...]``, int64 or int32, each in ``[0, V)`` or equal to ``ignore_index``.
        temperature: a number > 0, or a floating-point tensor of no dims or ``[...]`` (one value per token) that does
            not require grad.
        min_logit: None, or ``[...]`` in FP32 (FP64 for FP64 logits), without grad: in each row only entries with
            ``z >= min_logit`` count; the others have probability 0 and a gradient of exactly 0. z is the quotient that
            PyTorch gives for tensors, ``logits.float() / temperature[..., None]``. ``-inf`` keeps all, with the bits
            of None. A target that is not kept has a log-probability of -inf, without a gradient. A row of which nothing
            is kept gives NaN.
        ignore_index: positions with this id give 0 in every output and get zero gradient; their logits have no effect.
        row_indices: ``[R]``, int64 or int32, indices into the flattened rows; only these rows are computed. The other
            rows keep their value in ``out``, or are 0 without ``out``; their ids and min_logit are neither read nor
            checked.
        out: ``[...]`` in ``out_dtype``, on the device of logits; overwritten with the log-probabilities and
            returned. Must be None when logits require grad.
        out_dtype: dtype of the log-probabilities: FP32, BF16, FP16 or FP64. logsumexp and entropy are FP32, or FP64
            if ``out_dtype`` is FP64.
        return_stats: return ``LogpStats(logp, logsumexp, entropy)``, all differentiable.
        inplace_backward: backward writes the gradient over the logits. A later backward that needs the logits raises,
            as after any in-place write. Not available under torch.compile; has no effect inside
            ``torch.utils.checkpoint`` and under other hooks on saved tensors, where nothing would raise.
        validate: check the values of ids, indices, temperature and min_logit, and that targets are kept. This syncs
            with a GPU, with ``min_logit`` after the forward pass too, and is skipped under torch.compile and graph
            capture. Without the check, a row with an id out of range gives NaN, and row indices are clamped to the
            valid range.
        backend: name of a backend, ``auto``, or None: the backend that ``use_backend`` or ``RL_KERNELS_BACKEND``
            forces, otherwise ``auto``.

    Returns:
        Log-probabilities ``[...]`` in ``out_dtype``, or ``LogpStats`` of three tensors ``[...]``.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    options = (out, out_dtype, return_stats, inplace_backward, backend)
    ready, scale = _prepare(logits, target_ids, temperature, min_logit, ignore_index, row_indices, *options)
    if scale is None:
        dtype = compute_dtype(logits.dtype)
        check.temperature(temperature, target_ids.shape, logits.device, dtype, values=validate)
        scale = scalar_or_rows(temperature, target_ids.numel(), dtype)
    if validate:
        thresholds.validate(min_logit, target_ids.shape, logits.device, compute_dtype(logits.dtype))
        checked, numbers = target_ids, min_logit
        if row_indices is not None:
            check.ids_in_range("row_indices", row_indices, target_ids.numel(), ignorable=False)
            computed = row_indices.long()
            checked = target_ids.reshape(-1)[computed]
            numbers = None if min_logit is None else min_logit.reshape(-1)[computed]
        check.ids_in_range("target_ids", checked, logits.shape[-1], ignore_index)
        thresholds.check_numbers(numbers, checked, ignore_index)
    if out is not None:
        _check_writable(out, logits)
    no_lost_derivatives("fused_logp", logits, temperature, min_logit, out)
    (ids, rows), least = _flat(target_ids, row_indices), _of_rows(min_logit)
    op = ops["forward_stats" if return_stats else "forward"]
    if logits.requires_grad and torch.is_grad_enabled():
        settings = _Settings(op, ready, ids, scale, ignore_index, rows, least, inplace_backward)
        results = apply_of(_FusedLogp, ready)(logits, settings)
    else:
        results = op.call(ready, logits.reshape(-1, logits.shape[-1]), ids, scale, ignore_index, rows, least)
    if validate and least is not None:
        thresholds.check_targets(
            results[0], least, lambda: _without_min_logit(logits, ready, ids, scale, ignore_index, rows)
        )
    # Views and casts that change nothing would cost host time, those of a graph in backward too.
    if target_ids.ndim != 1:
        results = [value.view(target_ids.shape) for value in results[: 3 if return_stats else 1]]
    logp = results[0] if results[0].dtype == out_dtype else results[0].to(out_dtype)
    if out is not None:
        logp = _write(out, logp, rows)
    if not return_stats:
        return logp
    stats_dtype = compute_dtype(out_dtype)
    return LogpStats(logp, *[value.to(stats_dtype) for value in results[1:3]])


@remembered
def _prepare(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    min_logit: torch.Tensor | None,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    return_stats: bool,
    inplace_backward: bool,
    backend: str | None,
) -> tuple[Ready, torch.Tensor | None]:
    """Check what is the same for all calls of a kind, and choose a backend.

    Return the forward pass, and the temperature, None if it is a tensor.
    """
    check.tensor("logits", logits, check.FLOATS, least=1)
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: expected a vocabulary (last dim) of at least 1, got shape {tuple(logits.shape)}")
    check.target_ids("target_ids", target_ids, logits.shape[:-1], "the leading dims of logits")
    if row_indices is not None:
        check.tensor("row_indices", row_indices, check.INTEGERS, ndim=1)
    check.same_device(logits=logits, target_ids=target_ids, row_indices=row_indices)
    check.ignore_index(ignore_index, target_ids)
    check.choice("out_dtype", out_dtype, check.FLOATS)
    check.backend_name(backend)
    if out is not None:
        check.tensor("out", out, (out_dtype,))
        check.shape("out", out, target_ids.shape, "that of target_ids")
        check.same_device(logits=logits, out=out)
    if inplace_backward:
        if torch.compiler.is_compiling():
            raise ValueError("inplace_backward: expected False under torch.compile")
        check.own_storage("inplace_backward: logits", logits)
    dtype = compute_dtype(logits.dtype)
    check.temperature(temperature, target_ids.shape, logits.device, dtype, values=False)
    thresholds.validate(min_logit, target_ids.shape, logits.device, dtype)
    (ids, rows), scale = _flat(target_ids, row_indices), scalar_or_rows(temperature, target_ids.numel(), dtype)
    op, name = ops["forward_stats" if return_stats else "forward"], choose(OPERATOR, describe(logits), backend).name
    ready = op.ready(logits.reshape(-1, logits.shape[-1]), ids, scale, ignore_index, rows, _of_rows(min_logit), name)
    return ready, None if isinstance(temperature, torch.Tensor) else scale


def _check_writable(out: torch.Tensor, logits: torch.Tensor) -> None:
    check.writable("out", out)
    if torch.is_grad_enabled():
        if logits.requires_grad:
            raise ValueError("out: expected None when logits require grad: a result written to out has no gradient")
        if out.requires_grad:
            raise ValueError("out: expected a tensor that does not require grad, because it is overwritten")


def _flat(target_ids: torch.Tensor, row_indices: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ids and row indices of the raw ops; with validate=False indices may be out of range."""
    rows = row_indices
    if rows is not None:
        count = target_ids.numel()
        rows = rows.long().clamp(0, count - 1) if count else rows.new_empty(0, dtype=torch.int64)
    return target_ids if target_ids.ndim == 1 else target_ids.reshape(-1), rows


def _of_rows(min_logit: torch.Tensor | None) -> torch.Tensor | None:
    return None if min_logit is None else min_logit.detach().reshape(-1)


def _without_min_logit(logits: torch.Tensor, ready: Ready, *rest: Any) -> torch.Tensor:
    logp: torch.Tensor = ops["forward"](logits.detach().reshape(-1, logits.shape[-1]), *rest, None, ready.backend)[0]
    return logp


def _write(out: torch.Tensor, logp: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    if rows is not None:
        logp = out.flatten().index_copy(0, rows, logp.flatten()[rows]).view(out.shape)
    return out.copy_(logp)


class _Settings(NamedTuple):
    """The arguments of a call besides its logits; one tuple, because autograd inspects every argument."""

    op: Op
    ready: Ready
    target_ids: torch.Tensor
    temperature: torch.Tensor
    ignore_index: int | None
    row_indices: torch.Tensor | None
    min_logit: torch.Tensor | None
    inplace: bool


class _FusedLogp(torch.autograd.Function):
    """Saves logits and norm, and entropy with ``return_stats``; only the logits get a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, settings: _Settings) -> tuple[torch.Tensor, ...]:
        op, ready, target_ids, temperature, ignore_index, row_indices, min_logit, inplace = settings
        rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
        results = op.call(ready, rows, target_ids, temperature, ignore_index, row_indices, min_logit)
        save(ctx, logits, target_ids, temperature, row_indices, min_logit, results[-1], *results[2:3])
        ctx.set_materialize_grads(False)
        # Saved by hooks, changed logits would not be noticed by another backward pass that needs them.
        ctx.ignore_index, ctx.inplace, ctx.backend = ignore_index, inplace and not are_hooked(), ready.backend
        return tuple(results[:-1])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, target_ids, temperature, row_indices, min_logit, norm, *entropy = ctx.saved_tensors
        saved = (norm, entropy[0] if entropy else None, *upstream, *[None] * (3 - len(upstream)))
        rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
        arguments = (rows, target_ids, temperature, ctx.ignore_index, row_indices, min_logit, *saved, ctx.backend)
        if ctx.inplace:
            no_lost_derivatives("fused_logp", *arguments)
            ops["backward_inplace"](*arguments)
            grad = rows.detach()
        else:
            grad = first_order(ops["backward"], *arguments)
        return grad if logits.ndim == 2 else grad.view(logits.shape), None
