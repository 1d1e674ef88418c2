"""Calls of a backend's raw functions beside the definition in FP64, for tests that record its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rl_kernels.core.testing.logp_launches import Rows, back, gold, laid_out, rows_of, thresholds
from rl_kernels.linear_logp.api import linear_logp
from rl_kernels.linear_logp.vocabulary import slots, vocab_shards


class Checked(NamedTuple):
    """A call that was compared with the definition.

    Attributes:
        inputs: of the raw functions.
        rows: ids, temperatures and upstream gradients.
        stats: logp, logsumexp, entropy and norm.
        leaves: hidden, weight and bias in FP64, with their gradients; None without a bias.
        saved_mib: MiB of logits that are kept.
    """

    inputs: tuple[Any, ...]
    rows: Rows
    stats: list[torch.Tensor]
    leaves: Sequence[Any]
    saved_mib: int

    @property
    def saved(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Norm and entropy, as the backward pass takes them."""
        return self.stats[3], None if self.rows.upstream[2] is None else self.stats[2]


def below_targets(**call: Any) -> torch.Tensor:
    """Return a ``min_logit`` for a call of ``linear_logp``: half below the logit of each target."""
    with torch.no_grad():
        stats = linear_logp(**{**call, "return_stats": True})
    return stats.logp + stats.logsumexp - 0.5


def check_case(call: Mapping[str, Any], backend: Any) -> Checked:
    """Compare forward and backward of a call with the definition.

    ``rows``, ``vocab``, ``size``, ``dtype``; ``layout`` of hidden and weight; ``bias`` True, or "row" for a contiguous
    one; ``cap``; ``saved``: MiB of logits that are kept, and their columns; ``needed``; ``main_grad``; ``join``: tokens
    of a chain; ``least``: the kind of ``thresholds``. For the others see ``rows_of``.
    """
    torch.manual_seed(1)
    count, vocab, size, dtype, layout = (call[name] for name in ("rows", "vocab", "size", "dtype", "layout"))
    hidden = laid_out(torch.randn(count, size).to(dtype), layout)
    # Of equal rows of the weight no gradient is left.
    weight = laid_out(torch.randn(vocab, size).to(dtype), "odd" if layout == "expanded" else layout)
    bias = torch.randn(2 * vocab).to(dtype)[::2] if "bias" in call else None
    bias = bias.contiguous() if bias is not None and call["bias"] == "row" else bias
    rows, (saved_mib, width) = rows_of(call, count, vocab), call.get("saved", (0, 0))
    cap = torch.tensor(call["cap"], dtype=torch.float64) if "cap" in call else None
    leaves = [None if x is None else x.double().detach().requires_grad_() for x in (hidden, weight, bias)]
    rows = thresholds(_logits(leaves, call.get("cap")), rows, call.get("least"))
    inputs = hidden, weight, rows.ids, bias, rows.temperature, rows.ignored, cap, rows.min_logit
    *stats, kept = backend.forward_stats(*inputs, saved_mib)
    checked = Checked(inputs, rows, stats, leaves, saved_mib)
    expected = _gold(checked, call.get("cap"))
    for result, value in zip(stats, expected, strict=True):
        assert torch.allclose(result.double(), value, atol=1e-3, rtol=1e-4)
    logp, norm, again = backend.forward(*inputs, saved_mib)
    assert torch.equal(logp, stats[0])
    assert torch.equal(norm, stats[3])
    assert kept.shape == again.shape == (count, width)
    back(expected, rows.upstream)
    _check_backward(checked, kept if saved_mib else None, call, backend)
    return checked


def _gold(checked: Checked, cap: tuple[float, float] | None) -> list[torch.Tensor]:
    return gold(_logits(checked.leaves, cap), checked.rows, checked.rows.active)


def _logits(leaves: Sequence[Any], cap: tuple[float, float] | None) -> torch.Tensor:
    hidden, weight, bias = leaves
    z: torch.Tensor = hidden @ weight.t() + (0.0 if bias is None else bias)
    return z if cap is None else cap[0] * (z * cap[1]).tanh()


def _check_backward(checked: Checked, kept: torch.Tensor | None, call: Mapping[str, Any], backend: Any) -> None:
    needed = call.get("needed", [True, True, checked.leaves[2] is not None])
    # The last pass frees the logits.
    frees_kept = kept is not None and "main_grad" not in call
    shard = 0, call["vocab"], 1, False, None, 1, needed, call.get("join"), frees_kept
    arguments = *checked.inputs, *checked.saved, kept, *checked.rows.upstream, *shard
    for result, leaf, is_needed in zip(backend.backward(*arguments), checked.leaves, needed, strict=True):
        assert bool(result.numel()) == is_needed
        if is_needed:
            close(result, leaf.grad)
    assert kept is None or not frees_kept or not kept.numel()
    if "main_grad" in call:
        total = torch.randn(checked.inputs[1].shape)
        continued = total.double() + checked.leaves[1].grad
        backend.backward_main_grad(*arguments, total, None)
        close(total, continued)


def check_shards(checked: Checked, backend: Any) -> None:
    """Compare both parts of the forward pass over shards with the whole, and backward on them with the definition."""
    hidden, weight, ids, bias, scale, ignored, cap, least = checked.inputs
    vocab, entropy = len(weight), bias is not None
    for ranks in (2, 8):
        bounds, shards, packed, kept = vocab_shards(vocab, ranks), [], [], []
        for start, stop in bounds:
            of_bias = None if bias is None else bias[start:stop]
            shards.append((hidden, weight[start:stop], ids, of_bias, scale, ignored, cap, least))
            states, logits = backend.states(*shards[-1], start, slots(vocab, ranks), entropy, checked.saved_mib)
            packed.append(states)
            kept.append(logits)
        result = backend.finish(torch.stack(packed), ids, scale, ignored, vocab, entropy)
        for value, whole, is_needed in zip(result, checked.stats, (True, entropy, entropy, True), strict=True):
            assert bool(value.numel()) == is_needed
            assert not is_needed or torch.allclose(value, whole, atol=1e-5, rtol=1e-5)
    saved = checked.saved
    needed = [True, True, bias is not None]
    parts = [
        backend.backward(
            *shard, *saved, logits, *checked.rows.upstream, start, vocab, 8, True, None, 1, needed, None, False
        )
        for shard, logits, (start, _) in zip(shards, kept, bounds, strict=True)
    ]
    dhidden, *others = zip(*parts, strict=True)
    for value, leaf in zip((sum(dhidden), *map(torch.cat, others)), checked.leaves, strict=True):
        if leaf is not None:
            close(value, leaf.grad)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a gradient with the definition's."""
    assert result.shape == expected.shape
    assert not result.isnan().any()
    assert (result.double() - expected).abs().max() <= 1e-2 * expected.abs().max() + 1e-6
