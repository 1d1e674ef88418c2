"""``det_attention`` over ranks that share each sequence: their agreement, the exchanges, and the gradients.

Keys and values of all ranks are gathered in the forward pass, and again in the backward pass, so that nothing but this
rank's rows is kept between them. The backward pass also gathers queries, outputs, lse and the gradient of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from rl_kernels.attention import checks
from rl_kernels.attention.choice import choose_backend
from rl_kernels.attention.context import layout_of, lengths_of
from rl_kernels.attention.inputs import UNLIMITED, Attended, Inputs, Window
from rl_kernels.attention.op import ops
from rl_kernels.attention.plan import Packed, Where, of_keys, of_queries
from rl_kernels.core import validate as check
from rl_kernels.core.distributed import Validate, agree_on_kind, begin_all_gather, group_of, group_rank, group_size
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden

Tensors = tuple[Any, ...]
NAMES = ("cu_seqlens_q", "cu_seqlens_k", "k_start", "seqused_q", "seqused_k", "block_table")
REFUSED = NAMES[2:]
"""Arguments of padded sequences and of caches."""


class Options(NamedTuple):
    """The arguments of ``det_attention`` besides its tensors and its group."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    return_lse: bool
    validate: Validate
    backend: str | None


class Settings(NamedTuple):
    """What a call needs besides its operands.

    Attributes:
        group: the ranks.
        where: what is computed.
        numbers: scale and soft cap.
        backend: name of the backend.
    """

    group: ProcessGroup
    where: Where
    numbers: tuple[float, float]
    backend: str

    def arguments(self, call: Packed, *operands: torch.Tensor | None) -> Inputs:
        """Return the arguments of the raw ops for q, k, v and sinks of a packed call."""
        scale, softcap = self.numbers
        places = call.cu_seqlens_q, call.cu_seqlens_k, None, call.seqused_q, None, None
        return Inputs._make((*operands, *places, *call.longest, scale, *call.window, softcap))

    def gather(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to gather the rows of all ranks; return a function that waits for them."""
        layout = layout_of(self.where.lengths, self.where.ranks, self.where.device)
        ends = [begin_all_gather(layout.padded("rows", x, self.where.rank), self.group) for x in tensors]
        return lambda: [end() for end in ends]


# Sizes of all ranks cannot be traced. torch.compiler.disable would do, but it imports the compiler at once.
@_disable_dynamo
def attention_over_ranks(tensors: Tensors, process_group: object, options: Options) -> Attended:
    """Return out and lse of this rank's queries; the arguments are checked here.

    Args:
        tensors: q, k, v, sinks and the integer tensors of ``Inputs``.
        process_group: as in ``det_attention``.
        options: as in ``det_attention``.
    """
    settings = _agreed(tensors, group_of(process_group, sizes=None), options)
    operands = tensors[:4]
    no_lost_derivatives("det_attention", *operands)
    q, k, v, sinks = operands
    packed = (*(_rows(x) for x in (q, k, v)), sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        out, lse = AttentionOverRanks.apply(*packed, settings)
    else:
        out, lse = forward(packed, settings)
    if q.ndim == checks.PACKED_DIMS:
        return Attended(out, lse)
    rows = q.shape[:2]
    return Attended(out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous())


def _agreed(tensors: Tensors, group: ProcessGroup, options: Options) -> Settings:
    """Check the arguments and, in the first call of a kind, that all ranks give the same.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or, if ranks are compared, on any.
    """
    settings, error = None, None
    try:
        settings = _checked(tensors, group, options)
    except Exception as caught:
        # Whatever it is, the other ranks would wait for this one.
        error = caught
    same = _compared(tensors, options)
    q = tensors[0]
    compares = False if isinstance(q, torch.Tensor) and values_hidden(q) else options.validate

    def every() -> dict[str, object]:
        assert settings is not None
        return {**same, "q (lengths of sequences)": settings.where.lengths, "backend": settings.backend}

    agree_on_kind("det_attention", group, compares, ("det_attention", *map(str, same.values())), error, every)
    assert settings is not None
    return settings


def _compared(tensors: Tensors, options: Options) -> dict[str, object]:
    """Return what must be equal on all ranks in each call, but for the lengths of sequences."""
    q, k, v, sinks, cu_seqlens_q = tensors[:5]
    same: dict[str, object] = {
        name: f"{len(shape)} dims, {' heads of '.join(map(str, shape[-2:]))}, {getattr(x, 'dtype', None)}"
        for name, x in (("q", q), ("k", k), ("v", v))
        for shape in [getattr(x, "shape", ())]
    }
    same |= {name: getattr(options, name) for name in ("causal", "scale", "window", "softcap")}
    for name, value in (("sinks", sinks), ("cu_seqlens_q", cu_seqlens_q)):
        same[name] = "none" if value is None else "given"
    needed = [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in tensors[:4]]
    for name, is_needed in (("k and v", any(needed[1:3])), ("any operand", any(needed))):
        same[f"gradient of {name}"] = "needed" if is_needed else "not needed"
    return same


def _checked(tensors: Tensors, group: ProcessGroup, options: Options) -> Settings:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *others = tensors
    window = checks.window(options.window, causal=options.causal, unlimited=UNLIMITED)
    check.flag("return_lse", options.return_lse)
    for name, value in zip(REFUSED, others, strict=True):
        if value is not None:
            raise ValueError(f"{name}: expected None with process_group, whose sequences are whole and not padded")
    if window[1] and window != (UNLIMITED, UNLIMITED):
        raise ValueError(f"window: expected causal=True with a window and process_group, got {options.window!r}")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: expected None without cu_seqlens_q: packed keys are for packed queries")
    numbers = (None, None, options.scale, *window, options.softcap)
    checks.heads(Inputs._make((q, k, v, sinks, cu_seqlens_q, cu_seqlens_q, *others, *numbers)))
    ranks, rank = group_size(group), group_rank(group)
    if k.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"k: expected as many rows as q has with process_group, got shape {tuple(k.shape)}")
    if cu_seqlens_q is None:
        lengths = (ranks * q.shape[1],) * q.shape[0]
    else:
        lengths = lengths_of(cu_seqlens_q, "cu_seqlens_q")
        is_other = cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q
        if is_other and lengths_of(cu_seqlens_k, "cu_seqlens_k") != lengths:
            raise ValueError("cu_seqlens_k: expected None or the numbers of cu_seqlens_q with process_group")
    for name, most in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", options.max_seqlen_k)):
        checks.at_most(name, most, cu_seqlens_q, 0)
        if most is not None and most < max(lengths, default=0):
            raise ValueError(
                f"{name}: expected at least {max(lengths)}, the length of the longest sequence, got {most}"
            )
    where = Where(lengths, rank, ranks, window, q.shape[-2] // k.shape[-2], q.device)
    rows = [_rows(x) for x in (q, k, v)]
    layout_of(lengths, ranks, q.device).padded("q", rows[0], rank)
    alike = Inputs._make((*[x[None] for x in rows], sinks, *[None] * len(NAMES), *numbers))
    name, inputs = choose_backend(alike, options.backend)
    return Settings(group, where, (inputs.scale, inputs.softcap), name)


def forward(operands: Tensors, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out ``[rows, H, Dv]`` and lse ``[H, rows]`` of this rank's queries; the operands are packed."""
    q, k, v, sinks = operands
    call = of_queries(settings.where)
    keys = map(call.keys_of, settings.gather(k, v)())
    out, lse = ops["forward"](*settings.arguments(call, q, *keys, sinks), settings.backend)
    return out, lse


def backward(settings: Settings, operands: Tensors, needs: tuple[bool, ...], *rest: torch.Tensor) -> Tensors:
    """Return the gradients of the packed operands; ``rest`` is out, lse and the gradient of out."""
    q, k, v, sinks = operands
    out, lse, grad = rest
    backend, call = settings.backend, of_queries(settings.where)
    gathered_keys, gathered_rows = settings.gather(k, v), None
    if needs[1] or needs[2]:
        # It arrives while dq is computed.
        gathered_rows = settings.gather(q, out, lse.mT, grad)
    all_keys = gathered_keys()
    dq = dk = dv = dsinks = None
    if needs[0] or needs[3]:
        arguments = settings.arguments(call, q, *map(call.keys_of, all_keys), sinks)
        dq, _, _, dsinks = ops["backward"](*arguments, *rest, needs[0], False, backend)
        del arguments
    if gathered_rows is not None:
        all_rows = gathered_rows()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for call in of_keys(settings.where):
            queries, outs, lses, grads = map(call.queries_of, all_rows)
            arguments = settings.arguments(call, queries, *map(call.keys_of, all_keys), None)
            _, *gradients, _ = ops["backward"](*arguments, outs, lses.mT, grads, False, True, backend)
            for total, part in zip((dk, dv), gradients, strict=True):
                total.index_copy_(0, call.rows, part.index_select(0, call.own))
    return dq, dk, dv, dsinks


class AttentionOverRanks(torch.autograd.Function):
    """Saves this rank's operands, out and lse; lse carries no gradient. All ranks must run its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        settings: Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, packed."""
        out, lse = forward((q, k, v, sinks), settings)
        save(ctx, q, k, v, sinks, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the operands."""
        *operands, out, lse = ctx.saved_tensors
        # Which of them a pass asks for may differ between ranks.
        needs = ctx.needs_input_grad[:4]
        computed = first_order(backward, ctx.settings, tuple(operands), needs, out, lse, grad)
        return *[value if is_needed else None for value, is_needed in zip(computed, needs, strict=True)], None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -3)
