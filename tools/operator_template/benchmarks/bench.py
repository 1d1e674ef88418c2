"""scaled_add beside plain PyTorch: `python packages/scaled-add/benchmarks/bench.py --help`."""

import sys

import torch

from rl_kernels.core.bench import main
from rl_kernels.core.testing import Case
from rl_kernels.scaled_add.op import OPERATOR

CASES = (Case("square", {"batch": 1024, "width": 1024}, {"scale": 0.5}),)


def eager(x: torch.Tensor, y: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x + scale * y


if __name__ == "__main__":
    sys.exit(main(OPERATOR, CASES, {"eager": eager}))
