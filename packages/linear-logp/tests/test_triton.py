"""The Triton backend of linear_logp: pieces of the vocabulary and blocks of rows, at sizes where they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import IGNORED, Draw
from rl_kernels.lab.check.compare import bits
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

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


def _gradients(workspace_mib: int = 256, **options: Any) -> list[torch.Tensor]:
    draw = Draw(torch.float32, DEVICE, seed=5)
    weight = draw.normal(VOCAB, SIZE, scale=SIZE**-0.5)
    leaves = [draw.normal(ROWS, SIZE).requires_grad_(), weight.requires_grad_(), draw.normal(VOCAB).requires_grad_()]
    ids = draw.ids(VOCAB, ROWS).masked_fill(draw.mask(0.3, ROWS), IGNORED)
    options = {"ignore_index": IGNORED, "workspace_mib": workspace_mib, "return_stats": True, **options}
    found = linear_logp(*leaves[:2], ids, leaves[2], backend="triton", **options)
    return [*torch.autograd.grad(sum(value.sum() for value in found), leaves), *(value.detach() for value in found)]


def _cuts(monkeypatch: pytest.MonkeyPatch, **least: int) -> list[tuple[int, int]]:
    """Change the least that is worked on at once; return what will be."""
    from rl_kernels.linear_logp import blocks

    for name, value in least.items():
        monkeypatch.setattr(blocks, name, value)
    found: list[tuple[int, int]] = []
    cut = blocks.Blocks.cut

    def watched(self: Any, *args: Any) -> tuple[int, int]:
        found.append(cut(self, *args))
        return found[-1]

    monkeypatch.setattr(blocks.Blocks, "cut", watched)
    return found


def test_pieces_and_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _gradients()
    pieces = _cuts(monkeypatch, LEAST_PIECE=256)
    in_pieces = _gradients(1)
    assert pieces == [(768, 384)]
    blocks = _cuts(monkeypatch, LEAST_PIECE=1280, LEAST_HEIGHT=128)
    in_blocks = _gradients(1)
    assert blocks == [(1280, 128)]
    for name, a, b, c in zip(("hidden", "weight", "bias"), whole, in_pieces, in_blocks, strict=False):
        assert bits(b, a).passed, name
        assert bits(c, a).passed, name


def test_blocks_inside_joined_chains_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = _cuts(monkeypatch)
    whole = _gradients(join_tokens=208)
    _cuts(monkeypatch, LEAST_PIECE=1280, LEAST_HEIGHT=128)
    in_blocks = _gradients(1, join_tokens=208)
    # Rows of the longest chain, rounded up to 128; then blocks of fewer.
    assert [height for _, height in cuts][:2] == [256, 128]
    for name, a, b in zip(("hidden", "weight", "bias"), whole, in_blocks, strict=False):
        assert bits(b, a).passed, name


def test_main_grad_is_continued_in_pieces_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(torch.float32, DEVICE, seed=6)
    hidden, ids = draw.normal(ROWS, SIZE), draw.ids(VOCAB, ROWS)
    weight = draw.normal(VOCAB, SIZE, scale=SIZE**-0.5).requires_grad_()
    start = draw.normal(VOCAB, SIZE)
    found = []
    for least in ({}, {"LEAST_PIECE": 256}, {"LEAST_PIECE": 1280, "LEAST_HEIGHT": 128}):
        _cuts(monkeypatch, **least)
        weight.main_grad = start.clone()
        linear_logp(hidden, weight, ids, workspace_mib=1 if least else 256, backend="triton").sum().backward()
        assert weight.grad is None
        found.append(weight.main_grad)
    assert not bits(found[0], start).passed
    assert all(bits(other, found[0]).passed for other in found[1:])


@pytest.mark.parametrize("count", [1, 200, 4096, 100_000])
@pytest.mark.parametrize("workspace_mib", [1, 64, 256, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffers", [0, 2])
def test_cut_keeps_to_the_workspace(count: int, workspace_mib: int, dtype: torch.dtype, buffers: int) -> None:
    from rl_kernels.linear_logp.backends.triton.backward import Steps
    from rl_kernels.linear_logp.backends.triton.tiles import schedule_of
    from rl_kernels.linear_logp.blocks import LEAST_HEIGHT, LEAST_PIECE
    from rl_kernels.linear_logp.inputs import Inputs

    size, vocab = 128, 151_936
    meta = {"device": "meta", "dtype": dtype}
    operands = torch.empty(count, size, **meta), torch.empty(vocab, size, **meta)
    inputs = Inputs(*operands, torch.empty(count, device="meta"), None, torch.ones(()), None, None)
    piece, height = Steps().cut(inputs, workspace_mib << 20, [True, True, True], buffers)
    assert piece % 256 == 0
    assert height % 128 == 0
    dz = torch.empty(0, **meta)
    # dz and the parts of dbias, and dW where there are several blocks or chains.
    height, rows = min(count, height), schedule_of("gradient", dz).rows
    sums = 4 * size * max(buffers, height < count)
    used = min(piece, vocab) * (height * dz.itemsize + -(-height // rows) * 4 + sums)
    least = LEAST_PIECE * (4 * size * max(buffers, 1) + LEAST_HEIGHT * dz.itemsize + LEAST_HEIGHT // rows * 4)
    assert used <= max(workspace_mib << 20, least)


def test_every_row_and_column_is_worked_on_when_one_is_left_over() -> None:
    draw = Draw(torch.float32, DEVICE, seed=7)
    hidden, weight = draw.normal(65, 33), draw.normal(4097, 33, scale=33**-0.5)
    ids = torch.tensor([4096, 4095, 0, 255, 256], device=DEVICE).repeat(13)
    found = linear_logp(hidden, weight, ids, return_stats=True, backend="triton")
    logp = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    torch.testing.assert_close(found.logp.double(), logp.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


def test_selected_logit_has_the_bits_of_its_tile() -> None:
    hidden = Draw(torch.float32, DEVICE, seed=8).normal(40, 300)
    ids = torch.zeros(40, dtype=torch.int64, device=DEVICE)
    # One entry, whose probability is 1: what is left is the rounding of two logarithms, none of the logit's.
    found = linear_logp(hidden, hidden[:1] + 1, ids, backend="triton")
    assert found.abs().max() < 2e-7


@pytest.mark.parametrize(("cap", "scale"), [(30.0, 1.0), (4.0, 3.0), (50.0, 0.0625)])
def test_capped_logits_and_their_slope(cap: float, scale: float) -> None:
    sizes = torch.logspace(-8, 4, 2046, device=DEVICE)
    x = torch.cat((sizes, -sizes, torch.tensor([0.0, -torch.inf, torch.inf, torch.nan], device=DEVICE)))
    capped, slope = torch.empty_like(x), torch.empty_like(x)
    _capped[(1,)](x, capped, slope, cap, scale / cap, BLOCK=4096)
    t = (x.double() * scale / cap).tanh()
    torch.testing.assert_close(capped.double(), cap * t, rtol=5e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(slope.double(), scale * (1 - t.square()), rtol=0, atol=5e-7 * scale, equal_nan=True)
