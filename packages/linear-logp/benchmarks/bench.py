"""linear_logp beside plain PyTorch: `python packages/linear-logp/benchmarks/bench.py --help`."""

import sys

import torch
import torch.nn.functional as F

from rl_kernels.core.bench import main
from rl_kernels.core.testing import Case
from rl_kernels.linear_logp.op import OPERATOR

CASES = (
    Case("decode, one token", {"batch": 1, "seq": 1, "hidden": 256, "vocab": 32768}),
    Case("one sequence", {"batch": 1, "seq": 256, "hidden": 256, "vocab": 8192}),
    Case("Qwen2.5-0.5B hidden size", {"batch": 1, "seq": 64, "hidden": 896, "vocab": 8192}),
)


def eager(hidden: torch.Tensor, lm_head_weight: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, lm_head_weight).float()
    return torch.log_softmax(logits, -1).gather(-1, target_ids[..., None]).squeeze(-1)


if __name__ == "__main__":
    sys.exit(main(OPERATOR, CASES, {"eager": eager}))
