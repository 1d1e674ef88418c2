"""The plugin's functions beside those that ``invariant`` uses, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_kernels.models import invariant
from rl_kernels.models.clients.vllm.ops import silu_mul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_swiglu_has_the_bits_of_invariant(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        gate = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 2, 1 << 16)
    else:
        gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        gate = gate[~gate.isnan()]
    up = torch.ones_like(gate)
    model = nn.Sequential(nn.SiLU())
    with invariant(model):
        expected = model(gate[None]) * up
    assert torch.equal(silu_mul(torch.cat((gate, up))[None]), expected)
