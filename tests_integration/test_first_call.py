"""The very first call of each operator may be compiled, before any of its backends was imported."""

import subprocess
import sys

import pytest

CALLS = {
    "attention": "det_attention(*torch.ones(3, 1, 4, 2, 8))",
    "det_gemm": "det_linear(x, torch.ones(4, 8))",
    "fused_logp": "fused_logp(x, torch.tensor([1, 2]))",
    "gated_delta": "gated_delta_rule(*(x.mean() * torch.ones(3, 1, 4, 2, 16)), *torch.zeros(2, 1, 4, 2))",
    "grpo_loss": "grpo_loss(*torch.zeros(3, 2, 4), torch.ones(2), torch.ones(2, 4).bool(), samples_per_prompt=2).loss",
    "linear_logp": "linear_logp(x, torch.ones(4, 8), torch.tensor([1, 2]))",
    "moe": "experts(x, torch.ones(3, 8, 8), torch.ones(3, 8, 4), *route(x, torch.ones(3, 8), 1)[:2])",
    "norm": "rms_norm(x, torch.ones(8))",
}
SCRIPT = """
import torch
from rl_kernels.{package} import *
x = torch.ones(2, 8, requires_grad=True)
result = torch.compile(lambda: {call}, fullgraph=True, backend="aot_eager")()
if result.requires_grad:
    result.sum().backward()
    assert x.grad is not None
"""


@pytest.mark.parametrize("package", CALLS)
def test_the_first_call_of_an_operator_may_be_compiled(package: str) -> None:
    script = SCRIPT.format(package=package, call=CALLS[package])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
