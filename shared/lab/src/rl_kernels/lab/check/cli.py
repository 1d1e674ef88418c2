"""``rl-kernels check``: arguments and exit status.

0: at least one check ran, every check that ran passed, and each named backend launched kernels of its own. 1: one of
these does not hold, or something is worse than in the report of ``--against``. 2: bad arguments or a candidate that
cannot run here, reported before anything runs; or a report that could not be written. 130: Ctrl-C, with a report of
what is known so far.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rl_kernels.core.command import Parser, count, install_hint, number, print_anything, writable
from rl_kernels.core.contract import DTYPES, Contract, contract, read_contract
from rl_kernels.core.dispatch import check_environment
from rl_kernels.core.operator import Operator, arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry
from rl_kernels.core.testing import spec_of
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Setting
from rl_kernels.lab.check.choose import candidates_of, device_of
from rl_kernels.lab.check.isolation.remote import TIMEOUT
from rl_kernels.lab.check.jobs import shared
from rl_kernels.lab.check.plan import Part, Plan
from rl_kernels.lab.check.relations import RELATIONS
from rl_kernels.lab.check.reports.against import compared, read_report
from rl_kernels.lab.check.reports.document import as_json, document_of
from rl_kernels.lab.check.reports.html import write_html
from rl_kernels.lab.check.reports.junit import write_junit
from rl_kernels.lab.check.reports.text import text
from rl_kernels.lab.check.result import CaseId, Skip
from rl_kernels.lab.check.suite import CTRL_C, Report, in_turn, run

USAGE, INTERRUPTED = 2, 130
STYLES = {"PASS": "green", "FAIL": "bold red", "interrupted": "yellow", "skipped": "dim"}
CHOSEN_BY_REPLAY = ("op", "candidate", "dtype", "relation", "suite", "check_grad", "list", "against")


def parser(operators: Sequence[Operator]) -> Parser:
    """Return the parser; the cases of the operators define the shape flags."""
    command = Parser("rl-kernels check", "Check implementations of the operators against the tolerance contract.")
    command.add_argument("--op", action="append", metavar="NAME", help="operator (default: every installed one)")
    command.add_argument(
        "--candidate",
        action="append",
        metavar="NAME",
        help="pytorch, auto, all, cuda, a backend, or your own MODULE:CALLABLE or file.py:callable (default: auto)",
    )
    command.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: fp32")
    command.add_argument(
        "--device",
        default="auto",
        help="auto, or any device of PyTorch that a backend runs on: cpu, cuda, cuda:1 (default: auto)",
    )
    command.add_argument("--arch-key", help="key of the tolerance contract (default: that of the device)")
    command.add_argument(
        "--contract", type=Path, metavar="FILE", help="a tolerance contract of your own (default: that of this release)"
    )
    command.add_argument("--suite", choices=("quick", "full"), help="full: all cases, and gradients")
    command.add_argument(
        "--relation", nargs="+", choices=RELATIONS, metavar="NAME", help=f"any of {', '.join(RELATIONS)}"
    )
    command.add_argument(
        "--check-grad", action="store_true", help="check gradients too (implied by --suite full without --relation)"
    )
    command.add_argument("--grad-mode", choices=("random", "ones"), default="random", help="upstream gradients")
    command.add_argument("--grad-seed", type=count(0, 31), default=123, help="seed of upstream gradients (%(default)s)")
    command.add_argument("--seed", type=count(0, 31), default=123, help="seed of the inputs (%(default)s)")
    command.add_argument(
        "--input-mode",
        choices=("random", "constant"),
        default="random",
        help="constant: also run every case on constant inputs",
    )
    command.add_argument("--constant-value", type=number(), default=0.25, help="value of constant inputs (%(default)s)")
    command.add_argument("--token-value", type=count(0), default=0, help="id of constant inputs, modulo the vocabulary")
    command.add_argument(
        "--timeout", type=number(above=0), default=TIMEOUT, metavar="SECONDS", help="limit for each call of your own"
    )
    command.add_argument("--jobs", type=count(1), default=1, metavar="N", help="number of processes (%(default)s)")
    command.add_argument("--fail-fast", action="store_true", help="stop at the first check that fails")
    command.add_argument("-v", "--verbose", action="store_true", help="also print the checks that pass")
    command.add_argument("--json", action="store_true", help="print only the report, as strict JSON")
    command.add_argument("--junit", type=writable, metavar="FILE", help="also write the report as JUnit XML")
    command.add_argument("--html", type=writable, metavar="FILE", help="also write the report as one HTML file")
    command.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with an earlier report of --json; what is worse fails"
    )
    command.add_argument("--list", action="store_true", help="print the id of each case that would run; run nothing")
    command.add_argument("--replay", metavar="CASE_ID", help="run one relation on one case again, by its id in --list")
    shapes = command.add_argument_group("shapes", "replace the sizes of every case that has them")
    for name in dict.fromkeys(size for operator in operators for size in spec_of(operator).size_names()):
        shapes.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"size_{name}",
            type=count(1, 31),
            metavar="N",
            help=f"size {name} of each case",
        )
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checker; return the exit status."""
    print_anything()
    try:
        check_environment()
        operators = _operators(argv)
        args = parser(operators).parse_args(argv)
        # The output of a candidate must not mix with the report, not even when it is imported.
        with redirect_stdout(sys.stderr):
            earlier = read_report(args.against.expanduser()) if args.against else None
            plan, skips = _plan(args, operators)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels check: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:  # A candidate's process may take long to start.
        print("rl-kernels check: stopped before anything ran", file=sys.stderr)
        return INTERRUPTED
    if args.list:
        print("\n".join(plan.names()))
        return 0
    # With one job everything runs in this process.
    again = partial(_plan_again, list(sys.argv[1:] if argv is None else argv))
    sharing = shared(again, args.jobs) if args.jobs > 1 else nullcontext(in_turn)
    with redirect_stdout(sys.stderr), _progress(sum(1 for _ in plan.tasks())) as progress, sharing as results:
        report = run(plan, skips, progress, results)
    document = document_of(report)
    changes = None if earlier is None else compared(document, earlier)
    if args.json:
        print(as_json(document if changes is None else {**document, "against": changes.document()}), flush=True)
    else:
        _show(text(report, verbose=args.verbose or bool(args.replay), changes=changes))
    if not _write_files(report, args):
        return USAGE
    if report.interrupted == CTRL_C:
        return INTERRUPTED
    return 0 if report.passed and not (changes and changes.regressed) else 1


