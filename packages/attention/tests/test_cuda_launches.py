"""The host side of ``cuda-sm90``, with the native backend in place of its kernels; planted bugs show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from rl_kernels.attention.backends.cuda_sm90 import backend
from rl_kernels.attention.backends.native import backend as native
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.attention.spec.raw import dense, expanded, packed, paged, sliced
from rl_kernels.core.testing.host_tests import CudaHost
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug

PROCESSORS, SEGMENT, LOG2E = 3, 1024, 1.4426950408889634
DTYPES = {1: torch.bfloat16, 2: torch.float16}
INTEGERS = ("starts_q", "starts_k", "first_k", "used_q", "used_k", "table")


def uncovered():
    """Rows behind the last sequence, as calls without validation may have them."""
    given = packed((7, 20))
    return given._replace(cu_seqlens_q=torch.tensor([0, 7, 20]), cu_seqlens_k=torch.tensor([0, 7, 20]))


def keys_outside():
    """Keys, of which no sequence has any."""
    given = packed((7, 20))
    return given._replace(cu_seqlens_k=torch.zeros(3, dtype=torch.int32), max_seqlen_k=0)


def turned():
    """Operands as models lay them out: heads before queries; one sequence, whose stride may be any number."""
    given = dense(1, 70, 70, 2, 4, 64)
    return given._replace(
        **{name: getattr(given, name).transpose(1, 2).contiguous().mT.mT.transpose(1, 2) for name in "qkv"}
    )


def one_query():
    """Sequences that share their queries."""
    given = dense(3, 40, 90, 2, 4, 64)
    return given._replace(q=given.q[:1].expand(3, -1, -1, -1))


def over_ranks():
    """Queries that end behind the keys, some of them not in use, as ranks call it for gradients of keys."""
    given, keys = packed((90, 140)), packed((40, 90))
    bounds, used = keys.cu_seqlens_k, torch.tensor([90, 120], dtype=torch.int32)
    return given._replace(k=keys.k, v=keys.v, cu_seqlens_k=bounds, max_seqlen_k=90, seqused_q=used, right=50)


CALLS: dict[str, Callable[[], Inputs]] = {
    "over-ranks": over_ranks,
    "prompt": partial(dense, 2, 200, 200, 2, 4, 128),
    "sinks": lambda: dense(2, 20, 20, 2, 4, 128, sinks=torch.randn(8).bfloat16()),
    "wide-sinks": lambda: dense(2, 20, 20, 2, 4, 128, sinks=torch.randn(8)),
    "other-sinks": lambda: dense(2, 20, 20, 2, 4, 128, sinks=torch.randn(8).half()),
    "one-head": partial(dense, 1, 1, 2500, 1, 2, 64),
    "uncovered": uncovered,
    "long": partial(dense, 1, 40, 1300, 1, 8, 64),
    "one-token": partial(dense, 2, 1, 2500, 2, 4, 128),
    "several-tokens": partial(dense, 3, 5, 1700, 2, 7, 128, dtype=torch.float16),
    "groups-of-3": partial(dense, 2, 70, 70, 1, 3, 80, size_v=40, window=(UNLIMITED, UNLIMITED)),
    "sliced": sliced,
    "dropped": partial(dense, 2, 3, 1026, 2, 4, 64, window=(1025, 0), k_start=torch.tensor([-5, -9000])),
    "padded": partial(dense, 2, 70, 70, 2, 4, 64, k_start=torch.tensor([3, 0]), seqused_q=torch.tensor([70, 60])),
    "packed": partial(packed, (7, 0, 300, 64)),
    "paged": partial(paged, 2, 48, torch.tensor([9 * 48, 3], dtype=torch.int32)),
    "large-pages": partial(paged, 30, 256, torch.tensor([9 * 256, 3])),
    "turned": turned,
    "expanded": expanded,
    "one-query": one_query,
    "no-keys": partial(dense, 2, 3, 0, 2, 2, 64),
    "keys-outside": keys_outside,
    "wide": partial(dense, 2, 200, 1300, 2, 4, 256),
    "wide-unsaid": lambda: dense(1, 200, 1300, 1, 1, 256)._replace(max_seqlen_k=900),
    "wide-keys": partial(dense, 1, 40, 2500, 2, 4, 192, size_v=128),
    "wide-values": partial(dense, 2, 1, 2500, 2, 4, 40, size_v=136),
    "wide-pages": partial(paged, 2, 256, torch.tensor([9 * 256, 3]), size=136, size_v=40),
}


class Kernels:
    """Computes what each launch asks for, and holds the launch to its shapes."""

    def __init__(self, given: Inputs) -> None:
        self.given, self.wanted, self.rows = given, None, None

    def named(self) -> dict[str, Callable[[Launch], None]]:
        return {name: getattr(self, name) for name in ("attend", "finish", "rows_of", "of_queries", "of_keys")}

    def seen(self, launch: Launch, box: int) -> Inputs:
        """Return the call as the kernel sees it."""
        have, heads = launch.constants, launch["kv_heads"] * launch["group"]
        assert launch["q"].dtype == DTYPES[have["DTYPE"]]
        shape, strides = (launch["queries"], heads, launch["size"]), (launch["q_row"], launch["q_head"], 1)
        if launch["starts_q"] is None:
            shape, strides = (launch["batch"], *shape), (launch["q_batch"], *strides)
        q = launch["q"].as_strided(shape, strides, launch["q"].storage_offset())
        operands = []
        for name, width, size in (("k", "K_WIDTH", "size"), ("v", "V_WIDTH", "size_v")):
            described = launch[name]
            assert (described.box, described.swizzle) == ((1, box, 1, 64), 128)
            assert launch[size] <= have[width]
            value = described.tensor if self.given.k.numel() else getattr(self.given, name)
            if self.given.k.numel() and launch["starts_k"] is not None:
                value = value[0]
            assert value.shape[-1] == launch[size]
            operands.append(value)
        for place, name in enumerate(INTEGERS):
            value = launch[name]
            assert bool(launch["wide"] >> place & 1) == (value is not None and value.dtype == torch.int64)
            assert value is None or value.is_contiguous()
        inverse = -(-(1 << 32) // launch["group"])
        assert launch["inverse"] % (1 << 32) == inverse % (1 << 32)
        scale = launch["rate"] * launch["cap"] if launch["cap"] else launch["factor"] / LOG2E
        assert have["CAPPED"] == (launch["cap"] > 0)
        assert not launch["cap"] or launch["factor"] == LOG2E
        if launch["table"] is None:
            assert launch["keys"] == self.given.k.shape[self.given.k.ndim - 3]
        else:
            assert (launch["pages"], launch["page"]) == self.given.k.shape[:2]
            assert launch["keys"] == launch["table_step"] * launch["page"]
            assert launch["table_step"] == launch["table"].shape[1]
        sinks = launch.arguments.get("sinks", self.given.sinks)
        assert launch["box"] == box
        same = self.given.sinks is not None and self.given.sinks.dtype == launch["q"].dtype
        assert launch["sink_size"] == (0 if self.given.sinks is None else 2 if same else 4)
        if launch.arguments.get("sinks") is not None:
            assert (sinks.is_contiguous(), sinks.itemsize) == (True, launch["sink_size"])
        where = [launch[name] for name in INTEGERS]
        longest = self.given.max_seqlen_q, self.given.max_seqlen_k
        return Inputs(q, *operands, sinks, *where, *longest, scale, launch["left"], launch["right"], launch["cap"])

    def box(self, most: int) -> int:
        if self.given.block_table is None:
            return most
        page = self.given.k.shape[1]
        return next(size for size in (128, 64, 32, 16) if page % size == 0 and size <= most)

    def section(self, rows: int) -> int:
        given = self.given
        size = 2 * rows * (given.q.shape[-1] + given.v.shape[-1])
        return min(max((32 << 20) // max(size, 1), PROCESSORS // 4, 1), given.batch * given.v.shape[-2])

    def attend(self, launch: Launch) -> None:
        have, given = launch.constants, self.given
        rows = given.max_seqlen_q * given.group
        widths, wide = widths_of(given.q.shape[-1], given.v.shape[-1]), have["K_WIDTH"] > 128
        assert (have["K_WIDTH"], have["V_WIDTH"]) == widths
        block = 64 if have["V_WIDTH"] > 128 else 128
        most = 3 if have["K_WIDTH"] == have["V_WIDTH"] == 64 else 2
        assert have["GROUPS"] == (1 if rows <= 64 else most)
        height = 64 * have["GROUPS"]
        assert launch.block == 128 * (have["GROUPS"] + 1)
        stage = 2 * block * (have["K_WIDTH"] + have["V_WIDTH"])
        kept = 112 if wide else 4 * have["V_WIDTH"] if have["GROUPS"] > 1 else 2 * have["V_WIDTH"] + 16
        assert launch.shared == have["SHARED_BYTES"]
        assert launch.shared == 1024 + height * (2 * have["K_WIDTH"] + kept) + have["STAGES"] * stage
        assert launch.shared + 256 <= 227 << 10
        assert have["STAGES"] >= 2
        assert launch["tiles"] == -(-rows // height)
        reach = given.max_seqlen_k + (SEGMENT - 1) * (given.k_start is not None and given.left != UNLIMITED)
        segments, count = -(-reach // SEGMENT), launch["tiles"] * given.batch * launch["kv_heads"]
        split = segments > 1 and (have["GROUPS"] == 1 or 2 * count <= PROCESSORS)
        assert launch["parts"] == (segments if split else 1)
        assert launch.grid == (min(count * launch["parts"], PROCESSORS), 1, 1)
        differ = launch["starts_q"] is not None or launch["used_k"] is not None
        draws = differ and count * launch["parts"] > PROCESSORS
        assert (launch["counter"] is not None) == draws
        assert not draws or launch["counter"].tolist() == [0]
        assert launch["section"] == self.section(given.max_seqlen_k)
        found = self.seen(launch, self.box(block))
        out, lse = native.forward(*found)
        if not split:
            has_sums = wide and have["GROUPS"] > 1 and reach - given.max_seqlen_k + launch["keys"] > SEGMENT
            sums = launch.grid[0] * height * have["V_WIDTH"] if has_sums else 0
            assert (0 if launch["states"] is None else launch["states"].numel()) == sums
            self.write(launch, out, lse)
            return
        held = min(height, rows + rows % 2)
        assert launch["held"] == held
        states = count * segments * held
        assert launch["states"].numel() == states * (2 + have["V_WIDTH"])
        assert launch["states"].dtype == torch.float32
        self.wanted = launch, out, lse

    def finish(self, launch: Launch) -> None:
        attend, out, lse = self.wanted
        assert dict(launch.arguments) == {name: attend[name] for name in launch.arguments}
        assert launch.pdl
        rows = self.given.max_seqlen_q * self.given.group
        assert (launch.grid, launch.block) == ((self.given.batch, -(-rows // 4), launch["kv_heads"]), 128)
        self.wanted = None
        self.write(launch, out, lse)

    def write(self, launch: Launch, out: torch.Tensor, lse: torch.Tensor) -> None:
        launch["out"].copy_(out)
        if launch["lse"] is not None:
            launch["lse"].copy_(lse)

    def rows_of(self, launch: Launch) -> None:
        grad, out = launch["grad"], launch["out"]
        shape = (launch["queries"], launch["heads"], launch["size_v"])
        if out.ndim == 4:
            shape = (out.shape[0], *shape)
        assert out.is_contiguous()
        strides = (launch["g_batch"], launch["g_row"], launch["g_head"], 1)[-len(shape) :]
        grad = grad.as_strided(shape, strides, grad.storage_offset())
        assert out.shape == grad.shape
        assert launch.block == 256
        count = launch["queries"] * launch["heads"]
        assert launch.grid == (-(-count // 16) * (out.shape[0] if out.ndim == 4 else 1), 1, 1)
        delta = (out.double() * grad.double()).sum(-1)
        kv_heads = launch["heads"] // launch["group"]
        deltas = delta.unflatten(-1, (kv_heads, launch["group"])).movedim(-2, -3)
        launch["deltas"].copy_(deltas)
        launch["lses"].copy_(launch["lse"].unflatten(-2, (kv_heads, launch["group"])).mT * LOG2E)
        assert (launch["counters"].dtype, launch["counters"].numel()) == (torch.int32, 2)
        launch["counters"].zero_()
        self.rows = launch, out, grad

    def gradients(self, launch: Launch, box: int, counter: int) -> tuple[torch.Tensor, ...]:
        rows, out, grad = self.rows
        assert launch["counter"].data_ptr() == rows["counters"][counter].data_ptr()
        assert all(launch[name] is rows[name] for name in ("lses", "deltas", "grad"))
        assert all(launch[name] == rows[name] for name in ("g_batch", "g_row", "g_head"))
        have = launch.constants
        sizes = have["K_WIDTH"] + have["V_WIDTH"]
        # Wide tiles have half of the rows, and two blocks of weights of 64 x 64.
        wide = have["K_WIDTH"] > 128
        columns, given = (32, 2 * 64 * 64 * 2) if wide else (max(have["K_WIDTH"], have["V_WIDTH"]), 0)
        fixed = 1024 + (128 if wide else 256) * sizes + 128 * (2 * columns + 16) + given
        assert launch.shared == have["SHARED_BYTES"] == fixed + have["STAGES"] * 128 * sizes
        assert launch.shared + 256 + have["STAGES"] * 512 <= 227 << 10
        assert have["STAGES"] >= 3 - wide
        assert launch.block == 384
        found = self.seen(launch, box)
        assert launch["scale"] == pytest.approx(found.scale)
        return native.backward(*found, out, rows["lse"], grad, True, True)

    @staticmethod
    def height(launch: Launch) -> int:
        """Return the rows or keys of a tile."""
        return 64 if launch.constants["K_WIDTH"] > 128 else 128

    def of_queries(self, launch: Launch) -> None:
        tiles = -(-self.given.max_seqlen_q * self.given.group // self.height(launch))
        assert launch["tiles"] == tiles
        assert launch.grid == (min(tiles * self.given.batch * launch["kv_heads"], PROCESSORS), 1, 1)
        assert launch["section"] == self.section(self.given.max_seqlen_k)
        launch["dq"].copy_(self.gradients(launch, self.box(64), 0)[0])

    def of_keys(self, launch: Launch) -> None:
        given = self.given
        reach = given.max_seqlen_k + (SEGMENT - 1) * (given.k_start is not None and given.left != UNLIMITED)
        tiles = max(-(-reach // self.height(launch)), 1)
        assert launch["tiles"] == tiles
        assert launch.grid == (min(tiles * given.batch * launch["kv_heads"], PROCESSORS), 1, 1)
        assert launch["section"] == self.section(given.max_seqlen_q * given.group)
        assert launch["queries_of_block"] == 64 // given.group
        for name, value in (("of_q", given.q), ("of_grad", self.rows[2])):
            assert (launch[name].box, launch[name].swizzle) == ((1, 64 // given.group, given.group, 64), 128)
            assert torch.equal(launch[name].tensor.view(value.shape), value)
        _, dk, dv, _ = self.gradients(launch, 64, 1)
        launch["dk"].copy_(dk)
        launch["dv"].copy_(dv)


def widths_of(*sizes: int) -> tuple[int, ...]:
    if max(sizes) <= 128:
        return tuple(64 if size <= 64 else 128 for size in sizes)
    return (192, 128) if sizes[0] <= 192 and sizes[1] <= 128 else (256, 256)


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2, equal_nan=True)


def sections(batch, queries, keys, kv_heads, group, right=0):
    """Return a call with heads of 128 whose tensors have no data."""
    given = dense(batch, 1, 1, kv_heads, group, 128, window=(UNLIMITED, right))
    q, k, v = (
        x.new_empty(batch, rows, *x.shape[2:], device="meta")
        for x, rows in zip(given.operands, (queries, keys, keys), strict=True)
    )
    return given._replace(q=q, k=k, v=v, max_seqlen_q=queries, max_seqlen_k=keys)


class TestLaunches(CudaHost):
    modules = (
        *(f"rl_kernels.attention.backends.cuda_sm90.{name}" for name in ("schedule", "plan")),
        *("rl_kernels.attention.gpu", "rl_kernels.attention.backends.cuda_sm90.backend"),
    )
    bugs = (
        Bug("states of one segment too few", "* segments *", "* (segments - 1) *"),
        Bug("strides of the gradient for those of q", "*strides, *grad_strides)", "*strides, *strides)"),
        Bug("one counter for both kernels", "counters.unbind()", "(counters[0], counters[0])"),
        Bug("stages beyond the room", "- BARRIERS - self", "+ 65536 - self"),
        Bug("sums of one consumer for all of a thread block", "grid * tile.rows", "grid * HEIGHT"),
        Bug("no sums if the longest sequence is longer than said", "plan.most_k > SEGMENT", "segments > 1"),
    )
    calls = tuple(CALLS)
    failures = (AssertionError, RuntimeError, ValueError, IndexError, AttributeError, ZeroDivisionError)

    def recorder(self, call: str) -> Recorder:
        self.given = CALLS[call]()
        return Recorder(Kernels(self.given).named(), processors=PROCESSORS)

    def check(self, call: str, backend: Any, recorder: Recorder) -> None:
        """Compare a call with the native backend; the same launches serve another gradient."""
        given = self.given
        out, lse = native.forward(*given)
        close(backend.forward(*given), (out, lse))
        close((backend.output(*given),), (out,))
        if given.seqused_k is not None:
            return
        wide = torch.randn(*out.shape[:-1], 2 * out.shape[-1]).to(out.dtype)
        grad = wide[..., : out.shape[-1]]
        launch = backend.backward.prepare(*given, out, lse, grad, True, True)
        for scale in (1, 2):
            grad = wide.mul(scale)[..., : out.shape[-1]]
            close(launch(*given, out, lse, grad, True, True), native.backward(*given, out, lse, grad, True, True))
        grad = grad[:1].expand(grad.shape)
        close(backend.backward(*given, out, lse, grad, True, True), native.backward(*given, out, lse, grad, True, True))
        dq, dk, dv, _ = backend.backward(*given, out, lse, grad, True, False)
        close((dq,), native.backward(*given, out, lse, grad, True, True)[:1])
        assert dk.numel() == dv.numel() == 0
        dq, *keys, _ = backend.backward(*given, out, lse, grad, False, True)
        close(tuple(keys), native.backward(*given, out, lse, grad, True, True)[1:3])
        assert dq.numel() == 0

    def both_passes(self, given: Inputs) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
        """Return the launches of both passes on 132 multiprocessors, and their results."""
        with self.recording(recorder := Recorder()):
            out, lse = backend.forward(*given)
            return recorder.launches, (out, lse, *backend.backward(*given, out, lse, out, True, True)[:3])

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            # The L2 cache holds 8 pairs of 4 MiB; of 8 MiB only 4, whose 64 tiles would be half a round.
            ((4, 2048, 2048, 8, 4), (32, 32, 8)),
            ((4, 2048, 2048, 4, 8), (16, 16, 8)),
            # 64 tiles of keys to a pair: two are a round. Keys of 4 MiB.
            ((2, 8192, 8192, 8, 4), (16, 8, 2)),
            ((2, 8192, 8192, 8, 4, UNLIMITED), (8, 8, 2)),
            # Keys of 32 MiB, and one tile of rows: all pairs. Tiles of equal work in the forward pass: two pairs.
            ((2, 16, 65536, 70, 4), (33, 132, 140)),
            ((2, 16, 65536, 70, 4, UNLIMITED), (2, 132, 140)),
        ],
    )
    def test_sections(self, sizes, expected):
        launches, _ = self.both_passes(sections(*sizes))
        assert tuple(one["section"] for one in launches if one.entry not in ("finish", "rows_of")) == expected

    def test_no_query_launches_nothing(self):
        launches, (out, lse, _, dk, dv) = self.both_passes(dense(2, 0, 30, 2, 2, 64))
        assert not launches
        assert (out.shape, lse.shape) == ((2, 0, 4, 64), (2, 4, 0))
        assert not dk.any()
        assert not dv.any()

    def test_every_program_has_room_for_two_stages(self):
        programs = backend.programs("sm_90a")
        assert len(programs) == len(set(programs)) == 72
        assert all(dict(one.defines)["STAGES"] >= 2 for one in programs)
        assert backend.programs("sm_80") == []
