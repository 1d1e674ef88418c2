"""linear_logp under torch.compile: what the conformance tests do not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp import linear_logp

OPERANDS = ("hidden", "lm_head_weight", "bias")


@pytest.fixture
def compiled() -> Any:
    """Return the function, compiled anew."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(linear_logp, fullgraph=True, backend="aot_eager")


def _call(rows: int = 9) -> dict[str, Any]:
    draw = Draw(torch.float32, seed=21)
    call = {"lm_head_weight": draw.normal(1100, 16, scale=0.25), "bias": draw.normal(1100)}
    call |= {"hidden": draw.normal(rows, 16), "target_ids": draw.ids(1100, rows)}
    return {name: value.requires_grad_() if name in OPERANDS else value for name, value in call.items()}


def _same(call: dict[str, Any], result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(result, expected)
    grads, truth = (
        torch.autograd.grad(value.square().sum(), [call[name] for name in OPERANDS]) for value in (result, expected)
    )
    assert all(map(torch.equal, grads, truth))


def test_rows_do_not_recompile(compiled: Any) -> None:
    for rows in (3, 5, 8, 11, 40):
        call = _call(rows)
        _same(call, compiled(**call), linear_logp(**call))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    call["target_ids"][2] = 4000
    # Values cannot be looked at, shapes can.
    assert compiled(**call).isnan().nonzero().tolist() == [[2]]
    with pytest.raises(Exception, match="bias: expected shape"):
        compiled(**{**call, "bias": torch.zeros(3)})


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 compiles a graph for each value of a number")
def test_temperature_does_not_recompile(compiled: Any) -> None:
    call = _call()
    for temperature in (0.5, 0.7, 0.9, 1.1, 1.3):
        assert torch.equal(compiled(**call, temperature=temperature), linear_logp(**call, temperature=temperature))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_main_grad_is_continued(compiled: Any) -> None:
    eager, call = _call(), _call()
    for weight in (eager["lm_head_weight"], call["lm_head_weight"]):
        weight.main_grad = torch.ones(1100, 16)
    for _ in range(2):
        linear_logp(**eager).square().sum().backward()
        compiled(**call).square().sum().backward()
    assert call["lm_head_weight"].grad is None
    assert torch.equal(call["lm_head_weight"].main_grad, eager["lm_head_weight"].main_grad)
    assert torch.equal(call["hidden"].grad, eager["hidden"].grad)


def test_autocast_has_the_bits_of_cast_operands() -> None:
    def function(**call: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_logp(**call)

    torch.compiler.reset()
    call = _call()
    _same(call, torch.compile(function, fullgraph=True, backend="aot_eager")(**call), function(**call))
