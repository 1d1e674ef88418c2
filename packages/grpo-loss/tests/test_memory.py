"""When the gradient overwrites the slope that forward saved; offsets of elements beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.operator import Call
from rl_kernels.grpo_loss import (
    grpo_loss_from_advantages,
    sequence_losses,
)
from rl_kernels.grpo_loss.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
LOSSES = {
    "token": lambda *arguments, backend: grpo_loss_from_advantages(*arguments, beta=0.1, backend=backend).loss,
    "sequence": lambda *arguments, backend: (
        grpo_loss_from_advantages(*arguments, beta=0.1, loss_type="gspo", backend=backend).loss
    ),
    "sequences": lambda *arguments, backend: sequence_losses(*arguments, beta=0.1, backend=backend).sum(),
}


def arguments(dtype: torch.dtype = torch.float32) -> list[Any]:
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LOSSES)
def test_only_the_last_pass_overwrites_the_slope(kind: str, backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = arguments(dtype)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LOSSES)
def test_shared_slope_gives_each_pass_its_gradient(kind: str, backend: str) -> None:
    """Batched gradients, both passes of a checkpoint, and two losses that a hook gives one tensor."""
    current, *others = arguments()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return LOSSES[kind](x, *others, backend=backend)

    (expected,) = torch.autograd.grad(loss(current), current)
    upstream = torch.tensor([1.0, 2.0], device=DEVICE)
    (batched,) = torch.autograd.grad(loss(current), current, upstream, is_grads_batched=True)
    assert torch.equal(batched, torch.stack((expected, 2 * expected)))
    recomputed: Any = checkpoint(loss, current, use_reentrant=False)
    for retained in (True, False):
        assert torch.equal(torch.autograd.grad(recomputed, current, retain_graph=retained)[0], expected)
    stored: dict[Any, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        return stored.setdefault((x.shape, x.double().sum().item()), x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses = [loss(current) for _ in range(2)]
    for one in losses:
        assert torch.equal(torch.autograd.grad(one, current)[0], expected)
