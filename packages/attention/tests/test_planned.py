"""Calls that are planned once: the launches of the general path, and where they are not to be taken."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from rl_kernels.attention import det_attention
from rl_kernels.attention.inputs import Inputs
from rl_kernels.attention.spec.raw import dense, paged
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import Descriptor, TritonRecorder

MODULES = (
    *(f"rl_kernels.attention.backends.triton.{name}" for name in ("boxes", "plan", "passes")),
    *("rl_kernels.attention.gpu", "rl_kernels.attention.backends.triton.backend"),
)
BUGS = (
    Bug("shapes alone are planned", "x.stride(), x", "x"),
    Bug("planned keys between multiples of 16 bytes", "| inputs.k.data_ptr() |", "|"),
)
BACKEND = MODULES[-1]
FAILURES = (AssertionError, AttributeError, RuntimeError, ValueError, TypeError)


def call(queries=70, keys=1500, dtype=torch.bfloat16, **where):
    return dense(2, queries, keys, 2, 4, 64, dtype=dtype, **where)


def pages():
    given = paged(70, 64, torch.tensor([500, 3]), 64, 64)
    return given._replace(block_table=given.block_table.int().contiguous())


CALLS = {
    "prompt": call,
    "token": partial(call, queries=1),
    "fp32": partial(call, keys=70, dtype=torch.float32),
    "padded": partial(call, k_start=torch.tensor([3, 0])),
    "sinks": lambda: call(sinks=torch.randn(8)),
    "cache": lambda: call(3, seqused_k=torch.tensor([900, 3]), k_start=torch.tensor([1, 0]).int()),
    "paged": pages,
}


class Wrapper(torch.Tensor):
    """A class of somebody's."""


def apart(x):
    """Return the same numbers, none beside the next."""
    return torch.stack((x, x), -1)[..., 0]


