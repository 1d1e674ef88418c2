"""The rules of all operators, for each backend of det_gemm that runs here, and rules of det_gemm alone."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.det_gemm import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.op import OPERATOR, describe, describe_dw
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.lab.check.relations.integration import RawCalls

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLANTED = (
    Mutants(
        "native",
        (
            "rl_kernels.core.rowwise.operands",
            "rl_kernels.core.blocks",
            "rl_kernels.core.products",
            *(f"rl_kernels.det_gemm.{name}" for name in ("segments", "backends.native")),
        ),
        (
            Bug(
                "library product of the rows as they are",
                "left = _packed_left(a) if self._packs_left else a",
                "return torch.mm(a, b.to(a.dtype), out=out)",
            ),
            Bug(
                "strides of b ignored", "part = (b, out) if", "part = (b.as_strided(b.shape, (b.shape[1], 1)), out) if"
            ),
            Bug(
                "steps in descending order",
                "zip(left.t().split(STEP, 1), right.split(STEP), strict=True)",
                "zip(left.t().split(STEP, 1)[::-1], right.split(STEP)[::-1], strict=True)",
            ),
            Bug(
                "step rounded to BF16",
                "total.addmm_(left_step, right_step)",
                "total += (left_step @ right_step).bfloat16()",
            ),
        ),
        ("odd", "linear-column-major", "dw-continued"),
    ),
    Mutants(
        "triton",
        (
            "rl_kernels.core.triton_lib.schedule",
            *("rl_kernels.core.triton_lib.gemm_kernels", "rl_kernels.core.triton_lib.gemm"),
            *("rl_kernels.det_gemm.prepared", "rl_kernels.det_gemm.backends.triton.backend"),
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
    smoke = ("odd", "linear", "segments", "dw-continued")
    large = (
        Case("many-rows", {"m_dim": 1100, "n_dim": 4096, "k_dim": 4096}),
        Case("few-rows", {"m_dim": 8, "n_dim": 4096, "k_dim": 4096}),
        Case("skinny-linear", {"m_dim": 33, "n_dim": 1280, "k_dim": 8192}, {"bias": True}, "det_linear"),
        Case("dw", {"m_dim": 2050, "n_dim": 4096, "k_dim": 1024}, {}, "det_gemm_dw", grad=False),
    )
    far = tuple(
        Case(f"{function}-of-{m}", {"m_dim": m, "n_dim": n, "k_dim": k}, options, function, grad="bias" in options)
        for m, n, k in ((2, 2, 2), (24, 16, 40))
        for function, options in (("det_linear", {"bias": True}), ("det_gemm_dw", {"accumulate_into": True}))
    )


def same(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.smoke
def test_gradients_equal_public_products():
    draw = Draw(torch.bfloat16, seed=3)
    x, weight = draw.normal(2, 17, 30).requires_grad_(), draw.normal(20, 30).requires_grad_()
    bias, upstream = draw.normal(20).requires_grad_(), draw.normal(2, 17, 20)
    dx, dweight, dbias = torch.autograd.grad(det_linear(x, weight, bias), (x, weight, bias), upstream)
    rows, dc = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    assert torch.equal(dx.flatten(0, 1), det_gemm(dc, weight.detach()))
    assert torch.equal(dweight, det_gemm_dw(rows, dc).t())
    assert torch.equal(dbias, det_gemm_dw(rows.new_ones(34, 1), dc)[0])


def test_out_dtype_rounds_once():
    for dtype, wanted in product(DTYPES, DTYPES):
        draw = Draw(dtype, seed=5)
        a, b, upstream = draw.normal(17, 40), draw.normal(40, 17), draw.normal(17, 17, dtype=torch.float32).to(wanted)
        assert torch.equal(det_gemm(a, b, out_dtype=wanted), det_gemm(a, b, out_dtype=torch.float32).to(wanted))
        assert torch.equal(det_gemm_dw(b, b, out_dtype=wanted), det_gemm_dw(b, b, out_dtype=torch.float32).to(wanted))
        leaves = a.requires_grad_(), b.requires_grad_()
        found = torch.autograd.grad(det_gemm(*leaves, out_dtype=wanted), leaves, upstream)
        expected = torch.autograd.grad(det_gemm(*leaves), leaves, upstream.to(dtype))
        assert found[0].dtype == found[1].dtype == dtype
        assert same(found, expected)


@pytest.mark.usefixtures("poisoned_empty")
def test_empty_shapes():
    for m, k, n in ((0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)):
        a, b, bias = torch.ones(m, k, requires_grad=True), torch.ones(k, n, requires_grad=True), torch.full((n,), 7.0)
        out = det_gemm(a, b)
        assert torch.equal(out, torch.full((m, n), float(k)))
        da, db = torch.autograd.grad(out, (a, b), torch.ones(m, n))
        assert torch.equal(da, torch.full((m, k), float(n)))
        assert torch.equal(db, torch.full((k, n), float(m)))
        assert torch.equal(det_gemm_dw(a.detach(), torch.ones(m, n)), torch.full((k, n), float(m)))
        x = a.detach().expand(2, m, k)
        assert torch.equal(det_linear(x, b.detach().t(), bias), torch.full((2, m, n), k + 7.0))


def test_only_needed_products_run():
    draw = Draw(torch.float32, seed=8)
    operands = draw.normal(5, 6), draw.normal(4, 6), draw.normal(4)
    for place, name in enumerate(("forward", "weight_gradient", "weight_gradient")):
        leaves = [value.clone().requires_grad_(at == place) for at, value in enumerate(operands)]
        out = det_linear(*leaves)
        with RawCalls() as raw:
            out.sum().backward()
        assert list(raw.calls) == [f"rl_kernels.det_gemm_{name}.default"]
        assert leaves[place].grad.shape == operands[place].shape


def test_no_graph_without_requires_grad():
    a, b = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    assert not det_gemm(a, b.detach()).requires_grad
    with torch.no_grad():
        assert not det_gemm(a, b).requires_grad
        # Here operands of a weight gradient may require grad.
        assert torch.equal(det_gemm_dw(a, b.view(2, 3)), a.t() @ b.view(2, 3))


def test_autocast_dtypes_alternate():
    x, weight = torch.ones(2, 8), torch.ones(3, 8, dtype=torch.bfloat16)
    for _ in range(2):
        for dtype in DTYPES[1:]:
            with torch.autocast("cpu", dtype):
                assert det_linear(x, weight).dtype == dtype
        with pytest.raises(TypeError, match=r"weight: expected dtype torch\.float32"):
            det_linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="b: expected dtype"):
        det_gemm(x, weight.t())


def test_autocast_gradients_and_main_grad():
    draw = Draw(torch.float32, seed=10)
    x, upstream = draw.normal(20, 40).requires_grad_(), draw.normal(20, 8, dtype=torch.bfloat16)
    weight, bias = torch.nn.Parameter(draw.normal(8, 40)), draw.normal(8, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = det_linear(x, weight, bias)
    found = torch.autograd.grad(out, (x, weight, bias), upstream)
    assert [grad.dtype for grad in found] == [torch.float32, torch.float32, torch.bfloat16]
    weight.main_grad = torch.zeros(8, 40)
    with torch.autocast("cpu", torch.bfloat16):
        det_linear(x, weight).backward(upstream)
    assert weight.grad is None
    assert torch.equal(weight.main_grad, det_gemm_dw(x.detach().bfloat16(), upstream, out_dtype=torch.float32).t())


def test_what_the_dispatcher_is_told():
    a, b = torch.empty(2, 3), torch.empty(3, 5)
    for right, layout in ((b, "row"), (b.t().contiguous().t(), "column"), (torch.empty(3, 10)[:, ::2], "strided")):
        assert describe(a, right).traits == {"K": 3, "N": 5, "layout": layout}
    assert describe_dw(a, torch.empty(2, 5)).traits == {"K": 3, "N": 5, "layout": "row"}


def test_the_note_is_of_the_product(monkeypatch):
    monkeypatch.setattr("rl_kernels.core.products.note", lambda *sizes, transposed: (*sizes, transposed))
    note, a, b = OPERATOR.backend("native").note, torch.empty(2, 3), torch.empty(3, 5)
    assert note(describe(a, b)) == (3, 5, torch.float32, False)
    assert note(describe(a, b.t().contiguous().t())) == (3, 5, torch.float32, True)
    call = describe(a, b)
    assert note(replace(call, traits={"K": 3, "N": 5})) == (3, 5, torch.float32, True)
    assert not any(map(note, (replace(call, device=torch.device("cuda", 0)), replace(call, traits={"K": 3}))))
