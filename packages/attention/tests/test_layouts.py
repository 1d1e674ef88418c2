"""Random calls of det_attention in every layout that is promised to change no bit: forward and gradients."""

import importlib
import random
from functools import partial
from itertools import product

import pytest
import torch

from rl_kernels.attention import det_attention, gpu, reference
from rl_kernels.attention.op import OPERATOR, ops
from rl_kernels.attention.spec.raw import dense
from rl_kernels.core.calls import forget
from rl_kernels.core.testing import Case, Draw
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.conformance import cell, device
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check

LAYOUTS = (None, None, "left", "packed", "cache", "paged", "packed-paged")
CACHES = ("cache", "paged", "packed-paged")


def random_case(seed, most_queries, most_keys, heads, groups=(1, 2, 4, 7)):
    """Return a call of any kind; the same one for a seed. One choice of heads has its kernels compiled once."""
    source = random.Random(seed)
    layout = source.choice(LAYOUTS)
    queries = source.choice((1, 3, 17, most_queries))
    keys = source.choice((queries, source.randint(1, most_keys), most_keys))
    options = {"return_lse": True, "layout": layout}
    if layout in CACHES:
        options["page"] = source.choice((16, 64, 256))
    if source.random() < 0.3:
        options["window"] = (source.randint(0, keys), source.choice((0, None, 5)))
    if source.random() < 0.2:
        options["softcap"] = source.choice((2.0, 50.0))
    if source.random() < 0.3:
        options["sinks"] = True
    if source.random() < 0.15:
        options["causal"] = False
    sizes = {
        **{"batch": source.randint(1, 4), "queries": queries, "keys": keys},
        **{"kv_heads": source.choice((1, 2)), "group": source.choice(groups), "head": source.choice(heads)},
    }
    grad = layout not in CACHES and source.random() < 0.7
    return Case(f"random-{seed}", sizes, {k: v for k, v in options.items() if v is not None}, grad=grad)


def failures(case, dtype, backend):
    """Return what differs in bits."""
    records = check_relation(cell(OPERATOR, case, dtype, backend), "invariance")
    checks = [record for record in records if isinstance(record, Check)]
    assert checks, case
    return [f"{case}: {check.item}: {check.comparison.message}" for check in checks if not check.comparison.passed]


def test_native():
    for seed in range(12):
        assert not failures(random_case(seed, 70, 140, (8, 16)), "fp32", "native")


@pytest.mark.parametrize("seed", range(3))
def test_triton(monkeypatch, seed):
    """In the interpreter a product is NumPy's, whose bits follow a row's place in it: there they are only close."""
    if OPERATOR.backend("triton").why_not(OPERATOR.describe(torch.zeros(1, 1, 1, 8, device=device()))):
        pytest.skip("needs a GPU, or Triton's interpreter")
    if device().type == "cpu":
        monkeypatch.setattr(compare, "bits", close)
    assert not failures(random_case(seed, 20, 70, (8,)), "fp32", "triton")


def close(found, expected):
    return compare.Comparison(torch.allclose(found, expected, 1e-4, 1e-5), message="not close")


HEADS = {("triton", "bf16"): (64, 128, 256), ("triton", "fp16"): (64, 128, 256), ("triton", "fp32"): (64,)}
HEADS |= {("cuda-sm90", dtype): (64, 80, 128, 192, 256) for dtype in ("bf16", "fp16")}
"""Backend and dtype: head sizes."""


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize(("backend", "dtype"), HEADS)
def test_many_on_a_gpu(backend, dtype, part):
    """Tens of variants of each call: some two thousand layouts in all. The first has any heads, most have one size."""
    assert device().type == "cuda"
    reason = OPERATOR.backend(backend).why_not(OPERATOR.describe(torch.zeros(1, 1, 1, 8).bfloat16().to(device())))
    if reason:
        pytest.skip(reason)
    cases = [random_case(part, 300, 2500, HEADS[backend, dtype])]
    for seed in range(100 + part, 160 if dtype == "bf16" else 116, 10):
        cases.append(random_case(seed, 300, 2500, (64,) if dtype == "fp32" else (128,), (4,)))
    assert not [found for case in cases for found in failures(case, dtype, backend)]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loads_and_lse_change_no_bit_on_a_gpu(monkeypatch, dtype, width):
    """Keys by pointers as by TMA, and out without lse as with it."""
    plan = importlib.import_module("rl_kernels.attention.backends.triton.plan")
    for batch, queries, keys, where in (
        (1, 64, 64, {}),
        (2, 130, 1500, {}),
        (3, 1, 2100, {}),
        (2, 70, 70, {"k_start": torch.tensor([3, 0])}),
        (2, 9, 700, {"seqused_k": torch.tensor([650, 20])}),
    ):
        q, k, v = (
            torch.randn(batch, n, h, width, device="cuda", dtype=dtype)
            for n, h in zip((queries, keys, keys), (8, 2, 2), strict=True)
        )
        where = {name: value.cuda() for name, value in where.items()}
        found = []
        for small in (1 << 62, 0):
            monkeypatch.setattr(plan, "SMALL", small)
            forget()
            out, lse = det_attention(q, k, v, **where, causal=True, return_lse=True, backend="triton")
            assert torch.equal(out, det_attention(q, k, v, **where, causal=True, backend="triton"))
            found.append([out, lse, *(gradients(q, k, v, where) if "seqused_k" not in where else ())])
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=False):
            assert torch.equal(one, other), (name, batch, queries, keys)
    monkeypatch.undo()
    forget()


