"""The host side of the CUDA C++ backend, with kernels that a few lines of PyTorch stand for; planted bugs show."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import lying, poisoned_empty
from rl_kernels.core.testing.cuda_gemm import gemm
from rl_kernels.core.testing.launches import Box, Launch, Recorder, strided, vector
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import vocab_shards, vocabulary

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in (
        "inputs",
        "sums",
        "backward",
        "backends.cuda_sm90.tiles",
        "blocks",
        "backends.cuda_sm90.backward",
        "backends.cuda_sm90.backend",
    )
)
BUGS = (
    Bug("upstream gradients exchanged", "grad_logp, upstream.grad_logsumexp", "grad_logsumexp, upstream.grad_logp"),
    Bug("chain of dH not continued", "weight, out, continues=continues", "weight, out"),
    Bug("one stage too many", "self._boxes(stores)) // STAGE\n", "self._boxes(stores)) // STAGE + 1\n"),
    Bug("unaligned rows copied by TMA", "fits and x.data_ptr() % ALIGNED == 0", "fits"),
    Bug("last rows are not finished", "-(-count * WARP // 256)", "max(count * WARP // 256, 1)"),
    Bug("shard counted from column 0", "inputs.start, inputs.vocab", "0, inputs.vocab"),
)
PACKAGE = "rl_kernels.linear_logp.backends.cuda_sm90"
WATCHED = (*(f"{PACKAGE}.{name}" for name in ("tiles", "backend", "backward")), "rl_kernels.core.cuda.gemm.matmul")
FAILURES = (AssertionError, RuntimeError)
Plant = Callable[[], AbstractContextManager[None]]
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
    assert (launch.grid[0], launch.block) == (1, 1024)
    assert launch["ids"].shape == (launch["rows"],)
    parts = launch["ids"].split(height)
    assert order.shape == (1 + len(parts),)
    wanted = torch.tensor([bool((part != launch["ignore_index"]).any()) or not launch["has_ignored"] for part in parts])
    order.copy_(torch.cat((wanted.sum()[None], wanted.logical_not().sort(stable=True).indices)))


def logits(launch: Launch, units: int, boxes: int) -> torch.Tensor:
    """Return the logits of the tiles that are computed, NaN elsewhere, and hold the launch to its layout."""
    hidden, weight, constants = launch["hidden"], launch["weight"], launch.constants
    shape = launch["rows"], launch["inner"]
    assert hidden[1:3] == ((64, 64), 128)
    assert weight[1:3] == ((256, 64), 128)
    assert (hidden.tensor.shape, weight.tensor.shape) == (shape, (launch["columns"], launch["inner"]))
    assert {hidden.tensor.dtype, weight.tensor.dtype} == {[torch.bfloat16, torch.float16][constants["DTYPE"] - 1]}
    groups = constants["GROUPS"]
    assert groups in (1, 2)
    boxes *= launch.entry == "gradient" or constants["KEEPS"]
    assert launch.block == 128 * (groups + 1)
    assert constants["STAGE_BYTES"] == STAGE
    assert constants["STAGES"] >= 4
    assert launch.shared == constants["STAGES"] * STAGE + groups * boxes + 1024
    assert launch.grid[0] == min(-(-launch["rows"] // (64 * groups)) * units, PROCESSORS)
    assert launch["group"] > 0
    z = hidden.tensor.double() @ weight.tensor.double().t()
    if launch["bias"] is not None:
        assert launch["bias"].dtype == hidden.tensor.dtype
        z = z + vector(launch["bias"], launch["columns"]).double()
    if launch.constants["CAPPED"]:
        z = softcap_of(launch) * (z * launch["rate"]).tanh()
    return torch.where(rows_of_tiles(launch)[:, None], z / temperature(launch), torch.nan)


def softcap_of(launch: Launch) -> float:
    """Return the cap, and hold what goes with it to that."""
    cap, rate = launch["cap"], launch["rate"]
    assert launch["inverse_cap"] == pytest.approx(1 / cap)
    assert launch["steepest"] == pytest.approx(cap * rate)
    return cap


def temperature(launch: Launch) -> torch.Tensor:
    if launch["temperatures"] is None:
        return torch.tensor(launch["temperature"])
    assert launch["temperatures"].shape == (launch["rows"],)
    return launch["temperatures"].double()[:, None]


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
        raw = (z * temperature(launch))[:, launch["first_kept"] :]
        kept.tensor[:, : raw.shape[1]] = torch.where(
            rows_of_tiles(launch)[:, None], raw, kept.tensor[:, : raw.shape[1]]
        )
    column = launch["ids"] - launch["start"]
    here = (column >= 0) & (column < launch["columns"])
    # Other ranks have the logits of the other rows.
    launch["chosen"][here] = (z * temperature(launch)).float()[here, column[here]]
    for part, columns in enumerate(z.split(width, 1)):
        top = columns.amax(1)
        shifted = columns - top[:, None]
        state = (top, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1))
        parts[part].copy_(torch.stack(state))


def merge_blocks(launch: Launch) -> None:
    rows, units = launch["rows"], -(-launch["columns"] // 1024)
    assert launch["blocks"] == 1
    assert launch.block == 256
    assert (launch.grid[0] - 1) * 256 < rows <= launch.grid[0] * 256
    assert launch.grid[1] == units
    assert launch["units"].shape == (units, 3, rows)
    for unit, blocks in zip(launch["units"], launch["parts"].split(4), strict=True):
        unit.copy_(torch.stack(merged(blocks)))


def merged(parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the state of all parts."""
    tops, totals, weighted = parts.double().unbind(1)
    top = tops.amax(0)
    scale = (tops - top).exp()
    return top, (totals * scale).sum(0), ((weighted + totals * (tops - top)) * scale).sum(0)


