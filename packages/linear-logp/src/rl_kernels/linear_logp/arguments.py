"""The arguments of a call: checks, what ranks must agree on, and the inputs of the raw ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch

from rl_kernels.core import chains
from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.scalars import scalar_or_rows, scalars
from rl_kernels.linear_logp.known import Known, validate
from rl_kernels.linear_logp.op import OPERATOR, describe
from rl_kernels.linear_logp.shard import Shard, same_of, shard_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rl_kernels.core.distributed import Validate


class Keywords(TypedDict, total=False):
    """The keyword arguments of ``linear_logp`` that its type does not depend on."""

    temperature: float | torch.Tensor
    softcap: float
    logit_scale: float
    ignore_index: int | None
    join_tokens: int | None
    memory: Memory | None
    process_group: ProcessGroup | DeviceMesh | None
    vocab_size: int | None
    vocab_segments: Literal[1, 8] | None
    validate: Validate
    backend: str | None


class Memory(NamedTuple):
    """Limits of memory, in MiB; they change no bit.

    Attributes:
        workspace_mib: an integer >= 1: limit on the memory of backward besides the gradients. It includes the FP32
            buffer for the gradient of ``hidden`` and, with ``ignore_index``, a copy of ``hidden`` if the weight needs a
            gradient. If the limit is below these plus the smallest block that the backend works on, backward uses that
            much. With ``vocab_segments=8`` up to three further buffers come on top. None: as much as makes backward
            fast, for N tokens ``4 N D + 67584 N`` bytes (N at most 16384 in the second term), at least 256 MiB.
        saved_mib: an integer >= 0: at most this much of the logits, those of the last columns, stays in memory from the
            forward to the backward pass, which then does not recompute them. A logit takes 4 bytes, 8 for FP64 inputs.
            None: all of at most 64 tokens (37 MiB for 151936 entries), of more tokens nothing; on a CPU 64. Without
            gradients nothing is kept.
    """

    workspace_mib: int | None = None
    saved_mib: int | None = None


class Options(NamedTuple):
    """The arguments of a call besides its tensors and its group."""

    temperature: float | torch.Tensor = 1.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    ignore_index: int | None = None
    return_stats: bool = False
    join_tokens: int | None = None
    memory: Memory | None = None
    vocab_size: int | None = None
    vocab_segments: int | None = None
    validate: Validate = True
    backend: str | None = None
    known: Known | None = None
    return_known: bool = False
    check_rows: int = 0

    @property
    def workspace_mib(self) -> int | None:
        """Limit on the memory of backward."""
        return None if self.memory is None else self.memory.workspace_mib

    @property
    def saved_mib(self) -> int | None:
        """Limit on the logits that are kept."""
        return None if self.memory is None else self.memory.saved_mib


OF_ALL_RANKS = ("softcap", "logit_scale", "ignore_index", "return_stats", "check_rows", "join_tokens", "vocab_size")
"""Options that must be equal on all ranks."""
RawInputs: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, "int | None", "torch.Tensor | None"
]
"""hidden, weight, target_ids, bias, temperature, ignore_index and cap."""


class Prepared(NamedTuple):
    """What a call computes with.

    Attributes:
        inputs: as the raw ops take them, ``[N, D]`` and ``[N]``.
        main_grad: buffer to which the gradient of the weight is added, or None.
        differentiable: whether an input requires grad.
        shard: the columns of this process.
        backend: name of the backend that runs.
        known: statistics that the caller knows, of rows ``[N]``, or None.
    """

    inputs: RawInputs
    main_grad: torch.Tensor | None
    differentiable: bool
    shard: Shard
    backend: str
    known: Known | None


def agreed(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | None,
    options: Options,
) -> Prepared:
    """Check the arguments; in a group of several ranks, also that the ranks agree, unless values are not checked.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or, if values are checked, on any.
    """
    arguments = hidden, lm_head_weight, target_ids, bias, group, options
    if group is None or group.size() == 1:
        return _prepared(*arguments)
    # Under torch.compile and graph capture values cannot be read.
    if not options.validate or torch.compiler.is_compiling():
        return _prepared(*arguments)
    if isinstance(hidden, torch.Tensor) and values_hidden(hidden):
        return _prepared(*arguments)
    from rl_kernels.core.distributed import agree_on_kind

    error, prepared = None, None
    try:
        prepared = _prepared(*arguments)
    except Exception as caught:
        # Whatever it is, the other ranks would wait for this one.
        error = caught
    options_of_all = {name: getattr(options, name) for name in OF_ALL_RANKS}
    kinds = (getattr(hidden, "dtype", None), getattr(target_ids, "dtype", None), getattr(hidden, "shape", (None,))[-1:])
    needs_gradient = torch.is_grad_enabled() and getattr(hidden, "requires_grad", False)
    kind = (
        "linear_logp",
        bias is None,
        options.known is None,
        needs_gradient,
        *map(str, (*options_of_all.values(), *kinds)),
    )

    def same() -> dict[str, object]:
        assert prepared is not None
        compared = {"bias": "none" if bias is None else "given", **options_of_all, "backend": prepared.backend}
        return same_of(hidden, target_ids, options.temperature, options.known, **compared)

    agree_on_kind("linear_logp", group, options.validate, kind, error, same)
    assert prepared is not None
    return prepared


def _prepared(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | None,
    options: Options,
) -> Prepared:
    hidden, weight, bias = autocast_linear(hidden, lm_head_weight, bias)
    known, tensors = options.known, (hidden, weight, target_ids, bias)
    if group is None and known is None:
        shard, backend = _remembered(*tensors, *options)
    else:
        shard, backend = _checked(*tensors, group, options)
    dtype = compute_dtype(hidden.dtype)
    if isinstance(options.temperature, torch.Tensor):
        check.temperature(options.temperature, target_ids.shape, hidden.device, dtype, values=bool(options.validate))
    if options.validate:
        check.ids_in_range("target_ids", target_ids, shard.size, options.ignore_index)
    main_grad = getattr(lm_head_weight, "main_grad", None) if lm_head_weight.requires_grad else None
    temperature, cap = _scaled(options.temperature, options.softcap, options.logit_scale, dtype)
    if main_grad is not None:
        check.main_grad("lm_head_weight.main_grad", main_grad, weight)
    no_lost_derivatives("linear_logp", hidden, weight, bias, temperature)
    differentiable = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if options.return_known and differentiable and torch.is_grad_enabled():
        raise ValueError("linear_logp_known: expected no gradients, call it under torch.no_grad()")
    scale = scalar_or_rows(temperature, target_ids.numel(), dtype)
    rows = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]
    inputs = (rows, weight, target_ids.reshape(-1), bias, scale, options.ignore_index, cap)
    if known is not None:
        known = known.of_rows(inputs[2], options.ignore_index)
    return Prepared(inputs, main_grad, differentiable, shard, backend, known)


@remembered
def _remembered(
    hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> tuple[Shard, str]:
    return _checked(hidden, weight, target_ids, bias, None, Options(*options))


def _checked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | None,
    options: Options,
) -> tuple[Shard, str]:
    """Check all but the values of tensors; return the shard and the name of the backend."""
    check.tensor("hidden", hidden, check.FLOATS, least=1)
    check.tensor("lm_head_weight", weight, check.FLOATS, ndim=2)
    columns, dtype = weight.shape[0], compute_dtype(hidden.dtype)
    shard = shard_of(columns, group, options.vocab_size, options.vocab_segments)
    check.shape("lm_head_weight", weight, (columns, hidden.shape[-1]), "V, and the last dim of hidden")
    check.target_ids("target_ids", target_ids, hidden.shape[:-1], "the leading dims of hidden")
    if bias is not None:
        check.tensor("bias", bias, check.FLOATS, ndim=1)
        check.shape("bias", bias, (columns,), "the first dim of lm_head_weight")
    check.same_device(hidden=hidden, lm_head_weight=weight, target_ids=target_ids, bias=bias)
    check.same_dtype(hidden=hidden, lm_head_weight=weight, bias=bias)
    check.ignore_index(options.ignore_index, target_ids)
    if options.memory is not None and not isinstance(options.memory, Memory):
        raise TypeError(f"memory: expected Memory(...), got {type(options.memory).__name__}")
    if options.workspace_mib is not None:
        check.integer("workspace_mib", options.workspace_mib, least=1)
    if options.saved_mib is not None:
        check.integer("saved_mib", options.saved_mib, least=0)
    chains.validate(options.join_tokens)
    check.backend_name(options.backend)
    check.integer("check_rows", options.check_rows, least=0)
    if options.known is not None:
        validate(options.known, hidden, target_ids, return_stats=options.return_stats)
    check.temperature(options.temperature, target_ids.shape, hidden.device, dtype, values=False)
    check.number("softcap", options.softcap, least=0, dtype=dtype)
    check.number("logit_scale", options.logit_scale, above=0, dtype=dtype)
    call = describe(hidden, weight, target_ids, bias, vocab_size=shard.size)
    return shard, choose(OPERATOR, call, options.backend).name


def _scaled(
    temperature: float | torch.Tensor, softcap: float, logit_scale: float, dtype: torch.dtype
) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """Return the temperature and the numbers of ``Cap``, or without a cap temperature / logit_scale and None."""
    if softcap > 0:
        rate = logit_scale / softcap
        check.number("softcap", softcap, above=0, dtype=dtype)
        check.number("logit_scale / softcap", rate, above=0, dtype=dtype)
        return temperature, scalars(softcap, rate)
    if logit_scale == 1:
        return temperature, None
    if isinstance(temperature, torch.Tensor):
        return temperature.to(dtype) / logit_scale, None
    check.number("temperature / logit_scale", temperature / logit_scale, above=0, dtype=dtype)
    return temperature / logit_scale, None
