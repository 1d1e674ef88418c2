"""The host side of the CUDA C++ backend, with kernels that a few lines of PyTorch stand for; planted bugs show."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from rl_kernels.core.testing.host_tests import CudaHost
from rl_kernels.core.testing.launches import Launch, Recorder, strided
from rl_kernels.core.testing.logp_launches import (
    LEAST,
    below,
    logits_gradient,
    merged,
    state,
    write_statistics,
)
from rl_kernels.core.testing.planted import Bug
from rl_kernels.fused_logp.spec.raw import check_against_reference

SEGMENT, STEP, STATE = 32768, 1024, 12
"""As in fused_logp.cuh."""
DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}


def unit_of(column: torch.Tensor) -> torch.Tensor:
    """Return which state a column goes to: the eight of a segment take its steps in turn."""
    return column // SEGMENT * 8 + column // STEP % 8


def matrix(launch: Launch, name: str, row: str, column: str, rows: int) -> torch.Tensor:
    base = launch[name]
    assert base.dtype == DTYPES[launch.constants["DTYPE"]]
    return strided(base, (rows, launch["vocab"]), (launch[row], launch[column]))


def inputs(launch: Launch, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, which rows are active, and temperatures."""
    x = matrix(launch, "logits", "row_stride", "column_stride", rows).double()
    active, ids = torch.ones(rows, dtype=torch.bool), launch["ids"]
    assert ids.shape == (rows,)
    if launch["marks"] is not None:
        active &= launch["marks"] != 0
    if launch["has_ignored"]:
        active &= ids != launch["ignore_index"]
    temperatures = launch["temperatures"]
    number = torch.full((rows,), launch["temperature"]) if temperatures is None else temperatures
    assert number.shape == (rows,)
    is_below = below(x, number, launch["min_logits"] if launch.constants["MIN_LOGIT"] else None)
    return x.masked_fill(is_below, -torch.inf), active, number.double()


def forward_parts(launch: Launch) -> None:
    rows, parts = launch["rows"], launch["parts"]
    x, active, temperature = inputs(launch, rows)
    z, units = x / temperature[:, None], unit_of(torch.arange(launch["vocab"]))
    assert parts.shape == (len(units.unique()), 3, rows)
    warps = launch.grid[0] * launch.block // 32
    assert launch.block == 256
    assert warps - 8 < parts.shape[0] * rows <= warps
    place = units.expand_as(z)
    top = torch.full((rows, parts.shape[0]), -torch.inf, dtype=z.dtype).scatter_reduce(1, place, z, "amax")
    shifted = (z - top.gather(1, place).clamp(min=LEAST)).clamp(min=LEAST)
    total = torch.zeros_like(top).index_add(1, units, shifted.exp())
    weighted = torch.zeros_like(top).index_add(1, units, shifted.exp() * shifted)
    state = torch.stack((top.t(), total.t(), weighted.t()), 1)
    parts.copy_(torch.where(active, state, torch.nan))


def merge_parts(launch: Launch) -> None:
    rows = launch["rows"]
    assert launch.block == 256
    assert launch.grid[0] * 8 - 8 < rows <= launch.grid[0] * 8
    write(launch, merged(launch["parts"]))


def forward_rows(launch: Launch) -> None:
    rows = launch["rows"]
    units = len(unit_of(torch.arange(launch["vocab"])).unique())
    assert launch.grid[0] == rows
    assert launch.block <= 256
    assert launch.shared == units * STATE
    x, _, temperature = inputs(launch, rows)
    write(launch, state(x / temperature[:, None]))


