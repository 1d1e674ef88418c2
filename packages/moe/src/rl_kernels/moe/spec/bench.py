"""The benchmark of experts: models' shapes, the work of both products, and the peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.definition import (
    FORWARD,
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Pass,
    Peer,
    Shape,
    Work,
    forward_and_backward,
)
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.moe.spec.cases_dimensions import sizes

MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3.5-35B-A3B": (2048, 512, 256, 8),
    "OLMoE": (2048, 1024, 64, 8),
    "GLM-4.5-Air": (4096, 1408, 128, 8),
}
"""D, F, E and k."""
TRAIN, DECODE = (8192, 32768), (1, 16, 64, 256)
# A loop over experts in Python takes seconds for these.
LOOP = frozenset({"eager"})
TRAINING = tuple(
    Shape((count, *model), note=name, group="train", without=LOOP) for count in TRAIN for name, model in MODELS.items()
)
SKEWED = tuple(
    Shape((8192, *model), {"chosen": "half"}, f"{name}, half on one expert", "skewed", LOOP)
    for name, model in MODELS.items()
)
DECODING = tuple(
    Shape((count, *model), note=name, group="decode") for name, model in MODELS.items() for count in DECODE
)
SETS = {
    GOALS: (*TRAINING, *SKEWED, *DECODING, Shape((257, 520, 264, 12, 3), note="ragged")),
    # The goals in two calls.
    "train": (*TRAINING, *SKEWED),
    "decode": DECODING,
    HOST: (Shape((1, 256, 128, 8, 2), note="one token"),),
    SMALL: (
        Shape((64, 256, 128, 8, 2)),
        Shape((1, 256, 128, 8, 2), note="decode"),
        Shape((17, 40, 24, 5, 2), note="ragged"),
    ),
}


EXPERTS = RowLayout(
    arguments={"gate_up": 2, "down": 2},
    results=frozenset({"gradient:gate_up", "gradient:down"}),
    any_leading=False,
    naming="ids",
)
"""Rows are experts: a result of FP64 for all weights would not fit into memory. The output is a sum over them."""


def eager(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Loop over the experts that were chosen, as transformers' eager modules do."""
    out = torch.zeros_like(hidden)
    for expert in ids.unique().tolist():
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = F.linear(hidden[tokens], gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert]) * weights[tokens, slots, None]
        out.index_add_(0, tokens, y.to(out.dtype))
    return out


def grouped() -> Callable[..., torch.Tensor]:
    """Return the layer on ``torch._grouped_mm``, in the steps of transformers' ``grouped_mm`` experts."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")

    def call(
        hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, slots = ids.shape
        flat = ids.flatten()
        order = torch.argsort(flat)
        counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=ids.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(hidden[order // slots], gate_up.mT, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None]
        return y[torch.argsort(order)].view(tokens, slots, -1).sum(1).to(hidden.dtype)

    return call


def liger() -> Callable[..., torch.Tensor]:
    """Import Liger's fused mixture."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def call(
        hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = LigerFusedMoEFunction.apply(hidden, gate_up, down, ids.int(), weights)
        return out

    return call


def vllm() -> Callable[..., torch.Tensor]:
    """Import vLLM's fused experts, which have no backward pass."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    def call(
        hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = fused_experts(hidden, gate_up, down, weights.float(), ids.int())
        return out

    return call


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Count the operations of both products, and the bytes of chosen experts' weights, tokens and results."""
    tokens, width, inner, count, slots = shape.sizes
    touched = min(count, tokens * slots)
    size = (3 * width * inner * touched + 2 * tokens * width) * itemsize
    flops = 6.0 * tokens * slots * width * inner
    # Weights of routes as models pass them, which round them to the dtype of hidden.
    case = Case(shape.label, sizes(*shape.sizes), {"weights": torch.bfloat16, **shape.options})
    return forward_and_backward(case, Work(size, flops), Work(3 * size, 3 * flops))


BENCH = Benchmark(
    shape=("T", "D", "F", "E", "K"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": Peer(lambda: eager, note="a loop over the chosen experts, as transformers' eager modules", waits=True),
        "grouped": Peer(grouped, note="torch._grouped_mm, in the steps of transformers' grouped_mm experts"),
        "liger": Peer(liger, "liger-kernel"),
        "vllm": Peer(vllm, "vllm", passes=(FORWARD,)),
    },
    rows={"": EXPERTS},
)
