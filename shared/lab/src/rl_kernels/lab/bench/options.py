"""Numeric options of the operators as flags of ``rl-kernels bench``, checked and tried before anything is timed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import torch

from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Draw, function_of, spec_of
from rl_kernels.lab.bench.definition import Benchmark, Shape

Benches = Mapping[str, tuple[Operator, Benchmark]]
"""Name -> operator to run, and its benchmark."""
PREFIX = "option_"


def flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, benches: Benches) -> None:
    """Add a flag for each option of the operators."""
    owners: dict[str, list[str]] = {}
    for operator, bench in benches.values():
        for name in bench.options:
            owners.setdefault(name, []).append(operator.name)
    if not owners:
        return
    group = parser.add_argument_group("options of the operators", "set for every shape; every operator must have them")
    for name, operators in owners.items():
        option = benches[operators[0]][1].options[name]
        help_text = f"{option.help} ({', '.join(operators)})"
        group.add_argument(flag(name), dest=PREFIX + name, type=option.type, metavar="X", help=help_text)


def chosen_options(args: argparse.Namespace, unknown: Sequence[str], benches: Benches) -> dict[str, float]:
    """Return the options that are given, by name; ``ValueError`` if an operator does not have one of them."""
    if unknown:
        has = "; ".join(f"{name} has {_flags(bench)}" for name, (_, bench) in benches.items())
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; options: {has}")
    values = {
        name.removeprefix(PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(PREFIX) and value is not None
    }
    for name in values:
        for operator, bench in benches.values():
            if name not in bench.options:
                raise ValueError(f"{flag(name)}: {operator.name} has no such option; give operators that do with --op")
    return values


def _flags(bench: Benchmark) -> str:
    return ", ".join(map(flag, bench.options)) or "none"


def check_options(operator: Operator, bench: Benchmark, shapes: Sequence[Shape]) -> None:
    """Call the operator at sizes of 1 with the options of each shape; ``ValueError`` if it refuses them."""
    spec = spec_of(operator)
    for shape in shapes:
        for pass_ in bench.passes(shape, torch.float32.itemsize).values():
            small = pass_.case.resized(dict.fromkeys(pass_.case.sizes, 1))
            try:
                function_of(operator, small.function)(**spec.inputs(small, Draw(torch.float32)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{operator.name} {shape.label}: {error}") from error
