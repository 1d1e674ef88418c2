"""Gradients of DDP and FSDP2 whose sums over ranks have a fixed order, and a gradient norm that no rank count changes.

Gradients are added in rank order, ``((g0 + g1) + g2) + g3``, in the dtype in which the wrapper reduces gradients. The
bits are those of one process that accumulates the same micro-batches in ``.grad``, one after the other.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from rl_kernels.core import validate as check
from rl_kernels.core.distributed import all_gather, all_reduce, reduce_scatter
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.sums import row_sum

CHAIN = "chain"
BLOCK = 1 << 24
"""Elements of a gradient that are squared at once; each row is summed on its own, so this changes no bit."""
TINY = 1e-6
"""Added to the norm before the division, as in PyTorch's ``clip_grad_norm_``."""
NEEDED = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")
"""Methods of ``FSDPModule`` that select how it reduces gradients."""


def ordered_gradients(module: nn.Module, *, average: bool = False) -> nn.Module:
    """Let DDP or FSDP2 sum gradients in the order of ranks; return the module. Call it once, before the first backward.

    If each rank contributes one micro-batch, the gradient has the bits of one process that runs the micro-batches one
    after the other. If ranks accumulate several, the ranks' sums are added, which is another order.

    Args:
        module: a ``DistributedDataParallel``, or a module in which ``fully_shard`` was applied over a mesh with one
            dim; all modules in it that it shards are set.
        average: divide the sum by the number of ranks, as both wrappers do by default. False is for losses over the
            whole batch, such as ``grpo_loss`` with a process_group.

    Raises:
        TypeError: the module is neither of these.
        ValueError: FSDP2 shards it over a mesh with more than one dim.
        RuntimeError: this PyTorch has no custom reduce-scatter for FSDP2.
    """
    check.flag("average", average)
    if isinstance(module, DistributedDataParallel):
        hook = _averaged_hook if average else ordered_hook
        module.register_comm_hook(module.process_group, hook)
        return module
    modules = module.modules() if isinstance(module, nn.Module) else ()
    sharded = [part for part in modules if isinstance(part, FSDPModule)]
    if not sharded:
        got = type(module).__name__
        raise TypeError(f"module: expected DistributedDataParallel or a module under fully_shard, got {got}")
    missing = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise RuntimeError(f"ordered_gradients: FSDP2 of torch {torch.__version__} has no {missing[0]}")
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim != 1:
            raise ValueError(
                f"module: expected FSDP2 over a mesh with one dim, got {parameter.device_mesh.ndim} dims: "
                "gradients would be summed over the others without an order"
            )
    for part in sharded:
        # Cast, because the base class of a custom reduce-scatter is not public.
        part.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter()))
        # Reduce by sums only: FSDP2 then divides by its factor, by default the number of ranks.
        part.set_force_sum_reduction_for_comms(True)
        if not average:
            part.set_gradient_divide_factor(1.0)
    return module


