"""linear_logp never holds the logits, and its backward stays inside the workspace."""

from __future__ import annotations

import importlib
import weakref
from itertools import product
from math import ceil
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rl_kernels.core import products
from rl_kernels.core.scratch import Scratch
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp.backends import native
from rl_kernels.linear_logp.backward import Steps, _default_workspace
from rl_kernels.linear_logp.inputs import first_kept, kept_room

PACKAGE = "rl_kernels.linear_logp"
MODULES = tuple(f"{PACKAGE}.{name}" for name in ("arguments", "backward", "backends.native", "autograd", "api"))
BUGS = (
    Bug("freed though the graph is retained", "ctx.frees_kept and may_overwrite(kept)", "ctx.frees_kept"),
    Bug("freed though hooks may share it", " and not are_hooked()", ""),
    Bug("freed before the last piece", "if piece is self._last_piece and", "if self._last_piece and"),
    Bug("never freed", "if frees and parts else None", "if not parts else None"),
    Bug(
        "the gradient is allocated before",
        "        dweight: torch.Tensor | None = None\n",
        "        dweight = inputs.weight.new_empty(inputs.weight.shape)\n",
    ),
    Bug("half of the logits kept", "else WHOLE, WHOLE)", "else WHOLE, 40)"),
)
ROWS, SIZE, VOCAB, PADDED = 1000, 8, 20001, 20224
"""More logits than a CPU keeps by default."""


class Memory(TorchDispatchMode):
    """Measures tensors made inside the block: elements of the largest, and the most bytes alive at once."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.largest = self.peak = self.now = 0
        self._alive = {value.untyped_storage()._cdata: 0 for value in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = value.untyped_storage()
            self.largest = max(self.largest, value.numel())
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


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
            *inputs, *saved, 0, vocab, 1, False, None, workspace_mib, [True, True, True], join_tokens, False
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


class Call:
    """Operands, and the gradients of a call."""

    def __init__(self, rows: int = ROWS, size: int = SIZE, vocab: int = VOCAB) -> None:
        draw = Draw(torch.float32, seed=3)
        self.leaves = draw.normal(rows, size).requires_grad_(), draw.normal(vocab, size).requires_grad_()
        self.ids, self.upstream = draw.ids(vocab, rows), draw.normal(rows)

    def logp(self, memory: Any = "fast") -> torch.Tensor:
        """Return the log-probabilities, by the function that may have a planted bug."""
        api = importlib.import_module(f"{PACKAGE}.api")
        result: torch.Tensor = api.linear_logp(*self.leaves, self.ids, memory=memory, backend="native")
        return result

    def gradients(self, logp: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(logp, self.leaves, self.upstream, **options)


def kept_of(logp: torch.Tensor) -> torch.Tensor:
    """Return the logits that a result keeps for its backward pass."""
    kept = [x for x in logp.grad_fn.saved_tensors if x is not None and len(x.shape) == 2 and x.shape[1] % 256 == 0]
    return kept[0]


def check_kept() -> None:
    """All logits are saved in FP32, to the byte; the last pass frees them, and no other does."""
    call, sizes = Call(), []

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.nbytes)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        hooked = call.logp()
    assert max(sizes) == 4 * ROWS * PADDED
    plain = call.logp("lean")
    assert 32 << 20 < kept_of(plain).nbytes <= 64 << 20
    expected = call.gradients(plain)
    kept = kept_of(hooked)
    assert all(map(torch.equal, call.gradients(hooked), expected))
    assert kept.shape == (ROWS, PADDED)
    logp = call.logp()
    kept, copy = kept_of(logp), kept_of(logp).clone()
    assert all(map(torch.equal, call.gradients(logp, retain_graph=True), expected))
    assert torch.equal(kept[:, :VOCAB], copy[:, :VOCAB])
    assert all(map(torch.equal, call.gradients(logp), expected))
    assert kept.untyped_storage().nbytes() == 0
    # What runs again in the backward pass keeps logits no longer than that pass.
    again = checkpoint(lambda *_: call.logp(), *call.leaves, use_reentrant=False)
    assert all(map(torch.equal, call.gradients(again), expected))


def check_peak() -> None:
    """At most the logits and their gradient exist at once: 8 N V bytes in FP32; logits of no piece are freed early."""
    rows, vocab, size = 400, 3000, 150
    arguments, backward, backend = map(importlib.import_module, MODULES[:3])
    read: list[bool] = []

    class Steps(backend.Steps):  # type: ignore[misc, name-defined]
        """The arithmetic of the CPU, cut as on a GPU."""

        cut, room = backward.Steps.cut, backward.Steps.room

        def summed(self, hidden: torch.Tensor) -> int:
            return 16

        def dlogits(self, block: Any, columns: slice, *rest: Any) -> Any:
            read.append(block.kept_part(columns) is not None)
            return super().dlogits(block, columns, *rest)

        def dhidden(self, *_: Any, continues: bool) -> Any:
            return lambda dz, weight, out: torch.addmm(out, dz, weight, beta=continues, out=out)

        def dweight(self, *_: Any, continues: bool) -> Any:
            return lambda dz, hidden, out: torch.addmm(out, dz.t(), hidden, beta=continues, out=out)

    draw = Draw(torch.float32, seed=3)
    tensors = draw.normal(rows, size), draw.normal(vocab, size, scale=size**-0.5), draw.ids(vocab, rows)
    inputs = *tensors, None, torch.tensor(1.0), None, None, None
    fast = arguments.limits_of(arguments.Options(memory="fast"))

    def call(workspace_mib: int) -> torch.Tensor:
        _, norm, kept = backend.forward(*inputs, fast.saved_mib)
        given = *inputs, norm, None, kept, norm[:, 0], None, None, 0, vocab, 1, False, None, workspace_mib
        rest = [True, True, False], None, True
        backward.Backward(Steps(), *given, *rest)(*given, *rest)
        return kept

    # Two pieces.
    call(1)
    with Memory(*tensors) as measured:
        # What the thread keeps for its next call stays out of the account.
        call(fast.workspace_mib)
        measured.peak = before = measured.now
        assert not call(fast.workspace_mib).nbytes
    assert read == [True] * 4
    logits = 4 * rows * 3072
    # Beside them a few numbers of each row, and the states of the softmax.
    assert 2 * logits <= measured.peak - before < 2 * logits + (1 << 17)


def test_logits_are_kept_and_freed() -> None:
    check_kept()


def test_peak_is_that_of_logits_and_their_gradient() -> None:
    check_peak()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fails(bug: Bug) -> None:
    check = check_peak if bug in BUGS[2:5] else check_kept
    with planted(MODULES, bug), pytest.raises((AssertionError, RuntimeError, IndexError)):
        check()
