"""``python -m rl_kernels.lab.check``."""

import sys

from rl_kernels.lab.check.cli import main

sys.exit(main())
