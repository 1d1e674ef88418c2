"""sequence_losses: the terms of the loss, its gradients bit for bit, and no bit from other sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.grpo_loss import Normalizer, Objective, grpo_loss_from_advantages, sequence_losses

B, T = 7, 45
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"normalizer": Normalizer(num_tokens=100.0)},
    {"beta": 0.04, "normalizer": Normalizer(num_tokens=77)},
    {"objective": Objective(loss_type="grpo", beta=0.1), "normalizer": Normalizer(num_sequences=12)},
    {"objective": Objective(loss_type="dr_grpo"), "normalizer": Normalizer(num_sequences=5, max_completion_length=64)},
    {"objective": Objective(importance_level="sequence"), "normalizer": Normalizer(num_tokens=100)},
    {},
)
BACKENDS = [
    pytest.param("cpu", "native"),
    *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("triton", "native")),
]


def drawn(device: str, packed: bool, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the tensors of a call, and where packed sequences are."""
    draw = Draw(dtype, seed=3, device=device)
    shape = (B * T,) if packed else (B, T)
    current = draw.normal(*shape).sub(2.0)
    old, ref = (current + draw.normal(*shape, scale=0.3) for _ in range(2))
    mask = draw.mask(0.7, *shape)
    if not packed:
        mask[2] = False
        return [current, old, ref, draw.normal(B), mask], {}
    offsets = torch.tensor([0, 10, 10, 90, 91, 200, 250, B * T], device=device)
    return [current, old, ref, draw.normal(B), mask], {"cu_seqlens": offsets, "max_seqlen": 110}


@pytest.mark.parametrize("options", OBJECTIVES, ids=str)
@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_sum_and_gradients_match_the_loss(device: str, backend: str, options: dict[str, Any]) -> None:
    for packed in (False, True):
        call, where = drawn(device, packed)
        options = {**options, **where, "backend": backend}
        leaves = [call[0].clone().requires_grad_() for _ in range(2)]
        losses = sequence_losses(leaves[0], *call[1:], **options)
        loss = grpo_loss_from_advantages(leaves[1], *call[1:], **options).loss
        assert losses.shape == (B,)
        torch.testing.assert_close(losses.sum(), loss, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert torch.equal(sequence_losses(call[0], *call[1:], **options), losses)
        scale = torch.tensor(0.3, device=device)
        losses.backward(scale.expand(B))
        loss.backward(scale)
        assert torch.equal(bits_of(leaves[0].grad), bits_of(leaves[1].grad))


@pytest.mark.parametrize("options", OBJECTIVES[:-1], ids=str)
@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_sequences_are_independent(device: str, backend: str, options: dict[str, Any]) -> None:
    call, _ = drawn(device, packed=False)
    options, upstream = {**options, "backend": backend}, torch.linspace(-2.0, 3.0, B, device=device)

    def results(rows: slice) -> list[torch.Tensor]:
        current, *others = (value[rows].clone() for value in call)
        losses = sequence_losses(current.requires_grad_(), *others, **options)
        losses.backward(upstream[rows])
        return [bits_of(losses), bits_of(current.grad)]

    whole = results(slice(B))
    for rows in (slice(0, 1), slice(1, 4), slice(4, B)):
        assert all(torch.equal(part, value[rows]) for part, value in zip(results(rows), whole, strict=True)), rows


def test_masked_gradient_is_zero_for_any_upstream() -> None:
    call, _ = drawn("cpu", packed=False)
    call[0].requires_grad_()
    call[1][~call[4]] = torch.nan
    sequence_losses(*call).backward(torch.full((B,), torch.inf))
    assert not bits_of(call[0].grad[~call[4]]).any()


def test_dtypes_and_refused_calls() -> None:
    call, _ = drawn("cpu", packed=False, dtype=torch.bfloat16)
    call[0].requires_grad_()
    losses = sequence_losses(*call)
    assert losses.dtype == torch.float32
    grad = torch.autograd.grad(losses.sum(), call[0], create_graph=True)[0]
    assert grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()
    with pytest.raises(ValueError, match="advantages: expected"):
        sequence_losses(*call[:3], call[3][:2], call[4])
    with pytest.raises(ValueError, match="num_sequences: expected None"):
        sequence_losses(*call, normalizer=Normalizer(num_sequences=3))
