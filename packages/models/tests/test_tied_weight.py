"""A weight that an embedding shares with the head: its gradient lies in one place, ``main_grad`` if there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rl_kernels.det_gemm import det_linear
from rl_kernels.linear_logp import linear_logp

IDS = torch.tensor([3, 1, 3, 0, 8])
Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HEADS: dict[str, Head] = {"linear_logp": lambda x, weight: linear_logp(x, weight, IDS), "det_linear": det_linear}
pytestmark = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def tied() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(9, 8).requires_grad_()
    weight.main_grad = torch.zeros(9, 8)
    return weight


def loss_of(head: Head, weight: torch.Tensor) -> torch.Tensor:
    return (head(functional.embedding(IDS, weight).tanh(), weight) ** 2).sum()


def add(parameter: torch.Tensor) -> None:
    """Add a gradient to the buffer, as a hook of somebody else may do already."""
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def test_both_gradients_reach_main_grad(head: Head) -> None:
    """In two passes, where a hook does so already, and where the head is checkpointed apart from the embedding."""
    weight = tied()
    del weight.main_grad
    loss_of(head, weight).backward()
    expected = weight.grad

    def checkpointed(use_reentrant: bool) -> Head:
        return lambda x, weight: checkpoint(lambda x: head(x, weight), x, use_reentrant=use_reentrant)

    for one, hooked in ((head, False), (head, True), (checkpointed(False), False), (checkpointed(True), False)):
        weight = tied()
        if hooked:
            weight.register_post_accumulate_grad_hook(add)
        for passes in (1, 2):
            loss_of(one, weight).backward()
            assert weight.grad is None
            torch.testing.assert_close(weight.main_grad, passes * expected, rtol=1e-6, atol=1e-6)


def test_gradients_elsewhere_stay_there(head: Head) -> None:
    """What was in ``.grad`` before is not taken along, and what is returned stays so."""
    weight, hidden = tied(), torch.ones(5, 8, requires_grad=True)
    torch.autograd.grad(head(hidden, weight).sum(), hidden)
    assert weight.grad is None
    assert not weight.main_grad.any()
    weight.grad = torch.ones(9, 8)
    # The head alone adds nothing to it.
    head(torch.ones(5, 8), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(9, 8))
    with pytest.raises(RuntimeError, match=r"weight: this backward pass added to its \.grad, which was not None, and"):
        loss_of(head, weight).backward()
