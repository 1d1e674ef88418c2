"""The benchmark of fused_logp: shapes, minimum bytes moved, and peers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.command import number
from rl_kernels.core.testing import IGNORED, Case
from rl_kernels.fused_logp.spec.transforms import ROWS
from rl_kernels.lab.bench.definition import (
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

COMPILE, ALL = frozenset({"compile"}), frozenset({"eager", "compile", "liger", "quack"})
ENTROPY, MASKED = {"return_stats": True}, {"ignore_index": IGNORED}
SETS = {
    GOALS: (
        Shape((8192, 32768)),
        Shape((8192, 32768), ENTROPY, "with entropy", without=ALL),
        Shape((8192, 151936)),
        Shape((8192, 151936), ENTROPY, "with entropy", without=ALL),
        Shape((4096, 128256)),
        Shape((65536, 32000), note="long", without=COMPILE),
        *(Shape((rows, 151936), note="decode", without=COMPILE) for rows in (1, 8, 64)),
        Shape((4097, 50257), note="ragged", without=COMPILE),
        Shape((8192, 32768), MASKED, "40 % ignored", without=COMPILE),
    ),
    HOST: (Shape((1, 4096)),),
    SMALL: (
        Shape((256, 32768), without=COMPILE),
        Shape((512, 8192), without=COMPILE),
        Shape((8, 151936), note="decode", without=COMPILE),
        Shape((129, 5003), MASKED, "ragged, 40 % ignored", without=COMPILE),
    ),
}


def eager(
    logits: torch.Tensor, target_ids: torch.Tensor, *, ignore_index: int | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Return log-probabilities as trainers write them: log-softmax of all logits in FP32, then gather."""
    ids = target_ids if ignore_index is None else target_ids.clamp(min=0)
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    logp = torch.log_softmax(z, -1).gather(-1, ids[..., None]).squeeze(-1)
    return logp if ignore_index is None else logp.masked_fill(target_ids == ignore_index, 0)


def _cross_entropy(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a log-probability function made of a cross entropy that takes ``[N, V]`` and ``[N]``."""

    def call(logits: torch.Tensor, target_ids: torch.Tensor, *, ignore_index: int = IGNORED) -> torch.Tensor:
        loss = function(logits.flatten(0, -2), target_ids.flatten(), ignore_index=ignore_index, reduction="none")
        return -loss.view(target_ids.shape)

    return call


def liger() -> Callable[..., torch.Tensor]:
    """Import Liger's cross entropy."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return _cross_entropy(liger_cross_entropy)


def quack() -> Callable[..., torch.Tensor]:
    """Import quack's cross entropy."""
    from quack.cross_entropy import cross_entropy

    return _cross_entropy(cross_entropy)


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Return the work of each pass: forward reads the logits; backward reads them again and writes their gradient."""
    rows, vocab = shape.sizes
    case = Case(shape.label, {"batch": rows, "seq": 1, "vocab": vocab}, shape.options)
    logits = rows * vocab * itemsize
    return forward_and_backward(case, Work(logits), Work(3 * logits))


BENCH = Benchmark(
    shape=("N", "V"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": plain(eager, "log_softmax of FP32 logits, gather"),
        "compile": compiled(eager),
        "liger": Peer(
            liger, "liger-kernel", "forward writes the gradient over the logits", overwrites=True, waits=True
        ),
        "quack": Peer(quack, "quack-kernels"),
    },
    rows={"": ROWS},
    options={
        "temperature": Option(number(above=0), "divides the logits"),
    },
)
