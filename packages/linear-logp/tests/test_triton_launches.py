"""The host side of the Triton backend without Triton: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import lying, poisoned_empty
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import Descriptor, TritonLaunch, TritonRecorder
from rl_kernels.core.testing.triton_matmul import matmul, operand
from rl_kernels.linear_logp import vocab_shards, vocabulary

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in (
        *("vocabulary", "inputs", "packing", "tree", "sums", "backward"),
        *("backends.triton.kernels", "backends.triton.tiles"),
        *("blocks", "backends.triton.backward", "backends.triton.backend"),
    )
)
MODULES = ("rl_kernels.core.triton_lib.softcap", *MODULES)
BUGS = (
    Bug(
        "hidden gradient added to uninitialised memory",
        "weight, out, continues=continues",
        "weight, out, continues=True",
    ),
    Bug("strided temperatures read as if contiguous", "temperature.contiguous()", "temperature"),
    Bug(
        "last rows are not finished", "(ceil_div(count, kernels.ROWS.value),)", "(max(count // kernels.ROWS.value, 1),)"
    ),
    Bug("gradient counted from column 0", "block.start,\n", "0,\n"),
)
BLOCK, UNIT, ROWS = 256, 1024, 32
FAILURES = (AssertionError, RuntimeError)
Plant = Callable[[], AbstractContextManager[None]]


def logits(launch: TritonLaunch) -> torch.Tensor:
    """Return all logits after temperature."""
    n, v, d = launch["N"], launch["V"], launch["D"]
    hidden = operand(launch["hidden"], launch["HIDDEN"], (n, d), "hidden", launch, launch["BLOCK_M"])
    weight = operand(launch["weight"], launch["WEIGHT"], (v, d), "weight", launch, BLOCK)
    assert launch["BLOCK_K"] % 16 == 0
    assert hidden.dtype != torch.float32 or launch["BLOCK_K"] == 16
    z = capped(launch, hidden.double() @ weight.double().t() + bias_of(launch))
    return z / temperature(launch, n)[:, None]


def capped(launch: TritonLaunch, z: torch.Tensor) -> torch.Tensor:
    return launch["cap"] * (z * launch["rate"]).tanh() if launch["CAPPED"] else z


def bias_of(launch: TritonLaunch) -> torch.Tensor | float:
    if not launch["HAS_BIAS"]:
        return 0.0
    return launch["bias"].as_strided((launch["V"],), (launch["bias_stride"],), launch["bias"].storage_offset()).double()


def temperature(launch: TritonLaunch, rows: int) -> torch.Tensor:
    value = launch["temperature"]
    if not launch["PER_ROW"]:
        assert isinstance(value, float)
        return torch.full((rows,), value).double()
    return dense(value, rows).double()


def dense(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """A pointer without strides of its own."""
    assert x.shape == shape
    assert x.is_contiguous()
    return x


def state(z: torch.Tensor) -> torch.Tensor:
    top = z.amax(1)
    shifted = z - top[:, None]
    return torch.stack((top, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1)))


def merged(parts: torch.Tensor) -> torch.Tensor:
    tops, totals, weighted = parts.double().unbind(1)
    top = tops.amax(0)
    scale = (tops - top).exp()
    return torch.stack((top, (totals * scale).sum(0), ((weighted + totals * (tops - top)) * scale).sum(0)))


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
        x = logits(launch) * temperature(launch, n)[:, None]
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
    top, total, weighted = merged(dense(launch["parts"], launch["units"], 3, n))
    lse, number = top + total.log(), temperature(launch, n)
    results = {
        "logp": dense(launch["chosen"], n) / number - lse,
        "norm": torch.stack((top * number, total.log())),
    }
    if launch["ENTROPY"]:
        results |= {"lse": lse, "entropy": total.log() - weighted / total}
    for name, value in results.items():
        ignored = (ids == launch["ignore_index"]) & launch["HAS_IGNORED"]
        dense(launch[name], *value.t().shape).copy_(torch.where(ignored, 0.0, value).t())


def dlogits(launch: TritonLaunch) -> None:
    n, begin, width, ids = launch["N"], launch["begin"], launch["width"], dense(launch["ids"], launch["N"])
    tiles = -(-n // launch["BLOCK_M"]) * -(-width // BLOCK)
    assert launch.grid[0] == (min(tiles, 2) if launch["PERSISTENT"] else tiles)
    top, log_total = dense(launch["norm"], n, 2).double().split(1, 1)
    z = logits(launch)[:, begin : begin + width]
    if launch["KEPT"]:
        assert launch["BLOCK_M"] <= 32
        assert not launch["PERSISTENT"]
        assert not launch["DBIAS"]
        assert launch["kept"].shape == (n, width)
        assert launch["kept"].stride() == (launch["kept_row"], 1)
        z = launch["kept"].double() / temperature(launch, n)[:, None]
    d = z - top / temperature(launch, n)[:, None] - log_total

    def upstream(name: str, flag: str) -> torch.Tensor:
        return dense(launch[name], n).double()[:, None] if launch[flag] else torch.zeros(n, 1)

    first = launch["start"] + begin
    chosen = (ids[:, None] == torch.arange(first, first + width)).double()
    found = upstream("grad_logp", "HAS_LOGP") * (chosen - d.exp()) + upstream("grad_logsumexp", "HAS_LSE") * d.exp()
    if launch["HAS_ENTROPY"]:
        entropy = dense(launch["entropies"], n).double()[:, None]
        found -= upstream("grad_entropy", "HAS_ENTROPY") * d.exp() * (d + entropy)
    found = found / temperature(launch, n)[:, None]
    if launch["CAPPED"]:
        y = z * temperature(launch, n)[:, None]
        found *= launch["cap"] * launch["rate"] * (1 - (y / launch["cap"]).square())
    found = torch.where(((ids < 0) | (ids >= launch["vocab"]))[:, None], torch.nan, found)
    if launch["HAS_IGNORED"]:
        found = torch.where((ids != launch["ignore_index"])[:, None], found, 0.0)
    dz = launch["dz"]
    assert isinstance(dz, Descriptor) == launch["STORED"]
    if launch["STORED"]:
        assert dz.block_shape == [launch["BLOCK_M"], BLOCK]
        assert dz.base.shape == found.shape
        dz.base.copy_(found)
    else:
        dz.as_strided((n, width), (launch["dz_row"], 1), dz.storage_offset()).copy_(found)
    if launch["DBIAS"]:
        partial_sums = dense(launch["partial"], -(-n // launch["BLOCK_M"]), width)
        assert partial_sums.dtype == torch.float32
        for place, rows in zip(partial_sums, found.split(launch["BLOCK_M"]), strict=True):
            place.copy_(rows.sum(0))


def add_tiles(launch: TritonLaunch) -> None:
    width = launch["width"]
    assert launch.grid[0] * BLOCK - BLOCK < width <= launch.grid[0] * BLOCK
    dense(launch["out"], width).add_(dense(launch["partial"], launch["tiles"], width).sum(0))


STAND_INS = {one.__name__: one for one in (states, selected, merge_blocks, finish, dlogits, add_tiles)}
CALL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "row", "scale": 0.7, "grads": "all", "size": 24}
CALLS: tuple[dict[str, Any], ...] = (
    {"rows": 1, "vocab": 1, "size": 8, "bias": True},
    {"rows": 65, "vocab": 257, "layout": "odd", "ids": "apart", "grads": "expanded"},
    {"rows": 129, "vocab": 4097, "layout": "column", "scale": "rows", "ignored": 0, "bias": True, "grads": "logp"},
    {"rows": 300, "vocab": 4608, "layout": "apart", "scale": "apart", "ignored": -100, "bias": True, "grads": "apart"},
    {"rows": 130, "vocab": 600, "dtype": torch.float32, "size": 40, "bias": True, "grads": "entropy"},
    {"rows": 64, "vocab": 9000},
    {"rows": 700, "vocab": 1100, "bias": True, "scale": "rows"},
    {"rows": 10, "vocab": 300, "arch": "sm80"},
    {"rows": 70, "vocab": 9000, "dtype": torch.float32, "arch": "sm80", "ignored": 3},
    {"rows": 129, "vocab": 300, "arch": "sm80", "size": 8, "grads": "lse", "ids": torch.int32},
    {"rows": 65, "vocab": 4097, "cap": (5.0, 0.3), "bias": True, "scale": "rows", "ignored": 0},
    {"rows": 700, "vocab": 4608, "saved": 6, "scale": "rows", "ignored": -100, "cap": (5.0, 0.3)},
    {"rows": 130, "vocab": 2500, "saved": 9, "bias": True, "dtype": torch.float32},
    {"rows": 10, "vocab": 9000, "saved": 1, "arch": "sm80"},
    {"rows": 700, "vocab": 1100, "bias": True, "join": 256},
    {"rows": 300, "vocab": 600, "bias": True, "dtype": torch.float32, "join": 128, "arch": "sm80"},
)


def hold(call: dict[str, Any], backend: Any) -> tuple[Any, ...]:
    """Hold a call to the definition; return what ``hold_shards`` takes."""
    torch.manual_seed(1)
    rows, vocab, size, dtype = (call[name] for name in ("rows", "vocab", "size", "dtype"))
    hidden, weight = (lying(torch.randn(count, size).to(dtype), call["layout"]) for count in (rows, vocab))
    bias = torch.randn(2 * vocab).to(dtype)[::2] if "bias" in call else None
    ids, ignored, kind, how = torch.randint(vocab, (rows,)), call.get("ignored"), call.get("ids"), call["grads"]
    if ignored is not None:
        ids[rows // 3 : rows // 2] = ignored
    ids = ids.repeat_interleave(2)[::2] if kind == "apart" else ids.to(kind or torch.int64)
    scale = (torch.rand(2 * rows) + 0.5)[:: 2 if call["scale"] == "apart" else 1][:rows]
    scale = scale if isinstance(call["scale"], str) else torch.tensor(0.7)
    grads = [torch.randn(2 * rows)[::2] if how == "apart" else torch.randn(rows) for _ in range(3)]
    if how == "expanded":
        grads = [torch.tensor(value).expand(rows) for value in (0.5, -2.0, 3.0)]
    kept = ("all", "apart", "expanded")
    given = [g if how in (*kept, name) else None for g, name in zip(grads, ("logp", "lse", "entropy"), strict=True)]

    leaves = [None if x is None else x.double().detach().requires_grad_() for x in (hidden, weight, bias)]
    z = leaves[0] @ leaves[1].t() + (0.0 if bias is None else leaves[2])
    if "cap" in call:
        z = call["cap"][0] * (z * call["cap"][1]).tanh()
    z = z / (scale[:, None] if scale.ndim else scale)
    logs, lse = z.log_softmax(-1), z.logsumexp(-1)
    gold = (logs.gather(1, ids.long().clamp(0)[:, None])[:, 0], lse, -(logs.exp() * logs).sum(-1))
    keep = torch.ones(rows, dtype=torch.bool) if ignored is None else ids != ignored
    gold = [torch.where(keep, value, 0.0) for value in gold]
    top = (z * (scale[:, None] if scale.ndim else scale)).amax(-1)
    norm = torch.where(keep, torch.stack((top, lse - top / scale)), 0.0).t()
    cap = torch.tensor(call["cap"], dtype=torch.float64) if "cap" in call else None
    inputs = (hidden, weight, ids, bias, scale, ignored, cap)
    saved_mib = call.get("saved", 0)
    *stats, logits = backend.forward_stats(*inputs, saved_mib)
    *alone, _ = backend.forward(*inputs, saved_mib)
    for value, expected in zip((*stats, *alone), (*gold, norm, gold[0], norm), strict=True):
        assert torch.allclose(value.double(), expected, rtol=1e-4, atol=1e-3)
    sum((value * grad).sum() for value, grad in zip(gold, given, strict=True) if grad is not None).backward()
    saved = (stats[3], None if given[2] is None else stats[2], logits if saved_mib else None, *given)
    shard = (0, vocab, 1, False, 1, [True, True, bias is not None], call.get("join"))
    for found, leaf in zip(backend.backward(*inputs, *saved, *shard), leaves, strict=True):
        if leaf is not None:
            assert not found.isnan().any()
            assert (found.double() - leaf.grad).abs().max() <= 1e-2 * leaf.grad.abs().max() + 1e-6
    return inputs, stats, given, leaves, saved_mib


def hold_shards(
    inputs: tuple[Any, ...],
    stats: Any,
    given: list[torch.Tensor | None],
    leaves: list[Any],
    saved_mib: int,
    backend: Any,
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
    saved = stats[3], None if given[2] is None else stats[2]
    parts = [
        backend.backward(*shard, *saved, logits, *given, start, vocab, 8, True, 1, [True, True, bias is not None])
        for shard, logits, (start, _) in zip(shards, kept, bounds, strict=True)
    ]
    found = sum(part[0] for part in parts), *(torch.cat([part[place] for part in parts]) for place in (1, 2))
    for value, leaf in zip(found, leaves, strict=True):
        if leaf is not None:
            assert not value.isnan().any()
            assert (value.double() - leaf.grad).abs().max() <= 1e-2 * leaf.grad.abs().max() + 1e-6


def check_blocks(pieces: list[TritonLaunch]) -> None:
    """A block of rows ends at a multiple of every tile's height, or where the rows end."""
    for launch, after in pairwise(pieces):
        assert launch["begin"] != after["begin"] or launch["N"] % 128 == 0


