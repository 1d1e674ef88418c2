"""From the arguments of a public function to its results: checks, known statistics, gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.linear_logp.arguments import Options, agreed
from rl_kernels.linear_logp.autograd import LinearLogp, check_known, forward
from rl_kernels.linear_logp.known import Known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def process_group_of(process_group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """Return the group that ``process_group`` names."""
    if process_group is None:
        return None
    # Imported here: PyTorch may be built without torch.distributed.
    from rl_kernels.core.distributed import group_of

    return group_of(process_group)


def run(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: ProcessGroup | DeviceMesh | None,
    options: Options,
) -> Any:
    """Return log-probabilities, ``LogpStats`` or ``Known``, as the options say."""
    call = agreed(hidden, lm_head_weight, target_ids, bias, process_group_of(process_group), options)
    if options.known is not None and options.validate and not values_hidden(hidden):
        check_known(call, options.check_rows)
    has_stats = options.return_stats
    if call.differentiable and torch.is_grad_enabled():
        rows, weight, ids, bias, *scaled = call.inputs
        memory = call.main_grad, options.workspace_mib, options.saved_mib, options.join_tokens
        known = call.known or (None,) * len(Known._fields)
        without_gradient = ids, *scaled, *memory, has_stats, *call.shard, call.backend, *known
        results: tuple[torch.Tensor, ...] = LinearLogp.apply(rows, weight, bias, without_gradient)
        if call.main_grad is not None:
            fold_grad_into_main_grad("lm_head_weight", lm_head_weight, results[0])
    else:
        results = forward(call.shard, *call.inputs, has_stats, 0, call.backend, call.known)

    shape = target_ids.shape
    logp, *stats = (value.view(shape) for value in results[: 3 if has_stats else 1])
    if options.return_known:
        return Known(logp, results[-2].view(*shape, 2), *stats)
    return LogpStats(logp, *stats) if has_stats else logp
