"""The host side of the CUDA C++ backend, with kernels that a few lines of PyTorch stand for; planted bugs show."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import lying, poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder, strided
from rl_kernels.core.testing.planted import Bug, planted

MODULES = ("rl_kernels.fused_logp.rows", "rl_kernels.fused_logp.backends.cuda.backend")
BUGS = (
    Bug("temperature missing", "(None, scale)", "(None, 1.0)"),
    Bug("upstream gradients exchanged", "entropy, grad_logp, grad_lse", "entropy, grad_lse, grad_logp"),
    Bug("last columns have no gradient", "-(-vocab // (threads * COLUMNS))", "max(vocab // (threads * COLUMNS), 1)"),
    Bug("strides in elements", "* logits.itemsize for stride", "for stride"),
    Bug("no room for the states of a row", "shared=units * STATE", "shared=STATE"),
    Bug("norm in the dtype of logits", "(count, 2), dtype=torch.float32", "(count, 2), dtype=logits.dtype"),
)
HOST = "rl_kernels.fused_logp.backends.cuda.backend"
SEGMENT, STEP, STATE = 32768, 1024, 12
"""As in fused_logp.cuh."""
DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
FAILURES = (AssertionError, RuntimeError)


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
    return x, active, number.double()


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
    shifted = z - top.gather(1, place)
    total = torch.zeros_like(top).index_add(1, units, shifted.exp())
    weighted = torch.zeros_like(top).index_add(1, units, shifted.exp() * shifted)
    state = torch.stack((top.t(), total.t(), weighted.t()), 1)
    parts.copy_(torch.where(active, state, torch.nan))


def merge_parts(launch: Launch) -> None:
    rows = launch["rows"]
    assert launch.block == 256
    assert launch.grid[0] * 8 - 8 < rows <= launch.grid[0] * 8
    tops, totals, weighted = launch["parts"].double().unbind(1)
    top = tops.amax(0)
    scale = (tops - top).exp()
    total = (totals * scale).sum(0)
    write(launch, top, total, ((weighted + totals * (tops - top)) * scale).sum(0))


def forward_rows(launch: Launch) -> None:
    rows = launch["rows"]
    units = len(unit_of(torch.arange(launch["vocab"])).unique())
    assert launch.grid[0] == rows
    assert launch.block <= 256
    assert launch.shared == units * STATE
    x, _, temperature = inputs(launch, rows)
    z = x / temperature[:, None]
    top = z.amax(1)
    power = (z - top[:, None]).exp()
    write(launch, top, power.sum(1), (power * (z - top[:, None])).sum(1))


def write(launch: Launch, top: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor) -> None:
    x, active, temperature = inputs(launch, launch["rows"])
    chosen = x.gather(1, launch["ids"].clamp(0, x.shape[1] - 1)[:, None])[:, 0] / temperature
    lse = top + total.log()
    results = {"logp": chosen - lse, "norm": torch.stack((top * temperature, total.log()))}
    if launch.constants["ENTROPY"]:
        results |= {"lse": lse, "entropy": total.log() - weighted / total}
    for name, value in results.items():
        launch[name].copy_(torch.where(active, value, 0.0).t())


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
    z, zero = x / temperature[:, None], torch.zeros(rows, 1)

    def upstream(name: str) -> torch.Tensor:
        return zero if launch[name] is None else launch[name][:, None].double()

    assert (launch["grad_entropy"] is not None) == launch.constants["ENTROPY"]
    top, log_total = launch["norm"].double().split(1, 1)
    log_p = z - top / temperature[:, None] - log_total
    p = log_p.exp()
    chosen = launch["ids"][:, None] == torch.arange(vocab)
    found = upstream("grad_logp") * (chosen.double() - p) + upstream("grad_lse") * p
    if launch.constants["ENTROPY"]:
        found -= upstream("grad_entropy") * p * (log_p + launch["entropy"][:, None])
    found = torch.where(active[:, None], found / temperature[:, None], 0.0)
    out = matrix(launch, "out", "out_row_stride", "out_column_stride", rows)
    out[:, :computed].copy_(found[:, :computed])


STAND_INS = {one.__name__: one for one in (forward_parts, merge_parts, forward_rows, backward)}
FEW, MANY = {"SPLIT_BELOW": 2048}, {"SPLIT_BELOW": 1}
CALLS: tuple[dict[str, Any], ...] = (
    {"shape": (1, 1)},
    {"shape": (3, 7), "dtype": torch.float32, "layout": "apart", "ignored": 0, "scale": "rows"},
    {"shape": (5, 1024), "layout": "column", "indices": True, "upstream": "expanded"},
    {"shape": (9, 1025), "layout": "odd", "ids": torch.int32, "scale": "apart", "upstream": "apart"},
    {"shape": (4, 16400), "dtype": torch.float16, "ignored": -100, "pitch": 16407},
    {"shape": (16, 16384), "limits": MANY, "upstream": "logp"},
    {"shape": (5, 16385), "layout": "apart", "limits": MANY, "ids": "apart"},
    {"shape": (9, 16383), "layout": "odd", "limits": MANY, "upstream": "expanded", "ids": "apart"},
    {"shape": (7, 40000), "dtype": torch.float32, "layout": "column", "indices": True, "ignored": -1},
    {"shape": (4, 65536 + 8), "limits": MANY, "scale": "rows", "upstream": "lse"},
    {"shape": (3, 16385), "dtype": torch.float32, "limits": MANY, "upstream": "entropy"},
    {"shape": (3, 2 * 32768 + 3), "dtype": torch.float32, "limits": {"SPLIT_BELOW": 1, "MOST_UNITS": 16}},
    {"shape": (2, 2048), "limits": MANY, "layout": "expanded"},
)
CALL = {"dtype": torch.bfloat16, "layout": "row", "ids": torch.int64, "scale": 0.7, "limits": FEW, "upstream": "all"}


def laid_out(x: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    if call["layout"] == "expanded":
        return x[:1].expand(x.shape)
    if "pitch" in call:
        return x.new_full((len(x), call["pitch"]), 1e4)[:, : x.shape[1]].copy_(x)
    return lying(x, call["layout"])


def upstreams(how: str, rows: int) -> list[torch.Tensor | None]:
    names = ("logp", "lse", "entropy")
    if how == "expanded":
        return [torch.tensor(value).expand(rows) for value in (0.5, -2.0, 3.0)]
    grads = [torch.randn(2 * rows)[::2] if how == "apart" else torch.randn(rows) for _ in names]
    return [grad if how in ("all", "apart", name) else None for grad, name in zip(grads, names, strict=True)]


def constants(file: str, size: int) -> dict[str, int]:
    """Stand for what was tuned: no two alike."""
    return {"BLOCKS": size + len(file)}


def hold_calls() -> None:
    """Hold the host side to what every call implies."""
    module = importlib.import_module(HOST)
    for given in CALLS:
        call = {**CALL, **given}
        torch.manual_seed(1)
        rows, vocab = call["shape"]
        x = laid_out(torch.randn(rows, vocab).to(call["dtype"]), call)
        ids = torch.randint(vocab, (rows,))
        ids = ids.repeat_interleave(2)[::2] if call["ids"] == "apart" else ids.to(call["ids"])
        ignored = call.get("ignored")
        if ignored is not None:
            ids[rows // 2] = ignored
        scale = torch.tensor(call["scale"]) if isinstance(call["scale"], float) else torch.rand(rows) + 0.5
        if call["scale"] == "apart":
            scale = scale.repeat_interleave(2)[::2]
        indices = torch.tensor([0, rows - 1, 0]) if "indices" in call else None
        recorder = Recorder(STAND_INS)
        # Not from the cache, nor into it.
        tuned = {"constants": constants, "program": module.program.__wrapped__}
        with patch.multiple(module, **tuned, **call["limits"]), recorder.watching(HOST), poisoned_empty():
            compare(module, x, (ids, scale, ignored, indices), upstreams(call["upstream"], rows))
            compiled = {*module.programs("sm_90")}
        assert {launch.program for launch in recorder.launches} <= compiled


def compare(host: Any, x: torch.Tensor, options: tuple[Any, ...], grads: list[torch.Tensor | None]) -> None:
    ids, scale, ignored, indices = options
    rows = len(x)
    active = torch.ones(rows, dtype=torch.bool) if ignored is None else ids != ignored
    if indices is not None:
        active &= torch.zeros(rows, dtype=torch.bool).index_fill(0, indices, True)
    z = x.double().requires_grad_()
    logs = (z / (scale[:, None] if scale.ndim else scale)).log_softmax(-1)
    lse = (z / (scale[:, None] if scale.ndim else scale)).logsumexp(-1)
    top = z.amax(-1)
    gold = [logs.gather(1, ids.long().clamp(0)[:, None])[:, 0], lse, -(logs.exp() * logs).sum(-1)]
    gold = [torch.where(active, value, 0.0) for value in gold]
    norm = torch.where(active, torch.stack((top, lse - top / scale)), 0.0).t()
    stats = host.forward_stats(x, ids, scale, ignored, indices)
    results = (*stats, *host.forward(x, ids, scale, ignored, indices))
    for found, expected in zip(results, (*gold, norm, gold[0], norm), strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-4), (x.shape, found, expected)
    sum((value * grad.double()).sum() for value, grad in zip(gold, grads, strict=True) if grad is not None).backward()
    expected = z.grad.to(x.dtype)
    entropy = stats[2] if grads[2] is not None else None
    found = host.backward(x, ids, scale, ignored, indices, stats[3], entropy, *grads)
    assert torch.allclose(found.double(), expected.double(), rtol=2e-2, atol=1e-5), (x.shape, "gradient")
    if x.stride(0) or rows == 1:
        host.backward_inplace(x, ids, scale, ignored, indices, stats[3], entropy, *grads)
        assert torch.equal(x.contiguous(), found)


def hold_choices() -> None:
    """Which kernels a size takes, at the real limits: rows of one storage that overlap stand for many."""
    module = importlib.import_module(HOST)
    limit = 32 * SEGMENT
    for rows in (1, 2047, 2048, 100_000):
        for vocab in (1, STEP, STEP + 1, limit, limit + 1):
            x = torch.zeros(vocab, dtype=torch.bfloat16).as_strided((rows, vocab), (0, 1))
            recorder = Recorder()
            with recorder.watching(HOST):
                module.forward(x, torch.zeros(rows, dtype=torch.int64), torch.ones(()), None, None)
            split = vocab > limit or (vocab > STEP and rows < 2048)
            expected = ["forward_parts", "merge_parts"] if split else ["forward_rows"]
            assert [launch.entry for launch in recorder.launches] == expected, (rows, vocab)


def hold_all() -> None:
    hold_calls()
    hold_choices()


def test_kernels_are_launched_with_what_the_shapes_imply() -> None:
    hold_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises(FAILURES):
        hold_all()
