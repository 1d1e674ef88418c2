"""The command ``rl-kernels explain``: which backend a call would use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_kernels.core.command import json_parser, print_json, table
from rl_kernels.core.contract import DTYPES, contract
from rl_kernels.core.dispatch import Verdict, explain_call, explain_with_notes
from rl_kernels.core.operator import Call, Operator, arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry


class _Sizes(dict[str, Any]):
    """The traits of a described call; records the sizes that a backend reads but that were not given."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self.missing: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self.missing.append(name)
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        self.missing.append(name)
        return 0


def explain(argv: Sequence[str]) -> int:
    """Print the verdict on every backend for a described call; without an operator, for calls of all sizes."""
    parser = json_parser(
        "explain", "Print for each backend whether a call would use it, or why not. The call does not run."
    )
    parser.add_argument("op", nargs="?", help="operator, as `rl-kernels list` names it (default: all, for any sizes)")
    parser.add_argument("--shape", help="sizes joined by x or commas, in the operator's order (e.g. 4096x151936)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the operands (default: bf16)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda if there is a GPU, or --arch names one",
    )
    parser.add_argument(
        "--arch", help="architecture (e.g. sm_89 or gfx942): answer for such a GPU, which may be missing"
    )
    args = parser.parse_args(argv)
    if args.arch is not None:
        args.arch = args.arch.replace("_", "")
    if args.device is None:
        args.device = "cuda" if args.arch not in (None, "cpu") or torch.cuda.is_available() else "cpu"
    if args.op is None:
        return _explain_all(args)
    try:
        operator = kernel_registry.load(args.op)
        call = _described_call(operator, args)
        verdicts = explain_with_notes(operator, call)
        _check_sizes(operator, call)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels explain: {error}", file=sys.stderr)
        return 2
    if args.json:
        described = {"device": args.device, "arch": call.arch, "dtype": args.dtype, "sizes": dict(call.traits)}
        print_json({"operator": operator.name, **described, "backends": [as_json(verdict) for verdict in verdicts]})
        return 0
    for verdict in verdicts:
        print(verdict)
    return 0


def _explain_all(args: argparse.Namespace) -> int:
    try:
        if args.shape is not None:
            raise ValueError("--shape: expected only with an operator")
        device, arch = _device_and_arch(args)
    except ValueError as error:
        print(f"rl-kernels explain: {error}", file=sys.stderr)
        return 2
    verdicts = verdicts_of(Call(device, DTYPES[args.dtype], arch))
    if args.json:
        operators = {name: [as_json(verdict) for verdict in per_backend] for name, per_backend in verdicts.items()}
        print_json({"device": args.device, "arch": arch, "dtype": args.dtype, "operators": operators})
        return 0
    print(as_table(verdicts, f"{args.dtype} on {arch}"))
    return 0


def verdicts_of(call: Call) -> dict[str, Sequence[Verdict]]:
    """Return the verdicts on all backends of all operators, for calls of any size."""
    return {name: explain_call(kernel_registry.load(name), call) for name in kernel_registry.names()}


def as_table(verdicts: Mapping[str, Sequence[Verdict]], where: str) -> str:
    """Return the table of verdicts by operator."""
    rows = [
        (name, verdict.backend, str(verdict).partition(": ")[2])
        for name, per_backend in verdicts.items()
        for verdict in per_backend
    ]
    return table(("operator", "backend", where), rows)


def _described_call(operator: Operator, args: argparse.Namespace) -> Call:
    order = "x".join(operator.shape)
    sizes: list[int] = []
    if args.shape is not None:
        parts = args.shape.replace(",", "x").split("x")
        if len(parts) != len(operator.shape) or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"--shape: expected {order}, sizes >= 1, got {args.shape!r}")
        sizes = [int(part) for part in parts]
    traits = {name: size for name, size in zip(operator.shape, sizes, strict=False) if name not in operator.rows}
    device, arch = _device_and_arch(args)
    return Call(device, DTYPES[args.dtype], arch, _Sizes(traits))


def _device_and_arch(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Return device and architecture."""
    device = torch.device(args.device)
    if args.arch is not None and args.arch not in contract().archs:
        raise ValueError(f"--arch: expected one of {', '.join(contract().archs)}, got {args.arch!r}")
    if args.arch is None and args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--arch: needed to explain a GPU call on a machine without a GPU (e.g. --arch sm90)")
    return device, args.arch or arch_of(device.type, device.index)


def _check_sizes(operator: Operator, call: Call) -> None:
    """Raise ``ValueError`` if a backend looked at a size that was not given."""
    assert isinstance(call.traits, _Sizes)
    missing = [name for name in operator.shape if name in call.traits.missing]
    if missing:
        raise ValueError(f"--shape: expected {'x'.join(operator.shape)}: the answer depends on {', '.join(missing)}")


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as an object of strict JSON."""
    return {"backend": verdict.backend, "chosen": verdict.chosen, "reason": verdict.reason, "note": verdict.note}
