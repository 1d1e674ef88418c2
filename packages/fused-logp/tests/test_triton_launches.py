"""The host side of the Triton backend without Triton: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

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
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder
from rl_kernels.fused_logp.spec.raw import check_against_reference

SEGMENT = 8192


def inputs(launch: TritonLaunch, rows: int, column_stride: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits after temperature, which rows are active, and temperatures."""
    base = launch["logits"]
    x = base.as_strided((rows, launch["V"]), (launch["row_stride"], column_stride), base.storage_offset()).double()
    active, ids = torch.ones(rows, dtype=torch.bool), dense(launch["ids"], rows)
    if launch["HAS_ROWS"]:
        assert launch["marks"].dtype == torch.int8
        active &= dense(launch["marks"], rows) != 0
    if launch["HAS_IGNORED"]:
        active &= ids != launch["ignore_index"]
    temperature = triton_temperature(launch, rows)
    return x / temperature[:, None], active, temperature


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
    upstream, entropy = triton_upstream(launch, rows)
    chosen = launch["ids"][:, None] == torch.arange(vocab)
    found = logits_gradient(z, temperature, dense(launch["norm"], rows, 2), chosen, upstream, entropy)
    base = launch["out"]
    out = base.as_strided((rows, vocab), (launch["out_row_stride"], strides[1]), base.storage_offset())
    out.copy_(torch.where(active[:, None], found, 0.0))


class TestLaunches(TritonHost):
    modules = (
        "rl_kernels.fused_logp.rows",
        *(f"rl_kernels.fused_logp.backends.triton.{name}" for name in ("kernels", "backend")),
    )
    bugs = (
        Bug("upstream gradients exchanged", "contiguous() for grad in grads]", "contiguous() for grad in grads[::-1]]"),
        Bug("segments rounded down", "segments = ceil_div(vocab, kernels", "segments = max(1, vocab // kernels"),
        Bug("strided ids read as if contiguous", "target_ids.contiguous()", "target_ids"),
    )
    stand_ins = {one.__name__: one for one in (forward_rows, forward_segments, forward_merge, backward)}
    calls = (
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

    def check(self, call: dict[str, Any], backend: Any, recorder: TritonRecorder) -> None:
        with patch.object(backend, "SPLIT_BELOW", 1 if "many" in call else 2048):
            check_against_reference({"dtype": torch.bfloat16, "layout": "row", **call}, backend)
        names = {launch.name for launch in recorder.launches} - {"backward"}
        whole = "many" in call or call["vocab"] <= SEGMENT
        assert names == ({"forward_rows"} if whole else {"forward_segments", "forward_merge"})
