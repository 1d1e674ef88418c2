"""``rl-kernels check``: arguments, and what exit status they end in.

0: at least one check ran and every one that ran holds. 1: a check failed, or none ran. 2: unusable arguments, or a
candidate that cannot run here; said before anything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from rl_kernels.core.check import report as reports
from rl_kernels.core.check.candidate import Candidate
from rl_kernels.core.check.cell import Setting
from rl_kernels.core.check.relations import RELATIONS
from rl_kernels.core.check.result import Skip
from rl_kernels.core.check.suite import Plan, candidates_of, run
from rl_kernels.core.command import Parser, count
from rl_kernels.core.contract import DTYPES, contract
from rl_kernels.core.operator import Operator, arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry
from rl_kernels.core.testing import spec_of

USAGE = 2


def parser(operators: Sequence[Operator]) -> Parser:
    """Return the parser; the shape flags are those of the operators' cases."""
    made = Parser("rl-kernels check", "Hold implementations of the operators to the tolerance contract.")
    made.add_argument("--op", action="append", metavar="NAME", help="operator (default: every installed one)")
    made.add_argument(
        "--candidate", action="append", metavar="NAME", help="pytorch, auto, all, cuda, or a backend (default: auto)"
    )
    made.add_argument("--dtype", choices=DTYPES, default="fp32")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    made.add_argument("--arch-key", help="key of the tolerance contract (default: that of the device)")
    made.add_argument("--suite", choices=("quick", "full"), default="quick")
    made.add_argument("--relation", nargs="+", choices=RELATIONS, metavar="NAME", help=f"of {', '.join(RELATIONS)}")
    made.add_argument("--check-grad", action="store_true", help="check gradients too (implied by --suite full)")
    made.add_argument("--grad-mode", choices=("random", "ones"), default="random", help="upstream gradients")
    made.add_argument("--grad-seed", type=int, default=123)
    made.add_argument("--seed", type=int, default=123)
    made.add_argument("--input-mode", choices=("random", "constant"), default="random", help="constant adds to random")
    made.add_argument("--constant-value", type=float, default=0.25)
    made.add_argument("--token-value", type=count(0), default=0)
    made.add_argument("--json", action="store_true", help="print the report as strict JSON, and nothing else")
    made.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    shapes = made.add_argument_group("shapes", "replace the sizes of every case that has them")
    for name in dict.fromkeys(size for operator in operators for size in spec_of(operator).size_names()):
        shapes.add_argument(f"--{name.replace('_', '-')}", dest=f"size_{name}", type=count(1), metavar="N")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checker; return the exit status."""
    try:
        operators = _operators(argv)
        given = parser(operators).parse_args(argv)
        plan, skips = _plan(given, operators)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels check: {error}", file=sys.stderr)
        return USAGE
    if given.list:
        print("\n".join(plan.names()))
        return 0
    report = run(plan, skips)
    print(reports.as_json(report) if given.json else "\n".join(reports.text(report)))
    return 0 if report.passed else 1


def _operators(argv: Sequence[str] | None) -> list[Operator]:
    """Return the operators that the arguments name: their cases say which shape flags there are."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--op", action="append", default=[])
    named = first.parse_known_args(argv)[0].op
    found = [kernel_registry.load(name) for name in named or kernel_registry.names()]
    if not found:
        raise ValueError("no operator is installed; for example: pip install rl-kernels-fused-logp")
    return found


def _plan(given: argparse.Namespace, operators: Sequence[Operator]) -> tuple[Plan, list[Skip]]:
    device = _device(given.device)
    arch = given.arch_key or arch_of(device.type, device.index)
    if arch not in contract().archs:
        raise ValueError(f"--arch-key: {arch!r} is not in the tolerance contract; known: {', '.join(contract().archs)}")
    sizes = {name.removeprefix("size_"): n for name, n in vars(given).items() if name.startswith("size_") and n}
    constant = (given.constant_value, given.token_value) if given.input_mode == "constant" else None
    _token_in_vocabulary(constant, sizes, operators)
    setting = Setting(given.dtype, device, arch, seed=given.seed, grad_mode=given.grad_mode, grad_seed=given.grad_seed)
    found: list[Candidate] = []
    skips: list[Skip] = []
    for operator in operators:
        candidates, left_out = candidates_of(operator, given.candidate or ["auto"], setting)
        found += candidates
        skips += left_out
    relations = given.relation or [
        name for name in RELATIONS if name != "gradients" or given.check_grad or given.suite == "full"
    ]
    return Plan(found, setting, relations, given.suite, sizes, constant), skips


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: {name} is not there; this machine has {torch.cuda.device_count()} GPUs")
    return device


def _token_in_vocabulary(
    constant: tuple[float, int] | None, sizes: dict[str, int], operators: Sequence[Operator]
) -> None:
    if constant is None:
        return
    cases = [case for op in operators if spec_of(op).ids for case in spec_of(op).cases]
    smallest = min((sizes.get("vocab", case.sizes.get("vocab", 1)) for case in cases), default=constant[1] + 1)
    if constant[1] >= smallest:
        raise ValueError(f"--token-value: expected an id below the smallest vocabulary, {smallest}, got {constant[1]}")
