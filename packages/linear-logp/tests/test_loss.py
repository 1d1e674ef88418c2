"""linear_logp_loss: the bits of linear_logp, the loss and backward one after the other, for every size of a chunk."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.operator import Call
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.lab.check.relations.integration import RawCalls
from rl_kernels.linear_logp import Chunk, LogpStats, Memory, linear_logp, linear_logp_loss
from rl_kernels.linear_logp.loss.chunks import chunks_of
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.spec.raw import below_targets

MODULES = tuple(f"rl_kernels.linear_logp.{name}" for name in ("autograd", "loss.chunks", "loss.api"))
BUG = Bug("upstream gradients of the first rows", "value[here] for", "value[:count] for")
CALL = Call(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32, "cpu", {})
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
IGNORED, SCALE, CHUNKS = -100, 0.25, (1, 50, 100, 10**6)
LENGTHS = (5, 40, 0, 33, 70, 1, 16, 17, 200)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "return_stats": True, "ignore_index": IGNORED, "temperature": "tensor"},
    {"main_grad": True, "softcap": 9.0, "temperature": "no dims"},
    {"memory": Memory(1, 1), "bias": True},
    {"vocab_segments": 8, "main_grad": True, "bias": True, "return_stats": True},
    {"join_tokens": 48, "bias": True, "memory": Memory(1), "ignore_index": IGNORED},
    {"join_tokens": 144, "main_grad": True, "bias": True, "return_stats": True},
    {"min_logit": True, "main_grad": True, "bias": True, "return_stats": True, "temperature": "tensor"},
)


class Batch:
    """Operands of a call, and a loss whose numbers depend on their own sequence alone."""

    def __init__(
        self,
        options: dict[str, Any],
        dtype: torch.dtype,
        device: str,
        *,
        packed: bool,
        sizes: tuple[int, int] = (24, 2300),
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        size, vocab = sizes
        options, draw = dict(options), Draw(dtype, seed=5, device=device)
        lengths = lengths if packed else (30,) * 9
        count = sum(lengths)
        self.offsets, self.packed = [0, *accumulate(lengths)], packed
        leading = (count,) if packed else (9, 30)
        self.hidden = draw.normal(*leading, size).requires_grad_()
        self.weight = draw.normal(vocab, size, scale=size**-0.5).requires_grad_()
        self.bias = draw.normal(vocab).requires_grad_() if options.pop("bias", False) else None
        self.ids = draw.ids(vocab, count)
        if "ignore_index" in options:
            self.ids[::3] = IGNORED
        self.ids = self.ids.view(leading)
        if options.get("temperature") == "tensor":
            options["temperature"] = draw.uniform(0.5, 2.0, *leading, dtype=torch.float32)
        elif "temperature" in options:
            options["temperature"] = torch.tensor(0.7, device=device)
        if options.pop("main_grad", False):
            self.weight.main_grad = torch.ones(vocab, size, device=device)
        if options.pop("min_logit", False):
            call = dict(hidden=self.hidden, lm_head_weight=self.weight, target_ids=self.ids, bias=self.bias, **options)
            options["min_logit"] = below_targets(**call)
        self.advantages = draw.normal(count, dtype=torch.float32).view(leading)
        self.options = options

    def losses(self, result: torch.Tensor | LogpStats, chunk: Chunk) -> torch.Tensor:
        """Return a loss for each sequence."""
        logp = result.logp if isinstance(result, LogpStats) else result
        x = -logp.exp() * self.advantages[chunk.tokens if self.packed else chunk.sequences]
        if isinstance(result, LogpStats):
            x = x - 0.1 * result.entropy + 0.01 * result.logsumexp
        if not self.packed:
            return row_sum(x)
        parts = [x[a:b] for a, b in pairwise(chunk.cu_seqlens.tolist())]
        assert max(map(len, parts)) == chunk.max_seqlen
        return torch.stack([row_sum(part) if len(part) else x.new_zeros(()) for part in parts])

    def gradients(self, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the loss and what its backward pass gives."""
        total.backward(torch.full_like(total, SCALE))
        main_grad = getattr(self.weight, "main_grad", None)
        assert main_grad is None or self.weight.grad is None
        bias = None if self.bias is None else self.bias.grad
        result = [total.detach(), self.hidden.grad, self.weight.grad, main_grad, bias]
        return [value for value in result if value is not None]

    def in_turn(self, **more: Any) -> list[torch.Tensor]:
        """Return loss and gradients of linear_logp, the loss and backward one after the other."""
        result = linear_logp(self.hidden, self.weight, self.ids, self.bias, **self.options, **more)
        chunk = next(chunks_of(self.offsets, 10**9, self.hidden.device))
        return self.gradients(row_sum(self.losses(result, chunk)))

    def together(self, chunk_tokens: int, **more: Any) -> list[torch.Tensor]:
        """Return loss and gradients of linear_logp_loss."""
        more |= {"cu_seqlens": self.offsets} if self.packed else {}
        arguments = (self.hidden, self.weight, self.ids, self.losses, self.bias)
        return self.gradients(
            linear_logp_loss(*arguments, chunk_tokens=chunk_tokens, grad_scale=SCALE, **self.options, **more)
        )


