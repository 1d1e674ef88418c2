"""Linear layers whose weight is cut over ranks: forward and gradients have the bits of one process."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.constants import STEP
from rl_kernels.core.distributed import Validate, agree_on_kind, group_of, group_size
from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.det_gemm.arguments import choose_for_linear, prepare_linear
from rl_kernels.det_gemm.autograd import Settings
from rl_kernels.det_gemm.exchanged import Cut, layer
from rl_kernels.det_gemm.segments import COUNTS, segment_length


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    process_group: Any = None,
    dx_segments: int = 8,
    dx_length: int | None = None,
    scatter_dim: int | None = None,
    validate: Validate = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return this rank's columns of a linear layer: ``x @ weight^T + bias`` for its rows of the weight.

    The outputs and the gradients of weight and bias are those of ``det_linear`` with the whole weight. The gradient of
    ``x`` is a sum over all outputs, cut into ``dx_segments`` as in ``det_linear(..., dx_segments=dx_segments)``: each
    rank sums its segments, and one exchange in FP32 adds the ranks, with the bits of one process.

    Args:
        x: ``[..., K]``, the same on each rank; dtypes as in ``det_linear``.
        weight: ``[N / ranks, K]``, this rank's rows. ``main_grad`` works as in ``det_linear``.
        bias: ``[N / ranks]``, or None.
        process_group: 1, 2, 4 or 8 ranks, a ``ProcessGroup`` or a mesh with one dim; None is one process.
        dx_segments: 2, 4 or 8, at least the number of ranks; 1 only for one process.
        dx_length: outputs of a segment, a multiple of 16; None: ``N / dx_segments``, which must be one. With it, the
            shards of the last ranks may be shorter, or empty.
        scatter_dim: None: each rank gets the whole gradient of ``x``. Otherwise only its slice along this dim, zeros
            elsewhere: for an ``x`` that was gathered along it, which needs no more (sequence parallelism).
        validate: compare shapes and dtypes on all ranks in the first call of a kind, whose dtypes, segments and inner
            size are new to the group: an exchange of 4 KiB, and a sync of the GPU. ``"ranks"``, or
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, compares every call; otherwise an error in a later call is raised on its
            own rank, and the others wait. Skipped under torch.compile and while a CUDA graph is captured.
        backend: as in ``det_linear``.

    Returns:
        ``[..., N / ranks]`` in the dtype of the operands.

    Raises:
        TypeError, ValueError: an argument is not as above; where ranks are compared, each raises the same error.
        BackendUnavailable, RuntimeError, CanaryMismatch: as in ``det_linear``.
    """
    call = _Call("column_parallel_linear", x, weight, bias, process_group, "dx_segments", dx_segments, dx_length)
    return call.run(scatter_dim, validate, backend, of_columns=True)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    process_group: Any = None,
    k_segments: int = 8,
    scatter_dim: int | None = None,
    validate: Validate = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return a linear layer whose inputs are cut over ranks: the sum over ranks of ``x @ weight^T``, plus ``bias``.

    The sum over all inputs is cut into ``k_segments`` as in ``det_linear(..., k_segments=k_segments)``: each rank sums
    its segments, and one exchange in FP32 adds the ranks, with the bits of one process. The bias is added once, then
    the result is rounded once.

    Args:
        x: ``[..., K / ranks]``, this rank's inputs; dtypes as in ``det_linear``.
        weight: ``[N, K / ranks]``, this rank's columns. ``main_grad`` works as in ``det_linear``.
        bias: ``[N]``, the same on each rank, or None.
        process_group: as in ``column_parallel_linear``.
        k_segments: 2, 4 or 8, at least the number of ranks; 1 only for one process. K is a multiple of 16 of them.
        scatter_dim: None: each rank gets the whole result. Otherwise its slice along this dim of the result, whose size
            the number of ranks divides (sequence parallelism).
        validate: as in ``column_parallel_linear``.
        backend: as in ``det_linear``.

    Returns:
        ``[..., N]`` in the dtype of the operands, or this rank's slice of it.

    Raises:
        TypeError, ValueError: an argument is not as above; where ranks are compared, each raises the same error.
        BackendUnavailable, RuntimeError, CanaryMismatch: as in ``det_linear``.
    """
    call = _Call("row_parallel_linear", x, weight, bias, process_group, "k_segments", k_segments, None)
    return call.run(scatter_dim, validate, backend, of_columns=False)


class _Call(NamedTuple):
    """The arguments that both layers share; ``key`` is the name of the number of segments."""

    name: str
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    process_group: Any
    key: str
    segments: int
    length: int | None

    def run(
        self, scatter_dim: int | None, validate: Validate, backend: str | None, *, of_columns: bool
    ) -> torch.Tensor:
        """Check the call on all ranks, and return the layer."""
        group = None if self.process_group is None else group_of(self.process_group)
        x, weight, bias = self.x, self.weight, self.bias
        error: Exception | None = None
        try:
            check.tensor("x", x, check.FLOATS, least=1)
            x, weight, bias = autocast_linear(x, weight, bias)
            if of_columns:
                ready = prepare_linear(x, weight, bias, backend, 1, 1, None)
            else:
                ready = Ready(choose_for_linear(x, weight, bias, backend))
            ranks, shape = 1 if group is None else group_size(group), None if scatter_dim is None else tuple(x.shape)
            size = weight.shape[0 if of_columns else 1]
            cut = Cut(
                group if ranks > 1 else None,
                *_cut_of(self.key, self.segments, self.length, size, ranks, scatter_dim, shape, of_columns),
                scatter_dim,
            )
            main_grad = getattr(self.weight, "main_grad", None)
            if main_grad is not None:
                check.main_grad("weight.main_grad", main_grad, self.weight)
        except (TypeError, ValueError, RuntimeError) as raised:
            error = raised
        if group is not None:
            is_hidden = isinstance(x, torch.Tensor) and values_hidden(x)
            common = self._common_arguments(scatter_dim, of_columns)
            shape_of_x = common.pop("shape of x")
            shard = {} if error else {"size": size, "whole": cut.segments * cut.length}
            agree_on_kind(
                *(self.name, group, not is_hidden and validate, (self.name, *map(str, common.values())), error),
                lambda: {"shape of x": shape_of_x, **common, "backend": ready.backend},
                shard,
                _check_shards,
            )
        elif error is not None:
            raise error
        no_lost_derivatives(self.name, x, weight, bias)
        out = layer(x, weight, bias, Settings(ready, x.dtype, main_grad=main_grad), cut, of_columns=of_columns)
        if main_grad is not None and self.weight.requires_grad:
            fold_grad_into_main_grad("weight", self.weight, out)
        return out

    def _common_arguments(self, scatter_dim: int | None, of_columns: bool) -> dict[str, object]:
        x, weight = self.x, self.weight
        whole_dim = (
            weight.shape[1 if of_columns else 0] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None
        )
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else None
        operands = x, weight, self.bias
        dtypes = [getattr(value, "dtype", None) for value in operands]
        # Backward exchanges tensors where x, or with a scatter_dim any operand, needs a gradient.
        requires_grad = [torch.is_grad_enabled() and getattr(value, "requires_grad", False) for value in operands]
        return {
            "shape of x": shape,
            "dtypes of x, weight and bias": dtypes,
            "gradients of x, weight and bias": requires_grad,
            "whole dim of weight": whole_dim,
            self.key: self.segments,
            "scatter_dim": scatter_dim,
            "dx_length": self.length,
        }


def _check_shards(shards: list[dict[str, int]]) -> None:
    """Fail if segments differ, or a shard follows an incomplete one: sums would not have one process's order."""
    if len({shard.get("whole") for shard in shards}) > 1:
        sizes = ", ".join(str(shard["size"]) for shard in shards)
        raise ValueError(f"weight: expected as many rows on each rank without dx_length, got {sizes}")
    for before, after in pairwise(shards):
        if after["size"] and before["size"] < before["whole"]:
            sizes = ", ".join(str(shard["size"]) for shard in shards)
            raise ValueError(f"weight: expected {before['whole']} rows on each rank before the last, got {sizes}")


