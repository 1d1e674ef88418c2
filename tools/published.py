"""Write the list of operators in a release, from the installed packages: `python tools/published.py`.

Core uses that file to say how to install a missing operator.
"""

from __future__ import annotations

from pathlib import Path

from rl_kernels.core.command import write_json
from rl_kernels.core.registry import kernel_registry

FILE = Path(__file__).resolve().parents[1] / "shared" / "core" / "src" / "rl_kernels" / "core" / "published.json"


def published() -> dict[str, dict[str, object]]:
    """Return distribution, aliases and functions of each installed operator."""
    operators = [kernel_registry.load(name) for name in kernel_registry.names()]
    return {
        operator.name: {
            "distribution": operator.distribution,
            "aliases": list(operator.aliases),
            "functions": list(operator.functions),
        }
        for operator in operators
    }


if __name__ == "__main__":
    write_json(FILE, published())
