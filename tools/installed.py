"""Check what is installed: `python tools/installed.py core linear_logp` passes if rl_kernels has exactly these parts.

Each is imported too, and the operators are listed, so in an environment that borrows nothing this also proves that a
package declares what it uses.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys


def main(expected: list[str]) -> str | None:
    """Return a message about wrong installed parts, or None."""
    import rl_kernels

    parts = {part.name for part in pkgutil.iter_modules(rl_kernels.__path__)}
    if parts != set(expected):
        return f"expected rl_kernels.{{{','.join(sorted(expected))}}}, found rl_kernels.{{{','.join(sorted(parts))}}}"
    for name in expected:
        importlib.import_module(f"rl_kernels.{name}")
    from rl_kernels.core.commands.cli import main as command

    return "rl-kernels list failed" if command(["list"]) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