def check_case(
    options: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    backend: str,
    chunks: Sequence[int] = CHUNKS,
    **sizes: Any,
) -> None:
    expected = Batch(options, dtype, device, **sizes).in_turn(backend=backend)
    for chunk_tokens in chunks:
        batch = Batch(options, dtype, device, **sizes)
        result = batch.together(chunk_tokens, backend=backend, validate=chunk_tokens != CHUNKS[1])
        for one, other in zip(result, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(bits_of(one), bits_of(other)), chunk_tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_change_no_bit_of_any_backend(backend: str) -> None:
    sizes = {"packed": True, "sizes": (8, 70), "lengths": (5, 20, 0, 33)}
    check_case({"bias": True}, torch.float32, CALL.device.type, backend, CHUNKS[1:3], **sizes)
    if backend == "native":
        check_case({"bias": True}, torch.bfloat16, CALL.device.type, backend, CHUNKS[1:3], **sizes)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_one_gradient_of_chunks_alone_is_that_of_all(frozen: str) -> None:
    whole, alone = (Batch({}, torch.float32, "cpu", packed=True) for _ in range(2))
    getattr(alone, frozen).requires_grad_(False)
    expected = dict(zip(("loss", "hidden", "weight"), whole.together(50), strict=True))
    del expected[frozen]
    assert all(map(torch.equal, alone.together(50), expected.values()))


def test_no_gradient_of_chunks_is_computed_without_grad_mode() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=True)
    arguments = batch.hidden, batch.weight, batch.ids, batch.losses
    with torch.no_grad(), RawCalls() as raw:
        linear_logp_loss(*arguments, chunk_tokens=50, cu_seqlens=batch.offsets)
    assert raw.calls
    assert not any("backward" in name for name in raw.calls)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.bfloat16) for options in OPTIONS), (OPTIONS[1], torch.float32), (OPTIONS[3], torch.float64)],
    ids=str,
)
def test_chunk_size_changes_no_bit(options: dict[str, Any], dtype: torch.dtype, packed: bool) -> None:
    check_case(options, dtype, "cpu", "native", packed=packed)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_empty_sequences_change_no_bit(options: dict[str, Any]) -> None:
    """At the start, in the middle and at the end, as offsets padded with N have them, beside short and long ones."""
    draw = Random(str(options))
    for _ in range(12):
        lengths = [0] * draw.randint(0, 2)
        for _ in range(draw.randint(1, 4)):
            lengths += [draw.choice([1, 15, 16, 37, 130]), *[0] * draw.randint(0, 2)]
        sizes = {"packed": True, "sizes": (8, 50), "lengths": lengths}
        expected = Batch(options, torch.float32, "cpu", **sizes).in_turn()
        for chunk_tokens in (1, draw.randint(2, 140)):
            result = Batch(options, torch.float32, "cpu", **sizes).together(chunk_tokens)
            assert all(map(torch.equal, result, expected)), (lengths, chunk_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunk_size_changes_no_bit_on_a_gpu(gpu_backend: str, options: dict[str, Any], packed: bool) -> None:
    check_case(options, torch.bfloat16, "cuda", gpu_backend, sizes=(72, 5003), packed=packed)


def test_planted_bug_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of rows takes other upstream gradients from the second chunk on."""
    with planted(MODULES, BUG):
        loss = importlib.import_module("rl_kernels.linear_logp.loss.api")
        monkeypatch.setitem(globals(), "linear_logp_loss", loss.linear_logp_loss)
        with pytest.raises(AssertionError):
            check_case(OPTIONS[1], torch.bfloat16, "cpu", "native", packed=True)
        with pytest.raises(AssertionError):
            check_case(OPTIONS[2], torch.float32, "cpu", "native", packed=False)


def test_loss_without_gradients_and_with_a_frozen_weight() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)
    arguments = (batch.weight, batch.ids, batch.losses)
    expected = batch.in_turn()
    with torch.no_grad():
        result = linear_logp_loss(batch.hidden, *arguments, chunk_tokens=60, grad_scale=SCALE)
    assert torch.equal(result, expected[0])
    assert not result.requires_grad
    hidden = batch.hidden.detach().requires_grad_()
    frozen = linear_logp_loss(hidden, batch.weight.detach(), *arguments[1:], chunk_tokens=60)
    whole = linear_logp_loss(hidden, batch.weight.detach(), *arguments[1:])
    grads = [torch.autograd.grad(value, hidden)[0] for value in (frozen, whole)]
    assert torch.equal(*grads)
    other = linear_logp_loss(batch.hidden.detach(), *arguments, chunk_tokens=60, grad_scale=SCALE)
    assert torch.equal(torch.autograd.grad(other, batch.weight, torch.tensor(SCALE))[0], expected[2])


def test_autocast_and_tied_weights() -> None:
    """Gradients flow on through casts, and what an embedding leaves in .grad joins main_grad."""
    batch = Batch({}, torch.float32, "cpu", packed=False)
    with torch.autocast("cpu", torch.bfloat16):
        linear_logp_loss(batch.hidden, batch.weight, batch.ids, batch.losses, chunk_tokens=60).backward()
    assert batch.hidden.grad.dtype == torch.float32
    assert torch.equal(batch.weight.grad, batch.weight.grad.bfloat16().float())
    tied = Batch({"main_grad": True}, torch.float32, "cpu", packed=False)
    hidden = tied.hidden + torch.nn.functional.embedding(tied.ids, tied.weight)
    linear_logp_loss(hidden, tied.weight, tied.ids, tied.losses, chunk_tokens=60).backward()
    assert tied.weight.grad is None
    rows = torch.bincount(tied.ids.flatten(), minlength=len(tied.weight)) > 0
    alone = Batch({"main_grad": True}, torch.float32, "cpu", packed=False)
    linear_logp_loss(hidden.detach(), alone.weight, tied.ids, tied.losses, chunk_tokens=60).backward()
    assert torch.equal((tied.weight.main_grad != alone.weight.main_grad).any(1), rows)


def test_checkpoint_counts_gradients_once() -> None:
    """It calls the loss once more for each chunk; with ``main_grad`` it would add twice, and is refused."""

    def run(around: Any, main_grad: bool) -> tuple[list[torch.Tensor], int]:
        batch, calls = Batch({"main_grad": main_grad}, torch.float32, "cpu", packed=False), []

        def losses(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
            calls.append(chunk)
            return batch.losses(logp, chunk)

        def step(hidden: torch.Tensor) -> torch.Tensor:
            loss = linear_logp_loss(hidden, batch.weight, batch.ids, losses, chunk_tokens=60, grad_scale=SCALE)
            # A checkpoint runs again up to the last tensor that it saved.
            return loss + hidden.exp().sum()

        return batch.gradients(around(step, batch.hidden)), len(calls)

    for main_grad, use_reentrant in ((False, False), (False, True), (True, True)):
        expected, once = run(lambda step, hidden: step(hidden), main_grad)
        result, calls = run(partial(checkpoint, use_reentrant=use_reentrant), main_grad)
        assert all(map(torch.equal, result, expected))
        assert calls == 2 * once
    with pytest.raises(ValueError, match=r"lm_head_weight\.main_grad: expected no torch\.utils\.checkpoint around"):
        run(partial(checkpoint, use_reentrant=False), True)


@pytest.mark.gpu
def test_cuda_graph_replays_loss_and_gradients() -> None:
    batch = Batch({"main_grad": True}, torch.bfloat16, "cuda", packed=False)

    def step() -> torch.Tensor:
        arguments = (batch.hidden, batch.weight, batch.ids, batch.losses)
        loss = linear_logp_loss(*arguments, chunk_tokens=60, grad_scale=SCALE)
        loss.backward(torch.full_like(loss, SCALE))
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            batch.hidden.grad = None
            step()
        batch.weight.main_grad.fill_(1.0)
        batch.hidden.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()
        graph.replay()
    torch.cuda.synchronize()
    expected = Batch({"main_grad": True}, torch.bfloat16, "cuda", packed=False).in_turn()
    for one, other in zip((loss, batch.hidden.grad, batch.weight.main_grad), expected, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))
