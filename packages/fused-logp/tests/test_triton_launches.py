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

from rl_kernels.core.testing import lying, poisoned_empty
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder

MODULES = tuple(
    f"rl_kernels.fused_logp.{name}" for name in ("rows", "backends.triton.kernels", "backends.triton.backend")
)
BUGS = (
    Bug(
        "upstream gradients exchanged",
        "(grad_logp, grad_logsumexp, grad_entropy)",
        "(grad_logsumexp, grad_logp, grad_entropy)",
    ),
    Bug("segments rounded down", "segments = ceil_div(vocab, kernels", "segments = max(1, vocab // kernels"),
    Bug("strided ids read as if contiguous", "token_ids.contiguous()", "token_ids"),
)
BACKEND = "rl_kernels.fused_logp.backends.triton.backend"
SEGMENT = 8192
FAILURES = (AssertionError, RuntimeError)
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


def state(z: torch.Tensor) -> list[torch.Tensor]:
    top = z.amax(1)
    shifted = z - top[:, None]
    return [top, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1)]


def write(launch: TritonLaunch, rows: int, top: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor) -> None:
    z, active, temperature = inputs(launch, rows)
    lse = top + total.log()
    logp = z.gather(1, launch["ids"].long().clamp(0, z.shape[1] - 1)[:, None])[:, 0] - lse
    results = {"logp": logp, "norm": torch.stack((top * temperature, total.log()))}
    if launch["ENTROPY"]:
        results |= {"lse": lse, "entropy": total.log() - weighted / total}
    for name, value in results.items():
        assert launch[name].shape == value.t().shape
        assert launch[name].is_contiguous()
        launch[name].copy_(torch.where(active, value, 0.0).t())


def forward_rows(launch: TritonLaunch) -> None:
    check_wide(launch)
    rows = launch.grid[0]
    write(launch, rows, *state(inputs(launch, rows)[0]))


