"""Every backend of rms_norm that runs here, held to the rules of all operators; and what is special to norms."""

import pytest
import torch

from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants, planted
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.norm import layer_norm, reference, rms_norm
from rl_kernels.norm.op import OPERATOR, describe

PLANTED = (
    Mutants(
        "native",
        ("rl_kernels.norm.backends.native",),
        (
            Bug("squares by a library", "_mean(row * row)", "(row * row).mean(-1)"),
            Bug("projection left out", "- scaled * _mean(pull * scaled)[:, None]", "* 1"),
            Bug("buffer overwritten", "terms, main_grad", "terms, torch.zeros_like(main_grad)"),
        ),
        (
            *("plain", "residual", "residual-half", "gemma", "no-weight", "weight-of-another-dtype"),
            *("layer", "layer-residual", "layer-offset", "pairs-0", "pairs-1", "pairs-2", "pairs-3"),
            *("batch-129", "hidden-1025"),
        ),
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
        ),
        (
            *("plain", "residual", "gemma", "layer", "layer-residual", "layer-offset", "batch-2049"),
            *("hidden-33", "hidden-4096"),
        ),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    large = (
        Case("many-rows", {"batch": 4100, "hidden": 4096}, {"residual": True}),
        Case("many-heads", {"batch": 70000, "hidden": 128}),
        Case("layer", {"batch": 2050, "hidden": 5120}, {"bias": True}, "layer_norm"),
    )


def drawn(rows, width, dtype=torch.float32, seed=0):
    draw = Draw(dtype, seed=seed)
    return draw.normal(rows, width), draw.uniform(0.5, 1.5, width), draw.normal(rows, width)


@pytest.mark.parametrize("cut", [16, 48, 64])
def test_main_grad_is_continued_over_calls(cut):
    x, weight, upstream = drawn(70, 24)
    whole, parts = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    whole.main_grad, parts.main_grad = torch.zeros(24), torch.zeros(24)
    rms_norm(x, whole).backward(upstream)
    for rows, grad in zip(x.split(cut), upstream.split(cut), strict=True):
        rms_norm(rows, parts).backward(grad)
    assert whole.grad is None
    assert torch.equal(whole.main_grad, parts.main_grad)
    alone = weight.clone().requires_grad_()
    rms_norm(x, alone).backward(upstream)
    assert torch.equal(alone.grad, whole.main_grad)


def test_weight_gradient_is_a_chain_of_16_rows_a_step():
    x, weight, upstream = drawn(40, 5)
    leaf = weight.clone().requires_grad_()
    layer_norm(x, leaf).backward(upstream)
    row = x - x.mean(-1, keepdim=True)
    terms = (row / (row.square().mean(-1, keepdim=True) + 1e-5).sqrt() * upstream).double()
    expected = torch.zeros(5)
    for step in terms.split(16):
        expected = expected + step.sum(0).float()
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-6)


def needs_triton(device):
    reason = OPERATOR.backend("triton").why_not(describe(torch.empty(1, 8, device=device)))
    if reason is not None:
        pytest.skip(reason)


def sums_of_few_and_of_many(width, many, device):
    """Compare dx and dweight of 21 rows, where a program takes a tile, with those of many, where it takes a step."""
    x, weight, upstream = (value.to(device) for value in drawn(many, width))
    upstream[21:] = 0
    found = []
    for count in (21, many):
        leaves = [value.clone().requires_grad_() for value in (x[:count], weight)]
        rms_norm(*leaves, backend="triton").backward(upstream[:count])
        found.append((leaves[0].grad[:21], leaves[1].grad))
    return [torch.equal(few, more) for few, more in zip(*found, strict=True)]


@pytest.mark.parametrize(("width", "many"), [(40, 4200), (600, 600), (1030, 530)])
def test_triton_sums_the_same_where_a_program_takes_a_tile_and_where_it_takes_a_step(width, many, device):
    needs_triton(device)
    assert sums_of_few_and_of_many(width, many, device) == [True, True]


