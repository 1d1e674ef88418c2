"""linear_logp never holds the logits, and its backward stays inside the workspace."""

from __future__ import annotations

import weakref
from itertools import product
from math import ceil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_kernels.core import products
from rl_kernels.core.scratch import Scratch
from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp.backends import native
from rl_kernels.linear_logp.backward import Steps, _default_workspace
from rl_kernels.linear_logp.inputs import first_kept, kept_room


class Memory(TorchDispatchMode):
    """Measures tensors made inside the block: elements of the largest, and the most bytes alive at once."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.largest = self.peak = self._now = 0
        self._alive = {value.untyped_storage()._cdata: 0 for value in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = value.untyped_storage()
            self.largest = max(self.largest, value.numel())
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, key: int) -> None:
        self._now -= self._alive.pop(key)


def forget_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the memory that this thread keeps for its calls, so that what the next call needs of it is counted."""
    for module, name in product((native, products), ("_logits_room", "_gradient_room", "_wide_room", "_total")):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, Scratch())


@pytest.mark.parametrize("join_tokens", [None, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_both_passes_is_bounded(
    dtype: torch.dtype, join_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, size, vocab, workspace_mib = 1000, 32, 3000, 8
    draw = Draw(dtype, seed=3)
    operands = draw.normal(rows, size), draw.normal(vocab, size, scale=size**-0.5)
    tensors = (*operands, draw.ids(vocab, rows), draw.normal(vocab), torch.tensor(0.7))
    inputs = (*tensors, None, None, None)
    forget_scratch(monkeypatch)
    with Memory(*tensors) as forward:
        logp, lse, entropy, norm, _ = native.forward_stats(*inputs, 0)
    saved = (norm, entropy, None, logp, lse, entropy)
    forget_scratch(monkeypatch)
    with Memory(*tensors, norm, logp, lse, entropy) as backward:
        grads = native.backward(
            *inputs, *saved, 0, vocab, 1, False, None, workspace_mib, [True, True, True], join_tokens
        )
    assert max(forward.largest, backward.largest) < rows * vocab / 2
    buffer = 0 if dtype == torch.float32 else rows * size * 4
    assert buffer < backward.peak < sum(grad.nbytes for grad in grads) + (workspace_mib << 20)


def test_kept_logits_fill_their_limit() -> None:
    rows, vocab = 500, 5003
    for dtype, saved_mib in product((torch.float32, torch.float64), (0, 1, 3, 7, 12, 40)):
        room = kept_room(torch.empty(rows, 4, dtype=dtype), vocab, saved_mib)
        width, first = room.shape[1], first_kept(vocab, room.shape[1])
        assert room.dtype == dtype
        assert room.nbytes <= saved_mib << 20
        assert (first == vocab) == (width == 0)
        assert first % 1024 == 0 or width == 0
        assert width % 256 == 0
        # One unit more would not fit.
        assert first == 0 or (width + 1024) * rows * dtype.itemsize > saved_mib << 20
        assert width == 0 or width - 256 < vocab - first <= width


def test_the_default_workspace_holds_dz_of_a_round_of_tiles() -> None:
    for (rows, size), dtype in product(((100, 64), (20000, 4096)), (torch.bfloat16, torch.float32)):
        result = _default_workspace(torch.empty(rows, size, dtype=dtype, device="meta"))
        assert result == max(4 * rows * size + min(rows, 16384) * 33792 * dtype.itemsize, 256 << 20)


class Summed(Steps):
    """Steps that sum 16 rows into a term of dbias."""

    def summed(self, hidden: torch.Tensor) -> int:
        return 16


def test_pieces_and_blocks_fill_the_workspace() -> None:
    shapes, columns = ((1, 32), (500, 64), (9000, 512), (40000, 4096)), (700, 2048, 30000, 152000)
    for (count, size), vocab, mib, buffers, needs_bias in product(shapes, columns, (1, 64, 700), (0, 1, 2), (0, 1)):
        hidden = torch.empty(count, size, dtype=torch.bfloat16, device="meta")
        workspace = mib << 20
        width, height = Summed().cut(hidden, vocab, workspace, [True, True, bool(needs_bias)], buffers)

        def used(width: int, rows: int, size: int = size, bias: int = needs_bias, buffers: int = buffers) -> int:
            return width * (2 * rows + -(-rows // 16) * 4 * bias + 4 * size * buffers)

        assert width % 256 == height % 128 == 0
        most = workspace // used(1, count) // 256 * 256
        if most >= min(vocab, 2048):
            # All rows, and pieces alike, of which fewer would not fit.
            assert 0 <= height - count < 128
            alike = ceil(vocab / ceil(vocab / most))
            assert width == ceil(alike / 256) * 256 <= most
        else:
            assert (width, height) == (2048, 4096) or used(width, height) <= workspace
            assert height >= 4096
            assert used(2048, height + 128) + 4 * 2048 * size * (not buffers) > workspace
