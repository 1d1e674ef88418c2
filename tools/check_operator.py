"""The checker from a clone: `python tools/check_operator.py --op fused_logp` is `rl-kernels check --op fused_logp`."""

import sys

from rl_kernels.lab.check.cli import main

if __name__ == "__main__":
    sys.exit(main())
