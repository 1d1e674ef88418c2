"""What the Triton backend launches, recorded without a GPU and held to what the shapes imply; planted bugs show."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from rl_kernels.attention import gpu
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.attention.op import ops
from rl_kernels.attention.spec.raw import dense, expanded, packed, paged, sliced
from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.planted import Bug

BLOCK, SEGMENT, UNIT = 64, 1024, 8
FEW, FULL, PROCESSORS, SMALL = 16, 4, 2, 1 << 21


CALLS = {
    "prompt": partial(dense, 2, 400, 400, 2, 4, 128),
    "long-prompt": partial(dense, 1, 2100, 2100, 1, 8, 64),
    "one-token": partial(dense, 3, 1, 5000, 2, 4, 128),
    "several-tokens": partial(dense, 3, 9, 700, 2, 7, 128),
    "heads-of-80": partial(dense, 3, 1, 5000, 2, 4, 80),
    "wide-heads": partial(dense, 2, 70, 1500, 1, 2, 256),
    "fp32": partial(dense, 2, 70, 130, 1, 2, 64, dtype=torch.float32),
    "sliced": sliced,
    "dropped": partial(dense, 3, 1, 1026, 2, 4, 64, window=(1025, 0), k_start=torch.tensor([-5, 0, -9000])),
    "padded": partial(dense, 2, 70, 70, 2, 4, 64, k_start=torch.tensor([3, 0])),
    "packed": partial(packed, (7, 0, 1300, 64)),
    "paged": partial(paged, 2, 48, torch.full((5,), 50), size_v=64),
    "large-pages": partial(paged, 2, 128, torch.full((5,), 50), size_v=64),
    "expanded": expanded,
}


def rows_of(given):
    """The rows of a tile, as head size, dtype and, on Hopper, their number have it."""
    wide = max(given.q.shape[-1], given.v.shape[-1])
    if given.q.dtype == torch.float32:
        return 64 if wide <= 64 else 16
    return FEW if wide <= 128 and given.max_seqlen_q * given.group <= FEW else 64


def check_box(box, tensor, block):
    """A box is all of the tensor's, in four dims, and brings so many rows and heads."""
    shape = [1] * (4 - tensor.ndim) + list(tensor.shape)
    assert box.base.data_ptr() == tensor.data_ptr()
    assert (box.shape, box.block_shape[1:3]) == (shape, list(block))
    assert box.block_shape[0] == 1
    assert tensor.shape[-1] <= box.block_shape[3] < max(2 * tensor.shape[-1], 17)


def is_large(given, small):
    return given.batch * given.max_seqlen_q * given.q.shape[-2] * reach_of(given) > small


def check_key_boxes(launch, given, small):
    in_boxes = given.q.dtype != torch.float32 and 0 not in given.k.stride() and is_large(given, small)
    in_boxes &= given.block_table is None or given.k.shape[1] % BLOCK == 0
    assert [launch[name] is not None for name in ("K_BOX", "V_BOX")] == [in_boxes] * 2
    for name in ("K", "V") if in_boxes else ():
        check_box(launch[f"{name}_BOX"], launch[name], (BLOCK, 1))


def check_operands(launch, given):
    for name, tensor in (("Q", given.q), ("K", given.k), ("V", given.v)):
        assert torch.equal(launch[name], tensor)
        assert launch[name].data_ptr() % 16 == 0
        step, head = launch[name].stride()[-3:-1]
        assert launch[f"{name}_STEP"] * UNIT == step
        assert launch["Q_HEAD" if name == "Q" else f"{name.lower()}_head"] * UNIT == head
        assert launch[name].stride(-1) == 1
        if launch[name].ndim == 4:
            assert launch[f"{name.lower()}_batch"] * UNIT == launch[name].stride(0)
    is_free = [side == UNLIMITED for side in (given.left, given.right)]
    assert [launch["left"] >= 1 << 29, launch["right"] >= 1 << 29] == is_free
    assert is_free[0] or launch["left"] == given.left
    assert is_free[1] or launch["right"] == given.right
    assert launch["CAPPED"] == (given.softcap > 0)
    log2e = 1.4426950408889634
    assert launch["factor"] == pytest.approx(log2e if given.softcap else log2e * given.scale)
    assert not given.softcap or launch["rate"] * given.softcap == pytest.approx(given.scale)
    assert (launch["KV_HEADS"], launch["GROUP"]) == (given.k.shape[-2], given.group)
    assert (launch["D"], launch["DV"]) == (given.q.shape[-1], given.v.shape[-1])
    assert launch["queries"] == given.q.shape[-3]


def reach_of(given):
    """The longest sequence, and of the keys that a window's cache has dropped what whole segments leave."""
    is_shorter = given.k_start is not None and given.left != UNLIMITED
    return given.max_seqlen_k + (SEGMENT - 1) * is_shorter


