"""linear_logp_loss: the bits of linear_logp, the loss and backward one after the other, for every size of a chunk."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import Chunk, LogpStats, kept, linear_logp, linear_logp_loss
from rl_kernels.linear_logp.chunks import Rows, chunks_of

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in (
        *("known", "arguments", "sums", "backward", "backends.native"),
        *("autograd", "chunks", "forming", "loss", "api"),
    )
)
BUGS = (Bug("upstream gradients of the first rows", "value[here] for", "value[:count] for"),)
IGNORED, SCALE, CHUNKS = -100, 0.25, (1, 50, 100, 10**6)
LENGTHS = (5, 40, 0, 33, 70, 1, 16, 17, 200)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "return_stats": True, "ignore_index": IGNORED, "temperature": "tensor"},
    {"main_grad": True, "softcap": 9.0, "temperature": "no dims"},
    {"saved_mib": 1, "bias": True, "workspace_mib": 1},
    {"vocab_segments": 8, "main_grad": True, "bias": True, "return_stats": True},
    {"join_tokens": 48, "bias": True, "workspace_mib": 1, "ignore_index": IGNORED},
    {"join_tokens": 144, "main_grad": True, "bias": True, "return_stats": True},
)
PLANTED = (
    (({"bias": True, "return_stats": True, "temperature": "tensor"}, torch.bfloat16), True),
    (({"main_grad": True}, torch.float32), False),
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
        """Draw the operands."""
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
        self.advantages = draw.normal(count, dtype=torch.float32).view(leading)
        self.options = options

    def losses(self, found: torch.Tensor | LogpStats, chunk: Chunk) -> torch.Tensor:
        """Return a loss for each sequence."""
        logp = found.logp if isinstance(found, LogpStats) else found
        x = -logp.exp() * self.advantages[chunk.tokens if self.packed else chunk.sequences]
        if isinstance(found, LogpStats):
            x = x - 0.1 * found.entropy + 0.01 * found.logsumexp
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
        found = [total.detach(), self.hidden.grad, self.weight.grad, main_grad, bias]
        return [value for value in found if value is not None]

    def apart(self, **more: Any) -> list[torch.Tensor]:
        """Return loss and gradients of linear_logp, the loss and backward one after the other."""
        found = linear_logp(self.hidden, self.weight, self.ids, self.bias, **self.options, **more)
        chunk = next(chunks_of(self.offsets, 10**9, self.hidden.device))
        return self.gradients(row_sum(self.losses(found, chunk)))

    def together(self, chunk_tokens: int, **more: Any) -> list[torch.Tensor]:
        """Return loss and gradients of linear_logp_loss."""
        more |= {"cu_seqlens": self.offsets} if self.packed else {}
        given = (self.hidden, self.weight, self.ids, self.losses, self.bias)
        return self.gradients(
            linear_logp_loss(*given, chunk_tokens=chunk_tokens, grad_scale=SCALE, **self.options, **more)
        )


def hold(options: dict[str, Any], dtype: torch.dtype, device: str, backend: str, **sizes: Any) -> None:
    expected = Batch(options, dtype, device, **sizes).apart(backend=backend)
    for chunk_tokens in CHUNKS:
        for validate in (True, False):
            found = Batch(options, dtype, device, **sizes).together(chunk_tokens, backend=backend, validate=validate)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(bits_of(one), bits_of(other)), (chunk_tokens, validate)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.bfloat16) for options in OPTIONS), (OPTIONS[1], torch.float32), (OPTIONS[3], torch.float64)],
    ids=str,
)
def test_no_chunk_changes_a_bit(options: dict[str, Any], dtype: torch.dtype, packed: bool) -> None:
    hold(options, dtype, "cpu", "native", packed=packed)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_empty_sequences_change_no_bit(options: dict[str, Any]) -> None:
    """At the start, in the middle and at the end, as offsets padded with N have them, beside short and long ones."""
    draw = Random(str(options))
    for _ in range(12):
        lengths = [0] * draw.randint(0, 2)
        for _ in range(draw.randint(1, 4)):
            lengths += [draw.choice([1, 15, 16, 37, 130]), *[0] * draw.randint(0, 2)]
        made = {"packed": True, "sizes": (8, 50), "lengths": lengths}
        wanted = Batch(options, torch.float32, "cpu", **made).apart()
        for chunk_tokens in (1, draw.randint(2, 140)):
            found = Batch(options, torch.float32, "cpu", **made).together(chunk_tokens)
            assert all(map(torch.equal, found, wanted)), (lengths, chunk_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["cuda-sm90", "triton"])
def test_no_chunk_changes_a_bit_on_a_gpu(backend: str, options: dict[str, Any], packed: bool) -> None:
    if backend == "cuda-sm90" and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    hold(options, torch.bfloat16, "cuda", backend, sizes=(72, 5003), packed=packed)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(Batch(*case, "cpu", packed=packed).apart(), case, packed) for case, packed in PLANTED]
    with planted(MODULES, bug):
        monkeypatch.setitem(
            globals(), "linear_logp_loss", importlib.import_module("rl_kernels.linear_logp.loss").linear_logp_loss
        )

        def hold_all() -> None:
            for (wanted, case, packed), chunk_tokens in product(expected, CHUNKS):
                found = Batch(*case, "cpu", packed=packed).together(chunk_tokens)
                assert all(map(torch.equal, found, wanted))

        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, TypeError)):
            hold_all()


def test_chunks() -> None:
    chunks = list(chunks_of([0, 5, 45, 45, 78, 148, 149], 50, torch.device("cpu")))
    assert [(each.sequences.start, each.sequences.stop) for each in chunks] == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert [each.cu_seqlens.tolist() for each in chunks] == [[0, 5, 45, 45], [0, 33], [0, 70], [0, 1]]
    assert [each.max_seqlen for each in chunks] == [40, 33, 70, 1]
    # The gradients of rows 32 to 44 wait for the second chunk.
    assert [Rows.of(each, 149, 16) for each in chunks] == [(0, 32, 45), (32, 64, 78), (64, 144, 148), (144, 149, 149)]
    assert list(chunks_of([0], 50, torch.device("cpu"))) == []
    empty = chunks_of([0, 0, 70, 70, 70, 75, 75], 50, torch.device("cpu"))
    assert [each.cu_seqlens.tolist() for each in empty] == [[0, 0, 70, 70, 70], [0, 5, 5]]


def test_the_logits_of_one_chunk_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    empty = kept.empty

    def watched(*args: Any) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        found = empty(*args)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(kept, "empty", watched)
    Batch({}, torch.float32, "cpu", packed=True).together(60)
    assert len(alive) > 4


def test_no_gradients_and_only_some() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)
    given = (batch.weight, batch.ids, batch.losses)
    expected = batch.apart()
    with torch.no_grad():
        found = linear_logp_loss(batch.hidden, *given, chunk_tokens=60, grad_scale=SCALE)
    assert torch.equal(found, expected[0])
    assert not found.requires_grad
    hidden = batch.hidden.detach().requires_grad_()
    frozen = linear_logp_loss(hidden, batch.weight.detach(), *given[1:], chunk_tokens=60)
    whole = linear_logp_loss(hidden, batch.weight.detach(), *given[1:])
    grads = [torch.autograd.grad(value, hidden)[0] for value in (frozen, whole)]
    assert torch.equal(*grads)
    other = linear_logp_loss(batch.hidden.detach(), *given, chunk_tokens=60, grad_scale=SCALE)
    assert torch.equal(torch.autograd.grad(other, batch.weight, torch.tensor(SCALE))[0], expected[2])


@pytest.mark.parametrize("empty", [{"offsets": [0]}, {"offsets": [0, 0, 0]}])
def test_no_tokens(empty: dict[str, Any]) -> None:
    hidden, weight = torch.zeros(0, 8).requires_grad_(), torch.randn(50, 8).requires_grad_()
    ids, count = torch.zeros(0, dtype=torch.int64), len(empty["offsets"]) - 1

    def losses(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return logp.sum() + torch.full((count,), 2.0)

    found = linear_logp_loss(hidden, weight, ids, losses, cu_seqlens=torch.tensor(empty["offsets"]))
    found.backward()
    assert found == 2.0 * count
    assert hidden.grad.shape == (0, 8)
    assert not weight.grad.any()


@pytest.mark.parametrize(("rows", "length"), [(0, 5), (3, 0)])
def test_no_tokens_in_rows(rows: int, length: int) -> None:
    hidden, weight = torch.zeros(rows, length, 8).requires_grad_(), torch.randn(50, 8).requires_grad_()
    ids = torch.zeros(rows, length, dtype=torch.int64)
    seen: list[Any] = []

    def losses(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        seen.append((logp.shape, chunk.cu_seqlens.tolist()))
        return logp.sum(1) + 2.0

    found = linear_logp_loss(hidden, weight, ids, losses)
    found.backward()
    assert found == 2.0 * rows
    assert seen == ([((rows, length), [0] * (rows + 1))] if rows else [])
    assert not weight.grad.any()


def test_a_loss_of_no_gradient_gives_zeros() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)
    found = linear_logp_loss(batch.hidden, batch.weight, batch.ids, lambda logp, chunk: logp.detach().sum(1))
    found.backward()
    assert not batch.hidden.grad.any()
    assert not batch.weight.grad.any()


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


def test_the_upstream_gradient_is_that_of_the_forward_pass() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)
    call = (batch.hidden, batch.weight, batch.ids, batch.losses)
    with pytest.raises(RuntimeError, match=r"expected the upstream gradient 1, got 0\.5; give it as grad_scale"):
        (linear_logp_loss(*call) / 2).backward()
    with pytest.raises(RuntimeError, match="the upstream gradient is not grad_scale"):
        (linear_logp_loss(*call, validate=False) / 2).backward()
    (linear_logp_loss(*call, grad_scale=0.5) / 2).backward()
    found = linear_logp_loss(*call)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass"):
        found.backward()


def test_a_checkpoint_adds_nothing_twice() -> None:
    """It calls the loss once more for each chunk; with ``main_grad`` it is refused where it forms gradients twice."""

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
        wanted, once = run(lambda step, hidden: step(hidden), main_grad)
        found, calls = run(partial(checkpoint, use_reentrant=use_reentrant), main_grad)
        assert all(map(torch.equal, found, wanted))
        assert calls == 2 * once
    with pytest.raises(ValueError, match=r"lm_head_weight\.main_grad: expected no torch\.utils\.checkpoint around"):
        run(partial(checkpoint, use_reentrant=False), True)


def test_arguments() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)
    call, other = (batch.hidden, batch.weight, batch.ids), torch.ones(3, requires_grad=True)

    def given(loss: Any, **more: Any) -> None:
        linear_logp_loss(*call, loss, **more)

    with pytest.raises(TypeError, match="loss: expected a callable, got float"):
        given(1.0)
    with pytest.raises(TypeError, match="loss: expected it to return a tensor of floats, got dtype"):
        given(lambda logp, chunk: logp.sum(1).long())
    with pytest.raises(TypeError, match="loss: expected it to return a tensor of floats, got float"):
        given(lambda logp, chunk: 1.0)
    with pytest.raises(ValueError, match=r"loss: expected one number for each of 9 sequences, got \(\)"):
        given(lambda logp, chunk: logp.sum())
    with pytest.raises(ValueError, match="loss: expected device cpu, got meta"):
        given(lambda logp, chunk: logp.sum(1).to("meta"))
    with pytest.raises(ValueError, match=r"loss: expected no other tensor that requires grad, found one of shape"):
        given(lambda logp, chunk: logp.sum(1) * (2 * other).sum())
    with pytest.raises(ValueError, match="chunk_tokens: expected"):
        given(batch.losses, chunk_tokens=0)
    with pytest.raises(ValueError, match="grad_scale: expected"):
        given(batch.losses, grad_scale=float("nan"))
    with pytest.raises(ValueError, match="cu_seqlens: expected hidden of"):
        given(batch.losses, cu_seqlens=[0, 270])
    call = (batch.hidden.detach().flatten(0, 1), batch.weight, batch.ids.flatten())
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets, or hidden of"):
        given(batch.losses)
    for wrong in ([], [1, 270], [0, 100], [0, 100, 50, 270], torch.tensor([0, 269])):
        with pytest.raises(ValueError, match="cu_seqlens: expected offsets that rise from 0 to the number of"):
            given(batch.losses, cu_seqlens=wrong)
    with pytest.raises(TypeError, match="cu_seqlens: expected"):
        given(batch.losses, cu_seqlens=torch.tensor([0.0, 270.0]))


@pytest.mark.gpu
def test_a_graph_replays_loss_and_gradients() -> None:
    batch = Batch({"main_grad": True}, torch.bfloat16, "cuda", packed=False)

    def step() -> torch.Tensor:
        given = (batch.hidden, batch.weight, batch.ids, batch.losses)
        loss = linear_logp_loss(*given, chunk_tokens=60, grad_scale=SCALE)
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
    wanted = Batch({"main_grad": True}, torch.bfloat16, "cuda", packed=False).apart()
    for one, other in zip((loss, batch.hidden.grad, batch.weight.main_grad), wanted, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))


# After the break PyTorch looks at .grad of the result.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_compile_breaks_the_graph() -> None:
    batch = Batch({}, torch.float32, "cpu", packed=False)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        return linear_logp_loss(hidden, batch.weight, batch.ids, batch.losses, chunk_tokens=60) * 1.0

    grads = []
    for function in (step, torch.compile(step, backend="eager")):
        hidden = batch.hidden.detach().clone().requires_grad_()
        function(hidden).backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)
