"""Calls of a backend's raw functions beside the definition in FP64, for tests that record its launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing.logp_launches import back, gold, laid_out, rows_of, thresholds


def check_against_reference(call: Mapping[str, Any], backend: Any) -> None:
    """Compare forward and backward of a call with the definition.

    ``call`` has ``rows``, ``vocab``, ``dtype`` and ``layout``; ``least``: the kind of ``thresholds``; with ``indices``
    only the first and the last row are computed, the first one named twice. ``rows_of`` describes the other entries.
    """
    torch.manual_seed(1)
    count, vocab = call["rows"], call["vocab"]
    x = laid_out(torch.randn(count, vocab).to(call["dtype"]), call["layout"])
    rows, indices, active = rows_of(call, count, vocab), None, torch.ones(count, dtype=torch.bool)
    if "indices" in call:
        indices = torch.tensor([0, count - 1, 0])
        active = torch.zeros_like(active).index_fill(0, indices, True)
    leaf: Any = x.double().requires_grad_()
    rows = thresholds(leaf, rows, call.get("least"))
    inputs = x, rows.ids, rows.temperature, rows.ignored, indices, rows.min_logit
    expected = gold(leaf, rows, active & rows.active)
    stats = backend.forward_stats(*inputs)
    results = *stats, *backend.forward(*inputs)
    for result, value in zip(results, (*expected, expected[0], expected[3]), strict=True):
        assert result.shape == value.shape
        assert torch.allclose(result.double(), value, atol=1e-4)
    back(expected, rows.upstream)
    saved = stats[3], None if rows.upstream[2] is None else stats[2], *rows.upstream
    grad = backend.backward(*inputs, *saved)
    assert torch.allclose(grad.double(), leaf.grad, rtol=2e-2, atol=1e-5)
    if x.stride(0) or count == 1:
        backend.backward_inplace(*inputs, *saved)
        assert torch.equal(x, grad)