def _show(lines: Iterator[str]) -> None:
    """Print lines, with colored verdicts on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        shown = Text(line)
        for word, style in STYLES.items():
            shown.highlight_regex(rf"^ *{word}\b", style)
        console.print(shown)


def _write_files(report: Report, args: argparse.Namespace) -> bool:
    """Write the requested files, report those that cannot be written, and return whether all were written."""
    done = True
    for flag, write, path in (("--junit", write_junit, args.junit), ("--html", write_html, args.html)):
        try:
            if path:
                write(report, path)
        except OSError as error:
            print(f"rl-kernels check: {flag}: {path} cannot be written: {error.strerror or error}", file=sys.stderr)
            done = False
    return done


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal, and nowhere else."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield advance


def _case_id(text: str) -> CaseId:
    try:
        case_id = CaseId.parse(text)
    except ValueError as error:
        raise ValueError(f"--replay: {error}") from error
    for part, known in ((case_id.dtype, DTYPES), (case_id.relation, RELATIONS)):
        if part not in known:
            raise ValueError(f"--replay: expected one of {', '.join(known)}, got {part!r} in {text!r}")
    return case_id


def _operators(argv: Sequence[str] | None) -> list[Operator]:
    """Return the operators that the arguments name: their cases define the shape flags."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--op", action="append", default=[])
    first.add_argument("--replay")
    args = first.parse_known_args(argv)[0]
    named = [_case_id(args.replay).operator] if args.replay else args.op
    operators = [kernel_registry.load(name) for name in named or kernel_registry.names()]
    if not operators:
        raise ValueError(f"no operator is installed; for example, {install_hint('rl-kernels-fused-logp')}")
    return list({operator.name: operator for operator in operators}.values())


