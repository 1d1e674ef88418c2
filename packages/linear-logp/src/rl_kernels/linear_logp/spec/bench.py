"""The benchmark of linear_logp: shapes, minimum matrix products, and peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rl_kernels.core.command import count, number
from rl_kernels.core.testing import IGNORED, Case
from rl_kernels.lab.bench.definition import (
    BOTH,
    FORWARD,
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Option,
    Pass,
    Peer,
    Shape,
    Work,
    compiled,
    forward_and_backward,
    plain,
)
from rl_kernels.linear_logp.spec.transforms import ROWS

COMPILE = frozenset({"compile"})
MASKED = {"ignore_index": IGNORED}
SETS = {
    GOALS: (
        Shape((4096, 2048, 131072)),
        Shape((4096, 2048, 32768)),
        Shape((4096, 2048, 50257)),
        Shape((4096, 2048, 151936), without=COMPILE),
        Shape((4096, 4096, 128256)),
        Shape((8192, 4096, 151936)),
        *(Shape((rows, 2048, 131072), note="decode", without=COMPILE) for rows in (1, 8, 64)),
        Shape((1023, 2048, 50257), MASKED, "ragged, 40 % ignored", without=COMPILE),
    ),
    HOST: (Shape((1, 512, 4096)),),
    SMALL: (
        Shape((1, 256, 32768), note="decode", without=COMPILE),
        Shape((256, 256, 8192), without=COMPILE),
        Shape((64, 896, 8192), without=COMPILE),
        Shape((33, 129, 1025), MASKED, "ragged, 40 % ignored", without=COMPILE),
    ),
}


def eager(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    ignore_index: int | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return log-probabilities as trainers write them: all logits, cast to FP32, then log-softmax and gather."""
    ids = target_ids if ignore_index is None else target_ids.clamp(min=0)
    logits = F.linear(hidden, lm_head_weight).float()
    logits = logits if temperature == 1.0 else logits / temperature
    logp = torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)
    return logp if ignore_index is None else logp.masked_fill(target_ids == ignore_index, 0)


def gemm(hidden: torch.Tensor, lm_head_weight: torch.Tensor, target_ids: torch.Tensor, **_: object) -> torch.Tensor:
    """Return the logits alone: the least cost of a forward pass that multiplies with PyTorch."""
    return F.linear(hidden, lm_head_weight)


def cce(filter_eps: str | None) -> Callable[[], Callable[..., torch.Tensor]]:
    """Return an importer of cut-cross-entropy, with its filter of small gradients or without (None)."""

    def make() -> Callable[..., torch.Tensor]:
        from cut_cross_entropy import linear_cross_entropy

        def call(
            hidden: torch.Tensor, lm_head_weight: torch.Tensor, target_ids: torch.Tensor, *, ignore_index: int = IGNORED
        ) -> torch.Tensor:
            rows, ids = hidden.flatten(0, -2), target_ids.flatten()
            options = {"ignore_index": ignore_index, "reduction": "none", "filter_eps": filter_eps}
            return -linear_cross_entropy(rows, lm_head_weight, ids, **options).view(target_ids.shape)

        return call

    return make


def _summed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the sum of all log-probabilities, made of a linear cross entropy that takes ``[N, D]`` and ``[N]``."""

    def call(
        hidden: torch.Tensor, lm_head_weight: torch.Tensor, target_ids: torch.Tensor, *, ignore_index: int = IGNORED
    ) -> torch.Tensor:
        rows, ids = hidden.flatten(0, -2), target_ids.flatten()
        return -function(rows, lm_head_weight, ids, ignore_index=ignore_index, reduction="sum")

    return call


def liger() -> Callable[..., torch.Tensor]:
    """Import Liger's fused linear cross entropy; it returns a sum, and computes the gradient in the forward pass."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _summed(liger_fused_linear_cross_entropy)


def quack() -> Callable[..., torch.Tensor]:
    """Import quack's chunked linear cross entropy."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return _summed(chunked_linear_cross_entropy)


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Return the work of each pass: one product forward; backward repeats it and adds one per gradient."""
    rows, size, vocab = shape.sizes
    case = Case(shape.label, {"batch": rows, "seq": 1, "hidden": size, "vocab": vocab}, shape.options)
    product, weight, hidden = 2.0 * rows * size * vocab, vocab * size * itemsize, rows * size * itemsize
    forward, both = Work(weight + hidden, product), Work(3 * (weight + hidden), 4 * product)
    return forward_and_backward(case, forward, both)


SCALAR = "scalar loss: no gradient for a token of its own, three products"
BENCH = Benchmark(
    shape=("N", "D", "V"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": plain(eager, "linear, log_softmax of FP32 logits, gather"),
        "compile": compiled(eager),
        "gemm": Peer(lambda: gemm, note="the product alone, not a log-probability", passes=(FORWARD,), checked=False),
        "cce": Peer(cce("high"), "cut-cross-entropy", "leaves out small gradients", waits=True),
        "cce-unfiltered": Peer(cce(None), "cut-cross-entropy", "all gradients", waits=True),
        "liger": Peer(liger, "liger-kernel", SCALAR, passes=(BOTH,), scalar=True, waits=True),
        "quack": Peer(quack, "quack-kernels", SCALAR, passes=(BOTH,), scalar=True),
    },
    rows={"": ROWS},
    options={
        "temperature": Option(number(above=0), "divides the logits"),
        "saved_mib": Option(count(0), "bound of the logits that are kept for backward, in MiB"),
        "workspace_mib": Option(count(1), "bound of the backward workspace, in MiB"),
    },
)