def gradients(q, k, v, where):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = det_attention(*leaves, **where, causal=True, backend="triton")
    return torch.autograd.grad(
        out, leaves, torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    )


@pytest.fixture(params=["native", "triton", "triton-pointers"])
def backend(request, monkeypatch):
    """Return a backend; Triton's interpreter takes descriptors wherever it can, and in the last way pointers."""
    name, _, has_pointers = request.param.partition("-")
    if OPERATOR.backend(name).why_not(OPERATOR.describe(torch.zeros(1, 1, 1, 8, device=device()))):
        pytest.skip("needs a GPU, or Triton's interpreter")
    if has_pointers:
        plan = importlib.import_module("rl_kernels.attention.backends.triton.plan")
        monkeypatch.setattr(plan, "INTERPRETED", False)
        monkeypatch.setattr(plan, "SMALL", 1 << 62)
    forget()
    yield name
    forget()


def test_windows_over_packed_sequences(backend):
    """Windows that begin anywhere in a block of keys, rows of several tiles, one of the sequences behind."""
    draw = Draw(torch.float32, device(), seed=5)
    q, k, v, upstream = (draw.normal(105, heads, 8) for heads in (4, 2, 2, 4))
    bounds = torch.tensor([0, 5, 105], device=device())
    call = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": True}
    for left in (14, 94):
        found = []
        for function in (reference.det_attention, partial(det_attention, backend=backend)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = function(*leaves, **call, window=(left, 0))
            found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"window {left}")


def test_one_page_and_entries_that_are_not_in_use(backend):
    draw = Draw(torch.float32, device(), seed=6)
    for size, pages in product((16, 48, 128), (1, 3)):
        q, k, v = draw.normal(2, 3, 4, 8), draw.normal(pages, size, 2, 8), draw.normal(pages, size, 2, 8)
        table, used = torch.tensor([[pages - 1, 7], [0, -1]], device=device()), torch.tensor([9, 4], device=device())
        call = {"seqused_k": used, "causal": True, "backend": backend}
        with pytest.raises(ValueError, match="block_table: expected values"):
            det_attention(q, k, v, block_table=table + 1, **call)
        found = det_attention(q, k, v, block_table=table, **call)
        for b, (page, count) in enumerate(zip(table[:, 0], used, strict=True)):
            keys = (x[page, None, :count] for x in (k, v))
            alone = reference.det_attention(q[b : b + 1], *keys, causal=True)
            torch.testing.assert_close(found[b : b + 1], alone, rtol=1e-4, atol=1e-5)


def apart(x):
    """Return the same numbers, none beside the next."""
    return torch.stack((x, x), -1)[..., 0]


def off(x):
    """Return the same numbers at an address between two multiples of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def turned(x):
    """Return the same numbers, each head's together."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_arguments_may_have_other_layouts_in_every_call(backend):
    """Hooks for saved tensors may change a layout between the passes, and a gradient may have any."""
    draw = Draw(torch.float32, device(), seed=7)
    given = dense(2, 5, 70, 2, 2, 16, sinks=draw.normal(4), k_start=torch.tensor([3, 0]), dtype=torch.float32)
    call = {name: x.to(device()) if isinstance(x, torch.Tensor) else x for name, x in given._asdict().items()}
    out, lse = ops["forward"](*call.values(), backend)
    call |= {"out": out, "lse": lse, "grad": draw.normal(*out.shape)}

    def results(**changed):
        *arguments, out, lse, grad = (call | changed).values()
        return *ops["forward"](*arguments, backend), *ops["backward"](*arguments, out, lse, grad, True, True, backend)

    expected = results()
    # The kernels write no key of padding.
    assert not any(x[0, :3].any() for x in expected[3:5])
    changes = [(name, change) for name in ("q", "k", "v", "grad", "out") for change in (off, apart, turned)]
    changes += [(name, apart) for name in ("sinks", "k_start", "lse")] + [("grad", torch._neg_view), ("k_start", int32)]
    for name, change in changes:
        sign = -1 if change is torch._neg_view else 1
        for one, other in zip(results(**{name: change(sign * call[name])}), expected, strict=True):
            torch.testing.assert_close(one, other, msg=f"{name}, {change.__name__}")


def int32(x):
    return x.to(torch.int32)


def test_an_operand_is_copied_for_one_stride_that_kernels_do_not_read():
    k = torch.zeros(2, 3, 2, 8).bfloat16()
    q = torch.zeros(128).bfloat16().as_strided((2, 3, 2, 8), (64, 20, 8, 1))
    assert gpu.unreadable((q, k, k), expanded=True) == [0]
    one = torch.zeros(128).bfloat16().as_strided((2, 3, 1, 8), (64, 16, 3, 1))
    assert gpu.unreadable((k, one, one), expanded=False) == []