def write(launch: Launch, found: torch.Tensor) -> None:
    x, active, temperature = inputs(launch, launch["rows"])
    chosen = x.gather(1, launch["ids"].clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    write_statistics(launch, found, chosen, temperature, active, entropy=launch.constants["ENTROPY"])


def find_kept(launch: Launch) -> None:
    """Numbers of rows that are not active are not read."""
    rows, kept, grad = launch["rows"], launch["kept"], launch["grad_logp"]
    assert kept.shape == (rows, 2)
    assert launch.block == 256
    assert launch.grid[0] * 256 - 256 < rows <= launch.grid[0] * 256
    x, active, temperature = inputs(launch, rows)
    chosen = x.gather(1, launch["ids"].clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    upstream = torch.zeros(rows) if grad is None else grad.where(chosen > -torch.inf, 0.0)
    found = torch.stack((launch["min_logits"] * temperature, upstream), 1)
    kept.copy_(torch.where(active[:, None], found, torch.nan))


def backward(launch: Launch) -> None:
    vocab, chunks, width = launch["vocab"], launch["chunks"], launch.block * 32
    rows, rest = divmod(launch.grid[0], chunks)
    assert not rest
    assert launch.block <= 512
    assert launch["norm"].shape == (rows, 2)
    # A chunk that begins beyond the row would have a negative width.
    assert (chunks - 1) * width < vocab
    computed = min(chunks * width, vocab)
    x, active, temperature = inputs(launch, rows)
    assert (launch["grad_entropy"] is not None) == launch.constants["ENTROPY"]
    upstream = [launch[name] for name in ("grad_logp", "grad_lse", "grad_entropy")]
    if launch.constants["MIN_LOGIT"]:
        least, upstream[0] = launch["kept"].t()
        assert torch.equal(x[active] > -torch.inf, x[active] >= least[active, None])
    chosen = launch["ids"][:, None] == torch.arange(vocab)
    entropy = launch["entropy"] if launch.constants["ENTROPY"] else None
    found = logits_gradient(x / temperature[:, None], temperature, launch["norm"], chosen, upstream, entropy)
    found = torch.where(active[:, None] & (x > -torch.inf), found, 0.0)
    out = matrix(launch, "out", "out_row_stride", "out_column_stride", rows)
    out[:, :computed].copy_(found[:, :computed])


FEW, MANY = {"SPLIT_BELOW": 2048}, {"SPLIT_BELOW": 1}


def constants(file: str, size: int) -> dict[str, int]:
    """Stand for what was tuned: no two alike."""
    return {"BLOCKS": size + len(file)}


class TestLaunches(CudaHost):
    modules = (
        *("rl_kernels.core.outputs", "rl_kernels.fused_logp.rows"),
        "rl_kernels.fused_logp.backends.cuda.backend",
    )
    bugs = (
        Bug("temperature missing", "else (0, scale)", "else (0, 1.0)"),
        Bug("upstream gradients exchanged", "norm, row_entropy, *grads)", "norm, row_entropy, *grads[::-1])"),
        Bug(
            "last columns have no gradient", "-(-vocab // (threads * COLUMNS))", "max(vocab // (threads * COLUMNS), 1)"
        ),
        Bug("strides in elements", "count, *(stride * logits.itemsize for", "count, *(stride for"),
        Bug("no room for the states of a row", "units * STATE)]", "STATE)]"),
        Bug("strided thresholds read as if contiguous", "else min_logit.contiguous()", "else min_logit"),
        Bug("last rows have no threshold", "-(-count // KEPT_THREADS)", "max(count // KEPT_THREADS, 1) - 1"),
        Bug("norm in the dtype of logits", "count, 2, dtype=torch.float32", "count, 2, dtype=like.dtype"),
    )
    stand_ins = {one.__name__: one for one in (forward_parts, merge_parts, forward_rows, find_kept, backward)}
    calls = (
        dict(rows=1, vocab=1),
        dict(rows=3, vocab=7, dtype=torch.float32, layout="apart", ignored=0, scale="rows"),
        dict(rows=5, vocab=1024, layout="column", indices=True, upstream="expanded"),
        dict(rows=9, vocab=1025, layout="odd", ids=torch.int32, scale="apart", upstream="apart"),
        dict(rows=4, vocab=16400, dtype=torch.float16, ignored=-100, layout=(7, 0)),
        dict(rows=16, vocab=16384, limits=MANY, upstream="logp"),
        dict(rows=5, vocab=16385, layout="apart", limits=MANY, ids="apart"),
        dict(rows=9, vocab=16383, layout="odd", limits=MANY, upstream="expanded", ids="apart"),
        dict(rows=7, vocab=40000, dtype=torch.float32, layout="column", indices=True, ignored=-1),
        dict(rows=4, vocab=65536 + 8, limits=MANY, scale="rows", upstream="lse"),
        dict(rows=3, vocab=16385, dtype=torch.float32, limits=MANY, upstream="entropy"),
        dict(rows=3, vocab=2 * 32768 + 3, dtype=torch.float32, limits={"SPLIT_BELOW": 1, "MOST_UNITS": 16}),
        dict(rows=2, vocab=2048, limits=MANY, layout="expanded"),
        dict(rows=5, vocab=2100, layout="odd", least="apart", scale="rows", ignored=0),
        dict(rows=4, vocab=40000, limits=MANY, least="rows", indices=True, upstream="expanded"),
        *(dict(rows=rows, columns=size) for rows in (1, 2047, 2048, 100_000) for size in (1, STEP, STEP + 1)),
        *(dict(rows=rows, columns=32 * SEGMENT + more) for rows in (1, 2048) for more in (0, 1)),
    )

    def recorder(self, call: dict[str, Any]) -> Recorder:
        return Recorder({} if "columns" in call else self.stand_ins)

    def check(self, call: dict[str, Any], backend: Any, recorder: Recorder) -> None:
        if "columns" in call:
            self.check_choice(call["rows"], call["columns"], backend, recorder)
            return
        # Not from the cache, nor into it.
        tuned = {"constants": constants, "program": backend.program.__wrapped__}
        with patch.multiple(backend, **tuned, **call.get("limits", FEW)):
            check_against_reference({"dtype": torch.bfloat16, "layout": "row", **call}, backend)
            compiled = {*backend.programs("sm_90")}
        assert {launch.program for launch in recorder.launches} <= compiled

    def check_choice(self, rows: int, vocab: int, backend: Any, recorder: Recorder) -> None:
        """Which kernels a size takes, at the real limits: rows of one storage that overlap stand for many."""
        x = torch.zeros(vocab, dtype=torch.bfloat16).as_strided((rows, vocab), (0, 1))
        backend.forward(x, torch.zeros(rows, dtype=torch.int64), torch.ones(()), None, None, None)
        split = vocab > 32 * SEGMENT or (vocab > STEP and rows < 2048)
        expected = ["forward_parts", "merge_parts"] if split else ["forward_rows"]
        assert [launch.entry for launch in recorder.launches] == expected
