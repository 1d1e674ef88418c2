"""Run the checker from a clone: `python tools/check_operator.py ARGS` is the same as `rl-kernels check ARGS`."""

import sys

from rl_kernels.lab.check.cli import main

if __name__ == "__main__":
    sys.exit(main())
