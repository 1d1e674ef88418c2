"""A result is held to the contract in blocks of rows as it would be in one piece; inputs are drawn where they are."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.contract import contract
from rl_kernels.core.testing import Case, Spec
from rl_kernels.lab.bench.arena import Arena, DeviceDraw
from rl_kernels.lab.bench.verify import Wrong, call, verify
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.rows import RowLayout

LAYOUT = RowLayout({"x": 1, "shift": 0}, frozenset({"output", "gradient:x"}))


def product(x, weight, shift, scale=1.0):
    return scale * (x @ weight.T) + shift[..., None]


def magnitudes(case, inputs, upstream):
    x, weight = inputs["x"].abs(), inputs["weight"].abs()
    terms = {"output": x @ weight.T + inputs["shift"].abs()[..., None]}
    if upstream:
        grad = upstream["output"].abs()
        terms |= {"gradient:x": grad @ weight, "gradient:weight": grad.flatten(0, -2).T @ x.flatten(0, -2)}
    return terms


SPEC = Spec(
    cases=(),
    inputs=lambda case, draw: {
        "x": draw.normal(case.sizes["batch"], 3, case.sizes["size"]),
        "weight": draw.normal(5, case.sizes["size"]),
        "shift": draw.uniform(0.0, 1.0, case.sizes["batch"], 3),
        "scale": 1.0,
    },
    references={"": product},
    classes=dict.fromkeys(("output", "gradient:x", "gradient:weight"), "reduction"),
    differentiable=("x", "weight"),
    magnitudes=magnitudes,
    transforms={},
    illegal=(),
)


@pytest.fixture(params=["fp32", "bf16"])
def arena(request):
    return Arena(SPEC, Case("toy", {"batch": 11, "size": 7}), request.param, torch.device("cpu"))


def results(arena, function=product, backward=True):
    outputs = call(function, "output", arena.inputs, [], {})
    upstream = {"output": torch.randn(outputs["output"].shape).to(outputs["output"].dtype)} if backward else {}
    return call(function, "output", arena.inputs, arena.leaves, upstream), upstream


def test_right_in_blocks_of_any_size_that_are_no_larger_than_asked_for(arena):
    found, upstream = results(arena)
    for block in (7, 50, 2**24):
        share = verify(arena, LAYOUT, found, upstream, "cpu", block)
        assert 0 < share < 1
        assert share == pytest.approx(verify(arena, None, found, upstream, "cpu"), rel=1e-3)
    rows = []
    spying = replace(SPEC, references={"": lambda x, **others: rows.append(len(x)) or product(x, **others)})
    verify(replace(arena, spec=spying), LAYOUT, found, upstream, "cpu", 50)
    assert max(rows) == 50 // 11
    assert sum(rows) == 2 * 33


@pytest.mark.smoke
def test_one_wrong_element_is_seen(arena):
    for item in ("output", "gradient:x", "gradient:weight"):
        found, upstream = results(arena)
        found[item].view(-1)[-1] += 1
        with pytest.raises(Wrong, match=f"{item}: outside the contract's fence"):
            verify(arena, LAYOUT, found, upstream, "cpu", 14)


def test_the_relative_rule_is_that_of_the_checker():
    arena = Arena(SPEC, Case("toy", {"batch": 11, "size": 7}), "fp32", torch.device("cpu"))
    found, _ = results(arena, backward=False)
    gold = product(*(arena.inputs[name].double() for name in ("x", "weight", "shift")))
    tolerance = contract().tolerance("accuracy", "reduction", "fp32", "forward", "cpu")
    terms = magnitudes(None, {name: v.double() for name, v in arena.inputs.items() if name != "scale"}, {})["output"]
    eager = found["output"]
    verdicts = set()
    for error in (1e-7, 1e-6, 3e-6, 5e-6, 1e-5, 2e-5):
        spoilt = (gold + error).float()
        passed = compare.accuracy(spoilt, eager, gold, terms, tolerance, "forward").passed
        verdicts.add(passed)
        with nullcontext() if passed else pytest.raises(Wrong, match=r"relative|eager"):
            verify(arena, LAYOUT, {"output": spoilt}, {}, "cpu", 14)
    assert verdicts == {True, False}


def test_large_terms_may_round_by_more_than_the_row_allows():
    arena = Arena(SPEC, Case("toy", {"batch": 11, "size": 8}), "fp32", torch.device("cpu"))
    x, weight, shift = (arena.inputs[name] for name in ("x", "weight", "shift"))
    x.mul_(1e4)
    x[..., ::2], weight[:, ::2] = x[..., 1::2], -weight[:, 1::2]
    gold = shift.double()[..., None].expand(-1, -1, 5)
    terms = magnitudes(None, {"x": x.double(), "weight": weight.double(), "shift": shift.double()}, {})["output"]
    tolerance = contract().tolerance("accuracy", "reduction", "fp32", "forward", "cpu")
    verify(arena, LAYOUT, {"output": (gold + compare.ROUNDING * terms / 3).float()}, {}, "cpu", 14)
    assert float(compare.ROUNDING * terms.min() / 3) > tolerance.atol + tolerance.rtol
    with pytest.raises(Wrong, match="outside the contract's fence"):
        verify(arena, LAYOUT, {"output": (gold + 5 * compare.ROUNDING * terms).float()}, {}, "cpu", 14)


def test_nan_and_other_shapes_and_names_are_wrong(arena):
    found, upstream = results(arena)
    for change in (
        {"output": torch.full_like(found["output"], torch.nan)},
        {"output": found["output"][..., :-1]},
        {"another": found["output"]},
    ):
        with pytest.raises(Wrong):
            verify(arena, LAYOUT, {**found, **change}, upstream, "cpu")


def test_a_sum_over_rows_is_rounded_once():
    """BF16 parts that are rounded and then added would be further off than what the relative rule allows."""
    arena = Arena(SPEC, Case("toy", {"batch": 400, "size": 7}), "bf16", torch.device("cpu"))
    found, upstream = results(arena)
    rough = sum(arena.inputs["x"][i].T.mul(1) @ upstream["output"][i].to(arena.inputs["x"].dtype) for i in range(400))
    with pytest.raises(Wrong, match="gradient:weight"):
        verify(arena, LAYOUT, {**found, "gradient:weight": rough.T.contiguous()}, upstream, "cpu", 14)
    verify(arena, LAYOUT, found, upstream, "cpu", 14)


def test_draws_are_repeatable_and_never_zero():
    device = torch.device("cpu")
    first, second = (DeviceDraw(torch.bfloat16, device, 3) for _ in range(2))
    for one, other in (
        (first.normal(50, 4, scale=2.0), second.normal(50, 4, scale=2.0)),
        (first.uniform(0.5, 1.0, 30, dtype=torch.float64), second.uniform(0.5, 1.0, 30, dtype=torch.float64)),
        (first.ids(9, 40), second.ids(9, 40)),
        (first.mask(0.5, 40), second.mask(0.5, 40)),
    ):
        assert torch.equal(one, other)
        assert one.double().std() > 0.1
