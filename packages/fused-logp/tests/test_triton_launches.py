"""The host side of the Triton backend without Triton: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.logp_launches import logits_gradient, merged, state, write_statistics
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder
from rl_kernels.fused_logp.spec.raw import check_against_reference

BACKEND = "rl_kernels.fused_logp.backends.triton.backend"
MODULES = ("rl_kernels.fused_logp.rows", "rl_kernels.fused_logp.backends.triton.kernels", BACKEND)
BUGS = (
    Bug("upstream gradients exchanged", "contiguous() for grad in grads]", "contiguous() for grad in grads[::-1]]"),
    Bug("segments rounded down", "segments = ceil_div(vocab, kernels", "segments = max(1, vocab // kernels"),
    Bug("strided ids read as if contiguous", "target_ids.contiguous()", "target_ids"),
)
SEGMENT = 8192
Plant = Callable[[], AbstractContextManager[None]]


def inputs(launch: TritonLaunch, rows: int, column_stride: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits after temperature, which rows are active, and temperatures."""
    base = launch["logits"]
    x = base.as_strided((rows, launch["V"]), (launch["row_stride"], column_stride), base.storage_offset()).double()
    assert launch["ids"].shape == (rows,)
    assert launch["ids"].is_contiguous()
    active = torch.ones(rows, dtype=torch.bool)
    if launch["HAS_ROWS"]:
        assert (launch["marks"].shape, launch["marks"].dtype) == ((rows,), torch.int8)
        active &= launch["marks"] != 0
    if launch["HAS_IGNORED"]:
        active &= launch["ids"] != launch["ignore_index"]
    if not launch["PER_ROW"]:
        assert isinstance(launch["temperature"], float)
        return x / launch["temperature"], active, torch.full((rows,), launch["temperature"]).double()
    assert launch["temperature"].shape == (rows,)
    assert launch["temperature"].is_contiguous()
    return x / launch["temperature"][:, None], active, launch["temperature"].double()


def check_wide(launch: TritonLaunch) -> None:
    """How a row is read follows V alone; wide loads begin at multiples of 16 bytes."""
    assert launch["WIDE"] == (launch["V"] % 16 == 0)
    if launch["WIDE"]:
        assert launch["logits"].data_ptr() % 16 == 0
        assert launch["row_stride"] * launch["logits"].itemsize % 16 == 0


def write(launch: TritonLaunch, rows: int, found: torch.Tensor) -> None:
    z, active, temperature = inputs(launch, rows)
    chosen = z.gather(1, launch["ids"].long().clamp(0, z.shape[1] - 1)[:, None])[:, 0] * temperature
    write_statistics(launch, found, chosen, temperature, active, entropy=launch["ENTROPY"])


def forward_rows(launch: TritonLaunch) -> None:
    check_wide(launch)
    rows = launch.grid[0]
    write(launch, rows, state(inputs(launch, rows)[0]))


def forward_segments(launch: TritonLaunch) -> None:
    check_wide(launch)
    rows, segments = launch["count"], launch.grid[1]
    assert launch.grid[0] == rows
    assert (launch["parts"].shape, launch["parts"].dtype) == ((-(-launch["V"] // SEGMENT), 3, rows), torch.float32)
    for part, z in list(enumerate(inputs(launch, rows)[0].split(SEGMENT, 1)))[:segments]:
        launch["parts"][part].copy_(state(z))


def forward_merge(launch: TritonLaunch) -> None:
    rows = launch["count"]
    assert launch.grid[0] * 32 - 32 < rows <= launch.grid[0] * 32
    assert launch["segments"] == len(launch["parts"])
    write(launch, rows, merged(launch["parts"]))


def backward(launch: TritonLaunch) -> None:
    rows, chunks, vocab = *launch.grid[:2], launch["V"]
    assert (chunks - 1) * launch["WIDTH"] < vocab <= chunks * launch["WIDTH"]
    assert launch["WIDTH"] & (launch["WIDTH"] - 1) == 0
    strides = launch["column_stride"], launch["out_column_stride"]
    assert launch["UNIT"] == (strides == (1, 1))
    z, active, temperature = inputs(launch, rows, strides[0])

    flags = {"grad_logp": "HAS_LOGP", "grad_logsumexp": "HAS_LSE", "grad_entropy": "HAS_ENTROPY"}
    upstream = [launch[name] if launch[flag] else None for name, flag in flags.items()]
    entropy = launch["entropies"] if launch["HAS_ENTROPY"] else None
    for value in (*upstream, entropy):
        assert value is None or (value.shape == (rows,) and value.is_contiguous())
    assert launch["norm"].shape == (rows, 2)
    assert launch["norm"].is_contiguous()
    chosen = launch["ids"][:, None] == torch.arange(vocab)
    found = logits_gradient(z, temperature, launch["norm"], chosen, upstream, entropy)
    base = launch["out"]
    out = base.as_strided((rows, vocab), (launch["out_row_stride"], strides[1]), base.storage_offset())
    out.copy_(torch.where(active[:, None], found, 0.0))


STAND_INS = {one.__name__: one for one in (forward_rows, forward_segments, forward_merge, backward)}
CALL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "row"}
CALLS: tuple[dict[str, Any], ...] = (
    dict(rows=1, vocab=1),
    dict(rows=5, vocab=4096, layout="odd", indices=True, upstream="expanded"),
    dict(rows=5, vocab=4097, layout="apart", ignored=0, scale="rows"),
    dict(rows=33, vocab=8193, layout="column", scale="apart", ids="apart", upstream="lse"),
    dict(rows=65, vocab=2 * 8192, dtype=torch.float32, layout=(8, 0), ignored=-100, upstream="entropy"),
    dict(rows=1, vocab=3 * 8192 + 5, layout=(3, 1), ids=torch.int32, upstream="apart", indices=True),
    dict(rows=3, vocab=1024, layout=(16, 1), upstream="logp"),
    dict(rows=3, vocab=1024, layout=(4, 0)),
    dict(rows=2050, vocab=1, scale="rows"),
    dict(rows=3, vocab=8200, many=True),
)


def check_all(plant: Plant = nullcontext) -> None:
    for call in CALLS:
        recorder = TritonRecorder(STAND_INS)
        with recorder.pretended(), plant(), poisoned_empty():
            backend = importlib.import_module(BACKEND)
            with patch.object(backend, "SPLIT_BELOW", 1 if "many" in call else 2048):
                check_against_reference({**CALL, **call}, backend)
        names = {launch.name for launch in recorder.launches} - {"backward"}
        whole = "many" in call or call["vocab"] <= SEGMENT
        assert names == ({"forward_rows"} if whole else {"forward_segments", "forward_merge"})


def test_launches_match_the_shapes() -> None:
    check_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_all(partial(planted, MODULES, bug))
