"""Registry entry of gated_delta_rule: torch schemas, fake kernels, backends and their promises.

Arguments of the raw ops: x and y ``[N, D]``; scale ``[]`` in the compute dtype (FP32, or FP64 for FP64 inputs).
"""

from __future__ import annotations

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.torchlib.ops import define

SCHEMAS = {
    "forward": "(Tensor x, Tensor y, Tensor scale, str backend) -> Tensor",
    "backward": "(Tensor upstream, Tensor scale, str backend) -> (Tensor, Tensor)",
}
FAKES = {
    "forward": lambda x, *_: x.new_empty(x.shape),
    "backward": lambda upstream, *_: (upstream.new_empty(upstream.shape), upstream.new_empty(upstream.shape)),
}


def describe(x: torch.Tensor, *_: object, **__: object) -> Call:
    """Return what the dispatcher looks at in a call of the public function."""
    return Call.of(x, D=x.shape[-1])


OPERATOR = Operator(
    name="gated_delta_rule",
    package="rl_kernels.gated_delta",
    summary="x + scale * y",
    shape=("N", "D"),
    rows=frozenset({"N"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(Backend("native", "rl_kernels.gated_delta.backends.native", {"cpu": INVARIANT, "cuda": INVARIANT}),),
    describe=describe,
)

ops = define(OPERATOR)
