"""fused_logp beside plain PyTorch: `python packages/fused-logp/benchmarks/bench.py --help`."""

import sys

import torch

from rl_kernels.core.bench import main
from rl_kernels.core.testing import Case
from rl_kernels.fused_logp.op import OPERATOR

CASES = (
    Case("one sequence", {"batch": 1, "seq": 256, "vocab": 32768}),
    Case("short sequences", {"batch": 8, "seq": 64, "vocab": 8192}),
    Case("decode, Qwen3 vocabulary", {"batch": 8, "seq": 1, "vocab": 151936}),
)


def eager(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids[..., None]).squeeze(-1)


if __name__ == "__main__":
    sys.exit(main(OPERATOR, CASES, {"eager": eager}))