def off(x):
    """Return the same numbers at an address between two multiples of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


def moved(given):
    return Inputs._make([x.clone() if isinstance(x, torch.Tensor) else x for x in given])


def described(launches, inputs):
    """Return all that launches are; of what they write, how it lies."""
    known = {x.data_ptr(): name for name, x in inputs.items() if x is not None}

    def told(value):
        if isinstance(value, Descriptor):
            return told(value.base), value.shape, value.strides, value.block_shape
        if isinstance(value, torch.Tensor):
            return known.get(value.data_ptr()), value.shape, value.stride(), value.dtype
        return value

    return [
        (one.name, one.grid, one.options, {name: told(value) for name, value in one.arguments.items()})
        for one in launches
    ]


def lying(values):
    return [None if x is None or not x.numel() else (x.shape, x.stride(), x.dtype) for x in values]


def same(recorder, plan, backend, given):
    """Hold the launches of a plan to those of the general path."""
    inputs = dict(zip(given._fields[:10], (*given.operands, *given.optional_tensors), strict=True))

    def run(work, known):
        recorder.launches.clear()
        found = work()
        assert found is not None
        return described(recorder.launches, known), lying(found), found

    *general, _ = run(lambda: backend.forward(*given), inputs)
    launches, (of_out, _) = general
    *alone, (_, lse) = run(lambda: plan.forward(given, with_lse=False), inputs)
    assert lse is None
    without = [(*launch[:-1], {k: None if k == "LSE" else x for k, x in launch[-1].items()}) for launch in launches]
    assert alone == [without, [of_out, None]]
    *ours, (out, lse) = run(lambda: plan.forward(given, with_lse=True), inputs)
    assert ours == general
    if given.seqused_k is not None:
        return
    for grad in (torch.randn(out.shape).to(out.dtype), torch.randn(out.transpose(1, 2).shape).to(out.dtype).mT.mT):
        grad = grad if grad.shape == out.shape else grad.transpose(1, 2)
        for needs_keys in (True, False):
            rest = (out, lse, grad, needs_keys)
            known = {**inputs, "out": out, "lse": lse, "grad": grad}
            *ours, found = run(partial(plan.backward, given, *rest), known)
            *general, _ = run(partial(backend.backward, *given, *rest), known)
            assert ours == general
            assert given.k_start is None or not needs_keys or not (found[1].any() or found[2].any())


def refused(recorder, plan, given):
    """Hold a plan to launching nothing for tensors that lie otherwise."""
    out, lse = plan.forward(given, with_lse=True)
    recorder.launches.clear()
    for name in ("q", "k", "v"):
        assert plan.forward(given._replace(**{name: off(getattr(given, name))}), with_lse=True) is None
    if given.seqused_k is None:
        grad = torch.randn(out.shape).to(out.dtype)
        others = [{name: off(getattr(given, name))} for name in ("q", "k", "v")]
        others += [{"k": given.k.transpose(1, 2).contiguous().transpose(1, 2)}, {"q": given.q.half()}]
        others += [{"v": given.v[:, :-1].contiguous()}, {"q": given.q[:1]}]
        others += [{name: apart(x)} for name in ("sinks", "k_start") if (x := getattr(given, name)) is not None]
        for other in others:
            assert plan.backward(given._replace(**other), out, lse, grad, True) is None
        for rest in ((off(out), lse, grad), (apart(out), lse, grad), (out, apart(lse), grad)):
            assert plan.backward(given, *rest, True) is None
        for other in (off(grad), apart(grad), grad.double(), grad.as_subclass(Wrapper), torch._neg_view(grad)):
            assert plan.backward(given, out, lse, other, True) is None
        assert plan.backward(given, out, lse.double(), grad, True) is None
        if given.k_start is not None:
            assert plan.backward(given._replace(k_start=given.k_start.short()), out, lse, grad, True) is None
    assert not recorder.launches


def hold(plant=nullcontext):
    with TritonRecorder(processors=2).pretended() as recorder, plant():
        backend = importlib.import_module(BACKEND)
        # Any address is one that was met before: what is compiled for another kind of tensors shows.
        importlib.import_module("rl_kernels.core.triton_lib.launch").ALIGNMENT = 16
        for name in CALLS:
            torch.manual_seed(0)
            given = CALLS[name]()
            plan = backend.planned(given)
            assert plan is not None, name
            for other in (given, moved(given)):
                same(recorder, plan, backend, other)
            refused(recorder, plan, given)
        # Of one shape, but for what is beside the operands: int32 and int64 are two kinds.
        for dtype in (torch.int64, torch.int32):
            given = call(k_start=torch.tensor([3, 0], dtype=dtype))
            same(recorder, backend.planned(given), backend, given)
        given = call()
        out, lse = backend.forward(*given)
        grad = torch.randn(out.shape).to(out.dtype)
        for one in (grad, grad.float()):
            backend.backward(*given, out, lse, one, True)
        recorder.launches.clear()
        backend.backward(*given, out.transpose(1, 2).contiguous().transpose(1, 2), lse, grad, True)
        assert recorder.launches[0]["OUT"].is_contiguous()
        for changed in (
            {"q": apart(given.q)},
            {"sinks": torch.randn(16)[::2]},
            {"q": given.q[:, :0]},
            {"q": given.q[0], "cu_seqlens_q": torch.tensor([0, 70]), "seqused_k": torch.tensor([70])},
        ):
            other = given._replace(**changed, max_seqlen_q=0 if changed.get("q", given.q).shape[1] == 0 else 70)
            assert backend.planned(other) is None, changed


def test_launches_are_those_of_the_general_path():
    hold()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug):
    try:
        hold(partial(planted, MODULES, bug))
    except FAILURES:
        return
    pytest.fail("the launches are as they should be")


def test_what_varies_is_looked_at_in_every_call():
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
    used = torch.tensor([9, 4])
    for _ in range(2):
        det_attention(q, k, k, causal=True, seqused_k=used)
    with pytest.raises(ValueError, match=r"^max_seqlen_q: expected None without the cu_seqlens"):
        det_attention(q, k, k, causal=True, seqused_k=used, max_seqlen_q=5)
    used[1] = 10
    with pytest.raises(ValueError, match=r"^seqused_k: "):
        det_attention(q, k, k, causal=True, seqused_k=used)
    for window, seen in (((1, 0), 2), ((2, 0), 3)):
        out = det_attention(torch.zeros_like(q), k, k, causal=True, window=window)
        torch.testing.assert_close(out[:, -1, 0], k[:, -seen:, 0].mean(1))
    with pytest.raises(TypeError, match=r"^window: "):
        det_attention(q, k, k, causal=True, window=(True, 0))
