"""``python -m rl_kernels.demo``, as ``torchrun -m rl_kernels.demo`` starts it on each rank."""

import sys

from rl_kernels.demo.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