def forward_segments(launch: TritonLaunch) -> None:
    check_wide(launch)
    rows, segments = launch["count"], launch.grid[1]
    assert launch.grid[0] == rows
    assert (launch["parts"].shape, launch["parts"].dtype) == ((-(-launch["V"] // SEGMENT), 3, rows), torch.float32)
    for part, z in list(enumerate(inputs(launch, rows)[0].split(SEGMENT, 1)))[:segments]:
        launch["parts"][part].copy_(torch.stack(state(z)))


def forward_merge(launch: TritonLaunch) -> None:
    rows = launch["count"]
    assert launch.grid[0] * 32 - 32 < rows <= launch.grid[0] * 32
    assert launch["segments"] == len(launch["parts"])
    tops, totals, weighted = launch["parts"].double().unbind(1)
    top = tops.amax(0)
    scale = (tops - top).exp()
    write(launch, rows, top, (totals * scale).sum(0), ((weighted + totals * (tops - top)) * scale).sum(0))


def backward(launch: TritonLaunch) -> None:
    rows, chunks, vocab = *launch.grid[:2], launch["V"]
    assert (chunks - 1) * launch["WIDTH"] < vocab <= chunks * launch["WIDTH"]
    assert launch["WIDTH"] & (launch["WIDTH"] - 1) == 0
    strides = launch["column_stride"], launch["out_column_stride"]
    assert launch["UNIT"] == (strides == (1, 1))
    z, active, temperature = inputs(launch, rows, strides[0])

    def upstream(name: str) -> torch.Tensor:
        if not launch[{"grad_logp": "HAS_LOGP", "grad_logsumexp": "HAS_LSE", "grad_entropy": "HAS_ENTROPY"}[name]]:
            return torch.zeros(rows, 1)
        value = launch[name]
        assert value.shape == (rows,)
        assert value.is_contiguous()
        return value.double()[:, None]

    assert launch["norm"].shape == (rows, 2)
    assert launch["norm"].is_contiguous()
    top, log_total = launch["norm"].double().split(1, 1)
    d = z - top / temperature[:, None] - log_total
    chosen = (launch["ids"][:, None] == torch.arange(vocab)).double()
    found = upstream("grad_logp") * (chosen - d.exp()) + upstream("grad_logsumexp") * d.exp()
    if launch["HAS_ENTROPY"]:
        found -= upstream("grad_entropy") * d.exp() * (d + launch["entropies"].double()[:, None])
    base = launch["out"]
    out = base.as_strided((rows, vocab), (launch["out_row_stride"], strides[1]), base.storage_offset())
    out.copy_(torch.where(active[:, None], found / temperature[:, None], 0.0))


STAND_INS = {one.__name__: one for one in (forward_rows, forward_segments, forward_merge, backward)}
CALL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "row", "grads": "all", "scale": 0.7}
CALLS: tuple[dict[str, Any], ...] = (
    {"shape": (1, 1)},
    {"shape": (5, 4096), "layout": "odd", "indices": True, "grads": "expanded"},
    {"shape": (5, 4097), "layout": "apart", "ignored": 0, "scale": "rows"},
    {"shape": (33, 8193), "layout": "column", "scale": "apart", "ids": "apart", "grads": "lse"},
    {"shape": (65, 2 * 8192), "dtype": torch.float32, "layout": (8, 0), "ignored": -100, "grads": "entropy"},
    {"shape": (1, 3 * 8192 + 5), "layout": (3, 1), "ids": torch.int32, "grads": "apart", "indices": True},
    {"shape": (3, 1024), "layout": (16, 1), "grads": "logp"},
    {"shape": (3, 1024), "layout": (4, 0)},
    {"shape": (2050, 1), "scale": "rows"},
    {"shape": (3, 8200), "many": True},
)


def laid_out(x: torch.Tensor, layout: str | tuple[int, int]) -> torch.Tensor:
    if isinstance(layout, str):
        return lying(x, layout)
    more, first = layout
    return x.new_full((len(x), x.shape[1] + more), 1e4)[:, first : first + x.shape[1]].copy_(x)


def hold(call: dict[str, Any], backend: Any) -> None:
    torch.manual_seed(1)
    rows, vocab = call["shape"]
    x = laid_out(torch.randn(rows, vocab).to(call["dtype"]), call["layout"])
    ids, ignored, how = torch.randint(vocab, (rows,)), call.get("ignored"), call["grads"]
    if ignored is not None:
        ids[rows // 2] = ignored
    kind = call.get("ids", torch.int64)
    ids = ids.repeat_interleave(2)[::2] if kind == "apart" else ids.to(kind)
    scale = (torch.rand(2 * rows) + 0.5)[: 2 * rows : 2 if call["scale"] == "apart" else 1][:rows]
    scale = scale if isinstance(call["scale"], str) else torch.tensor(0.7)
    indices = torch.tensor([0, rows - 1, 0]) if "indices" in call else None
    grads = [torch.randn(2 * rows)[::2] if how == "apart" else torch.randn(rows) for _ in range(3)]
    if how == "expanded":
        grads = [torch.tensor(value).expand(rows) for value in (0.5, -2.0, 3.0)]
    kept = ("all", "apart", "expanded")
    given = [g if how in (*kept, name) else None for g, name in zip(grads, ("logp", "lse", "entropy"), strict=True)]

    active = torch.ones(rows, dtype=torch.bool) if ignored is None else ids != ignored
    if indices is not None:
        active &= torch.zeros(rows, dtype=torch.bool).index_fill(0, indices, True)
    leaf = x.double().requires_grad_()
    z = leaf / (scale[:, None] if scale.ndim else scale)
    logs, lse = z.log_softmax(-1), z.logsumexp(-1)
    gold = (logs.gather(1, ids.long().clamp(0)[:, None])[:, 0], lse, -(logs.exp() * logs).sum(-1))
    gold, top = [torch.where(active, value, 0.0) for value in gold], leaf.amax(-1)
    norm = torch.where(active, torch.stack((top, lse - top / scale)), 0.0).t()
    stats = backend.forward_stats(x, ids, scale, ignored, indices)
    found = (*stats, *backend.forward(x, ids, scale, ignored, indices))
    for value, expected in zip(found, (*gold, norm, gold[0], norm), strict=True):
        assert torch.allclose(value.double(), expected, atol=1e-4)
    sum((value * grad.double()).sum() for value, grad in zip(gold, given, strict=True) if grad is not None).backward()
    saved = (stats[3], stats[2] if given[2] is not None else None, *given)
    grad = backend.backward(x, ids, scale, ignored, indices, *saved)
    assert torch.allclose(grad.double(), leaf.grad, rtol=2e-2, atol=1e-5)
    backend.backward_inplace(x, ids, scale, ignored, indices, *saved)
    assert torch.equal(x, grad)


def hold_all(plant: Plant = nullcontext) -> None:
    for call in CALLS:
        recorder = TritonRecorder(STAND_INS)
        with recorder.pretended(), plant(), poisoned_empty():
            backend = importlib.import_module(BACKEND)
            with patch.object(backend, "SPLIT_BELOW", 1 if "many" in call else 2048):
                hold({**CALL, **call}, backend)
        names = {launch.name for launch in recorder.launches} - {"backward"}
        whole = "many" in call or call["shape"][1] <= SEGMENT
        assert names == ({"forward_rows"} if whole else {"forward_segments", "forward_merge"})


def test_kernels_are_launched_with_what_the_shapes_imply() -> None:
    hold_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        hold_all(partial(planted, MODULES, bug))
