"""The host side of the Triton backend without Triton: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.logp_launches import (
    dense,
    logits_gradient,
    merged,
    state,
    triton_temperature,
    triton_upstream,
    write_statistics,
)
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.triton_launches import Descriptor, TritonLaunch, TritonRecorder
from rl_kernels.core.testing.triton_matmul import matmul, operand
from rl_kernels.linear_logp.spec.raw import check_case, check_shards

BLOCK, UNIT, ROWS = 256, 1024, 32


def logits(launch: TritonLaunch) -> torch.Tensor:
    """Return all logits after temperature."""
    n, v, d = launch["N"], launch["V"], launch["D"]
    hidden = operand(launch["hidden"], launch["HIDDEN"], (n, d), "hidden", launch, launch["BLOCK_M"])
    weight = operand(launch["weight"], launch["WEIGHT"], (v, d), "weight", launch, BLOCK)
    assert launch["BLOCK_K"] % 16 == 0
    assert hidden.dtype != torch.float32 or launch["BLOCK_K"] == 16
    z = capped(launch, hidden.double() @ weight.double().t() + bias_of(launch))
    return z / triton_temperature(launch, n)[:, None]


def capped(launch: TritonLaunch, z: torch.Tensor) -> torch.Tensor:
    return launch["cap"] * (z * launch["rate"]).tanh() if launch["CAPPED"] else z


def bias_of(launch: TritonLaunch) -> torch.Tensor | float:
    if not launch["HAS_BIAS"]:
        return 0.0
    return launch["bias"].as_strided((launch["V"],), (launch["bias_stride"],), launch["bias"].storage_offset()).double()


def states(launch: TritonLaunch) -> None:
    n, v, width = launch["N"], launch["V"], launch["width"]
    blocks = -(-v // width)
    assert width in (BLOCK, UNIT)
    assert launch["RAGGED"] == bool(v % BLOCK)
    assert launch.grid[0] == -(-n // launch["BLOCK_M"]) * blocks
    assert launch["parts"].dtype == torch.float32
    for part, z in zip(dense(launch["parts"], blocks, 3, n), logits(launch).split(width, 1), strict=True):
        part.copy_(state(z))
    if launch["KEEPS"]:
        first = launch["first_kept"]
        assert first % UNIT == 0
        assert launch["kept_width"] == -(-v // BLOCK) * BLOCK - first
        x = logits(launch) * triton_temperature(launch, n)[:, None]
        dense(launch["kept"], n, launch["kept_width"])[:, : v - first] = x[:, first:]


def selected(launch: TritonLaunch) -> None:
    n, v, d = launch["N"], launch["V"], launch["D"]
    assert launch.grid[0] * 64 - 64 < n <= launch.grid[0] * 64
    pairs = [(launch["hidden"], n, "hidden"), (launch["weight"], v, "weight")]
    hidden, weight = (
        x.as_strided((rows, d), (launch[f"{name}_row"], launch[f"{name}_k"]), x.storage_offset()).double()
        for x, rows, name in pairs
    )
    z = capped(launch, hidden @ weight.t() + bias_of(launch))
    column = dense(launch["ids"], n).long() - launch["start"]
    here = (column >= 0) & (column < v)
    chosen = z.gather(1, column.clamp(0, v - 1)[:, None])[:, 0]
    dense(launch["chosen"], n).copy_(torch.where(here, chosen, 0.0))


def merge_blocks(launch: TritonLaunch) -> None:
    n, blocks = launch["count"], launch["blocks"]
    assert launch.grid[:2] == (-(-n // ROWS), -(-blocks // 4))
    parts = dense(launch["parts"], blocks, 3, n)
    for unit, place in enumerate(dense(launch["merged"], launch.grid[1], 3, n)):
        place.copy_(merged(parts[unit * 4 : unit * 4 + 4]))


def finish(launch: TritonLaunch) -> None:
    n, ids = launch["count"], dense(launch["ids"], launch["count"])
    assert launch.grid[0] == -(-n // ROWS)
    assert launch["units"] == -(-launch["V"] // UNIT)
    ignored = (ids == launch["ignore_index"]) & launch["HAS_IGNORED"]
    arguments = dense(launch["chosen"], n), triton_temperature(launch, n), ~ignored
    write_statistics(
        launch, merged(dense(launch["parts"], launch["units"], 3, n)), *arguments, entropy=launch["ENTROPY"]
    )


def dlogits(launch: TritonLaunch) -> None:
    n, begin, width, ids = launch["N"], launch["begin"], launch["width"], dense(launch["ids"], launch["N"])
    tiles = -(-n // launch["BLOCK_M"]) * -(-width // BLOCK)
    assert launch.grid[0] == (min(tiles, 2) if launch["PERSISTENT"] else tiles)
    z = logits(launch)[:, begin : begin + width]
    if launch["KEPT"]:
        assert launch["BLOCK_M"] <= 32
        assert not launch["PERSISTENT"]
        assert not launch["DBIAS"]
        assert launch["kept"].shape == (n, width)
        assert launch["kept"].stride() == (launch["kept_row"], 1)
        z = launch["kept"].double() / triton_temperature(launch, n)[:, None]
    upstream, entropy = triton_upstream(launch, n)
    first = launch["start"] + begin
    chosen = ids[:, None] == torch.arange(first, first + width)
    result = logits_gradient(z, triton_temperature(launch, n), dense(launch["norm"], n, 2), chosen, upstream, entropy)
    if launch["CAPPED"]:
        y = z * triton_temperature(launch, n)[:, None]
        result *= launch["cap"] * launch["rate"] * (1 - (y / launch["cap"]).square())
    result = torch.where(((ids < 0) | (ids >= launch["vocab"]))[:, None], torch.nan, result)
    if launch["HAS_IGNORED"]:
        result = torch.where((ids != launch["ignore_index"])[:, None], result, 0.0)
    dz = launch["dz"]
    assert isinstance(dz, Descriptor) == launch["STORED"]
    if launch["STORED"]:
        assert dz.block_shape == [launch["BLOCK_M"], BLOCK]
        assert dz.base.shape == result.shape
        dz.base.copy_(result)
    else:
        dz.as_strided((n, width), (launch["dz_row"], 1), dz.storage_offset()).copy_(result)
    if launch["DBIAS"]:
        partial_sums = dense(launch["partial"], -(-n // launch["BLOCK_M"]), width)
        assert partial_sums.dtype == torch.float32
        for place, rows in zip(partial_sums, result.split(launch["BLOCK_M"]), strict=True):
            place.copy_(rows.sum(0))


def add_tiles(launch: TritonLaunch) -> None:
    width = launch["width"]
    assert launch.grid[0] * BLOCK - BLOCK < width <= launch.grid[0] * BLOCK
    dense(launch["out"], width).add_(dense(launch["partial"], launch["tiles"], width).sum(0))


class TestLaunches(TritonHost):
    modules = (
        "rl_kernels.core.triton_lib.softcap",
        *(f"rl_kernels.linear_logp.{name}" for name in ("vocabulary", "inputs", "backward")),
        *(f"rl_kernels.linear_logp.backends.triton.{name}" for name in ("kernels", "backward", "backend")),
    )
    bugs = (
        Bug("dH added to uninitialized memory", "weight, out, continues=continues", "weight, out, continues=True"),
        Bug("strided temperatures read as if contiguous", "temperature.contiguous()", "temperature"),
        Bug(
            "last rows are not finished",
            "(ceil_div(count, kernels.ROWS.value),)",
            "(count // kernels.ROWS.value or 1,)",
        ),
        Bug("gradient counted from column 0", "block.start, block.vocab, count", "0, block.vocab, count"),
    )
    stand_ins = {one.__name__: one for one in (states, selected, merge_blocks, finish, dlogits, add_tiles)}
    stand_ins |= {"multiply": matmul}
    calls = (
        dict(rows=1, vocab=1, size=8, bias=True),
        dict(rows=65, vocab=257, layout="odd", ids="apart", upstream="expanded"),
        dict(rows=129, vocab=4097, layout="column", scale="rows", ignored=0, bias=True, upstream="logp"),
        dict(rows=300, vocab=4608, layout="apart", scale="apart", ignored=-100, bias=True, upstream="apart"),
        dict(rows=130, vocab=600, dtype=torch.float32, size=40, bias=True, upstream="entropy"),
        dict(rows=64, vocab=9000),
        dict(rows=700, vocab=1100, bias=True, scale="rows"),
        dict(rows=10, vocab=300, arch="sm80"),
        dict(rows=70, vocab=9000, dtype=torch.float32, arch="sm80", ignored=3),
        dict(rows=129, vocab=300, arch="sm80", size=8, upstream="lse", ids=torch.int32),
        dict(rows=65, vocab=4097, cap=(5.0, 0.3), bias=True, scale="rows", ignored=0),
        dict(rows=700, vocab=4608, saved=(6, 1536), scale="rows", ignored=-100, cap=(5.0, 0.3)),
        dict(rows=130, vocab=2500, saved=(9, 2560), bias=True, dtype=torch.float32),
        dict(rows=10, vocab=9000, saved=(1, 9216), arch="sm80"),
        dict(rows=700, vocab=1100, bias=True, join=256),
        dict(rows=300, vocab=600, bias=True, dtype=torch.float32, join=128, arch="sm80"),
    )

    def check(self, call: dict[str, Any], backend: Any, recorder: TritonRecorder) -> None:
        backward = importlib.import_module("rl_kernels.linear_logp.backward")
        with patch.multiple(backward, LEAST_PIECE=1024, LEAST_HEIGHT=128):
            checked = check_case({"dtype": torch.bfloat16, "layout": "row", "size": 24, **call}, backend)
            # A block of rows ends at a multiple of every tile's height, or where the rows end.
            for launch, after in pairwise(one for one in recorder.launches if one.name == "dlogits"):
                assert launch["begin"] != after["begin"] or launch["N"] % 128 == 0
            check_shards(checked, backend)

    def check_all(self, recorders: list[TritonRecorder]) -> None:
        widths, elsewhere = set(), dict[torch.dtype, set[tuple[int, int]]]()
        for call, recorder in zip(self.calls, recorders, strict=True):
            forward, pieces = ([one for one in recorder.launches if one.name == name] for name in ("states", "dlogits"))
            widths |= {launch["width"] for launch in forward}
            dtype = call.get("dtype", torch.bfloat16)
            if recorder.arch == "sm90":
                # The width of a piece must not decide how its gradient is stored.
                assert all(launch["STORED"] == (dtype != torch.float32) for launch in pieces)
            else:
                # Logits that were kept are not recomputed.
                again = [launch for launch in pieces if not launch["KEPT"]]
                cuts = elsewhere.setdefault(dtype, set())
                cuts |= {(launch["BLOCK_M"], launch["BLOCK_K"]) for launch in (*forward, *again)}
        # Elsewhere than on Hopper nobody has shown that bits follow no schedule.
        assert all(len(cuts) == 1 for cuts in elsewhere.values())
        assert widths == {BLOCK, UNIT}
