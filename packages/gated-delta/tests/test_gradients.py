"""Gradients: those of the recurrence, and the same bits alone, packed, padded and in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Call
from rl_kernels.gated_delta import gated_delta_rule, reference
from rl_kernels.gated_delta.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call(torch.device(DEVICE), torch.float32, "cpu", {})
BACKENDS = [
    backend.name
    for backend in OPERATOR.backends
    if backend.why_not(CALL) is None and backend.promises[DEVICE] >= INVARIANT
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
HEADS, SIZES = (1, 2), (16, 32)


def operands(tokens: int, batch: int = 1) -> list[torch.Tensor]:
    """Return q, k, v, g, beta, the initial state, and the gradients of the output and of the last state."""
    torch.manual_seed(tokens)
    shapes = [HEADS[:1] + SIZES[:1]] * 2 + [HEADS[1:] + SIZES[1:]] + [HEADS[1:]] * 2
    q, k, v, g, beta = (torch.randn(batch, tokens, *shape) for shape in shapes)
    states = [torch.randn(batch, *HEADS[1:], *SIZES) for _ in range(2)]
    call = [q, k, v, -0.3 * g.sigmoid(), beta.sigmoid(), states[0], torch.randn_like(v), states[1]]
    return [x.to(DEVICE) for x in call]


def gradients(function, call: Sequence[torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the initial state."""
    leaves = [x.clone().requires_grad_() for x in call[:6]]
    out = function(*leaves[:5], initial_state=leaves[5], return_state=True, **options)
    return torch.autograd.grad(out, leaves, call[6:])


@each_backend
def test_gradients_of_packed_sequences(backend: str) -> None:
    calls = [operands(count) for count in (7, 66, 64)]
    alone = [gradients(gated_delta_rule, call, backend=backend) for call in calls]
    for call, ours in zip(calls, alone, strict=True):
        gold = gradients(reference.gated_delta_rule, [x.double() for x in call])
        for value, exact in zip(ours, gold, strict=True):
            torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)
    bounds = torch.tensor([[0, 9], [7, 1], [73, 5], [137, 0]], device=DEVICE)[:, 0]
    joined = [torch.cat(parts, int(place not in (5, 7))) for place, parts in enumerate(zip(*calls, strict=True))]
    packed = gradients(gated_delta_rule, joined, cu_seqlens=bounds, backend=backend)
    for number, expected in enumerate(alone):
        for ours, value in zip(packed[:5], expected, strict=False):
            assert torch.equal(ours[:, bounds[number] : bounds[number + 1]], value)
        assert torch.equal(packed[5][number], expected[5][0])


@each_backend
def test_errors_in_fp16(backend: str) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 192, 1, 32).half() for _ in range(2))
    v, upstream = (torch.randn(1, 192, 2, 32).half() for _ in range(2))
    call = [x.to(DEVICE) for x in (q, k, v, -0.02 * torch.rand(1, 192, 2), torch.rand(1, 192, 2))]

    def of_beta(function, rows: Sequence[torch.Tensor], **options) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in rows]
        out = function(*leaves, **options)
        return torch.autograd.grad(out, leaves, upstream.to(out))[4].double()

    gold = of_beta(reference.gated_delta_rule, [x.double() for x in call])
    # 6.4e-4 where the gradient of the inverse is rounded to one factor.
    assert (of_beta(gated_delta_rule, call, backend=backend) - gold).norm() < 6e-4 * gold.norm()


@each_backend
def test_padding_has_no_gradient(backend: str) -> None:
    call = operands(20)
    expected = gradients(gated_delta_rule, call, backend=backend)
    padded = [torch.cat((x.new_full((1, 5, *x.shape[2:]), torch.nan), x), 1) for x in call[:5]]
    start = torch.tensor([5], device=DEVICE)
    grad = torch.cat((call[6].new_full((1, 5, *call[6].shape[2:]), torch.nan), call[6]), 1)
    ours = gradients(gated_delta_rule, [*padded, call[5], grad, call[7]], start=start, backend=backend)
    for value, alone in zip(ours[:5], expected, strict=False):
        assert torch.equal(value[:, 5:], alone)
        assert not value[:, :5].any()
    assert torch.equal(ours[5], expected[5])


def test_gradients_are_those_of_the_recurrence() -> None:
    call = [x.double() for x in operands(130)]
    results = [gradients(function, call) for function in (gated_delta_rule, reference.gated_delta_rule)]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@each_backend
def test_gradients_of_no_token(backend: str) -> None:
    call = operands(0, 2)
    *rest, grad = gradients(gated_delta_rule, call, backend=backend)
    assert torch.equal(grad, call[7])
    assert [x.numel() for x in rest] == [0] * 5