def finish(launch: Launch) -> None:
    assert launch.block == 256
    assert (launch["start"], launch["vocab"]) == (0, launch["columns"])
    assert launch.grid[0] * 8 - 8 < launch["rows"] <= launch.grid[0] * 8
    assert len(launch["parts"]) == -(-launch["columns"] // (256 * launch["blocks"]))
    top, total, weight = merged(launch["parts"])
    number = temperature(launch).flatten()
    lse = top + total.log()
    results = {"logp": launch["chosen"] / number - lse, "norm": torch.stack((top * number, total.log()))}
    if launch.constants["ENTROPY"]:
        results |= {"lse": lse, "entropy": total.log() - weight / total}
    for name, value in results.items():
        ignored = (launch["ids"] == launch["ignore_index"]) & bool(launch["has_ignored"])
        launch[name].copy_(torch.where(ignored, 0.0, value).t())


def gradient(launch: Launch) -> None:
    begin, width, rows, constants = launch["begin"], launch["width"], launch["rows"], launch.constants
    is_kept = launch.entry == "gradient_of_kept"
    if is_kept:
        assert (launch.block, launch.shared, launch.pdl) == (128, 0, False)
        assert launch.grid[0] * 16 - 16 < rows <= launch.grid[0] * 16
        assert launch.grid[1] * 512 - 512 < width <= launch.grid[1] * 512
        assert launch["kept_row"] % 256 == launch["dz_row"] % 256 == 0
        assert launch["kept"].dtype == torch.float32
        z = strided(launch["kept"], (rows, width), (4 * launch["kept_row"], 4)).double() / temperature(launch)
    else:
        z = logits(launch, -(-width // 256), BOXES)[:, begin : begin + width]
    assert (launch["grad_entropy"] is not None) == constants["ENTROPY"]
    assert launch["norm"].shape == (rows, 2)
    top, log_total = launch["norm"].double().split(1, 1)
    d = z - top / temperature(launch) - log_total
    first = launch["start"] + begin
    chosen = (launch["ids"][:, None] == torch.arange(first, first + width)).double()
    found = torch.zeros_like(d)
    if launch["grad_logp"] is not None:
        found += launch["grad_logp"][:, None] * (chosen - d.exp())
    if launch["grad_lse"] is not None:
        found += launch["grad_lse"][:, None] * d.exp()
    if constants["ENTROPY"]:
        found -= launch["grad_entropy"][:, None] * d.exp() * (d + launch["entropy"][:, None])
    found = found / temperature(launch)
    if constants["CAPPED"]:
        found *= launch["steepest"] * (1 - (z * temperature(launch) / softcap_of(launch)).square())
    bad = (launch["ids"] < 0) | (launch["ids"] >= launch["vocab"])
    found = torch.where(bad[:, None], torch.nan, found)
    if launch["has_ignored"]:
        found = torch.where((launch["ids"] != launch["ignore_index"])[:, None], found, 0.0)
    dz = launch["dz"]
    assert dz.shape == (rows, width)
    assert dz.stride() == (launch["dz_row"], 1)
    if not is_kept:
        assert launch["dz_map"].tensor is dz
        assert launch["dz_map"][1:3] == ((64, 64), 128)
    dz.copy_(found)
    if launch["sums"] is not None:
        padded = torch.nn.functional.pad(found, (0, 0, 0, -rows % 16))
        launch["sums"].copy_(padded.unflatten(0, (-1, 16)).sum(1))


def add_rows(launch: Launch) -> None:
    rows, width = launch["rows"], launch["width"]
    assert launch.block <= 256
    assert (launch.grid[0] - 1) * launch.block < width <= launch.grid[0] * launch.block
    assert launch["sums"].shape == (-(-rows // 16), width)
    launch["out"].add_(launch["sums"].sum(0))


STAND_INS = {one.__name__: one for one in (sort_tiles, states, merge_blocks, finish, gradient, add_rows)}
STAND_INS |= {"gradient_of_kept": gradient, "gemm": partial(gemm, processors=PROCESSORS)}
KEPT = {4: 2560 - 2048, 9: 2560, 1: 9216 - 3072}
"""Columns that are kept of the calls below, by MiB."""
CALL: dict[str, Any] = {"dtype": torch.float16, "size": 24, "layout": "row", "ids": torch.int64, "scale": 0.7}
CALLS: tuple[dict[str, Any], ...] = (
    {"rows": 1, "vocab": 1, "size": 8},
    {"rows": 1, "vocab": 257, "layout": (3, 0), "grads": "expanded"},
    {"rows": 64, "vocab": 255, "dtype": torch.bfloat16, "ids": torch.int32, "ignored": 0, "layout": (4, 0)},
    {"rows": 65, "vocab": 600, "layout": "odd", "scale": "apart", "ids": "apart", "grads": "apart"},
    {"rows": 129, "vocab": 1025, "layout": "column", "ignored": -100, "masked": 128, "bias": "row", "grads": "logp"},
    {"rows": 700, "vocab": 2500, "layout": "apart", "ignored": 7, "masked": 300, "bias": "row", "scale": "rows"},
    {"rows": 700, "vocab": 2500, "layout": "expanded", "bias": "apart", "scale": "rows", "grads": "entropy"},
    {"rows": 300, "vocab": 2500, "main_grad": True, "ignored": -1, "masked": 300, "grads": "lse"},
    {"rows": 400, "vocab": 900, "main_grad": True, "needed": [True, True, False], "layout": (8, 1)},
    {"rows": 130, "vocab": 600, "needed": [False, True, False], "ids": torch.int32},
    {"rows": 1, "vocab": 257, "cap": (5.0, 0.3)},
    {"rows": 300, "vocab": 1100, "cap": (30.0, 0.02), "bias": "row", "scale": "rows", "ignored": 7, "masked": 130},
    {"rows": 700, "vocab": 2500, "saved": 4, "bias": "row", "scale": "rows", "ignored": 7, "masked": 300},
    {"rows": 300, "vocab": 2500, "saved": 9, "dtype": torch.bfloat16, "cap": (5.0, 0.3), "main_grad": True},
    {"rows": 40, "vocab": 9000, "saved": 1, "grads": "logp"},
    {"rows": 700, "vocab": 1100, "bias": "row", "ignored": 7, "masked": 300, "join": 144},
    {"rows": 400, "vocab": 900, "main_grad": True, "layout": (8, 1), "join": 256},
)


def laid_out(x: torch.Tensor, layout: str | tuple[int, int]) -> torch.Tensor:
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if isinstance(layout, tuple):
        more, first = layout
        return x.new_full((len(x), x.shape[1] + more), 1e4)[:, first : first + x.shape[1]].copy_(x)
    return lying(x, layout)


def drawn(call: dict[str, Any]) -> tuple[Any, ...]:
    """Return hidden, weight, ids, bias, temperature, ignore_index and cap."""
    torch.manual_seed(1)
    rows, vocab, size, dtype = (call[name] for name in ("rows", "vocab", "size", "dtype"))
    hidden = laid_out(torch.randn(rows, size).to(dtype), call["layout"])
    # Of equal rows of the weight no gradient is left.
    weight = laid_out(torch.randn(vocab, size).to(dtype), "odd" if call["layout"] == "expanded" else call["layout"])
    ids, ignored = torch.randint(vocab, (rows,)), call.get("ignored")
    if ignored is not None:
        ids[rows // 3 : rows // 3 + call.get("masked", 1)] = ignored
    ids = ids.repeat_interleave(2)[::2] if call["ids"] == "apart" else ids.to(call["ids"])
    bias = torch.randn(2 * vocab).to(dtype)[::2] if "bias" in call else None
    bias = bias.contiguous() if call.get("bias") == "row" else bias
    scale = torch.rand(2 * rows) + 0.5
    scale = scale[::2] if call["scale"] == "apart" else scale[:rows]
    scale = scale if isinstance(call["scale"], str) else torch.tensor(0.7)
    cap = torch.tensor(call["cap"], dtype=torch.float64) if "cap" in call else None
    return hidden, weight, ids, bias, scale, ignored, cap


def upstream_of(how: str, rows: int) -> list[torch.Tensor | None]:
    if how == "expanded":
        return [torch.tensor(value).expand(rows) for value in (0.5, -2.0, 3.0)]
    grads = [torch.randn(2 * rows)[::2] if how == "apart" else torch.randn(rows) for _ in range(3)]
    return [
        grad if how in ("all", "apart", name) else None
        for grad, name in zip(grads, ("logp", "lse", "entropy"), strict=True)
    ]


def close(found: torch.Tensor, gold: torch.Tensor) -> None:
    assert found.shape == gold.shape
    assert not found.isnan().any()
    assert (found.double() - gold).abs().max() <= 1e-2 * gold.abs().max() + 1e-6


def hold(call: dict[str, Any], backend: Any) -> None:
    """Hold forward and backward of one call to the definition."""
    hidden, weight, ids, bias, scale, ignored, _ = inputs = drawn(call)
    grads, needed = (
        upstream_of(call.get("grads", "all"), call["rows"]),
        call.get("needed", [True, True, bias is not None]),
    )
    leaves = [None if x is None else x.double().detach().requires_grad_() for x in (hidden, weight, bias)]
    z = leaves[0] @ leaves[1].t() + (0.0 if leaves[2] is None else leaves[2])
    if "cap" in call:
        z = call["cap"][0] * (z * call["cap"][1]).tanh()
    logs = (z / (scale[:, None] if scale.ndim else scale)).log_softmax(-1)
    lse = (z / (scale[:, None] if scale.ndim else scale)).logsumexp(-1)
    keep = torch.ones_like(ids, dtype=torch.bool) if ignored is None else ids != ignored
    gold = (logs.gather(1, ids.long().clamp(0)[:, None])[:, 0], lse, -(logs.exp() * logs).sum(-1))
    gold, top = [torch.where(keep, value, 0.0) for value in gold], z.amax(-1)
    norm = torch.where(keep, torch.stack((top, lse - top / scale)), 0.0).t()
    saved_mib = call.get("saved", 0)
    *stats, kept = backend.forward_stats(*inputs, saved_mib)
    *alone, again = backend.forward(*inputs, saved_mib)
    for found, expected in zip(stats, (*gold, norm), strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-3, rtol=1e-4)
    for found, expected in zip(alone, (stats[0], stats[3]), strict=True):
        assert torch.equal(found, expected)
    assert kept.shape == again.shape == (call["rows"], KEPT.get(saved_mib, 0))
    kept = kept if saved_mib else None
    sum((value * grad).sum() for value, grad in zip(gold, grads, strict=True) if grad is not None).backward()
    saved = (stats[3], None if grads[2] is None else stats[2], kept, *grads, 0, call["vocab"], 1, False, 1, needed)
    saved = *saved, call.get("join")
    hold_shards(inputs, stats, grads, leaves, backend, saved_mib)
    found = list(backend.backward(*inputs, *saved))
    for name, value, leaf, wanted in zip(("hidden", "weight", "bias"), found, leaves, needed, strict=True):
        assert bool(value.numel()) == bool(wanted), name
        if wanted:
            close(value, leaf.grad)
    if "main_grad" in call:
        total = torch.randn(weight.shape)
        continued = total.double() + leaves[1].grad
        backend.backward_main_grad(*inputs, *saved, total)
        close(total, continued)


def hold_shards(
    inputs: tuple[Any, ...],
    stats: Any,
    grads: list[torch.Tensor | None],
    leaves: list[Any],
    backend: Any,
    saved_mib: int,
) -> None:
    """Hold both parts of the forward pass over shards to the whole, and backward on the shards to the definition."""
    hidden, weight, ids, bias, scale, ignored, cap = inputs
    vocab, entropy = len(weight), bias is not None
    for ranks in (2, 8):
        bounds, slots = vocab_shards(vocab, ranks), vocabulary.slots(vocab, ranks)
        shards = [
            (hidden, weight[start:stop], ids, None if bias is None else bias[start:stop], scale, ignored, cap)
            for start, stop in bounds
        ]
        packed, kept = zip(
            *(
                backend.states(*shard, start, slots, entropy, saved_mib)
                for shard, (start, _) in zip(shards, bounds, strict=True)
            ),
            strict=True,
        )
        found = backend.finish(torch.stack(packed), ids, scale, ignored, vocab, entropy)
        for value, whole, wanted in zip(found, stats, (True, entropy, entropy, True), strict=True):
            assert bool(value.numel()) == wanted
            assert not wanted or torch.allclose(value, whole, atol=1e-5, rtol=1e-5)
    saved = stats[3], None if grads[2] is None else stats[2]
    needed = [True, True, bias is not None]
    parts = [
        backend.backward(*shard, *saved, logits, *grads, start, vocab, 8, True, 1, needed)
        for shard, logits, (start, _) in zip(shards, kept, bounds, strict=True)
    ]
    close(sum(part[0] for part in parts), leaves[0].grad)
    close(torch.cat([part[1] for part in parts]), leaves[1].grad)
    if bias is not None:
        close(torch.cat([part[2] for part in parts]), leaves[2].grad)


def hold_all(plant: Plant = nullcontext) -> None:
    """Hold every call, rows and columns cut into blocks and pieces."""
    with plant():
        blocks = importlib.import_module("rl_kernels.linear_logp.blocks")
        backend = importlib.import_module(f"{PACKAGE}.backend")
        widths = set()
        for call in CALLS:
            recorder = Recorder(STAND_INS, processors=PROCESSORS)
            least = {"LEAST_PIECE": 1024, "LEAST_HEIGHT": 128}
            with (
                patch.multiple(blocks, **least),
                patch.object(backend, "MOST_ROWS", 384),
                recorder.watching(*WATCHED),
                poisoned_empty(),
            ):
                hold({**CALL, **call}, backend)
                assert {launch.program for launch in recorder.launches} <= set(backend.programs("sm_90a"))
            formed = [launch for launch in recorder.launches if launch.entry == "states"]
            # What is kept for each row must have a bound.
            assert all(launch["rows"] <= 384 for launch in formed)
            widths |= {launch["blocks"] for launch in formed}
        assert widths == {1, 4}


def test_kernels_are_launched_with_what_the_shapes_imply() -> None:
    hold_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        hold_all(partial(planted, MODULES, bug))