def test_triton_bug_planted_in_a_step_shows():
    bug = Bug("tiles beside the sum of a step", "inner += tl.load(place, mask", "total += tl.load(place, mask")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needs_triton(device)
    with planted(PLANTED[1].modules, bug):
        assert sums_of_few_and_of_many(600, 600, device) != [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_here_has_the_bits_of_the_sum_before(dtype):
    x, weight, residual = drawn(35, 96, dtype)
    leaves = [value.clone().requires_grad_() for value in (x, residual, weight)]
    whole = rms_norm(leaves[0], leaves[2], residual=leaves[1])
    apart = [(x + residual).requires_grad_(), weight.clone().requires_grad_()]
    alone = rms_norm(*apart)
    assert torch.equal(whole.sum, apart[0])
    assert torch.equal(whole.output, alone)
    upstream = drawn(35, 96, dtype, seed=1)[0]
    found = torch.autograd.grad(whole.output, leaves, upstream)
    expected = torch.autograd.grad(alone, apart, upstream)
    assert [torch.equal(a, b) for a, b in zip(found, (expected[0], *expected), strict=True)] == [True] * 3


@pytest.mark.parametrize("name", ["x", "residual"])
def test_x_and_residual_share_a_gradient_and_not_its_storage(name):
    x, weight, upstream = drawn(3, 8)
    leaves = {"x": x.clone().requires_grad_(), "residual": x.clone().requires_grad_()}
    found = rms_norm(leaves["x"], weight, residual=leaves["residual"])
    torch.autograd.backward(found, (upstream, upstream))
    kept = {key: leaf.grad.clone() for key, leaf in leaves.items()}
    assert torch.equal(kept["x"], kept["residual"])
    leaves[name].grad.zero_()
    other = "residual" if name == "x" else "x"
    assert torch.equal(leaves[other].grad, kept[other])


def test_what_is_not_used_or_asked_for_costs_no_gradient():
    x, weight, upstream = drawn(5, 8)
    leaves = [value.clone().requires_grad_() for value in (x, upstream, weight)]
    output, total = rms_norm(leaves[0], leaves[2], residual=leaves[1])
    (of_sum,) = torch.autograd.grad(total, leaves[0], upstream, retain_graph=True)
    assert torch.equal(of_sum, upstream)
    (of_output,) = torch.autograd.grad(output, leaves[1], upstream, retain_graph=True)
    (both,) = torch.autograd.grad((output, total), leaves[1], (upstream, upstream))
    torch.testing.assert_close(both, of_output + upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_of_the_dtype_of_llamas_module(dtype):
    x, weight, _ = drawn(3, 8, dtype)
    assert rms_norm(x, weight).dtype == dtype
    assert rms_norm(x, weight.float()).dtype == torch.float32
    assert rms_norm(x, weight.float(), cast_first=False).dtype == dtype
    assert rms_norm(x).dtype == dtype
    assert layer_norm(x, weight.float()).dtype == dtype


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_first", [True, False])
def test_rows_are_rounded_where_the_definition_rounds_them(offset, cast_first, backend, device):
    """To the last bit, but for the few that another order of the row's sum moves."""
    x, weight = (value.to(device) for value in drawn(40, 256, torch.float16)[:2])
    reason = OPERATOR.backend(backend).why_not(describe(x))
    if reason is not None:
        pytest.skip(reason)
    found = rms_norm(x, weight, offset=offset, cast_first=cast_first, backend=backend)
    same = [
        float((found == reference.rms_norm(x, weight, offset=offset, cast_first=first)).double().mean())
        for first in (cast_first, not cast_first)
    ]
    assert same[0] > 0.99 > 0.95 > same[1]


def test_fp32_rows_agree_with_pytorch():
    x, weight, bias = drawn(9, 50)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), torch.nn.functional.rms_norm(x, (50,), weight, 1e-5))
    expected = torch.nn.functional.layer_norm(x, (50,), weight, bias[0], 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias[0]), expected)


@pytest.mark.usefixtures("poisoned_empty")
def test_no_rows_leave_sums_of_zero():
    x, weight, _ = drawn(0, 6)
    leaf = weight.clone().requires_grad_()
    rms_norm(x, leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(6))
