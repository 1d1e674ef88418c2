"""The build hook of the wheel: that of the tree, tools/hatch_cubins.py; an sdist has no tree, and no cubins.

The same file stands in every package with CUDA kernels.
"""

from __future__ import annotations

import os
from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TOOL = Path(__file__).resolve().parents[2] / "tools" / "hatch_cubins.py"
VARIABLE = "RL_KERNELS_CUBINS"

if TOOL.exists():
    Cubins = run_path(str(TOOL))["Cubins"]
else:

    class Sources(BuildHookInterface):
        """Leaves the wheel with its sources, and refuses what it cannot compile."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Refuse to leave out cubins that were asked for."""
            if os.environ.get(VARIABLE, "").split():
                reason = "cubins are built in the repository, not from an sdist"
                self.app.abort(f"{VARIABLE}={os.environ[VARIABLE]!r}: {reason}")
