"""The gradient takes the place of the slope that forward saved, but only if no further pass reads the slope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.operator import Call
from rl_kernels.grpo_loss import grpo_loss_from_advantages, sequence_losses
from rl_kernels.grpo_loss.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
LOSSES = {
    "planned": lambda *given, backend: grpo_loss_from_advantages(*given, beta=0.1, backend=backend).loss,
    "general": lambda *given, backend: (
        grpo_loss_from_advantages(*given, beta=0.1, loss_type="gspo", backend=backend).loss
    ),
    "sequences": lambda *given, backend: sequence_losses(*given, beta=0.1, backend=backend).sum(),
}
pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.parametrize("kind", LOSSES)]


def given(dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    current = (-torch.rand(4, 33, device=DEVICE)).to(dtype).requires_grad_()
    others = (current.detach() - 0.1, current.detach() + 0.05, torch.randn(4, device=DEVICE))
    return [current, *others, torch.rand(4, 33, device=DEVICE) < 0.7]


def places_of(loss: torch.Tensor) -> set[int]:
    """Return the addresses of what the function of ours saved for a loss."""
    node: Any = loss.grad_fn
    while not hasattr(node, "saved_tensors"):
        ((node, _),) = node.next_functions
    return {x.data_ptr() for x in node.saved_tensors if x is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_last_pass_alone_writes_into_the_slope(kind: str, backend: str, dtype: torch.dtype) -> None:
    call = given(dtype)
    loss = LOSSES[kind](*call, backend=backend)
    places = places_of(loss)
    grads = [torch.autograd.grad(loss * scale, call[0], retain_graph=True)[0] for scale in (1, 4, 1)]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(4 * grads[0], grads[1])
    assert places.isdisjoint(grad.data_ptr() for grad in grads)
    loss.backward()
    assert torch.equal(call[0].grad, grads[0])
    # A gradient of 16 bits does not fit the slope, which is FP32. AccumulateGrad takes the tensor without a copy.
    assert (call[0].grad.data_ptr() in places) == (dtype == torch.float32)


def test_batched_gradients_share_one_slope(kind: str, backend: str) -> None:
    call = given()
    (expected,) = torch.autograd.grad(LOSSES[kind](*call, backend=backend), call[0])
    upstream = torch.tensor([1.0, 2.0], device=DEVICE)
    (found,) = torch.autograd.grad(LOSSES[kind](*call, backend=backend), call[0], upstream, is_grads_batched=True)
    assert torch.equal(found, torch.stack((expected, 2 * expected)))


def test_checkpoint_gives_the_same_gradient_in_every_pass(kind: str, backend: str) -> None:
    current, *others = given()
    (expected,) = torch.autograd.grad(LOSSES[kind](current, *others, backend=backend), current)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return LOSSES[kind](x, *others, backend=backend)

    recomputed = checkpoint(loss, current, use_reentrant=False)
    assert isinstance(recomputed, torch.Tensor)
    (first,) = torch.autograd.grad(recomputed, current, retain_graph=True)
    (last,) = torch.autograd.grad(recomputed, current)
    assert torch.equal(first, expected)
    assert torch.equal(last, expected)


def test_hooks_may_give_two_losses_one_tensor(kind: str, backend: str) -> None:
    call, stored = given(), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        return stored.setdefault((x.shape, x.double().sum().item()), x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        first, second = (LOSSES[kind](*call, backend=backend) for _ in range(2))
    expected = torch.autograd.grad(first, call[0])[0].clone()
    (found,) = torch.autograd.grad(second, call[0])
    assert torch.equal(found, expected)
