"""The command ``rl-kernels list``: what is installed."""

from __future__ import annotations

from collections.abc import Sequence

from rl_kernels.core.command import json_parser, print_json, table
from rl_kernels.core.registry import kernel_registry


def list_operators(argv: Sequence[str]) -> int:
    """Print the installed operators."""
    given = json_parser("list", "Print the installed operators, their other names and their backends.").parse_args(argv)
    operators = [kernel_registry.load(name) for name in kernel_registry.names()]
    if given.json:
        print_json(
            [
                {
                    "operator": each.name,
                    "aliases": list(each.aliases),
                    "functions": list(each.functions),
                    "backends": [backend.name for backend in each.backends],
                    "shape": list(each.shape),
                    "summary": each.summary,
                }
                for each in operators
            ]
        )
        return 0
    rows = [
        (each.name, ", ".join(each.aliases), ", ".join(backend.name for backend in each.backends), each.summary)
        for each in operators
    ]
    print(table(("operator", "aliases", "backends", "what it computes"), rows))
    return 0
