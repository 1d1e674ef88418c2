"""The Triton backend of linear_logp: pieces of the vocabulary, blocks of rows, and its raw ops on any layout."""

from __future__ import annotations

import importlib
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import IGNORED, Draw
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.lab.check.compare import bits
from rl_kernels.linear_logp import Memory, linear_logp
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.spec.raw import check_case, check_shards

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="draws on the CPU; a GPU runs all cases")

if REASON is None:
    import triton
    import triton.language as tl

    from rl_kernels.core.triton_lib import softcap

    @triton.jit
    def _capped(x, capped, slope, cap, rate, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        y = softcap.capped(tl.load(x + at), cap, rate)
        tl.store(capped + at, y)
        tl.store(slope + at, softcap.slope(y, cap, rate))


ROWS, SIZE, VOCAB = 300, 24, 1500
PACKAGE = "rl_kernels.linear_logp"
MODULES = (
    *(f"{PACKAGE}.{name}" for name in ("vocabulary", "inputs", "backward")),
    *(f"{PACKAGE}.backends.triton.{name}" for name in ("kernels", "backward", "backend")),
)
BUGS = (
    Bug("dH added to uninitialized memory", "weight, out, continues=continues", "weight, out, continues=True"),
    Bug("strided temperatures read as if contiguous", "temperature.contiguous()", "temperature"),
    Bug("last rows are not finished", "(ceil_div(count, kernels.ROWS.value),)", "(count // kernels.ROWS.value or 1,)"),
    Bug("gradient counted from column 0", "block.start, block.vocab, count", "0, block.vocab, count"),
)
RAW: tuple[dict[str, Any], ...] = (
    dict(rows=1, vocab=1, size=8, bias=True),
    dict(rows=33, vocab=257, layout="odd", ids="apart", upstream="expanded"),
    dict(rows=65, vocab=1025, layout="column", scale="rows", ignored=0, bias=True, upstream="logp"),
    dict(rows=40, vocab=2304, layout="apart", scale="apart", ignored=-100, bias=True, upstream="apart"),
    dict(rows=40, vocab=600, size=40, bias=True, upstream="entropy"),
    dict(rows=33, vocab=300, size=8, upstream="lse", ids=torch.int32),
    dict(rows=33, vocab=1100, cap=(5.0, 0.3), bias=True, scale="rows", ignored=0),
    dict(rows=40, vocab=2304, saved=(1, 2304), scale="rows", ignored=-100, cap=(5.0, 0.3)),
    dict(rows=150, vocab=600, bias=True, join=128),
    dict(rows=40, vocab=1300, least="apart", scale="rows", ignored=0, cap=(5.0, 0.3), bias=True),
    dict(rows=33, vocab=600, least="rows", saved=(1, 768)),
)


def check_raw() -> None:
    backend, backward = (importlib.import_module(MODULES[place]) for place in (-1, 2))
    for call in RAW:
        with patch.multiple(backward, LEAST_PIECE=1024, LEAST_HEIGHT=128):
            forget()
            check_shards(check_case({"dtype": torch.float32, "layout": "row", "size": 24, **call}, backend), backend)


@interpreted
def test_raw_ops_compute_the_definition() -> None:
    check_raw()


@interpreted
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_shows_in_the_raw_ops(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises((AssertionError, RuntimeError)):
        check_raw()


def _gradients(workspace_mib: int, *, main_grad: bool = False, **options: Any) -> list[torch.Tensor]:
    draw = Draw(torch.float32, DEVICE, seed=5)
    weight = draw.normal(VOCAB, SIZE, scale=SIZE**-0.5).requires_grad_()
    leaves = [draw.normal(ROWS, SIZE).requires_grad_(), draw.normal(VOCAB).requires_grad_(), weight]
    ids = draw.ids(VOCAB, ROWS).masked_fill(draw.mask(0.3, ROWS), IGNORED)
    if main_grad:
        weight.main_grad = draw.normal(VOCAB, SIZE)
    arguments = {"ignore_index": IGNORED, "memory": Memory(workspace_mib), "return_stats": True, **options}
    result = linear_logp(leaves[0], weight, ids, leaves[1], backend="triton", **arguments)
    sum(value.sum() for value in result).backward()
    return [leaf.grad if leaf.grad is not None else leaf.main_grad for leaf in leaves]


@pytest.mark.parametrize("more", [{}, {"main_grad": True, "join_tokens": 208}], ids=str)
def test_pieces_and_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    from rl_kernels.linear_logp import backward

    result: list[tuple[int, int]] = []
    cut = backward.Steps.cut

    def watched(self: Any, *args: Any) -> tuple[int, int]:
        result.append(cut(self, *args))
        return result[-1]

    monkeypatch.setattr(backward.Steps, "cut", watched)
    forget()
    whole = _gradients(256, **more)
    for least in ({"LEAST_PIECE": 256}, {"LEAST_PIECE": 1280, "LEAST_HEIGHT": 128}):
        for name, value in least.items():
            monkeypatch.setattr(backward, name, value)
        forget()
        assert all(bits(one, other).passed for one, other in zip(_gradients(1, **more), whole, strict=True))
    # Of chains of 208 rows, blocks have their length, rounded up to 128; then fewer.
    assert [height for _, height in result] == ([256, 256, 128] if "join_tokens" in more else [384, 384, 128])
    assert result[-1][0] == 1280


@pytest.mark.parametrize("count", [1, 200, 4096, 100_000])
@pytest.mark.parametrize("workspace_mib", [1, 64, 256, 4096])
@pytest.mark.parametrize(("dtype", "buffers"), product((torch.float32, torch.bfloat16), (0, 2)))
def test_cut_fits_the_workspace(count: int, workspace_mib: int, dtype: torch.dtype, buffers: int) -> None:
    from rl_kernels.linear_logp.backends.triton.backward import Steps, schedule_of
    from rl_kernels.linear_logp.backward import LEAST_HEIGHT, LEAST_PIECE

    size, vocab = 128, 151_936
    meta = {"device": "meta", "dtype": dtype}
    hidden = torch.empty(count, size, **meta)
    piece, height = Steps().cut(hidden, vocab, workspace_mib << 20, [True, True, True], buffers)
    assert piece % 256 == 0
    assert height % 128 == 0
    dz = torch.empty(0, **meta)
    # dz and the parts of dbias, and dW where there are several blocks or chains.
    height, rows = min(count, height), schedule_of("gradient", dz).rows
    sums = 4 * size * max(buffers, height < count)
    used = min(piece, vocab) * (height * dz.itemsize + -(-height // rows) * 4 + sums)
    least = LEAST_PIECE * (4 * size * max(buffers, 1) + LEAST_HEIGHT * dz.itemsize + LEAST_HEIGHT // rows * 4)
    assert used <= max(workspace_mib << 20, least)


def test_selected_logit_has_the_bits_of_its_tile() -> None:
    hidden = Draw(torch.float32, DEVICE, seed=8).normal(40, 300)
    ids = torch.zeros(40, dtype=torch.int64, device=DEVICE)
    # One entry, whose probability is 1: what is left is the rounding of two logarithms, none of the logit's.
    result = linear_logp(hidden, hidden[:1] + 1, ids, backend="triton")
    assert result.abs().max() < 2e-7


@pytest.mark.parametrize(("cap", "scale"), [(30.0, 1.0), (4.0, 3.0), (50.0, 0.0625)])
def test_capped_logits_and_their_slope(cap: float, scale: float) -> None:
    sizes = torch.logspace(-8, 4, 2046, device=DEVICE)
    x = torch.cat((sizes, -sizes, torch.tensor([0.0, -torch.inf, torch.inf, torch.nan], device=DEVICE)))
    capped, slope = torch.empty_like(x), torch.empty_like(x)
    _capped[(1,)](x, capped, slope, cap, scale / cap, BLOCK=4096)
    t = (x.double() * scale / cap).tanh()
    torch.testing.assert_close(capped.double(), cap * t, rtol=5e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(slope.double(), scale * (1 - t.square()), rtol=0, atol=5e-7 * scale, equal_nan=True)


def test_some_logits_kept_and_ids_out_of_range() -> None:
    """Logits of no, the last or all columns are kept, others formed again; an unchecked id spoils its row alone."""
    draw = Draw(torch.float32, DEVICE, seed=9)
    hidden, weight, ids = draw.normal(70, 8), draw.normal(5000, 8), draw.ids(5000, 70)
    found = []
    for memory in (Memory(saved_mib=0), Memory(saved_mib=1), "fast"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logp = linear_logp(*leaves, ids, backend="triton", memory=memory)
        found.append([logp.detach(), *torch.autograd.grad(logp.square().sum(), leaves)])
    for formed, *kept in zip(*found, strict=True):
        for value in kept:
            torch.testing.assert_close(value, formed)
    ids[3], ids[40] = 5000, -1
    logp = linear_logp(hidden, weight, ids, backend="triton", validate=False)
    assert logp.isnan().nonzero().flatten().tolist() == [3, 40]
