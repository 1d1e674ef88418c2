"""The definition of causal_conv1d in plain PyTorch; with FP64 inputs it is the gold."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_kernels.gated_delta.reference import spans
from rl_kernels.gated_delta.results import Convolved


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    return_state: bool = False,
) -> torch.Tensor | Convolved:
    """Return ``activation(bias + sum_j weight_j x_(t-3+j))``, computed in FP32 (FP64 for FP64), rounded once."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out, states = torch.zeros_like(x, dtype=dtype), []
    for number, (row, tokens) in enumerate(spans(x, cu_seqlens, start)):
        before = x.new_zeros(3, x.shape[2]) if state is None else state[number]
        inputs = torch.cat((before, x[row, tokens]))
        count = len(inputs) - 3
        states.append(inputs[count:])
        result = x.new_zeros(x.shape[2], dtype=dtype) if bias is None else bias.to(dtype)
        for tap, factor in enumerate(weight.to(dtype).unbind(1)):
            result = result + inputs[tap : tap + count].to(dtype) * factor
        result = F.silu(result) if activation == "silu" else result
        place = torch.arange(tokens.start, tokens.stop, device=x.device)
        out = out.index_put((torch.tensor(row, device=x.device), place), result)
    out = out.to(x.dtype)
    return Convolved(out, torch.stack(states) if states else x.new_zeros(0, 3, x.shape[2])) if return_state else out
