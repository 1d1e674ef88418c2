"""The CUDA C++ kernels that draw tokens, built by a C++ compiler and run on the CPU, draw what native draws."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_kernels.core.cuda.signature import Signature
from rl_kernels.linear_logp import drawing
from rl_kernels.linear_logp.backends.cuda_sm90 import sampling
from rl_kernels.linear_logp.sampled import request_of
from rl_kernels.linear_logp.spec.drawing import KINDS, REQUESTS, given, per_row, uniform_of

SOURCES = Path(sampling.__file__).parent
RUN = """
#include "sampling_sm90.cu"
static Args args;
extern "C" int run(int collects, int rows, int parts, int threads, int listed, const Args* given, int size) {
    if (size != sizeof(Args) || threads != BLOCK || listed < LISTED) return 1;
    args = *given, gridDim = {rows, parts, 1};
    for (blockIdx.y = 0; blockIdx.y < parts; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x)
            run_block(BLOCK, collects ? +[] { collect(args); } : +[] { narrow(args); });
    return 0;
}
"""
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SMALL = {"LISTED = 4096": "LISTED = 16"}


def built(folder: Path, changes: dict[str, str]) -> Any:
    """Return the function that runs the kernels, compiled from changed sources."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    sizes, kernels = (SOURCES / name for name in ("sampling.cuh", "sampling_sm90.cu"))
    text = sizes.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / sizes.name).write_text(text, encoding="utf-8")
    shutil.copy(kernels, folder)
    (folder / "run.cpp").write_text(RUN, encoding="utf-8")
    include = Path(__file__).parent / "emulated"
    options = ("-std=c++17", "-O2", "-w", "-ffp-contract=off", "-fPIC", "-shared", f"-I{include}")
    subprocess.run([compiler, *options, "run.cpp", "-o", "run.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "run.so")).run


def draws(run: Any, monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """Let kernels be run on the CPU, cut as for a GPU of so many multiprocessors."""

    class Kernel:
        def __init__(self, _: Any, entry: str, form: str, __: Any) -> None:
            self.collects, self.form = entry == "collect", Signature(form).struct

        def start(self, grid: tuple[int, ...], block: int, shared: int, pdl: bool, numbers: list[Any]) -> None:
            packed = self.form.pack(*numbers)
            assert run(self.collects, *grid[:2], block, sampling.LISTED, packed, len(packed)) == 0

    monkeypatch.setattr(sampling, "kernel", Kernel)
    monkeypatch.setattr(sampling, "processors", lambda _: processors)


def check(vocab: int, step: int, rows: int = 4) -> None:
    """Compare tokens and thresholds with the definition's; of requests every ``step``-th."""
    draw = torch.Generator().manual_seed(1)
    wide = dict(top_k=torch.randint(vocab, (rows,), generator=draw), top_p=1 - torch.rand(rows, generator=draw) ** 2)
    for place, kind in enumerate(KINDS):
        logits = given(kind, rows, vocab)
        x = logits.logits.new_empty(rows, -(-vocab // 4) * 4)[:, :vocab].copy_(logits.logits)
        for request in (*REQUESTS[place % step :: step], per_row(rows), wide):
            filters = (request.get(name, off) for name, off in OFF.items())
            asked = request_of(x, logits.norm, *filters, uniform_of(rows), None, True)
            found, smallest = sampling.launches_of(x, asked)(x, logits.norm, asked)
            expected = drawing.draw(x, logits.norm, asked)
            assert torch.equal(found.ids, expected.ids)
            assert torch.equal(found.min_logit, expected.min_logit)
            assert torch.equal(found.temperature, expected.temperature)
            assert torch.equal(x >= smallest[:, None], x / found.temperature[:, None] >= found.min_logit[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, SMALL], ids=["as it is", "lists of 16"])
@pytest.mark.parametrize(("vocab", "processors", "step"), [(301, 1, 1), (17000, 132, 4)])
def test_cuda_draws_what_native_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], vocab: int, processors: int, step: int
) -> None:
    draws(built(tmp_path, changes), monkeypatch, processors)
    check(vocab, step)


def test_rows_without_a_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(built(tmp_path, {}), monkeypatch, 1)
    logits = given("normal", 4, 92)
    logits.norm[:3] = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [1.0, torch.nan]])
    asked = request_of(logits.logits, logits.norm, 1.0, 3, 0.5, 0.0, uniform_of(4), None, False)
    found, smallest = sampling.launches_of(logits.logits, asked)(logits.logits, logits.norm, asked)
    assert found.ids[:3].tolist() == [0, 0, 0]
    assert all(x[:3].isnan().all() and x[3].isfinite() for x in (found.min_logit, smallest))


def test_extreme_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few columns, with one finite entry, or equal across the threshold; the least and largest uniform."""
    draws(built(tmp_path, {}), monkeypatch, 1)
    for vocab in (1, 2, 3, 5, 1025):
        logits = torch.full((4, -(-vocab // 4) * 4), torch.nan)[:, :vocab]
        logits[0] = 0.5
        logits[1] = -torch.inf
        logits[1, -1] = -3e38
        logits[2:] = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)).round()
        logits[3, 0] = 3e38
        top = logits.amax(1)
        norm = torch.stack((top, (logits - top[:, None]).exp().sum(1).log()), 1)
        for u in (0.0, 1 - 2.0**-53):
            for filters in (1.0, 0, 5e-10, 0.0), (1.0, 0, 1 - 2.0**-24, 0.3), (2.0, 2, 0.7, 0.0), (1.0, 9, 0.999, 0.0):
                asked = request_of(logits, norm, *filters, torch.full((4,), u, dtype=torch.float64), None, True)
                found, _ = sampling.launches_of(logits, asked)(logits, norm, asked)
                expected = drawing.draw(logits, norm, asked)
                assert torch.equal(found.ids, expected.ids)
                assert torch.equal(found.min_logit, expected.min_logit)


def test_many_entries_just_below_the_k_th(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in its bucket, but top-p's share is of what top-k keeps."""
    run = built(tmp_path, {})
    for vocab, processors in ((1004, 1), (9000, 132)):
        draws(run, monkeypatch, processors)
        logits = torch.full((2, vocab), -1.001)
        logits[0, 3], logits[0, vocab - 2] = 0.0, -1.0
        logits[1, 5], logits[1, vocab // 2 :] = 0.0, -9.0
        norm = torch.stack((logits.amax(1), logits.exp().sum(1).log()), 1)
        for top_k, top_p in ((2, 0.7), (2, 0.74), (2, 0.9), (vocab // 4, 0.99)):
            asked = request_of(logits, norm, 1.0, top_k, top_p, 0.0, torch.full((2,), 0.9), None, True)
            found, _ = sampling.launches_of(logits, asked)(logits, norm, asked)
            expected = drawing.draw(logits, norm, asked)
            assert torch.equal(found.ids, expected.ids)
            assert torch.equal(found.min_logit, expected.min_logit)
