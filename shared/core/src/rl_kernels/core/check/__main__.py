"""``python -m rl_kernels.core.check``."""

import sys

from rl_kernels.core.check.cli import main

sys.exit(main())
