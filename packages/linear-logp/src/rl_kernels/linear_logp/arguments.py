"""The arguments of a call: checks, and the choice of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rl_kernels.core import chains
from rl_kernels.core import min_logit as thresholds
from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalar, scalar_or_rows, scalars
from rl_kernels.linear_logp import kept_columns, kept_ids
from rl_kernels.linear_logp.inputs import flat, rows_of
from rl_kernels.linear_logp.known import Known
from rl_kernels.linear_logp.op import OPERATOR, describe, ops
from rl_kernels.linear_logp.vocabulary import Shard, VocabCuts, shard_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rl_kernels.core.distributed import Validate
    from rl_kernels.linear_logp.halo import Halo


class Memory(NamedTuple):
    """Limits of memory, in MiB, in place of ``"lean"`` and ``"fast"``; they change no bit.

    Attributes:
        workspace_mib: an integer >= 1: limit on the memory of backward besides the gradients. It includes the FP32
            buffer for the gradient of ``hidden`` and, with ``ignore_index``, a copy of ``hidden`` if the weight needs a
            gradient. If the limit is below these plus the smallest block that the backend works on, backward uses that
            much. With ``vocab_segments=8`` up to three further buffers come on top. None: as much as makes backward
            fast, for N tokens ``4 N D + 67584 N`` bytes (N at most 16384 in the second term), at least 256 MiB.
        saved_mib: an integer >= 0: at most this much of the logits, those of the last columns, stays in memory from the
            forward to the backward pass, which then does not recompute them. A logit takes 4 bytes, 8 for FP64 inputs.
            None: all of at most 64 tokens (37 MiB for 151936 entries), of more tokens nothing; on a CPU 64. Without
            gradients nothing is kept. The last backward pass frees them as soon as it has read them.
    """

    workspace_mib: int | None = None
    saved_mib: int | None = None


WHOLE = 1 << 30
"""MiB that no call takes."""
LEAN: Literal["lean"] = "lean"
FAST: Literal["fast"] = "fast"
MemoryUse = Literal["lean", "fast"] | Memory
"""How much memory a call takes."""


class Options(NamedTuple):
    """The arguments of a call besides its tensors and its group."""

    temperature: float | torch.Tensor = 1.0
    min_logit: torch.Tensor | None = None
    softcap: float = 0.0
    logit_scale: float = 1.0
    ignore_index: int | None = None
    return_stats: bool = False
    join_tokens: int | None = None
    memory: MemoryUse = LEAN
    vocab_size: int | VocabCuts | None = None
    vocab_segments: int | None = None
    validate: Validate = True
    backend: str | None = None
    known: Known | None = None
    return_known: bool = False
    check_rows: int = 0
    kept_ids: torch.Tensor | None = None


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Hidden states ``[N, D]``, weight ``[V, D]`` and bias ``[V]``, after autocast."""


class Call(NamedTuple):
    """What a call computes with besides its operands; one tuple, because autograd inspects every argument.

    Attributes:
        target_ids: ``[N]``.
        temperature: ``[]`` or ``[N]`` in the compute dtype.
        min_logit: ``[N]`` in the compute dtype, or None.
        ignore_index: the id of positions that are ignored, or None.
        cap: the numbers of ``inputs.Cap``, or None.
        has_stats: whether logsumexp and entropy are results.
        saved_mib: limit on the logits that are kept for backward, or None for the default.
        workspace_mib: limit on the memory of backward, or None for the default.
        join_tokens: rows of a chain of the gradients of weight and bias, or None.
        main_grad: buffer to which the gradient of the weight is added, or None.
        shard: the columns of this process.
        ready: the forward pass on the chosen backend.
        known: statistics that the caller knows, of rows ``[N]``, or None.
        needs_gradient: whether autograd records the call.
        is_checked: whether targets are compared with ``min_logit``.
        halo: rows of other ranks, if the shards are not those of ``vocab_shards``.
        columns: ``[N, K]``, the columns that count in each row (``kept_columns.columns_of``), or None for all.
    """

    target_ids: torch.Tensor
    temperature: torch.Tensor
    min_logit: torch.Tensor | None
    ignore_index: int | None
    cap: torch.Tensor | None
    has_stats: bool
    saved_mib: int | None
    workspace_mib: int | None
    join_tokens: int | None
    main_grad: torch.Tensor | None
    shard: Shard
    ready: Ready
    known: Known | None
    needs_gradient: bool
    is_checked: bool
    halo: Halo | None = None
    columns: torch.Tensor | None = None

    def of_rows(self, rows: slice | torch.Tensor, saved_mib: int | None) -> Call:
        """Return the call for some of the rows."""
        scale = self.temperature[rows] if self.temperature.ndim else self.temperature
        least = None if self.min_logit is None else self.min_logit[rows]
        changed = self._replace(target_ids=self.target_ids[rows], temperature=scale, min_logit=least)
        if self.columns is not None:
            changed = changed._replace(columns=self.columns[rows])
        return changed._replace(saved_mib=saved_mib, ready=Ready(self.ready.backend), known=None)


