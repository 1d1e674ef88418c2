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
HEADS = {"linear_logp": lambda x, weight: linear_logp(x, weight, IDS), "det_linear": det_linear}


def tied() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(9, 8).requires_grad_()


def loss_of(head: Head, weight: torch.Tensor) -> torch.Tensor:
    return (head(functional.embedding(IDS, weight).tanh(), weight) ** 2).sum()


@pytest.mark.parametrize("name", HEADS)
def test_both_gradients_reach_main_grad(name: str) -> None:
    weight, expected = tied(), tied()
    loss_of(HEADS[name], expected).backward()
    weight.main_grad = torch.zeros(9, 8)
    for passes in (1, 2):
        loss_of(HEADS[name], weight).backward()
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, passes * expected.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_checkpointed_apart_from_the_embedding(name: str, use_reentrant: bool) -> None:
    weight, expected = tied(), tied()
    loss_of(HEADS[name], expected).backward()
    weight.main_grad = torch.zeros(9, 8)

    def head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: HEADS[name](x, weight), x, use_reentrant=use_reentrant)

    loss_of(head, weight).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, expected.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_a_hook_that_does_so_already_is_left_alone(name: str) -> None:
    weight, expected = tied(), tied()
    loss_of(HEADS[name], expected).backward()
    weight.main_grad = torch.zeros(9, 8)

    def add(parameter: torch.Tensor) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(add)
    loss_of(HEADS[name], weight).backward()
    torch.testing.assert_close(weight.main_grad, expected.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_what_was_in_grad_before_is_not_taken_along(name: str) -> None:
    weight = tied()
    weight.main_grad, weight.grad = torch.zeros(9, 8), torch.ones(9, 8)
    # The head alone adds nothing to it.
    HEADS[name](torch.ones(5, 8), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(9, 8))
    with pytest.raises(RuntimeError, match=r"weight: this backward pass added to its \.grad, which was not None, and"):
        loss_of(HEADS[name], weight).backward()


@pytest.mark.parametrize("name", HEADS)
def test_gradients_that_are_returned_stay_there(name: str) -> None:
    weight, hidden = tied(), torch.ones(5, 8, requires_grad=True)
    weight.main_grad = torch.zeros(9, 8)
    torch.autograd.grad(HEADS[name](hidden, weight).sum(), hidden)
    assert weight.grad is None
    assert not weight.main_grad.any()
