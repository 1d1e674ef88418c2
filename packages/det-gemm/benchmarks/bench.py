"""det_gemm beside plain torch.matmul: `python packages/det-gemm/benchmarks/bench.py --help`."""

import sys

import torch

from rl_kernels.core.bench import main
from rl_kernels.core.testing import Case
from rl_kernels.det_gemm.op import OPERATOR

CASES = (
    Case("decode, one row", {"m_dim": 1, "n_dim": 1024, "k_dim": 1024}),
    Case("decode, 16 rows", {"m_dim": 16, "n_dim": 1024, "k_dim": 1024}),
    Case("Qwen2.5-0.5B gate", {"m_dim": 64, "n_dim": 4864, "k_dim": 896}),
    Case("Qwen2.5-0.5B down", {"m_dim": 64, "n_dim": 896, "k_dim": 4864}),
    Case("training", {"m_dim": 256, "n_dim": 1024, "k_dim": 1024}),
)


if __name__ == "__main__":
    sys.exit(main(OPERATOR, CASES, {"torch.matmul": lambda a, b: torch.matmul(a, b)}))