def check_forward(given, launches, out, lse, small):
    attend, *rest = launches
    check_operands(attend, given)
    rows = rows_of(given)
    tiles, segments = -(-given.max_seqlen_q * given.group // rows), -(-reach_of(given) // SEGMENT)
    programs, heads = given.batch * tiles, given.k.shape[-2]
    split = segments > 1 and (programs * heads < FULL * PROCESSORS or rows <= FEW)
    assert (attend["ROWS"], attend["BLOCK"], attend["tiles"]) == (rows, BLOCK, tiles)
    check_key_boxes(attend, given, small)
    assert (attend["SPLIT"], attend["ONE"], attend["LEFT"]) == (split, segments <= 1, given.left != UNLIMITED)
    assert attend.grid == (programs * (segments if split else 1), heads, 1)
    assert attend["OUT"] is out
    assert out.is_contiguous()
    assert attend["LSE"] is lse
    assert lse is None or lse.shape == given.lse_shape()
    sinks = attend["SINKS"]
    assert sinks is None if given.sinks is None else torch.equal(sinks, given.sinks) and sinks.is_contiguous()
    if given.block_table is not None:
        assert (attend["PAGE"], attend["pages"]) == (given.k.shape[1], given.k.shape[0])
        assert attend["keys"] == given.k.shape[1] * given.block_table.shape[1]
        assert attend["table_step"] == given.block_table.shape[1]
        assert torch.equal(attend["TABLE"], given.block_table)
        assert attend["TABLE"].is_contiguous()
    assert len(rest) == split
    for finish in rest:
        states = programs * heads * segments * rows
        assert attend["TOPS"].numel() == attend["TOTALS"].numel() == states
        assert attend["ACCS"].numel() == states * attend["WIDTH_V"]
        parts = (rows // finish["PART"]) * (attend["WIDTH_V"] // finish["COLUMNS"])
        assert finish.grid == (programs * parts, heads, 1)
        assert (finish["tiles"], finish["segments"], finish["ROWS"]) == (tiles, segments, rows)


def check_backward(given, launches, gradients, small):
    of_rows, of_queries, *of_keys = launches
    batch = 1 if given.q.ndim == 3 else given.q.shape[0]
    assert of_rows.grid == (batch * -(-given.q[..., 0].numel() // batch // of_rows["ROWS"]), 1, 1)
    assert of_rows["GRAD"].stride(-1) == 1
    assert of_rows["G_STEP"] * UNIT == of_rows["GRAD"].stride(-3)
    check_operands(of_queries, given)
    tiles = -(-given.max_seqlen_q * given.group // of_queries["ROWS"])
    assert of_queries.grid == (given.batch * tiles, given.k.shape[-2], 1)
    assert (of_queries["BLOCK"], of_queries["tiles"]) == (BLOCK, tiles)
    check_key_boxes(of_queries, given, small)
    assert of_queries["DQ"] is gradients[0]
    assert len(of_keys) == 1
    check_operands(of_keys[0], given)
    tiles = -(-reach_of(given) // of_keys[0]["BLOCK"])
    assert of_keys[0].grid == (given.batch * tiles, given.k.shape[-2], 1)
    assert (of_keys[0]["DK"] is gradients[1], of_keys[0]["DV_"] is gradients[2]) == (True, True)
    in_boxes = given.q.dtype != torch.float32 and of_keys[0]["ROWS"] % given.group == 0 and is_large(given, small)
    for name, tensor in (("Q_BOX", of_keys[0]["Q"]), ("G_BOX", of_keys[0]["GRAD"])):
        assert (of_keys[0][name] is not None) == in_boxes
        if in_boxes:
            check_box(of_keys[0][name], tensor, (of_keys[0]["ROWS"] // given.group, given.group))
    for launch in (of_queries, of_keys[0]):
        assert launch["LSES"].shape == launch["DELTAS"].shape
        assert launch["LSES"].numel() == given.q[..., 0].numel()
        assert launch["scale"] == given.scale


def moved(given):
    """Return the same call with tensors of the same layouts elsewhere."""

    def copied(x):
        if not isinstance(x, torch.Tensor):
            return x
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return tuple(map(copied, given))


class Wrapper(torch.Tensor):
    """A user's class."""


def apart(x):
    """Return the same numbers, none beside the next."""
    return torch.stack((x, x), -1)[..., 0]


def off(x):
    """Return the same numbers at an address between two multiples of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


def wrapped(x):
    return x.as_subclass(Wrapper)


class TestLaunches(TritonHost):
    modules = (
        *(f"rl_kernels.attention.backends.triton.{name}" for name in ("boxes", "plan")),
        *("rl_kernels.attention.gpu", "rl_kernels.attention.backends.triton.backend"),
    )
    bugs = (
        Bug(
            "tiles rounded down",
            "ceil_div(self.longest_q * self.group, rows)",
            "max(self.longest_q * self.group // rows, 1)",
        ),
        Bug("strides in elements", "batch // UNIT", "batch"),
        Bug("box across pages", "(table is None or self.page % BLOCK == 0)", "True"),
    )
    calls = tuple((name, small) for name in CALLS for small in (0, SMALL))
    options = {"processors": PROCESSORS}

    def check(self, call, backend, recorder):
        """Check the launches of a call, and of one like it; up to ``small`` scores are few."""
        (name, small), plan = call, importlib.import_module(self.modules[1])
        given = CALLS[name]()
        assert plan.SMALL == SMALL
        plan.SMALL = small
        forward, output = backend.forward.prepare(*given), backend.output.prepare(*given)
        for tensors in (given, moved(given)):
            recorder.launches.clear()
            out, lse = forward(*tensors)
            check_forward(Inputs._make(tensors), recorder.launches, out, lse, small)
            recorder.launches.clear()
            check_forward(Inputs._make(tensors), recorder.launches, output(*tensors), None, small)
        if given.block_table is not None:
            return
        saved = (*given, out, lse, torch.randn(*out.shape, 2).to(out.dtype)[..., 0], True)
        backward = backend.backward.prepare(*saved)
        for tensors in (saved, moved(saved)):
            recorder.launches.clear()
            check_backward(Inputs._make(tensors[:16]), recorder.launches, backward(*tensors), small)

    def test_no_query_launches_nothing(self):
        given = dense(2, 0, 30, 2, 2, 64)
        with self.recording(recorder := self.recorder(None)):
            backend = importlib.import_module(self.modules[-1])
            out, lse = backend.forward(*given)
            _, dk, dv, _ = backend.backward(*given, out, lse, out, True)
        assert not recorder.launches
        assert (out.shape, lse.shape) == ((2, 0, 4, 64), (2, 4, 0))
        assert (dk.shape, dv.shape) == (given.k.shape, given.v.shape)
        assert not dk.any()
        assert not dv.any()

    def test_arguments_may_have_other_layouts_in_every_call(self):
        """Hooks for saved tensors may change a layout between the passes, and a gradient may have any."""
        sinks, starts = torch.randn(8), torch.tensor([3, 0])
        given = dense(2, 70, 1500, 2, 4, 64, sinks=sinks, k_start=starts)._asdict()
        with self.recording(recorder := self.recorder(None)):
            out, lse = ops["forward"](*given.values(), "triton")
            given |= {"out": out, "lse": lse, "grad": torch.randn(out.shape).to(out.dtype)}
            changes = [{}, *({"k_start": starts.to(dtype)} for dtype in (torch.int32, torch.int64))]
            changes += [
                {name: change(given[name])} for name in ("q", "k", "v", "grad", "out") for change in (off, apart)
            ]
            changes += [{name: apart(given[name])} for name in ("sinks", "k_start", "lse")]
            changes += [{"grad": wrapped(change(given["grad"]))} for change in (torch.clone, off, apart)]
            changes += [{"grad": torch._neg_view(given["grad"])}, {"grad": given["grad"].float()}]
            changes += [{"k": given["k"].transpose(1, 2).contiguous().transpose(1, 2)}]
            for changed in changes:
                *arguments, out, lse, grad = (given | changed).values()
                inputs = Inputs._make(arguments)
                recorder.launches.clear()
                check_forward(inputs, recorder.launches, *ops["forward"](*inputs, "triton"), SMALL)
                recorder.launches.clear()
                gradients = ops["backward"](*inputs, out, lse, grad, True, "triton")
                if not isinstance(grad, Wrapper):
                    # A result in the class of the gradient is another object.
                    check_backward(inputs, recorder.launches, gradients, SMALL)
                rows = recorder.launches[0]
                assert rows["OUT"].is_contiguous()
                assert rows["LSE"].is_contiguous()
                assert rows["GRAD"].data_ptr() % 16 == 0
                assert rows["GRAD"].stride(-1) == 1
                assert torch.equal(rows["GRAD"], grad)
                # The kernels write no key of padding.
                assert not any(x.any() for x in gradients[1:3])


def test_an_operand_is_copied_for_one_stride_that_kernels_do_not_read():
    k = torch.zeros(2, 3, 2, 8).bfloat16()
    q = torch.zeros(128).bfloat16().as_strided((2, 3, 2, 8), (64, 20, 8, 1))
    assert gpu.unreadable((q, k, k), expanded=True) == [0]
    one = torch.zeros(128).bfloat16().as_strided((2, 3, 1, 8), (64, 16, 3, 1))
    assert gpu.unreadable((k, one, one), expanded=False) == []
