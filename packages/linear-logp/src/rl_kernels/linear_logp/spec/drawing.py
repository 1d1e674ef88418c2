"""Logits of several kinds, and what is asked of a sampler, for its tests."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp.sampling import LinearLogits

CPU = torch.device("cpu")
REQUESTS: tuple[dict[str, Any], ...] = (
    dict(top_p=0.9),
    dict(top_p=0.3, temperature=10.0),
    dict(top_k=20, top_p=0.9, temperature=0.7),
    dict(min_p=0.05),
    dict(top_k=7, min_p=0.2, temperature=1.5),
    dict(top_k=150, top_p=0.3),
    dict(top_p=0.999, temperature=3.0),
    dict(top_p=1e-6),
    dict(min_p=0.5, top_p=0.99),
    dict(temperature=0.02, top_k=50),
    dict(),
)
KINDS = ("normal", "tied", "masked", "equal")


def given(kind: str, rows: int, vocab: int, backend: str = "native", device: torch.device = CPU) -> LinearLogits:
    """Return logits of a kind, as the product of one-hot hidden states and their transpose is."""
    draw = Draw(torch.float32, seed=4)
    logits = draw.normal(rows, vocab) * 3
    if kind == "tied":
        logits = logits.round()
    elif kind == "masked":
        logits[:, torch.arange(vocab) % 5 > 0] = -math.inf
    elif kind == "equal":
        logits[:] = 0.25
    top = logits.amax(1)
    norm = torch.stack((top, (logits - top[:, None]).exp().sum(1).log()), 1)
    return LinearLogits(logits.to(device), norm.to(device), None, backend, torch.float32)


def per_row(rows: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """Return a request with other numbers in each row: some filters off, some rows greedy."""
    row = torch.arange(rows, device=device)
    top_p = torch.where(row % 4 == 1, 1.0, 0.2 + 0.7 * (row % 5) / 5)
    temperature = torch.where(row % 4 == 3, 0.0, 0.3 + row % 3)
    return dict(temperature=temperature, top_k=row % 3 * 9, top_p=top_p, min_p=torch.where(row % 2 == 0, 0.1, 0.0))


def uniform_of(rows: int, device: torch.device = CPU) -> torch.Tensor:
    """Return a uniform number for each row."""
    return torch.rand(rows, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(device)
