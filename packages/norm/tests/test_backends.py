"""Every backend of rms_norm that runs here, held to the rules of all operators; and what is special to norms."""

from itertools import product

import pytest
import torch

from rl_kernels.core import calls
from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants, planted
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.norm import layer_norm, reference, rms_norm
from rl_kernels.norm.op import OPERATOR, describe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [
    pytest.param(backend.name, marks=[pytest.mark.gpu] * (DEVICE == "cuda"))
    for backend in OPERATOR.backends
    if backend.why_not(describe(torch.empty(1, 8, device=DEVICE))) is None
]
PLANTED = (
    Mutants(
        "native",
        ("rl_kernels.norm.backends.native",),
        (
            Bug("squares by a library", "_mean(row * row)", "(row * row).mean(-1)"),
            Bug("projection left out", "- scaled * _mean(pull * scaled)[:, None]", "* 1"),
            Bug("buffer overwritten", "terms, main_grad", "terms, torch.zeros_like(main_grad)"),
            Bug("gate without its sigmoid", "row.mul_(silu(gate.to(row.dtype)))", "row.mul_(gate.to(row.dtype))"),
            Bug("gradient of the gate without the weight", "norm = norm * _scale(weight, ", "norm * _scale(weight, "),
        ),
        ("gemma", "no-weight", "gated"),
    ),
    Mutants(
        "triton",
        ("rl_kernels.norm.backends.triton.kernels", "rl_kernels.norm.backends.triton.backend"),
        (
            Bug("mean over the tile", "D, tl.float32", "x.shape[1], tl.float32"),
            Bug(
                "columns behind the row not zero",
                "tl.where(inside[None, :], x - spread(mean, x), 0.0)",
                "x - spread(mean, x)",
            ),
            Bug("gradient of the sum lost", "dx = dx + of_sum", "dx = dx * 1.0"),
            Bug("mean of another row", "count + rows, mask", "count + rows // 2, mask"),
            Bug("last parts left out", "AHEAD, count", "AHEAD, count - REST"),
            Bug(
                "slope of the sigmoid lost",
                "slope = product(sigmoid, fma(gate, one - sigmoid, one))",
                "slope = sigmoid",
            ),
            Bug("gradient of the norm not gated", "return product(grad, product(gate, sigmoid))", "return grad"),
            Bug(
                "gate's gradient without the weight",
                "grad, weighted(x, WEIGHT, d, inside, offset), gate",
                "grad, x, gate",
            ),
        ),
        (
            *("plain", "residual", "gemma", "gated", "layer", "layer-residual", "layer-offset", "batch-2049"),
            *("hidden-33", "hidden-4096"),
        ),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    smoke = ("plain", "layer-residual", "gated")
    large = (
        Case("many-rows", {"batch": 4100, "hidden": 4096}, {"residual": True}),
        Case("many-heads", {"batch": 70000, "hidden": 128}),
        Case("gated-heads", {"batch": 70000, "hidden": 128}, {"gate": True}),
        Case("layer", {"batch": 2050, "hidden": 5120}, {"bias": True}, "layer_norm"),
    )
    far = tuple(Case(f"of-{n}", {"batch": n, "hidden": n}, {"residual": True}) for n in (2, 3))


def drawn(rows, width, dtype=torch.float32, device="cpu"):
    """Return rows, a weight, and an upstream gradient."""
    draw = Draw(dtype, device)
    return draw.normal(rows, width), draw.uniform(0.5, 1.5, width), draw.normal(rows, width)


def leaves_of(*tensors):
    return [value.clone().requires_grad_() for value in tensors]


@pytest.mark.smoke
def test_main_grad_is_continued_over_calls():
    x, weight, upstream = drawn(70, 24)
    alone, whole = leaves_of(weight, weight)
    rms_norm(x, alone).backward(upstream)
    whole.main_grad = torch.zeros(24)
    rms_norm(x, whole).backward(upstream)
    assert whole.grad is None
    assert torch.equal(whole.main_grad, alone.grad)
    for cut in (16, 48, 64):
        (parts,) = leaves_of(weight)
        parts.main_grad = torch.zeros(24)
        for rows, grad in zip(x.split(cut), upstream.split(cut), strict=True):
            rms_norm(rows, parts).backward(grad)
        assert torch.equal(parts.main_grad, whole.main_grad), cut


def test_main_grad_leaves_the_gradient_of_a_bias():
    x, weight, upstream = drawn(70, 24)
    found = []
    for has_buffer in (False, True):
        leaves = leaves_of(x, weight, weight.flip(0))
        if has_buffer:
            leaves[1].main_grad = torch.zeros(24)
        layer_norm(*leaves).backward(upstream)
        found.append([leaves[0].grad, leaves[1].main_grad if has_buffer else leaves[1].grad, leaves[2].grad])
    assert all(map(torch.equal, *found))


def few_rows_equal_many(backend, width, many):
    """Compare the gradients of 21 rows, where a Triton program takes a tile, with many, where it takes a step."""
    x, weight, upstream = drawn(many, width, device=DEVICE)
    upstream[21:] = 0
    found = []
    for count in (21, many):
        leaves = leaves_of(x[:count], weight)
        rms_norm(*leaves, backend=backend).backward(upstream[:count])
        found.append((leaves[0].grad[:21], leaves[1].grad))
    return all(torch.equal(few, more) for few, more in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_few_rows_equal_those_of_many(backend, monkeypatch):
    if backend == "triton" and DEVICE == "cpu":
        # The interpreter takes a minute for as many steps as fill a GPU.
        monkeypatch.setattr(OPERATOR.backend(backend).load(), "FEW_STEPS", 2)
    for width, many in (
        ((40, 4200), (600, 600), (1030, 530)) if DEVICE == "cuda" else ((40, 270), (600, 40), (1030, 35))
    ):
        assert few_rows_equal_many(backend, width, many), width


@pytest.mark.parametrize("backend", [param for param in BACKENDS if "triton" in param.values])
def test_planted_bug_in_a_step_shows(backend):
    bug = Bug("tiles beside the sum of a step", "inner += tl.load(place, mask", "total += tl.load(place, mask")
    with planted(PLANTED[1].modules, bug):
        assert not few_rows_equal_many(backend, 600, 600)


def one_warp_equals_several(monkeypatch, dtype, width, centered):
    """Compare programs of one warp with those of several; in the interpreter, which adds otherwise, sums are exact."""
    module, draw = OPERATOR.backend("triton").load(), Draw(dtype, DEVICE)
    rows = [draw.normal(150, width) for _ in range(3)]
    grad, grad_sum, x = rows if DEVICE == "cuda" else [value.mul(2).round() for value in rows]
    stats, weight = torch.full((2, 150), 0.5, device=DEVICE), draw.normal(width).round()
    monkeypatch.setattr(module, "FEW_STEPS", 0)
    found = []
    for most in (1 << 30, 1):
        calls.forget()
        monkeypatch.setattr(module, "MANY_STEPS", most)
        found.append(module.backward(grad, grad_sum, x, weight, stats, centered, 0.0, True, centered))
    return all(map(torch.equal, *found))


ONE_WARP = (
    *((torch.float16, 128, False), (torch.float32, 128, True)),
    *((torch.float16, 64, True), (torch.float32, 40, False)),
)


@pytest.mark.parametrize("backend", [param for param in BACKENDS if "triton" in param.values])
def test_one_warp_takes_the_rows_of_several(backend, monkeypatch):
    assert all(one_warp_equals_several(monkeypatch, *one) for one in ONE_WARP)
    bug = Bug("rows of another warp", "TURN * ALIKE +", "TURN +")
    with planted(PLANTED[1].modules, bug):
        assert not all(one_warp_equals_several(monkeypatch, *one) for one in ONE_WARP)


def test_residual_is_added_and_rounded_as_a_step_of_its_own():
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, residual = drawn(35, 96, dtype)
        leaves = leaves_of(x, residual, weight)
        whole = rms_norm(leaves[0], leaves[2], residual=leaves[1])
        apart = leaves_of(x + residual, weight)
        alone = rms_norm(*apart)
        assert torch.equal(whole.sum, apart[0])
        assert torch.equal(whole.output, alone)
        found = torch.autograd.grad(whole.output, leaves, x)
        dx, dweight = torch.autograd.grad(alone, apart, x)
        assert all(torch.equal(*pair) for pair in zip(found, (dx, dx, dweight), strict=True))


def test_results_may_be_changed_in_place():
    x = torch.randn(2, 3, 8, requires_grad=True)
    for residual in (None, torch.randn(2, 3, 8)):
        results = rms_norm(x, torch.ones(8), residual=residual)
        for result in (results,) if residual is None else results:
            result.mul_(2)
            assert result.shape == x.shape


@pytest.mark.parametrize("compiled", [False, True])
def test_leaves_share_no_gradient(compiled):
    x, weight, upstream = drawn(3, 8)
    leaves = leaves_of(x, x)
    call = torch.compile(rms_norm, fullgraph=True, backend="aot_eager") if compiled else rms_norm
    for count in (1, 2):
        torch.autograd.backward(call(leaves[0], weight, residual=leaves[1]), (upstream, upstream))
        if count == 1:
            first = leaves[0].grad.clone()
        assert all(torch.equal(leaf.grad, count * first) for leaf in leaves)
    leaves[0].grad.zero_()
    assert leaves[1].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_rounded_where_the_definition_rounds_them(backend):
    """All bits are equal, but for the few rows whose sum in another order is another number."""
    x, half, _ = drawn(40, 256, torch.float16, DEVICE)
    for weight, offset, cast_first in (*product((half,), (0.0, 1.0), (True, False)), (half.float(), 0.0, True)):
        found = rms_norm(x, weight, offset=offset, cast_first=cast_first, backend=backend)
        right, wrong = (
            float((found == reference.rms_norm(x, weight, offset=offset, cast_first=first)).double().mean())
            for first in (cast_first, not cast_first)
        )
        assert right > 0.99 > 0.95 > wrong, (weight.dtype, offset, cast_first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_rows_are_rounded_where_qwen3_next_rounds_them(backend):
    """All bits are equal, but for the few rows whose sum in another order, or exponential, is another number."""
    x, half, gate = drawn(40, 256, torch.float16, DEVICE)
    for weight, cast_first in product((half, half.float(), None), (True, False)):
        found = rms_norm(x, weight, gate=gate, cast_first=cast_first, backend=backend)
        right, wrong = (
            float((found == reference.rms_norm(x, weight, gate=gate, cast_first=first)).double().mean())
            for first in (cast_first, not cast_first)
        )
        assert right > 0.99 > 0.95 > wrong, (weight is None or weight.dtype, cast_first)


def test_main_grad_leaves_the_gradient_of_a_gate():
    x, weight, upstream = drawn(70, 24)
    alone = leaves_of(x, weight, x.flip(0))
    rms_norm(*alone[:2], gate=alone[2]).backward(upstream)
    whole = leaves_of(x, weight, x.flip(0))
    whole[1].main_grad = torch.zeros(24)
    rms_norm(*whole[:2], gate=whole[2]).backward(upstream)
    assert whole[1].grad is None
    assert torch.equal(whole[1].main_grad, alone[1].grad)
    assert all(torch.equal(whole[place].grad, alone[place].grad) for place in (0, 2))
