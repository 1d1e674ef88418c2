"""What was measured on a GPU and is frozen: a package's ``tuned/h200.json``. Nothing is timed at run time."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any


@functools.cache
def tuned(package: str) -> dict[str, Any]:
    """Return the launch configurations of a package, measured on an H200."""
    return json.loads((files(package) / "tuned" / "h200.json").read_text(encoding="utf-8"))
