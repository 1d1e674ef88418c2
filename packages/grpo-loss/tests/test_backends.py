"""The rules of all operators, for each backend of grpo_loss that runs here, and rules of this operator alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.dispatch import record_dispatch
from rl_kernels.core.testing import Case, Draw, bits_of, function_of, spec_of
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.grpo_loss import Normalizer, sequence_losses
from rl_kernels.grpo_loss.backends.native import backend as native
from rl_kernels.grpo_loss.op import OPERATOR, ops
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.lab.check.relations.integration import RawCalls

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

PLANTED = (
    Mutants(
        "native",
        (
            "rl_kernels.core.rowwise.operands",
            "rl_kernels.core.rowwise.sums",
            *(f"rl_kernels.grpo_loss.backends.native.{name}" for name in ("advantages", "terms", "metrics", "backend")),
        ),
        (
            Bug(
                "one-pass variance",
                "sums(centered.square())",
                "(sums(r.square()) - sums(r).square() / size)",
            ),
            Bug("upper bound 0.01 % too wide", "1 + n.clip_high) * down", "1 + 1.0001 * n.clip_high) * down"),
            Bug(
                "masks by multiplication, after the exponential",
                "(x.view(lanes.dtype) & lanes).view(x.dtype)",
                "x * (lanes != 0)",
            ),
            Bug(
                "halves of the batch summed separately",
                "row_sum(terms)",
                "sum(row_sum(part) for part in terms.tensor_split(2, 1))",
            ),
            Bug(
                "slope kept between calls",
                "(slopes, 0).contiguous()",
                "(slopes, 0).contiguous()\n    kept = (call.batch, call.length)\n"
                "    slope = globals().setdefault(kept, slope).copy_(slope)",
            ),
        ),
        ("large-kl", "ragged", "groups-double"),
    ),
    Mutants(
        "triton",
        tuple(
            f"rl_kernels.grpo_loss.backends.triton.{name}"
            for name in (*("groups", "terms", "tokens", "sequence", "kernels", "reduce", "backend"),)
        ),
        (
            Bug("one reward beyond the group", "is_there = place < end", "is_there = place <= end"),
            Bug("gradient of clipped tokens", "tl.where(is_flat, 0.0, slope)", "slope"),
            Bug("KL of masked tokens", "e = tl.where(is_active, ref_x - x, 0.0)", "e = ref_x - x"),
            Bug(
                "beta missing in the gradient",
                "fma(tl.full(token_slope.shape, n[2], tl.float32), token_slope, slope)",
                "slope + token_slope",
            ),
            Bug("scores of the first tokens", "scores += start if PACKED else row * score_row", "scores += 0"),
            Bug(
                "last tokens have no gradient",
                "(ceil_div(size, GRADIENT_BLOCK),), (size, GRADIENT_BLOCK)",
                "(max(size // GRADIENT_BLOCK, 1),), (size - 1, GRADIENT_BLOCK)",
            ),
        ),
        ("kl", "ragged", "advantages-per-token", "groups-ragged"),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    smoke = ("ragged", "advantages-per-token", "gspo", "groups-ragged", "groups")
    large = (
        Case("many-tokens", {"prompts": 128, "samples": 16, "completion": 2048}, {"beta": 0.04, "density": 0.9}),
        Case("many-prompts", {"prompts": 4096, "samples": 8, "completion": 129}, {"group_sizes": (1, 5000, 7)}),
    )
    far = tuple(
        Case(f"{name}-of-{count}", {"prompts": 1, "samples": count, "completion": 5}, options, function)
        for count in (2, 3)
        for name, options, function in (
            ("plain", {"beta": 0.1, "density": 0.7}, ""),
            ("objective", {"beta": 0.1, "rollout": "token", "entropy": True, "return_metrics": True}, ""),
            ("groups", {}, "group_advantages"),
        )
    )


def _call(dtype: torch.dtype = torch.float32, length: int = 7) -> dict[str, Any]:
    case = Case("call", {"prompts": 2, "samples": 3, "completion": length}, {"beta": 0.1, "density": 0.7})
    call = spec_of(OPERATOR).inputs(case, Draw(dtype, seed=3))
    call["current_logps"].requires_grad_()
    return call


def _one_token(current: float, old: float, advantage: float, **options: float) -> tuple[float, float]:
    """Return loss and gradient of one token."""
    leaf, before = (torch.tensor([[value]]) for value in (current, old))
    mask = torch.ones(1, 1, dtype=torch.bool)
    leaf.requires_grad_()
    loss = grpo_loss_from_advantages(leaf, before, before, torch.tensor([advantage]), mask, **options).loss
    return float(loss.detach()), float(torch.autograd.grad(loss, leaf)[0])


def _k3(e: float) -> float:
    # For small e exp(e) - e - 1 cancels in FP64 too; its series, summed exactly, does not.
    if abs(e) > 1:
        return math.expm1(e) - e
    return math.fsum(e**n / math.factorial(n) for n in range(2, 60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_and_its_gradient_are_accurate(sign: int, dtype: torch.dtype) -> None:
    """One sequence of one token for each e: the loss is a sum over all, a sequence loss shows each."""
    ulp, small = torch.finfo(dtype).eps, float(torch.tensor(0.06, dtype=dtype))
    edges = torch.tensor([1e-4, 0.0599999, 0.06, 0.0600001], dtype=dtype)
    e = sign * torch.cat((torch.logspace(-7, 1, 161, dtype=dtype), edges))[:, None]
    # Beside a log-probability of 0, and of -1, where ref - current is rounded.
    for current in (torch.zeros_like(e), -torch.ones_like(e)):
        leaf, ref = current.requires_grad_(), current.detach() + e
        count, mask = Normalizer(num_tokens=1), torch.ones_like(e, dtype=torch.bool)
        result = sequence_losses(leaf, None, ref, torch.zeros(len(e)), mask, beta=1.0, normalizer=count)
        (grad,) = torch.autograd.grad(result.sum(), leaf)
        for difference, kl, slope in zip(
            (ref - current).flatten().tolist(), result.tolist(), grad.flatten(), strict=True
        ):
            assert kl >= 0
            # Above the series the difference expm1(e) - e loses bits, fewer the larger e is.
            assert kl == pytest.approx(_k3(difference), rel=(4 if abs(difference) < small else 40) * ulp, abs=0)
            assert float(slope) == pytest.approx(-math.expm1(difference), rel=4 * ulp, abs=0)


def test_ratio_on_the_bound_is_not_clipped() -> None:
    for advantage in (2.0, -2.0):
        for d in (0.5, -0.5):
            # The ratio is exactly on the bound of the range.
            ratio = float(torch.tensor(d).exp())
            loss, grad = _one_token(d, 0.0, advantage, clip_eps=abs(ratio - 1))
            assert loss == grad == pytest.approx(-ratio * advantage, rel=1e-7, abs=0)
        assert _one_token(-1.0, -1.0, advantage, clip_eps=0.0) == (-advantage, -advantage)


def test_clipped_tokens_and_infinite_ratios() -> None:
    assert _one_token(0.5, 0.0, 1.0)[1] == 0
    assert _one_token(-0.5, 0.0, -1.0)[1] == 0
    assert _one_token(0.5, 0.0, -1.0)[1] > 1
    assert _one_token(-0.5, 0.0, 1.0)[1] < 0
    # An advantage of 0 contributes nothing even to an infinite ratio.
    assert _one_token(500.0, -500.0, 0.0) == (0.0, 0.0)
    assert _one_token(500.0, -500.0, -1.0) == (torch.inf, torch.inf)
    assert _one_token(500.0, -500.0, 1.0) == (pytest.approx(-1.2, rel=1e-7), 0.0)
    assert all(value != value for value in (*_one_token(torch.nan, -1.0, 1.0), *_one_token(-1.0, -1.0, torch.nan)))


def test_only_loss_and_current_logps_have_a_gradient() -> None:
    call = _call()
    for name in ("old_logps", "ref_logps", "rewards"):
        call[name].requires_grad_()
    result = grpo_loss(**call)
    assert [value.requires_grad for value in result] == [True, False, False]
    result.loss.backward()
    assert call["current_logps"].grad is not None
    assert all(call[name].grad is None for name in ("old_logps", "ref_logps", "rewards"))
    assert not grpo_loss(**{**call, "current_logps": call["current_logps"].detach()}).loss.requires_grad


def test_output_dtype_is_that_of_current_logps() -> None:
    wide = {name: value.double() for name, value in _call().items() if name in ("old_logps", "ref_logps", "rewards")}
    assert grpo_loss(**{**_call(), **wide}).loss.dtype == torch.float32
    # Advantages of FP32 rewards are FP64 if the log-probabilities are.
    call = _call(torch.float64)
    call["rewards"] = call["rewards"].float()
    result = grpo_loss(**call)
    assert {value.dtype for value in result} == {torch.float64}
    assert torch.equal(result.loss, grpo_loss(**{**call, "rewards": call["rewards"].double()}).loss)


def test_unchecked_nonzero_mask_values_are_active() -> None:
    call = _call()
    twice = call["completion_mask"].int() * 2
    assert grpo_loss(**{**call, "completion_mask": twice, "validate": False}) == grpo_loss(**call)


def test_a_step_takes_two_raw_ops() -> None:
    call = _call()
    with RawCalls() as raw, record_dispatch() as log:
        grpo_loss(**call).loss.backward()
    assert len(log) == 1
    assert {*raw.calls} == {f"rl_kernels.grpo_loss_{name}.default" for name in ("forward_grad", "backward")}
    op, arguments = raw.calls["rl_kernels.grpo_loss_forward_grad.default"]
    assert torch.equal(arguments[3], call["rewards"])
    assert arguments[4:7] == (None, 3, None)
    # A masked token has a slope of -0.
    *_, count, slope = op(*arguments)
    assert count == call["completion_mask"].sum()
    assert torch.equal((slope == 0) & slope.signbit(), ~call["completion_mask"])


def test_raw_backward_does_not_overwrite_the_slope() -> None:
    current, count, upstream = torch.zeros(1, 3), torch.tensor(4.0), torch.tensor(2.0)
    slope = torch.tensor([[1.0, -0.0, -6.0]])
    grad = ops["backward"](current, count, slope, upstream, "native")
    assert grad.tolist() == [[0.5, 0.0, -3.0]]
    assert not grad[0, 1].signbit()
    assert slope.tolist() == [[1.0, -0.0, -6.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("poisoned_empty")
def test_blocks_of_sequences_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    # More elements than PyTorch gives to one thread, and more than one block.
    call, results = _call(dtype, 12_001), []
    for elements in (native.BLOCK_ELEMENTS, 1, 5000, 1 << 30):
        monkeypatch.setattr(native, "BLOCK_ELEMENTS", elements)
        output = grpo_loss(**call)
        results.append([*(x.detach() for x in output), *torch.autograd.grad(output.loss, call["current_logps"])])
    assert all(x.isfinite().all() for x in results[0])
    for result in results[1:]:
        assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(result, results[0], strict=True))
