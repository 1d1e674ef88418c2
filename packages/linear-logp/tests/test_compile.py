"""linear_logp under torch.compile: what the conformance tests do not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp import LogpStats, linear_logp

OPERANDS = ("hidden", "lm_head_weight", "bias")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def _call(rows: int = 9) -> dict[str, Any]:
    draw = Draw(torch.float32, seed=21)
    call = {"lm_head_weight": draw.normal(1100, 16, scale=0.25), "bias": draw.normal(1100)}
    call |= {"hidden": draw.normal(rows, 16), "target_ids": draw.ids(1100, rows)}
    return {name: value.requires_grad_() if name in OPERANDS else value for name, value in call.items()}


def _compiled() -> Any:
    return torch.compile(linear_logp, fullgraph=True, backend="aot_eager")


def _grads(call: dict[str, Any], result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.square().sum(), [call[name] for name in OPERANDS]))


def test_number_of_rows_may_change_without_many_graphs() -> None:
    torch._dynamo.utils.counters.clear()
    compiled = _compiled()
    for rows in (3, 5, 8, 11, 40):
        call = _call(rows)
        found = compiled(**call)
        assert torch.equal(found, linear_logp(**call))
        for grad, truth in zip(_grads(call, found), _grads(call, linear_logp(**call)), strict=True):
            assert torch.equal(grad, truth)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 compiles a graph for each value of a number")
def test_temperature_may_change_without_many_graphs() -> None:
    torch._dynamo.utils.counters.clear()
    compiled, call = _compiled(), _call()
    for temperature in (0.5, 0.7, 0.9, 1.1, 1.3):
        assert torch.equal(compiled(**call, temperature=temperature), linear_logp(**call, temperature=temperature))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_main_grad_is_continued() -> None:
    eager, call = _call(), _call()
    for weight in (eager["lm_head_weight"], call["lm_head_weight"]):
        weight.main_grad = torch.ones(1100, 16)
    compiled = _compiled()
    for _ in range(2):
        linear_logp(**eager).square().sum().backward()
        compiled(**call).square().sum().backward()
    assert call["lm_head_weight"].grad is None
    assert torch.equal(call["lm_head_weight"].main_grad, eager["lm_head_weight"].main_grad)
    assert torch.equal(call["hidden"].grad, eager["hidden"].grad)


def test_autocast() -> None:
    def function(**call: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_logp(**call)

    call = _call()
    found, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(**call), function(**call)
    assert torch.equal(found, expected)
    for grad, truth in zip(_grads(call, found), _grads(call, expected), strict=True):
        assert torch.equal(grad, truth)


def test_statistics_come_as_a_named_tuple() -> None:
    call = _call()
    found = _compiled()(**call, return_stats=True)
    assert isinstance(found, LogpStats)
    for value, truth in zip(found, linear_logp(**call, return_stats=True), strict=True):
        assert torch.equal(value, truth)


def test_bad_id_gives_nan_where_values_cannot_be_looked_at() -> None:
    call = _call()
    call["target_ids"][2] = 4000
    found = _compiled()(**call)
    assert found.isnan().tolist() == [row == 2 for row in range(9)]


def test_wrong_shape_is_refused_while_tracing() -> None:
    call = _call()
    with pytest.raises(Exception, match="bias: expected shape"):
        _compiled()(**{**call, "bias": torch.zeros(3)})