def ordered_hook(state: ProcessGroup | None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, in their order: a hook of ``register_comm_hook`` of DDP.

    It returns the sum, not the average. It does not overlap with the backward pass.

    Args:
        state: the process group of the ranks; None is the default group.
        bucket: DDP's bucket.
    """
    return _completed_future(_sum_over_ranks(state, bucket))


def _averaged_hook(state: ProcessGroup | None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _completed_future(_sum_over_ranks(state, bucket) / _group(state).size())


def _sum_over_ranks(state: ProcessGroup | None, bucket: distributed.GradBucket) -> torch.Tensor:
    return all_reduce(bucket.buffer(), _group(state), order=CHAIN)


def _group(state: ProcessGroup | None) -> ProcessGroup:
    group = distributed.group.WORLD if state is None else state
    assert group is not None, "DDP exists only where a default group does"
    return group


def _completed_future(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    # A future with a device also makes streams that wait for it wait for the device's kernels.
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[value.device] if value.is_cuda else None)
    done.set_result(value)
    return done


class OrderedReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sums in the order of ranks.

    It sums: ``ordered_gradients`` sets what else FSDP2 needs.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's slice of the sum over the ranks to ``output_tensor``.

        Raises:
            ValueError: FSDP2 asks for another reduction than a sum.
        """
        if op != distributed.ReduceOp.SUM:
            raise ValueError(f"op: expected a sum, got {op}; call ordered_gradients(module), which sets it")
        output_tensor.copy_(reduce_scatter(input_tensor, group, order=CHAIN))


@torch.no_grad()
def clip_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their common 2-norm is at most ``max_norm``; return the norm before, equal on all ranks.

    Squares are summed in a fixed order, in FP32 (FP64 for FP64 gradients): the elements of each row of dim 0, the rows
    of a parameter, then the parameters. FSDP2 shards whole rows, so the norm has the same bits without sharding and
    with any number of ranks, if the gradients have. Ranks exchange one number for each row.

    Args:
        parameters: all of the model, in one order on all ranks. A gradient is a plain tensor, complete on each rank (as
            under DDP), or a DTensor that is sharded on dim 0 over a mesh with one dim (FSDP2).
        max_norm: > 0.

    Raises:
        TypeError, ValueError: ``max_norm`` is not such a number, or a gradient is laid out otherwise.
    """
    check.number("max_norm", max_norm, above=0)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    groups = {id(group): group for group in map(_sharding_group, grads) if group is not None}
    if len(groups) > 1:
        raise ValueError("parameters: expected gradients that are sharded over one mesh, got several")
    rows = [row_squares(_local_shard(grad)) for grad in grads]
    for group in groups.values():
        rows = _gather_rows(rows, grads, group)
    norm = norm_of(rows)
    scale([_local_shard(grad) for grad in grads], norm, max_norm)
    return norm


def norm_of(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients, from the sums of squares of their rows."""
    if not rows:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    widest = torch.float64 if any(sums.dtype == torch.float64 for sums in rows) else torch.float32
    return row_sum(torch.stack([row_sum(sums.to(widest)) for sums in rows])).sqrt()


def scale(grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place, so that their norm is at most ``max_norm``."""
    factor = (max_norm / (norm + TINY)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


def _local_shard(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sharding_group(grad: torch.Tensor) -> ProcessGroup | None:
    """Return the group over which a gradient is sharded, or None if it is whole."""
    if not isinstance(grad, DTensor):
        return None
    if grad.placements != (Shard(0),):
        raise ValueError(f"parameters: expected gradients sharded on dim 0 of one mesh dim, got {grad.placements}")
    return grad.device_mesh.get_group()


def row_squares(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of dim 0, in FP32, or FP64 for FP64."""
    dtype = compute_dtype(grad.dtype)
    rows = grad.reshape(grad.shape[0] if grad.ndim else 1, -1) if grad.numel() else grad.new_zeros(grad.shape[0], 1)
    step = max(BLOCK // max(rows.shape[1], 1), 1)
    return torch.cat([row_sum(part.to(dtype).square()) for part in rows.split(step)])


def _gather_rows(rows: list[torch.Tensor], grads: list[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    """Gather the row sums of sharded gradients from all ranks; return the sums of all rows of each gradient."""
    size = group.size()
    sharded = [index for index, grad in enumerate(grads) if isinstance(grad, DTensor)]
    # FSDP2 cuts dim 0 as torch.chunk does: all shards before the last one that is not empty are of one size.
    widths = [-(-grads[index].shape[0] // size) for index in sharded]
    padded = [F.pad(rows[index], (0, width - len(rows[index]))) for index, width in zip(sharded, widths, strict=True)]
    parts = all_gather(torch.cat(padded)[None], group).split(widths, 1)
    whole = {index: part.flatten()[: grads[index].shape[0]] for index, part in zip(sharded, parts, strict=True)}
    return [whole.get(index, own) for index, own in enumerate(rows)]
