"""The host side of the CUDA C++ backend, with kernels that a few lines of PyTorch stand for; planted bugs show."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing.cuda_gemm import gemm
from rl_kernels.core.testing.host_tests import CudaHost
from rl_kernels.core.testing.launches import Box, Launch, Recorder, strided, vector
from rl_kernels.core.testing.logp_launches import below, logits_gradient, merged, state, write_statistics
from rl_kernels.core.testing.planted import Bug
from rl_kernels.linear_logp.spec.raw import check_case, check_shards

STAGE, BOXES, PROCESSORS = (64 + 256) * 128, 2 * 64 * 128, 1


def rows_of_tiles(launch: Launch) -> torch.Tensor:
    """Return which rows are in tiles that are computed."""
    height, computed = 64 * launch.constants["GROUPS"], torch.zeros(launch["rows"], dtype=torch.bool)
    order, every = launch["order"], range(-(-launch["rows"] // height))
    for tile in every if order is None else order[1 : 1 + order[0]].tolist():
        computed[tile * height : (tile + 1) * height] = True
    return computed


def sort_tiles(launch: Launch) -> None:
    order, height = launch["order"], 64 * launch.constants["GROUPS"]
    assert (launch.grid, launch.block) == ((1, 1, 1), 1024)
    assert launch["ids"].shape == (launch["rows"],)
    parts = launch["ids"].split(height)
    assert order.shape == (1 + len(parts),)
    taken = torch.tensor([bool((part != launch["ignore_index"]).any()) or not launch["has_ignored"] for part in parts])
    order.copy_(torch.cat((taken.sum()[None], taken.logical_not().sort(stable=True).indices)))


def logits(launch: Launch, units: int, boxes: int) -> torch.Tensor:
    """Return the logits of the tiles that are computed, NaN elsewhere, and check the launch's layout."""
    hidden, weight, constants = launch["hidden"], launch["weight"], launch.constants
    shape = launch["rows"], launch["inner"]
    assert hidden[1:3] == ((64, 64), 128)
    assert weight[1:3] == ((256, 64), 128)
    assert (hidden.tensor.shape, weight.tensor.shape) == (shape, (launch["columns"], launch["inner"]))
    assert {hidden.tensor.dtype, weight.tensor.dtype} == {[torch.bfloat16, torch.float16][constants["DTYPE"] - 1]}
    groups = constants["GROUPS"]
    assert groups in (1, 2)
    boxes *= launch.entry == "gradient" or constants["KEEPS"]
    assert (launch.block, launch.pdl) == (128 * (groups + 1), False)
    assert constants["STAGE_BYTES"] == STAGE
    assert constants["STAGES"] >= 4
    assert launch.shared == constants["STAGES"] * STAGE + groups * boxes + 1024
    assert launch.grid == (min(-(-launch["rows"] // (64 * groups)) * units, PROCESSORS), 1, 1)
    assert launch["group"] > 0
    z = hidden.tensor.double() @ weight.tensor.double().t()
    if launch["bias"] is not None:
        assert launch["bias"].dtype == hidden.tensor.dtype
        z = z + vector(launch["bias"], launch["columns"]).double()
    if launch.constants["CAPPED"]:
        z = softcap_of(launch) * (z * launch["rate"]).tanh()
    return torch.where(rows_of_tiles(launch)[:, None], z / temperature(launch)[:, None], torch.nan)


def softcap_of(launch: Launch) -> float:
    """Return the cap, and check the numbers derived from it."""
    cap, rate = launch["cap"], launch["rate"]
    assert launch["inverse_cap"] == pytest.approx(1 / cap)
    assert launch["steepest"] == pytest.approx(cap * rate)
    return cap


def temperature(launch: Launch) -> torch.Tensor:
    if launch["temperatures"] is None:
        return torch.full((launch["rows"],), launch["temperature"]).double()
    assert launch["temperatures"].shape == (launch["rows"],)
    return launch["temperatures"].double()


def least(launch: Launch) -> torch.Tensor | None:
    return vector(launch["min_logits"], launch["rows"]) if launch.constants["MIN_LOGIT"] else None


def states(launch: Launch) -> None:
    parts, width = launch["parts"], 256 * launch["blocks"]
    count = -(-launch["columns"] // width)
    assert launch["blocks"] in (1, 4)
    assert parts.shape == (count, 3, launch["rows"])
    z = logits(launch, count, BOXES)
    if launch.constants["KEEPS"]:
        kept: Box = launch["kept"]
        assert kept.tensor.shape == (launch["rows"], -(-launch["columns"] // 256) * 256 - launch["first_kept"])
        assert kept[1:3] == ((64, 32), 128)
        assert launch["first_kept"] % 1024 == 0
        raw = (z * temperature(launch)[:, None])[:, launch["first_kept"] :]
        kept.tensor[:, : raw.shape[1]] = torch.where(
            rows_of_tiles(launch)[:, None], raw, kept.tensor[:, : raw.shape[1]]
        )
    raw = z * temperature(launch)[:, None]
    is_below = below(raw, temperature(launch), least(launch))
    z, raw = z.masked_fill(is_below, -torch.inf), raw.masked_fill(is_below, -torch.inf)
    column = launch["ids"] - launch["start"]
    here = (column >= 0) & (column < launch["columns"])
    # Other ranks have the logits of the other rows.
    launch["chosen"][here] = raw.float()[here, column[here]]
    for part, columns in zip(parts, z.split(width, 1), strict=True):
        part.copy_(state(columns))


def merge_blocks(launch: Launch) -> None:
    rows, units = launch["rows"], -(-launch["columns"] // 1024)
    assert launch["blocks"] == 1
    assert (launch.block, launch.pdl) == (256, False)
    assert (launch.grid[0] - 1) * 256 < rows <= launch.grid[0] * 256
    assert launch.grid[1:] == (units, 1)
    assert launch["units"].shape == (units, 3, rows)
    for unit, blocks in zip(launch["units"], launch["parts"].split(4), strict=True):
        unit.copy_(merged(blocks))


def finish(launch: Launch) -> None:
    assert (launch.block, launch.pdl) == (256, False)
    assert (launch["start"], launch["vocab"]) == (0, launch["columns"])
    assert launch.grid[0] * 8 - 8 < launch["rows"] <= launch.grid[0] * 8
    assert launch.grid[1:] == (1, 1)
    assert len(launch["parts"]) == -(-launch["columns"] // (256 * launch["blocks"]))
    active = (launch["ids"] != launch["ignore_index"]) | (not launch["has_ignored"])
    arguments = launch["chosen"], temperature(launch), active
    write_statistics(launch, merged(launch["parts"]), *arguments, entropy=launch.constants["ENTROPY"])


def gradient(launch: Launch) -> None:
    begin, width, rows, constants = launch["begin"], launch["width"], launch["rows"], launch.constants
    is_kept = launch.entry == "gradient_of_kept"
    if is_kept:
        assert (launch.block, launch.shared, launch.pdl) == (128, 0, False)
        assert launch.grid[0] * 16 - 16 < rows <= launch.grid[0] * 16
        assert launch.grid[1] * 512 - 512 < width <= launch.grid[1] * 512
        assert launch.grid[2] == 1
        assert launch["kept_row"] % 256 == launch["dz_row"] % 256 == 0
        assert launch["kept"].dtype == torch.float32
        z = strided(launch["kept"], (rows, width), (4 * launch["kept_row"], 4)).double() / temperature(launch)[:, None]
    else:
        z = logits(launch, -(-width // 256), BOXES)[:, begin : begin + width]
    assert (launch["grad_entropy"] is not None) == constants["ENTROPY"]
    assert launch["norm"].shape == (rows, 2)
    first = launch["start"] + begin
    chosen = launch["ids"][:, None] == torch.arange(first, first + width)
    upstream = [launch[name] for name in ("grad_logp", "grad_lse", "grad_entropy")]
    entropy = launch["entropy"] if constants["ENTROPY"] else None
    result = logits_gradient(z, temperature(launch), launch["norm"], chosen, upstream, entropy)
    raw = z * temperature(launch)[:, None]
    if constants["CAPPED"]:
        result *= launch["steepest"] * (1 - (raw / softcap_of(launch)).square())
    result = result.masked_fill(below(raw, temperature(launch), least(launch)), 0.0)
    bad = (launch["ids"] < 0) | (launch["ids"] >= launch["vocab"])
    result = torch.where(bad[:, None], torch.nan, result)
    if launch["has_ignored"]:
        result = torch.where((launch["ids"] != launch["ignore_index"])[:, None], result, 0.0)
    dz = launch["dz"]
    assert dz.shape == (rows, width)
    assert dz.stride() == (launch["dz_row"], 1)
    if not is_kept:
        assert launch["dz_map"].tensor is dz
        assert launch["dz_map"][1:3] == ((64, 64), 128)
    dz.copy_(result)
    if launch["sums"] is not None:
        padded = torch.nn.functional.pad(result, (0, 0, 0, -rows % 16))
        launch["sums"].copy_(padded.unflatten(0, (-1, 16)).sum(1))


def add_rows(launch: Launch) -> None:
    rows, width = launch["rows"], launch["width"]
    assert launch.block <= 256
    assert not launch.pdl
    assert (launch.grid[0] - 1) * launch.block < width <= launch.grid[0] * launch.block
    assert launch.grid[1:] == (1, 1)
    assert launch["sums"].shape == (-(-rows // 16), width)
    launch["out"].add_(launch["sums"].sum(0))


class TestLaunches(CudaHost):
    modules = (
        *(f"rl_kernels.linear_logp.{name}" for name in ("vocabulary", "inputs", "backward")),
        *(f"rl_kernels.linear_logp.backends.cuda_sm90.{name}" for name in ("tiles", "backward", "backend")),
    )
    watched = (*modules[3:], "rl_kernels.core.cuda.gemm.matmul")
    bugs = (
        Bug("upstream gradients exchanged", "*block[11:14], sums", "*block[11:14][::-1], sums"),
        Bug("chain of dH not continued", "weight, out, continues=continues", "weight, out"),
        Bug("one stage too many", "self._boxes(stores)) // STAGE\n", "self._boxes(stores)) // STAGE + 1\n"),
        Bug("unaligned rows copied by TMA", "row * x.itemsize | x.data_ptr()", "row * x.itemsize"),
        Bug(
            "thresholds of the first rows",
            "(inputs.min_logit.data_ptr(),)",
            "(inputs.min_logit[:1].clone().data_ptr(),)",
        ),
        Bug("last rows are not finished", "-(-count * WARP // 256)", "max(count * WARP // 256, 1)"),
        Bug("shard counted from column 0", "inputs.start, inputs.vocab, _group()", "0, inputs.vocab, _group()"),
    )
    stand_ins = {one.__name__: one for one in (sort_tiles, states, merge_blocks, finish, gradient, add_rows)}
    stand_ins |= {"gradient_of_kept": gradient, "gemm": partial(gemm, processors=PROCESSORS)}
    options = {"processors": PROCESSORS}
    calls = (
        dict(rows=1, vocab=1, size=8),
        dict(rows=1, vocab=257, layout=(3, 0), upstream="expanded"),
        dict(rows=64, vocab=255, dtype=torch.bfloat16, ids=torch.int32, ignored=0, layout=(4, 0)),
        dict(rows=65, vocab=600, layout="odd", scale="apart", ids="apart", upstream="apart"),
        dict(rows=129, vocab=1025, layout="column", ignored=-100, masked=128, bias="row", upstream="logp"),
        dict(rows=700, vocab=2500, layout="apart", ignored=7, masked=300, bias="row", scale="rows"),
        dict(rows=700, vocab=2500, layout="expanded", bias=True, scale="rows", upstream="entropy"),
        dict(rows=300, vocab=2500, main_grad=True, ignored=-1, masked=300, upstream="lse"),
        dict(rows=400, vocab=900, main_grad=True, needed=[True, True, False], layout=(8, 1)),
        dict(rows=130, vocab=600, needed=[False, True, False], ids=torch.int32),
        dict(rows=1, vocab=257, cap=(5.0, 0.3)),
        dict(rows=300, vocab=1100, cap=(30.0, 0.02), bias="row", scale="rows", ignored=7, masked=130),
        dict(rows=700, vocab=2500, saved=(4, 512), bias="row", scale="rows", ignored=7, masked=300),
        dict(rows=300, vocab=2500, saved=(9, 2560), dtype=torch.bfloat16, cap=(5.0, 0.3), main_grad=True),
        dict(rows=40, vocab=9000, saved=(1, 6144), upstream="logp"),
        dict(rows=700, vocab=1100, bias="row", ignored=7, masked=300, join=144),
        dict(rows=300, vocab=1300, least="apart", scale="rows", ignored=7, masked=130, cap=(5.0, 0.3)),
        dict(rows=40, vocab=2500, least="rows", saved=(1, 2560), bias="row", upstream="expanded"),
        dict(rows=400, vocab=900, main_grad=True, layout=(8, 1), join=256),
    )

    def check(self, call: dict[str, Any], backend: Any, recorder: Recorder) -> None:
        """Check a call with rows and columns cut into blocks and pieces."""
        backward = importlib.import_module("rl_kernels.linear_logp.backward")
        least = patch.multiple(backward, LEAST_PIECE=1024, LEAST_HEIGHT=128)
        with least, patch.object(backend, "MOST_ROWS", 384):
            check_shards(check_case({"dtype": torch.float16, "size": 24, "layout": "row", **call}, backend), backend)
        assert {launch.program for launch in recorder.launches} <= set(backend.programs("sm_90a"))

    def check_all(self, recorders: list[Recorder]) -> None:
        forward = [launch for one in recorders for launch in one.launches if launch.entry == "states"]
        # What is kept for each row must have a bound.
        assert all(launch["rows"] <= 384 for launch in forward)
        assert {launch["blocks"] for launch in forward} == {1, 4}
