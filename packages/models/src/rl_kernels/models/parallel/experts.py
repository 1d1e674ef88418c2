"""``parallelize_experts(model, mesh)``: cut the experts of a mixture over ranks that have their own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rl_kernels.core.distributed import agree, fingerprint, group_of, group_rank, group_size
from rl_kernels.models.mixtures import is_experts
from rl_kernels.models.mixtures.ranks import RANKS, ExpertRanks
from rl_kernels.models.swap import SWAPPED, original_of


def parallelize_experts(
    model: nn.Module, mesh: DeviceMesh | ProcessGroup, *, validate: bool = True
) -> list[nn.Parameter]:
    """Cut the experts of a model over ranks, each of which has its own tokens; return the new parameters.

    Each rank keeps the weights of E / ranks consecutive experts, as DTensors that are sharded on dim 0. A token's
    logits have the bits of one process. The gradient of an expert's weights is the sum over the tokens of all ranks, in
    the order of ranks: the bits of one process that runs the tokens of all ranks in one pass. It is complete, and no
    wrapper may add or average it over the ranks: pass the parameters to FSDP2 as ``ignored_params``. All ranks run the
    same passes, forward and backward, a rank without tokens too. It cannot be undone.

    Args:
        model: with mixtures of transformers, after ``invariant(model)`` and before the optimizer; the same weights on
            each rank.
        mesh: the ranks: a mesh with one dim, or a group.
        validate: compare the weights of experts on all ranks now, by an exchange of 4 KiB and a sync of the GPU.

    Raises:
        TypeError, ValueError: the model has no experts, or some that ``invariant`` left alone; their number is no
            multiple of the ranks; or ranks differ. With ``validate`` each rank raises the same error.
    """
    group = group_of(mesh, "mesh", sizes=None)
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    error = None
    try:
        _check(modules, group_size(group))
    except (TypeError, ValueError) as raised:
        error = raised
    if validate:
        weights = [value for module in modules.values() for value in module.parameters()] if error is None else []
        numbers = (fingerprint(value) * (2 * place + 1) for place, value in enumerate(weights))
        agree("parallelize_experts", group, error, {"weights of experts": f"{sum(numbers) % (1 << 64):016x}"})
    elif error is not None:
        raise error
    return [parameter for module in modules.values() for parameter in _cut(module, mesh, group)]


def _check(modules: dict[str, nn.Module], ranks: int) -> None:
    if not modules:
        raise ValueError("model: expected a mixture of experts of transformers")
    for name, module in modules.items():
        if not hasattr(type(module), SWAPPED):
            kind = original_of(module).__name__
            raise TypeError(f"model: expected experts that invariant(model) swapped, {name} is a {kind}")
        for key, value in module.named_parameters():
            if isinstance(value, DTensor):
                raise TypeError(f"model: expected whole weights, {name}.{key} is a DTensor: cut experts before FSDP2")
            if value.shape[0] % ranks:
                raise ValueError(f"mesh: expected ranks that divide {value.shape[0]} experts of {name}, got {ranks}")


def _cut(module: Any, mesh: DeviceMesh | ProcessGroup, group: ProcessGroup) -> list[nn.Parameter]:
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    count = len(module.gate_up_proj)
    vars(module)[RANKS] = ExpertRanks(group, count)
    parts = []
    for name, value in list(module.named_parameters()):
        with torch.no_grad():
            part = value.chunk(group_size(group))[group_rank(group)].clone()
        whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        parameter = nn.Parameter(whole, requires_grad=value.requires_grad)
        setattr(module, name, parameter)
        parts.append(parameter)
    return parts
