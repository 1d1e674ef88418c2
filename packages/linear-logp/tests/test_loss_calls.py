"""linear_logp_loss: how chunks are cut, calls without tokens, what is passed back, and arguments."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp import Chunk, linear_logp_loss
from rl_kernels.linear_logp.backends import native
from rl_kernels.linear_logp.loss.chunks import chunks_of, rows_of


def call(*leading: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden, weight and ids."""
    draw = Draw(torch.float32, seed=5)
    return draw.normal(*leading, 8).requires_grad_(), draw.normal(50, 8).requires_grad_(), draw.ids(50, *leading)


def total(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return logp.sum(1)


def test_chunks_are_whole_sequences() -> None:
    chunks = list(chunks_of([0, 5, 45, 45, 78, 148, 149], 50, torch.device("cpu")))
    assert [(each.sequences.start, each.sequences.stop) for each in chunks] == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert [each.cu_seqlens.tolist() for each in chunks] == [[0, 5, 45, 45], [0, 33], [0, 70], [0, 1]]
    assert [each.max_seqlen for each in chunks] == [40, 33, 70, 1]
    # The gradients of rows 32 to 44 wait for the second chunk.
    assert [rows_of(each, 149, 16) for each in chunks] == [(0, 32, 45), (32, 64, 78), (64, 144, 148), (144, 149, 149)]
    assert list(chunks_of([0], 50, torch.device("cpu"))) == []
    empty = chunks_of([0, 0, 70, 70, 70, 75, 75], 50, torch.device("cpu"))
    assert [each.cu_seqlens.tolist() for each in empty] == [[0, 0, 70, 70, 70], [0, 5, 5]]


def test_logits_of_one_chunk_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    empty = native.kept_room

    def watched(*args: Any) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        result = empty(*args)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(native, "kept_room", watched)
    linear_logp_loss(*call(9, 30), total, chunk_tokens=60)
    assert len(alive) > 4


# After the break PyTorch looks at .grad of the result.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_compile_breaks_the_graph() -> None:
    start, weight, ids = call(9, 30)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        return linear_logp_loss(hidden, weight, ids, total, chunk_tokens=60) * 1.0

    grads = []
    for function in (step, torch.compile(step, backend="eager")):
        hidden = start.detach().clone().requires_grad_()
        function(hidden).backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("leading", "offsets"), [((0,), [0]), ((0,), [0, 0, 0]), ((0, 5), None), ((3, 0), None)], ids=str
)
def test_no_tokens(leading: tuple[int, ...], offsets: list[int] | None) -> None:
    hidden, weight, ids = call(*leading)
    sequences = leading[0] if offsets is None else len(offsets) - 1

    def losses(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        assert logp.shape == leading
        assert chunk.cu_seqlens.tolist() == [0] * (sequences + 1)
        return logp.sum() + torch.full((sequences,), 2.0)

    result = linear_logp_loss(
        hidden, weight, ids, losses, cu_seqlens=None if offsets is None else torch.tensor(offsets)
    )
    result.backward()
    assert result == 2.0 * sequences
    assert hidden.grad.shape == (*leading, 8)
    assert not weight.grad.any()


def test_constant_loss_gives_zero_gradients() -> None:
    hidden, weight, ids = call(9, 30)
    linear_logp_loss(hidden, weight, ids, lambda logp, chunk: logp.detach().sum(1)).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.smoke
def test_other_upstream_gradient_raises() -> None:
    arguments = *call(9, 30), total
    with pytest.raises(RuntimeError, match=r"expected the upstream gradient 1, got 0\.5; give it as grad_scale"):
        (linear_logp_loss(*arguments) / 2).backward()
    with pytest.raises(RuntimeError, match="the upstream gradient is not grad_scale"):
        (linear_logp_loss(*arguments, validate=False) / 2).backward()
    (linear_logp_loss(*arguments, grad_scale=0.5) / 2).backward()
    result = linear_logp_loss(*arguments)
    result.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass"):
        result.backward()


def test_invalid_losses_raise() -> None:
    other, arguments = torch.ones(3, requires_grad=True), call(9, 30)
    returns = "loss: expected it to return a tensor of floats, got"
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        (1.0, TypeError, "loss: expected a callable, got float"),
        (lambda logp, chunk: logp.sum(1).long(), TypeError, f"{returns} dtype"),
        (lambda logp, chunk: 1.0, TypeError, f"{returns} float"),
        (lambda logp, chunk: logp.sum(), ValueError, r"loss: expected one number for each of 9 sequences, got \(\)"),
        (lambda logp, chunk: logp.sum(1).to("meta"), ValueError, "loss: expected device cpu, got meta"),
        (
            lambda logp, chunk: logp.sum(1) * (2 * other).sum(),
            ValueError,
            "loss: expected no other tensor that requires grad, found one of shape",
        ),
    )
    for loss, error, match in wrong:
        with pytest.raises(error, match=match):
            linear_logp_loss(*arguments, loss)


def test_invalid_arguments_raise_before_the_loss_is_called() -> None:
    def refused(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        raise AssertionError("the loss was called")

    padded, packed = call(9, 30), call(270)
    rising = "cu_seqlens: expected offsets that rise from 0 to the number of"
    for arguments, error, match, more in (
        (padded, ValueError, "chunk_tokens: expected", {"chunk_tokens": 0}),
        (padded, ValueError, "grad_scale: expected", {"grad_scale": float("nan")}),
        (padded, ValueError, "join_tokens: expected None or a multiple of 16", {"join_tokens": 24}),
        (padded, ValueError, "cu_seqlens: expected hidden of", {"cu_seqlens": [0, 270]}),
        (packed, ValueError, "cu_seqlens: expected offsets, or hidden of", {}),
        (packed, TypeError, "cu_seqlens: expected", {"cu_seqlens": torch.tensor([0.0, 270.0])}),
        *(
            (packed, ValueError, rising, {"cu_seqlens": wrong})
            for wrong in ([], [1, 270], [0, 100], [0, 100, 50, 270], torch.tensor([0, 269]))
        ),
    ):
        with pytest.raises(error, match=match):
            linear_logp_loss(*arguments, refused, **more)