def _plan_again(argv: list[str]) -> Plan:
    operators = _operators(argv)
    return _plan(parser(operators).parse_args(argv), operators)[0]


def _plan(args: argparse.Namespace, operators: Sequence[Operator]) -> tuple[Plan, list[Skip]]:
    case = ""
    if args.replay:
        case = _apply_replay(args)
    device = device_of(args.device, operators)
    terms = _contract(args.contract)
    arch = _arch(args.arch_key, device, terms)
    sizes = {name.removeprefix("size_"): n for name, n in vars(args).items() if name.startswith("size_") and n}
    constant = (args.constant_value, args.token_value) if args.input_mode == "constant" else None
    names = list(dict.fromkeys(args.candidate or ["auto"]))
    _check_user_candidates(names, operators)
    suite = args.suite or "quick"
    parts: list[Part] = []
    skips: list[Skip] = []
    for dtype in dict.fromkeys(args.dtype or ["fp32"]):
        setting = Setting(dtype, device, arch, args.seed, args.grad_mode, args.grad_seed, suite, contract=terms)
        all_candidates: list[Candidate] = []
        for operator in operators:
            candidates, left_out = candidates_of(operator, names, setting, args.timeout)
            all_candidates += candidates
            skips += left_out
        parts.append(Part(setting, all_candidates))
    relations = _relations(args, suite)
    plan = Plan(parts, relations, suite, sizes, constant, case, args.fail_fast)
    if case and not any(plan.cells()):
        hint = "" if constant or not case.endswith(", constant") else " without --input-mode constant"
        raise ValueError(f"--replay: {operators[0].name} has no case {case!r}{hint}")
    return plan, skips


def _apply_replay(args: argparse.Namespace) -> str:
    """Set candidate, dtype and relation from the case id; return the case's name."""
    chosen = [name for name in CHOSEN_BY_REPLAY if getattr(args, name)]
    if chosen:
        flags = ", ".join("--" + name.replace("_", "-") for name in chosen)
        raise ValueError(f"--replay: cannot be combined with {flags}")
    case_id = _case_id(args.replay)
    args.candidate, args.dtype, args.relation = [case_id.candidate], [case_id.dtype], [case_id.relation]
    args.suite = "full"
    return case_id.case


def _check_user_candidates(names: Sequence[str], operators: Sequence[Operator]) -> None:
    for name in names:
        if ":" in name and len(operators) > 1:
            raise ValueError(f"--candidate {name}: say which operator it implements, with --op")


def _contract(file: Path | None) -> Contract:
    try:
        return contract() if file is None else read_contract(file.expanduser())
    except ValueError as error:
        raise ValueError(f"--contract: {error}") from error


def _arch(arch_key: str | None, device: torch.device, terms: Contract) -> str:
    """Return the architecture whose rows apply: the requested one, or the device's."""
    arch = arch_of(device.type, device.index) if arch_key is None else arch_key
    if arch not in terms.archs:
        which = f"{arch!r} of {device}" if arch_key is None else repr(arch)
        raise ValueError(f"--arch-key: {which} is not in the tolerance contract; known: {', '.join(terms.archs)}")
    return arch


def _relations(args: argparse.Namespace, suite: str) -> list[str]:
    if args.relation:
        requested = {*args.relation, *(["gradients"] if args.check_grad else [])}
        return [name for name in RELATIONS if name in requested]
    return [name for name in RELATIONS if name != "gradients" or args.check_grad or suite == "full"]
