"""Every backend of det_gemm that runs here, held to the rules of all operators; and what is special to det_gemm."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.det_gemm import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.op import OPERATOR
from rl_kernels.lab.check.conformance import Conformance

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


PLANTED = (
    Mutants(
        "native",
        (
            "rl_kernels.core.rowwise.operands",
            "rl_kernels.core.products",
            *(f"rl_kernels.det_gemm.{name}" for name in ("segments", "backends.native")),
        ),
        (
            Bug(
                "library product of the rows as they are",
                "_columns(left, b, out, settings)\n            return out",
                "return torch.mm(a, b.to(dtype))",
            ),
            Bug("strides of b ignored", "b, out.dtype", "b.as_strided(b.shape, (b.shape[1], 1)), out.dtype"),
            Bug("steps in descending order", "range(0, len(left), STEP)", "reversed(range(0, len(left), STEP))"),
            Bug(
                "step rounded to BF16",
                "total.addmm_(left[row : row + STEP].t(), right[row : row + STEP])",
                "total += (left[row : row + STEP].t() @ right[row : row + STEP]).bfloat16()",
            ),
        ),
    ),
    Mutants(
        "triton",
        (
            "rl_kernels.core.triton_lib.schedule",
            "rl_kernels.core.triton_lib.gemm",
            *(f"rl_kernels.det_gemm.backends.triton.{name}" for name in ("backend",)),
        ),
        (
            Bug("mask of K off by one", "(c < K)[None, :]", "(c < K - 1)[None, :]"),
            Bug("buffer overwritten", "load(place, mask=inside, other=0.0)", "zeros((BLOCK_M, BLOCK_N), tl.float32)"),
            Bug("every tile from the first rows", "tile_m * BLOCK_M", "0 * tile_m"),
            Bug("segments that reach into the next", "tl.minimum((index + 1) * length, K)", "K"),
            Bug(
                "tiles rounded down",
                "min(tiles, processors(a.device)) if cut.persistent else tiles",
                "max(tiles - 1, 1)",
            ),
        ),
        (
            *("odd", "one-column", "linear-leading", "linear-column-major", "dw-many-steps"),
            *("dw-continued", "segments"),
        ),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    large = (
        Case("many-rows", {"m_dim": 1100, "n_dim": 4096, "k_dim": 4096}),
        Case("few-rows", {"m_dim": 8, "n_dim": 4096, "k_dim": 4096}),
        Case("skinny-linear", {"m_dim": 33, "n_dim": 1280, "k_dim": 8192}, {"bias": True}, "det_linear"),
        Case("dw", {"m_dim": 2050, "n_dim": 4096, "k_dim": 1024}, {}, "det_gemm_dw", grad=False),
    )


class RawOps(TorchDispatchMode):
    """Lists the raw ops that run inside the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rl_kernels":
            self.names.append(func.name().removeprefix("rl_kernels::det_gemm_"))
        return func(*args, **(kwargs or {}))


def test_gradients_are_the_public_products():
    draw = Draw(torch.bfloat16, seed=3)
    x, weight = draw.normal(2, 17, 30).requires_grad_(), draw.normal(20, 30).requires_grad_()
    bias, upstream = draw.normal(20).requires_grad_(), draw.normal(2, 17, 20)
    dx, dweight, dbias = torch.autograd.grad(det_linear(x, weight, bias), (x, weight, bias), upstream)
    rows, dc = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    assert torch.equal(dx.flatten(0, 1), det_gemm(dc, weight.detach()))
    assert torch.equal(dweight, det_gemm_dw(rows, dc).t())
    assert torch.equal(dbias, det_gemm_dw(rows.new_ones(34, 1), dc)[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_upstream_gradient_of_another_dtype_is_rounded_first(dtype):
    draw = Draw(dtype, seed=4)
    a, b = draw.normal(17, 30).requires_grad_(), draw.normal(30, 20).requires_grad_()
    upstream = draw.normal(17, 20, dtype=torch.float32)
    wide = torch.autograd.grad(det_gemm(a, b, out_dtype=torch.float32), (a, b), upstream)
    narrow = torch.autograd.grad(det_gemm(a, b), (a, b), upstream.to(dtype))
    assert [grad.dtype for grad in wide] == [dtype, dtype]
    assert all(torch.equal(one, other) for one, other in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype_is_the_one_rounding(dtype, wanted):
    draw = Draw(dtype, seed=5)
    a, b = draw.normal(6, 40), draw.normal(40, 5)
    assert torch.equal(det_gemm(a, b, out_dtype=wanted), det_gemm(a, b, out_dtype=torch.float32).to(wanted))
    assert torch.equal(det_gemm_dw(b, b, out_dtype=wanted), det_gemm_dw(b, b, out_dtype=torch.float32).to(wanted))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)])