def call_of(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | None,
    options: Options,
) -> tuple[Operands, Call]:
    """Check the arguments, and choose a backend.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    if group is not None and check.is_dtensor(lm_head_weight):
        from rl_kernels.linear_logp.halo import of_dtensors

        lm_head_weight, bias, cuts = of_dtensors(lm_head_weight, bias, group, options.vocab_size)
        options = options._replace(vocab_size=cuts)
    hidden, weight, bias = autocast_linear(hidden, lm_head_weight, bias)
    needs_gradient = torch.is_grad_enabled() and (
        getattr(hidden, "requires_grad", False)
        or getattr(weight, "requires_grad", False)
        or getattr(bias, "requires_grad", False)
    )
    known = options.known
    prepare = _remembered if group is None and known is None else _prepare
    shard, ready, scale, cap = prepare(hidden, weight, target_ids, bias, needs_gradient, group, *options)
    if scale is None:
        dtype, is_read = compute_dtype(hidden.dtype), bool(options.validate)
        check.temperature(options.temperature, target_ids.shape, hidden.device, dtype, values=is_read)
        scale = _scale(options, cap, target_ids.numel(), dtype)
    if options.validate:
        thresholds.validate(options.min_logit, target_ids.shape, hidden.device, compute_dtype(hidden.dtype))
        check.ids_in_range("target_ids", target_ids, shard.size, options.ignore_index)
        thresholds.check_numbers(options.min_logit, target_ids, options.ignore_index)
        if options.kept_ids is not None:
            check.ids_in_range("kept_ids", options.kept_ids, shard.size, kept_columns.FILLING)
    main_grad = getattr(lm_head_weight, "main_grad", None) if lm_head_weight.requires_grad else None
    if main_grad is not None:
        check.main_grad("lm_head_weight.main_grad", main_grad, weight)
    no_lost_derivatives("linear_logp", hidden, weight, bias, scale, options.min_logit)
    if options.return_known and needs_gradient:
        raise ValueError("linear_logp_known: expected no gradients, call it under torch.no_grad()")
    ids, memory, columns = flat(target_ids), limits_of(options), None
    if options.kept_ids is not None:
        columns = kept_columns.columns_of(options.kept_ids, ids, options.ignore_index, shard.size)
        if options.validate:
            kept_ids.check_targets(columns, ids, options.ignore_index)
    call = Call(
        *(ids, scale, _of_rows(options.min_logit), options.ignore_index, cap, options.return_stats),
        *(
            memory.saved_mib if needs_gradient else 0,
            memory.workspace_mib,
            options.join_tokens,
            main_grad,
            shard,
            ready,
        ),
        None if known is None else known.of_rows(ids, options.ignore_index),
        needs_gradient,
        bool(options.validate),
        columns=columns,
    )
    return (rows_of(hidden), weight, bias), call


def _prepare(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    needs_gradient: bool,
    group: ProcessGroup | None,
    *values: Any,
) -> tuple[Shard, Ready, torch.Tensor | None, torch.Tensor | None]:
    """Check all but the values of tensors, choose a backend, and prepare the forward pass of this process alone.

    Return the shard, the forward pass, the temperature (None if it is a tensor) and the cap.
    """
    options = Options(*values)
    shard, dtype = checked(hidden, weight, target_ids, bias, group, options), compute_dtype(hidden.dtype)
    _check_options(options, target_ids, hidden.device, dtype, is_group=shard.group is not None)
    if options.known is not None:
        Known.validate(options.known, hidden, target_ids, return_stats=options.return_stats)
    chosen = choose(OPERATOR, describe(hidden, weight, vocab_size=shard.size), options.backend).name
    cap = cap_numbers(options, dtype)
    scale = _scale(options, cap, target_ids.numel(), dtype)
    ready = Ready(chosen)
    if group is None and options.known is None and options.kept_ids is None:
        memory = limits_of(options)
        rows, least = (rows_of(hidden), weight, flat(target_ids), bias), _of_rows(options.min_logit)
        op = ops["forward_stats" if options.return_stats else "forward"]
        ready = op.ready(
            *(*rows, scale, options.ignore_index, cap, least, memory.saved_mib if needs_gradient else 0, chosen)
        )
    return shard, ready, None if isinstance(options.temperature, torch.Tensor) else scale, cap


_remembered = remembered(_prepare)


def checked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | None,
    options: Options,
) -> Shard:
    """Check the tensors but for their values; return the shard."""
    check.tensor("hidden", hidden, check.FLOATS, least=1)
    check.tensor("lm_head_weight", weight, check.FLOATS, ndim=2)
    columns = weight.shape[0]
    shard = shard_of(columns, group, options.vocab_size, options.vocab_segments)
    check.shape("lm_head_weight", weight, (columns, hidden.shape[-1]), "V, and the last dim of hidden")
    check.target_ids("target_ids", target_ids, hidden.shape[:-1], "the leading dims of hidden")
    if bias is not None:
        check.tensor("bias", bias, check.FLOATS, ndim=1)
        check.shape("bias", bias, (columns,), "the first dim of lm_head_weight")
    check.same_device(hidden=hidden, lm_head_weight=weight, target_ids=target_ids, bias=bias)
    check.same_dtype(hidden=hidden, lm_head_weight=weight, bias=bias)
    check.ignore_index(options.ignore_index, target_ids)
    return shard


def _check_options(
    options: Options, target_ids: torch.Tensor, device: torch.device, dtype: torch.dtype, *, is_group: bool
) -> None:
    memory = options.memory
    if not isinstance(memory, Memory):
        if memory not in (LEAN, FAST):
            kind, value = (ValueError, repr(memory)) if isinstance(memory, str) else (TypeError, type(memory).__name__)
            raise kind(f"memory: expected {LEAN!r}, {FAST!r} or Memory(...), got {value}")
    else:
        if memory.workspace_mib is not None:
            check.integer("workspace_mib", memory.workspace_mib, least=1)
        if memory.saved_mib is not None:
            check.integer("saved_mib", memory.saved_mib, least=0)
    chains.validate(options.join_tokens)
    check.backend_name(options.backend)
    check.integer("check_rows", options.check_rows, least=0)
    check.temperature(options.temperature, target_ids.shape, device, dtype, values=False)
    thresholds.validate(options.min_logit, target_ids.shape, device, dtype)
    kept_ids.validate(options.kept_ids, target_ids.shape, device)
    if options.kept_ids is not None:
        is_known = options.return_known or options.known is not None
        given = {"min_logit": options.min_logit is not None, "process_group": is_group, "known statistics": is_known}
        for name, is_given in given.items():
            if is_given:
                raise ValueError(f"kept_ids: expected None with {name}")
    check.number("softcap", options.softcap, least=0, dtype=dtype)
    check.number("logit_scale", options.logit_scale, above=0, dtype=dtype)


def limits_of(options: Options) -> Memory:
    """Return the limits of a call: with ``"fast"`` none, so that all logits are kept and dz is formed in one piece.

    With ``join_tokens`` that piece would need FP32 buffers of the whole weight: there the workspace stays that of
    ``"lean"``. So it does with ``kept_ids``, where backward forms no logits: keeping all would save nothing.
    """
    if isinstance(options.memory, Memory):
        return options.memory
    is_lean = options.memory == LEAN or options.kept_ids is not None
    return Memory() if is_lean else Memory(None if options.join_tokens else WHOLE, WHOLE)


def cap_numbers(options: Options, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the numbers of ``Cap``, or None if logits are not capped."""
    softcap, logit_scale = options.softcap, options.logit_scale
    if not softcap > 0:
        return None
    rate = logit_scale / softcap
    check.number("softcap", softcap, above=0, dtype=dtype)
    check.number("logit_scale / softcap", rate, above=0, dtype=dtype)
    return scalars(softcap, rate)


def _of_rows(min_logit: torch.Tensor | None) -> torch.Tensor | None:
    return None if min_logit is None else flat(min_logit.detach())


def _scale(options: Options, cap: torch.Tensor | None, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the temperature ``[]`` or ``[N]``; without a cap it takes in the scale of the logits."""
    temperature, logit_scale = options.temperature, options.logit_scale
    if cap is not None or logit_scale == 1:
        return scalar_or_rows(temperature, rows, dtype)
    if isinstance(temperature, torch.Tensor):
        return scalar_or_rows(temperature.to(dtype) / logit_scale, rows, dtype)
    check.number("temperature / logit_scale", temperature / logit_scale, above=0, dtype=dtype)
    return scalar(temperature / logit_scale, dtype)
