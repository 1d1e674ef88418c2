"""Every backend of grpo_loss that runs here, held to the rules of all operators, and what is special to this one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.dispatch import record_dispatch
from rl_kernels.core.testing import Case, Draw, function_of
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.grpo_loss import GRPOLossOutput
from rl_kernels.grpo_loss.op import OPERATOR, ops
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.lab.check.relations.integration import RawCalls

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


PLANTED = (
    Mutants(
        "native",
        (
            "rl_kernels.core.rowwise.operands",
            "rl_kernels.core.rowwise.sums",
            *(
                f"rl_kernels.grpo_loss.{name}"
                for name in (
                    *("lanes", "backends.native.advantages", "backends.native.terms"),
                    *("backends.native.metrics", "backends.native.backend"),
                )
            ),
        ),
        (
            Bug(
                "one-pass variance",
                "(centred.square()[None], start, end)",
                "(r.square()[None], start, end) - ((_group_sums(r[None], start, end)[0]).square() / size)[None]",
            ),
            Bug("upper bound 0.01 % too wide", "1 + n.clip_high) * a)", "1 + 1.0001 * n.clip_high) * a)"),
            Bug(
                "masks by multiplication, after the exponential",
                "(x.view(lanes.dtype) & lanes).view(x.dtype)",
                "x * (lanes != 0)",
            ),
            Bug(
                "halves of the batch summed separately",
                "row_sum(each)",
                "sum(row_sum(part) for part in each.tensor_split(2))",
            ),
            Bug(
                "slope kept between calls",
                "new_empty((call.batch, call.length), dtype=call.dtype)",
                "new_empty(0)\n    kept = torch.empty((call.batch, call.length), dtype=call.dtype)\n"
                "    slope = globals().setdefault((call.batch, call.length), kept)",
            ),
        ),
    ),
    Mutants(
        "triton",
        tuple(
            f"rl_kernels.grpo_loss.backends.triton.{name}"
            for name in (
                *("groups", "terms", "tokens", "metrics", "sequence", "kernels", "reduce", "objectives"),
                *("plain", "planned", "backend"),
            )
        ),
        (
            Bug("one reward beyond the group", "is_there = place < end", "is_there = place <= end"),
            Bug("gradient of clipped tokens", "tl.where(is_clipped, 0.0, unclipped)", "unclipped"),
            Bug("KL of masked tokens", "tl.where(is_active, other.to(tl.float32) - x, 0.0)", "other - x"),
            Bug("beta missing in the gradient", "fma(constant(beta), -expm1, slope)", "slope - expm1"),
            Bug("advantages of the tokens of the first sequence", "+ row * score_row +", "+"),
            Bug(
                "last tokens have no gradient",
                "(-(-size // GRADIENT_BLOCK),), (size, GRADIENT_BLOCK)",
                "(max(size // GRADIENT_BLOCK, 1),), (size - 1, GRADIENT_BLOCK)",
            ),
        ),
        ("kl", "ragged", "advantages-per-token", "groups-ragged"),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    large = (
        Case("many-tokens", {"prompts": 128, "samples": 16, "completion": 2048}, {"beta": 0.04, "density": 0.9}),
        Case("many-prompts", {"prompts": 4096, "samples": 8, "completion": 129}, {"group_sizes": (1, 5000, 7)}),
    )


def _call(dtype: torch.dtype = torch.float32, batch: int = 6, length: int = 7, **options: Any) -> dict[str, Any]:
    draw = Draw(dtype, seed=3)
    current = draw.uniform(1e-3, 1.0, batch, length).log()
    tensors = {name: (current + draw.normal(batch, length, scale=0.3)).clamp(max=0) for name in ("old", "ref")}
    call = {"current_logps": current.requires_grad_(), "old_logps": tensors["old"], "ref_logps": tensors["ref"]}
    call |= {"rewards": draw.normal(batch), "completion_mask": draw.mask(0.7, batch, length)}
    return {**call, "samples_per_prompt": 3, "beta": 0.1, **options}


def _gradient(call: dict[str, Any], upstream: float = 1.0) -> torch.Tensor:
    loss = grpo_loss(**call).loss
    return torch.autograd.grad(loss, call["current_logps"], torch.tensor(upstream, dtype=loss.dtype))[0]


def _one_token(current: float, old: float, advantage: float, **options: float) -> tuple[float, float]:
    """Return loss and gradient of one token."""
    values = (torch.tensor([[value]]) for value in (current, old))
    leaf, before = values
    mask = torch.ones(1, 1, dtype=torch.bool)
    leaf.requires_grad_()
    loss = grpo_loss_from_advantages(leaf, before, before, torch.tensor([advantage]), mask, **options).loss
    return float(loss.detach()), float(torch.autograd.grad(loss, leaf)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_and_its_gradient_are_accurate_from_tiny_to_large_e_and_never_negative(
    sign: int, dtype: torch.dtype
) -> None:
    ulp = torch.finfo(dtype).eps
    edges = torch.tensor([1e-4, 0.0599999, 0.06, 0.0600001], dtype=dtype)
    for e in sign * torch.cat((torch.logspace(-7, 1, 161, dtype=dtype), edges)):
        current = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
        mask = torch.ones(1, 1, dtype=torch.bool)
        found = grpo_loss_from_advantages(current, None, e.view(1, 1), torch.zeros(1), mask, beta=1.0)
        assert found.kl >= 0
        # Above the series the difference expm1(e) - e loses bits, fewer the larger e is.
        assert float(found.kl) == pytest.approx(_k3(float(e)), rel=(4 if abs(e) < 0.06 else 40) * ulp, abs=0)
        (grad,) = torch.autograd.grad(found.loss, current)
        assert float(grad) == pytest.approx(-math.expm1(e), rel=4 * ulp, abs=0)


def _k3(e: float) -> float:
    # For small e exp(e) - e - 1 cancels in FP64 too; its series, summed exactly, does not.
    if abs(e) > 1:
        return math.expm1(e) - e
    return math.fsum(e**n / math.factorial(n) for n in range(2, 60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("e", [1e-4, -1e-4, 1e-3])
def test_k3_of_a_difference_of_log_probabilities(dtype: torch.dtype, e: float) -> None:
    current = torch.full((1, 1), -1.0, dtype=dtype)
    ref = current + e
    found = grpo_loss_from_advantages(current, None, ref, torch.zeros(1), torch.ones(1, 1).bool(), beta=1.0).kl
    exact = _k3(float(ref.double() - current.double()))
    assert float(found) == pytest.approx(exact, rel=4 * torch.finfo(dtype).eps, abs=0)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_tie_takes_the_unclipped_branch(advantage: float) -> None:
    for d in (0.5, -0.5):
        # The ratio is exactly on the bound of the range.
        ratio = float(torch.tensor(d).exp())
        loss, grad = _one_token(d, 0.0, advantage, clip_eps=abs(ratio - 1))
        assert loss == grad == pytest.approx(-ratio * advantage, rel=1e-7, abs=0)
    assert _one_token(-1.0, -1.0, advantage, clip_eps=0.0) == (-advantage, -advantage)


def test_clipped_side_has_no_gradient_and_the_other_has() -> None:
    assert _one_token(0.5, 0.0, 1.0)[1] == 0
    assert _one_token(-0.5, 0.0, -1.0)[1] == 0
    assert _one_token(0.5, 0.0, -1.0)[1] > 1
    assert _one_token(-0.5, 0.0, 1.0)[1] < 0


def test_zero_advantage_contributes_nothing_even_to_an_infinite_ratio() -> None:
    assert _one_token(500.0, -500.0, 0.0) == (0.0, 0.0)


def test_infinite_ratio_and_nan_are_not_hidden() -> None:
    assert _one_token(500.0, -500.0, -1.0) == (torch.inf, torch.inf)
    assert _one_token(500.0, -500.0, 1.0) == (pytest.approx(-1.2, rel=1e-7), 0.0)
    assert all(value != value for value in _one_token(torch.nan, -1.0, 1.0))
    assert all(value != value for value in _one_token(-1.0, -1.0, torch.nan))


@pytest.mark.parametrize("kl", [{}, {"beta": 0.0}, {"old_logps": None}])
def test_gradcheck(kl: dict[str, Any]) -> None:
    call = _call(torch.float64, **kl)

    def function(current_logps: torch.Tensor) -> torch.Tensor:
        return grpo_loss(**{**call, "current_logps": current_logps}).loss

    if "old_logps" in kl:
        # On-policy the old log-probabilities follow the current ones, which no difference quotient shows.
        fixed = {**call, "old_logps": call["current_logps"].detach()}
        assert torch.equal(_gradient(call), _gradient(fixed))
        assert torch.equal(grpo_loss(**call).loss, grpo_loss(**fixed).loss)
    else:
        assert torch.autograd.gradcheck(function, call["current_logps"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("upstream", [0.0, -1.0, 3.0])
def test_gradient_is_the_upstream_times_that_of_one(dtype: torch.dtype, upstream: float) -> None:
    call = _call(dtype)
    wide = {**call, "current_logps": call["current_logps"].detach().double().requires_grad_()}
    assert _gradient(call, upstream).dtype == dtype
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7} if dtype != torch.float64 else {}
    torch.testing.assert_close(_gradient(call, upstream).double(), upstream * _gradient(wide), **rounding)


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan])
def test_masked_gradient_is_zero_for_any_upstream(upstream: float) -> None:
    call = _call()
    grad = _gradient(call, upstream)
    assert (grad[~call["completion_mask"]] == 0).all()
    assert not grad[call["completion_mask"]].isfinite().any()


def test_backward_again_after_retain_graph_and_with_another_upstream() -> None:
    call = _call()
    loss = grpo_loss(**call).loss
    grads = [torch.autograd.grad(loss * scale, call["current_logps"], retain_graph=True)[0] for scale in (1, 4, 1)]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(4 * grads[0], grads[1])


def test_only_the_loss_carries_a_gradient() -> None:
    found = grpo_loss(**_call())
    assert [value.requires_grad for value in found] == [True, False, False]
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.kl.backward()


def test_others_that_require_grad_get_none() -> None:
    call = _call()
    for name in ("old_logps", "ref_logps", "rewards"):
        call[name].requires_grad_()
    grpo_loss(**call).loss.backward()
    assert call["current_logps"].grad is not None
    assert all(call[name].grad is None for name in ("old_logps", "ref_logps", "rewards"))
    assert not grpo_loss(**{**call, "current_logps": call["current_logps"].detach()}).loss.requires_grad


def test_second_derivative_through_what_came_before_raises() -> None:
    call = _call()
    logits = call["current_logps"].detach().clone().requires_grad_()
    loss = grpo_loss(**{**call, "current_logps": logits.sin() - 1}).loss
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.square().sum().backward()


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (6, 0), (0, 0)])
def test_empty(batch: int, length: int) -> None:
    call = _call(batch=batch, length=length)
    assert grpo_loss(**call) == GRPOLossOutput(*[torch.tensor(0.0)] * 3)
    assert _gradient(call).shape == (batch, length)


def test_all_masked() -> None:
    call = _call()
    call["completion_mask"] = torch.zeros(6, 7)
    assert grpo_loss(**call) == GRPOLossOutput(*[torch.tensor(0.0)] * 3)
    assert (_gradient(call) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_output_dtype_follows_current_logps_alone(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in grpo_loss(**_call(dtype))} == {wide}
    others = {name: value.double() for name, value in _call().items() if name in ("old_logps", "ref_logps", "rewards")}
    assert grpo_loss(**{**_call(), **others}).loss.dtype == torch.float32


def test_fp64_log_probabilities_get_fp64_advantages() -> None:
    call = _call(torch.float64)
    call["rewards"] = call["rewards"].float()
    assert torch.equal(grpo_loss(**call).loss, grpo_loss(**{**call, "rewards": call["rewards"].double()}).loss)


@pytest.mark.parametrize("name", ["old_logps", "ref_logps", "completion_mask", "rewards"])
def test_nothing_is_broadcast(name: str) -> None:
    call = _call()
    for small in (call[name][:1], call[name][..., :1], call[name][0]):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            grpo_loss(**{**call, name: small})


def test_unchecked_mask_counts_what_is_not_zero() -> None:
    call = _call()
    twice = call["completion_mask"].int() * 2
    assert grpo_loss(**{**call, "completion_mask": twice, "validate": False}) == grpo_loss(**call)


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan])
def test_active_token_without_a_slope_is_told_from_a_masked_one(upstream: float) -> None:
    # A ratio that underflows to 0 has the slope -0 A.
    current = torch.tensor([[-500.0, -1.0]], requires_grad=True)
    mask, advantages = torch.tensor([[True, False]]), torch.tensor([1.0])
    loss = grpo_loss_from_advantages(current, torch.zeros(1, 2), None, advantages, mask).loss
    (grad,) = torch.autograd.grad(loss, current, torch.tensor(upstream))
    assert grad.isnan().tolist() == [[True, False]]


def test_raw_ops_of_a_step() -> None:
    call = _call()
    with RawCalls() as raw, record_dispatch() as log:
        _gradient(call)
    assert {*raw.calls} == {f"rl_kernels.grpo_loss_{name}.default" for name in ("forward_grad", "backward")}
    _, arguments = raw.calls["rl_kernels.grpo_loss_forward_grad.default"]
    assert torch.equal(arguments[3], call["rewards"])
    assert arguments[4:7] == (None, 3, None)
    assert len(log) == 1


def test_raw_ops_tell_masked_tokens_by_a_negative_zero() -> None:
    call = _call()
    with RawCalls() as raw:
        _gradient(call)
    op, arguments = raw.calls["rl_kernels.grpo_loss_forward_grad.default"]
    *_, count, slope = op(*arguments)
    assert count == call["completion_mask"].sum()
    assert torch.equal((slope == 0) & slope.signbit(), ~call["completion_mask"])


def test_raw_backward_overwrites_nothing() -> None:
    current, count, upstream = torch.zeros(1, 3), torch.tensor(4.0), torch.tensor(2.0)
    slope = torch.tensor([[1.0, -0.0, -6.0]])
    grad = ops["backward"](current, count, slope, upstream, "native")
    assert grad.tolist() == [[0.5, 0.0, -3.0]]
    assert not grad[0, 1].signbit()
    assert slope.tolist() == [[1.0, -0.0, -6.0]]