@pytest.mark.usefixtures("poisoned_empty")
def test_empty_shapes(m, k, n):
    a, b, bias = torch.ones(m, k, requires_grad=True), torch.ones(k, n, requires_grad=True), torch.full((n,), 7.0)
    out = det_gemm(a, b)
    assert torch.equal(out, torch.full((m, n), float(k)))
    da, db = torch.autograd.grad(out, (a, b), torch.ones(m, n))
    assert torch.equal(da, torch.full((m, k), float(n)))
    assert torch.equal(db, torch.full((k, n), float(m)))
    assert torch.equal(det_gemm_dw(a.detach(), torch.ones(m, n)), torch.full((k, n), float(m)))
    x = a.detach().expand(2, m, k)
    assert torch.equal(det_linear(x, b.detach().t(), bias), torch.full((2, m, n), k + 7.0))


@pytest.mark.usefixtures("poisoned_empty")
def test_results_are_wholly_written_and_inputs_unchanged():
    draw = Draw(torch.float32, seed=6)
    x, weight, bias = draw.normal(70, 33), draw.normal(4100, 33), draw.normal(4100)
    copies = [value.clone() for value in (x, weight, bias)]
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    out = det_linear(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(bool(value.isfinite().all()) for value in (out, *grads))
    assert all(torch.equal(value, copy) for value, copy in zip(leaves, copies, strict=True))


def test_expanded_and_offset_operands():
    draw = Draw(torch.float32, seed=7)
    row, b = draw.normal(1, 37), draw.normal(74, 40)
    expanded = row.expand(5, 37)
    assert torch.equal(det_gemm(expanded, b[3:40, 5:24]), det_gemm(row, b[3:40, 5:24].clone()).expand(5, 19))
    assert torch.equal(det_gemm_dw(expanded, b[:5]), det_gemm_dw(expanded.clone(), b[:5].clone()))


def test_only_the_products_that_are_needed_run():
    draw = Draw(torch.float32, seed=8)
    x, weight, bias = draw.normal(5, 6), draw.normal(4, 6), draw.normal(4)
    expected = {
        "x": ["forward"],
        "weight": ["weight_gradient"],
        "bias": ["weight_gradient"],
    }
    for needed, value in (("x", x), ("weight", weight), ("bias", bias)):
        value.requires_grad_()
        out = det_linear(x, weight, bias)
        with RawOps() as ran:
            out.sum().backward()
        assert ran.names == expected[needed]
        assert value.grad.shape == value.shape
        value.requires_grad_(False)


def test_no_graph_without_need():
    a, b = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    assert not det_gemm(a, b.detach()).requires_grad
    with torch.no_grad():
        assert not det_gemm(a, b).requires_grad
        assert torch.equal(det_gemm_dw(a, b.t()[:, :2].reshape(2, 2)), a.t() @ b.t()[:, :2])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_casts_as_linear_does(dtype):
    draw = Draw(torch.float32, seed=9)
    x, weight = draw.normal(3, 5, 40).requires_grad_(), draw.normal(8, 40, scale=0.2).requires_grad_()
    bias, upstream = draw.normal(8, dtype=dtype).requires_grad_(), draw.normal(3, 5, 8, dtype=dtype)
    leaves = (x, weight, bias)
    with torch.autocast("cpu", dtype):
        found, plain = det_linear(*leaves), F.linear(*leaves)
    assert found.dtype == plain.dtype == dtype
    explicit = det_linear(*(value.to(dtype) for value in leaves))
    assert torch.equal(found, explicit)
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)
    grads, expected = (torch.autograd.grad(out, leaves, upstream) for out in (found, explicit))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, dtype]
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))


def test_what_autocast_casts_is_remembered_apart():
    x, weight = torch.ones(2, 8), torch.ones(3, 8, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert det_linear(x, weight).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert det_linear(x, weight).dtype == torch.float16
        with pytest.raises(TypeError, match=r"weight: expected dtype torch\.float32"):
            det_linear(x, weight)


def test_autocast_finds_main_grad_on_the_parameter():
    draw = Draw(torch.float32, seed=10)
    x, upstream = draw.normal(20, 40), draw.normal(20, 8, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(draw.normal(8, 40))
    weight.main_grad = torch.zeros(8, 40)
    with torch.autocast("cpu", torch.bfloat16):
        det_linear(x, weight).backward(upstream)
    assert weight.grad is None
    assert torch.equal(weight.main_grad, det_gemm_dw(x.bfloat16(), upstream, out_dtype=torch.float32).t())


def test_autocast_leaves_det_gemm_alone():
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert det_gemm(a, b).dtype == torch.float32
        with pytest.raises(TypeError, match="b: expected dtype"):
            det_gemm(a, b.bfloat16())


def test_double_backward_raises_for_every_gradient():
    draw = Draw(torch.float32, seed=11)
    leaves = [value.requires_grad_() for value in (draw.normal(5, 6), draw.normal(4, 6), draw.normal(4))]
    out = det_linear(*leaves).square().sum()
    for leaf in leaves:
        (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            grad.sum().backward()
