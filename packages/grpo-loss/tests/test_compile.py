"""grpo_loss under torch.compile: one graph for all values of its numbers, values unchecked, errors while tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Case, Draw, spec_of
from rl_kernels.grpo_loss import (
    Extras,
    GRPOLossOutput,
    LossAndMetrics,
    Normalizer,
    Objective,
    api,
    group_advantages,
    grpo_loss,
)
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.op import OPERATOR


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def _compiled(function: Callable[..., Any] = grpo_loss, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def _call(batch: int = 6, length: int = 9) -> dict[str, Any]:
    case = Case("call", {"prompts": batch // 3, "samples": 3, "completion": length}, {"density": 0.7})
    call = spec_of(OPERATOR).inputs(case, Draw(torch.float32, seed=31))
    call["current_logps"].requires_grad_()
    del call["samples_per_prompt"]
    return call


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _agree(compiled: Callable[..., Any], call: dict[str, Any]) -> None:
    result, expected = compiled(**call), grpo_loss(**call)
    assert isinstance(result, GRPOLossOutput)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    if call["current_logps"].requires_grad:
        grads = [torch.autograd.grad(value.loss, call["current_logps"])[0] for value in (result, expected)]
        assert torch.equal(*grads)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 compiles a graph for each value of a number")
def test_few_graphs_for_all_numbers() -> None:
    compiled, call = _compiled(), {**_call(), "samples_per_prompt": 3}
    call["current_logps"] = call["current_logps"].detach()
    for step in range(1, 5):
        _agree(compiled, {**call, "clip_eps": 0.1 * step, "beta": 0.02 * step, "objective": Objective(eps=1e-6 * step)})
    assert _graphs() <= 3


def test_few_graphs_for_all_sizes() -> None:
    compiled = _compiled(dynamic=True)
    for batch, length in ((6, 9), (6, 17), (12, 33)):
        _agree(compiled, {**_call(batch, length), "samples_per_prompt": 3, "beta": 0.1})
    assert _graphs() <= 2


def test_one_graph_for_all_boundaries() -> None:
    compiled, call = _compiled(), {**_call(), "beta": 0.1}
    for offsets in ([0, 1, 4, 6], [0, 2, 3, 6], [0, 4, 5, 6]):
        _agree(compiled, {**call, "group_boundaries": torch.tensor(offsets)})
    assert _graphs() == 1


def test_one_graph_for_all_values_of_tensors() -> None:
    call = _call()

    def step(count: torch.Tensor, entropy: torch.Tensor) -> LossAndMetrics:
        objective = Objective(loss_type="dapo", clip_high=0.28)
        extras, normalizer = Extras(entropy=entropy), Normalizer(num_tokens=count)
        options = {"objective": objective, "extras": extras, "normalizer": normalizer}
        return grpo_loss(**call, samples_per_prompt=3, **options, return_metrics=True)

    compiled = _compiled(step)
    for count in (20.0, 31.0, 7.0):
        tensors = torch.tensor(count), torch.full((6, 9), count)
        result, expected = compiled(*tensors), step(*tensors)
        assert torch.equal(result.output.loss, expected.output.loss)
        assert torch.equal(result.metrics, expected.metrics)
    assert _graphs() == 1


def test_compiled_call_checks_all_but_values() -> None:
    call = {**_call(), "samples_per_prompt": 3}
    twice = {**call, "completion_mask": call["completion_mask"].int() * 2}
    assert torch.equal(_compiled()(**twice).loss, grpo_loss(**call).loss)
    result = _compiled(group_advantages)(call["rewards"], group_boundaries=torch.tensor([-5, 3, 10**6]))
    assert result.shape == (6,)
    for changes, message in (
        ({"samples_per_prompt": 3, "group_boundaries": [0, 6]}, "expected exactly one of them, got both"),
        ({"group_boundaries": [1, 3, 6]}, "group_boundaries: expected offsets"),
        ({"samples_per_prompt": 4}, "samples_per_prompt: expected a divisor"),
        ({"samples_per_prompt": 3, "beta": -1.0}, "beta: expected a number >= 0"),
    ):
        with pytest.raises(Exception, match=message):
            _compiled()(**{**_call(), **changes})


@pytest.mark.parametrize("packed", [False, True])
def test_raw_ops_for_ranks_pass_opcheck(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[LossCall] = []
    monkeypatch.setattr(api, "loss_of", lambda call, ready: calls.append(call))
    call = {**_call(), "samples_per_prompt": 3, "beta": 0.1, "loss_type": "dr_grpo", "return_metrics": packed}
    if packed:
        tokens = ("current_logps", "old_logps", "ref_logps", "completion_mask")
        call |= {name: call[name].detach().flatten() for name in tokens}
        call |= {"cu_seqlens": torch.tensor([0, 9, 9, 20, 31, 50, 54]), "max_seqlen": 19}
    grpo_loss(**call)
    (checked,) = calls
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in checked]
    raw = torch.ops.rl_kernels
    sums = raw.grpo_loss_sums(*arguments, "native")
    assert sums.shape == (14 if packed else 3, 6)
    torch.library.opcheck(raw.grpo_loss_sums.default, (*arguments, "native"))
    torch.library.opcheck(raw.grpo_loss_sums_grad.default, (*arguments, "native"))
    options = (checked.normalizer, checked.length, checked.numbers, checked.plan, "native")
    torch.library.opcheck(raw.grpo_loss_combine.default, (sums, *options))