def hold_all(plant: Plant = nullcontext) -> None:
    widths: set[int] = set()
    elsewhere: dict[torch.dtype, set[tuple[int, int]]] = {}
    for call in CALLS:
        recorder = TritonRecorder({**STAND_INS, "_matmul": matmul}, arch=call.get("arch", "sm90"))
        with recorder.pretended(), plant(), poisoned_empty():
            backend = importlib.import_module("rl_kernels.linear_logp.backends.triton.backend")
            blocks = importlib.import_module("rl_kernels.linear_logp.blocks")
            with patch.multiple(blocks, LEAST_PIECE=1024, LEAST_HEIGHT=128):
                held = hold({**CALL, **call}, backend)
                check_blocks([launch for launch in recorder.launches if launch.name == "dlogits"])
                hold_shards(*held, backend)
        formed = [launch for launch in recorder.launches if launch.name == "states"]
        pieces = [launch for launch in recorder.launches if launch.name == "dlogits"]
        widths |= {launch["width"] for launch in formed}
        dtype = call.get("dtype", torch.bfloat16)
        if recorder.arch == "sm90":
            # The width of a piece must not decide how its gradient is stored.
            assert all(launch["STORED"] == (dtype != torch.float32) for launch in pieces)
        else:
            # Logits that were kept are not formed again.
            again = [launch for launch in pieces if not launch["KEPT"]]
            cuts = {(launch["BLOCK_M"], launch["BLOCK_K"]) for launch in (*formed, *again)}
            elsewhere[dtype] = elsewhere.get(dtype, set()) | cuts
    # Elsewhere than on Hopper nobody has shown that bits follow no schedule.
    assert all(len(cuts) == 1 for cuts in elsewhere.values())
    assert widths == {BLOCK, UNIT}


def test_kernels_are_launched_with_what_the_shapes_imply() -> None:
    hold_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        hold_all(partial(planted, MODULES, bug))