@functools.lru_cache(maxsize=4096)
def _cut_of(
    key: str,
    segments: int,
    length: int | None,
    size: int,
    ranks: int,
    scatter_dim: int | None,
    shape: tuple[int, ...] | None,
    of_columns: bool,
) -> tuple[int, int]:
    """Check a sum over ranks, for a shard of ``size``; return this rank's segments and their length.

    ``shape`` is that of x, or None without a scatter_dim.
    """
    check.choice(key, segments, COUNTS)
    if segments % ranks:
        raise ValueError(f"{key}: expected a multiple of the {ranks} ranks, got {segments}")
    rank_segments = segments // ranks
    if length is None:
        # One process may have segments of any size; the last one is then shorter.
        length = segment_length(size, rank_segments)
        if ranks > 1 and length * rank_segments != size:
            dim = "rows" if of_columns else "columns"
            raise ValueError(
                f"weight: expected {dim} in multiples of 16 for each of {rank_segments} segments, got {size}"
            )
    else:
        check.integer("dx_length", length, least=STEP)
        if length % STEP:
            raise ValueError(f"dx_length: expected a multiple of 16, got {length}")
        if size > length * rank_segments:
            raise ValueError(f"weight: expected at most {rank_segments} segments of {length} rows, got {size}")
    if scatter_dim is not None and shape is not None:
        check.integer("scatter_dim", scatter_dim, least=0, most=len(shape) - 2)
        if shape[scatter_dim] % ranks:
            raise ValueError(f"x: expected dim {scatter_dim} to divide by {ranks} ranks, got shape {shape}")
    return rank_segments, length
