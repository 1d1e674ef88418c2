"""Logits from a CUDA graph of few rows: the bits of `linear_logits`, for any number of rows, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_kernels.core.testing import bits_of
from rl_kernels.linear_logp import LinearLogits, linear_logits
from rl_kernels.models.clients.vllm import graphs

ROWS = (3, 1, 4, 2, 64, 5, 70, 3)
"""More and fewer than before, the size of a graph and another one, and too many."""


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand for CUDA graphs on a CPU: what was captured runs again into the same memory; return the sizes captured."""
    sizes: list[int] = []

    def captured(run: Callable[[], LinearLogits], pool: object) -> tuple[LinearLogits, Callable[[], object]]:
        result = run()
        sizes.append(len(result.logits))

        def replay() -> None:
            again = run()
            result.logits.copy_(again.logits)
            result.norm.copy_(again.norm)

        return result, replay

    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(graphs, "new_pool", object)
    monkeypatch.setattr(graphs, "can_replay", lambda hidden: True)
    return sizes


def check(device: str, dtype: torch.dtype, bias: torch.Tensor | None) -> None:
    """Compare logits and log-probs with those of `linear_logits`, call by call."""
    source = torch.Generator().manual_seed(0)
    weight = (torch.randn(300, 64, generator=source) / 8).to(device, dtype)
    logits_of, ids = graphs.GraphedLogits(), torch.arange(70, device=device)
    with torch.inference_mode():
        for rows in ROWS:
            hidden = torch.randn(rows, 64, generator=source).to(device, dtype)
            graphed, expected = logits_of(hidden, weight, bias), linear_logits(hidden, weight, bias)
            assert torch.equal(bits_of(graphed.logits), bits_of(expected.logits))
            assert torch.equal(bits_of(graphed.logp(ids[:rows])), bits_of(expected.logp(ids[:rows])))
            # As vLLM masks them; the next call writes them anew.
            graphed.logits[:, 5:] = -torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_call_has_the_bits_of_linear_logits(replayed: list[int], dtype: torch.dtype) -> None:
    check("cpu", dtype, None)
    # One for each size, when it is first needed.
    assert replayed == [4, 1, 2, 64, 8]


def test_another_weight_has_graphs_of_its_own(replayed: list[int]) -> None:
    logits_of, hidden = graphs.GraphedLogits(), torch.randn(2, 8)
    for weight in (torch.randn(9, 8), torch.randn(9, 8)):
        with torch.no_grad():
            assert torch.equal(logits_of(hidden, weight, None).logits, linear_logits(hidden, weight).logits)
            # In place, as weights are synchronized.
            weight += 1
            assert torch.equal(logits_of(hidden, weight, None).logits, linear_logits(hidden, weight).logits)
    assert replayed == [2, 2]


def test_a_cpu_has_no_graphs() -> None:
    hidden, weight = torch.randn(2, 8), torch.randn(9, 8)
    with torch.no_grad():
        graphed = graphs.GraphedLogits()(hidden, weight, None)
    assert torch.equal(graphed.logits, linear_logits(hidden.detach(), weight).logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("with_bias", [False, True])
def test_graphs_on_a_gpu(*, with_bias: bool) -> None:
    bias = torch.randn(300, device="cuda").bfloat16() if with_bias else None
    check("cuda", torch.bfloat16, bias)
