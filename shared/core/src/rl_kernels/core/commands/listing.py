"""The command ``rl-kernels list``: what is installed."""

from __future__ import annotations

from collections.abc import Sequence

from rl_kernels.core.command import json_parser, print_json, table
from rl_kernels.core.registry import kernel_registry


def list_operators(argv: Sequence[str]) -> int:
    """Print the installed operators."""
    args = json_parser("list", "Print the installed operators, their other names and their backends.").parse_args(argv)
    operators = [kernel_registry.load(name) for name in kernel_registry.names()]
    if args.json:
        print_json(
            [
                {
                    "operator": operator.name,
                    "aliases": list(operator.aliases),
                    "functions": list(operator.functions),
                    "backends": [backend.name for backend in operator.backends],
                    "shape": list(operator.shape),
                    "summary": operator.summary,
                }
                for operator in operators
            ]
        )
        return 0
    rows = [
        (
            operator.name,
            ", ".join(operator.aliases),
            ", ".join(backend.name for backend in operator.backends),
            operator.summary,
        )
        for operator in operators
    ]
    print(table(("operator", "aliases", "backends", "what it computes"), rows))
    return 0
