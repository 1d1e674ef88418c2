"""Measure the errors of plain PyTorch for each accuracy row of the tolerance contract: `python tools/calibrate.py`.

Runs the definition of every installed operator on its cases, on the CPU, and compares it with the same definition in
FP64: once as written (`eager`), once without its casts to a wider dtype (`same_dtype`). `--write` adds the numbers to
the rows of the contract; it never changes their tolerances.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.overrides import TorchFunctionMode

from rl_kernels.core import contract as contract_module
from rl_kernels.core import kernel_registry
from rl_kernels.core.command import Parser, count, json_rows
from rl_kernels.core.contract import DTYPES, Calibration, Errors, Key, Measured, contract
from rl_kernels.core.testing import spec_of
from rl_kernels.lab.check.candidate import reference_candidate
from rl_kernels.lab.check.cell import Cell, Setting

DEVICE = "cpu"
FIRST_SEED = 123
FILE = Path(contract_module.__file__).with_name("tolerance_contract.json")
WIDTH = 170
CASTS = (torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.float, torch.Tensor.double)


class SameDtype(TorchFunctionMode):
    """Skips casts of a floating-point tensor to a wider dtype, so that what follows runs in the dtype of the tensor.

    If an input is wider, PyTorch's type promotion widens what it touches, as in any program.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return func(*args, **kwargs)
        if _wider(kwargs.get("dtype"), x.dtype):
            kwargs["dtype"] = x.dtype
        result = func(*args, **kwargs)
        return x if func in CASTS and _wider(result.dtype, x.dtype) else result


def _wider(dtype: Any, than: torch.dtype) -> bool:
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return floating and torch.finfo(dtype).eps < torch.finfo(than).eps


ARITHMETIC: Mapping[str, type[AbstractContextManager[Any]]] = {"eager": nullcontext, "same_dtype": SameDtype}


class Sample(NamedTuple):
    """The errors of one output or gradient, and the row that it counts for."""

    row: Key
    arithmetic: str
    errors: Errors


def cells(suite: str, seeds: Iterable[int]) -> Iterator[Cell]:
    """Yield the definition of every installed operator on every case, dtype and seed."""
    for name in kernel_registry.names():
        operator = kernel_registry.load(name)
        spec = spec_of(operator)
        # Generated cases, and cases with their own dtype, say nothing new about plain PyTorch.
        for case in (case for case in spec.cases if not case.relations and not case.dtype):
            for dtype in DTYPES if suite == "full" or case.suite == "quick" else ():
                for seed in seeds:
                    setting = Setting(dtype, torch.device(DEVICE), DEVICE, seed)
                    yield Cell(reference_candidate(operator, spec), spec, case, setting)


def measure(cell: Cell) -> Iterator[Sample]:
    """Yield a sample for each output and gradient of a case, in both kinds of arithmetic.

    Both count for the row of the definition's own result, which comes first.
    """
    rows: dict[str, Key] = {}
    for arithmetic, mode in ARITHMETIC.items():
        with mode():
            run = cell.eager()
        upstream = cell.upstream(run)
        gold = cell.gold().results({name: value.double() for name, value in upstream.items()})
        for item, value in run.results(upstream).items():
            if value.numel():
                row = rows.setdefault(item, _row(cell, item, value.dtype))
                yield Sample(row, arithmetic, _errors(cell, item, value, gold[item], row))


def _row(cell: Cell, item: str, dtype: torch.dtype) -> Key:
    """Return the row of `Cell.tolerance`, for the coarser of the tested dtype and the result's own dtype."""
    direction = "gradient" if item.startswith("gradient:") else "forward"
    tested = DTYPES[cell.setting.dtype]
    counted = tested if _wider(dtype, tested) else dtype
    name = next(name for name, known in DTYPES.items() if known == counted)
    return "accuracy", cell.spec.classes[item], name, direction


def _errors(cell: Cell, item: str, value: torch.Tensor, gold: torch.Tensor, row: Key) -> Errors:
    finite = gold.isfinite()
    # An overflow counts as the largest number of its dtype, because the file cannot hold infinity.
    largest = torch.finfo(value.dtype).max
    error = torch.where(finite, value.double().nan_to_num(largest, largest, -largest) - gold, 0.0).abs()
    fence = contract().rows[row]
    share = error / (fence.atol + fence.rtol * torch.where(finite, gold, 0.0).abs())
    relation = "gradients" if item.startswith("gradient:") else "accuracy"
    worst = float(share.max())
    return Errors(float(error.max()), worst, int(worst <= 1), cell.case_id(relation), item, cell.setting.seed)


def summary(samples: Iterable[Sample]) -> dict[Key, Measured]:
    """Return the errors of the worst samples of each row, to two digits."""
    by_row: dict[Key, dict[str, list[Errors]]] = {}
    for row, arithmetic, errors in samples:
        by_row.setdefault(row, {name: [] for name in ARITHMETIC})[arithmetic].append(errors)
    return {
        row: Measured(len(every["eager"]), **{name: _worst(errors) for name, errors in every.items()})
        for row, every in by_row.items()
    }


def _worst(errors: Sequence[Errors]) -> Errors:
    most = max(errors, key=lambda error: error.share)
    largest = _rounded(max(error.max_abs for error in errors))
    return most._replace(max_abs=largest, share=_rounded(most.share), inside=sum(error.inside for error in errors))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def table(measured: Mapping[Key, Measured]) -> Table:
    """Return the table to print: two lines per row, one for each kind of arithmetic."""
    result = Table(
        "row", "atol / rtol", "arithmetic", "inside", "max_abs", "share", "largest share at", "seed", box=None
    )
    for row in filter(measured.__contains__, contract().rows):
        fence = f"{contract().rows[row].atol:g} / {contract().rows[row].rtol:g}"
        for name in ARITHMETIC:
            errors: Errors = getattr(measured[row], name)
            inside = f"{errors.inside} of {measured[row].results}"
            location = f"{errors.case} {errors.item}"
            numbers = (inside, f"{errors.max_abs:g}", f"{errors.share:g}", location, str(errors.seed))
            result.add_row(" ".join(row[1:]), fence, name, *numbers)
    return result


def written(document: Mapping[str, Any], measured: Mapping[Key, Measured], calibration: Calibration) -> str:
    """Return the text of the contract with these measurements, one row per line."""
    rows = []
    for row in document["rows"]:
        entry = {name: value for name, value in row.items() if name != "measured"}
        measurement = measured.get((row["relation"], row["op_class"], row["dtype"], row["direction"]))
        rows.append({**entry, "measured": _plain(measurement)} if measurement else entry)
    head = {"version": document["version"], "calibration": calibration._asdict()}
    return json_rows({**head, "arch_overrides": document["arch_overrides"], "rows": rows}) + "\n"


def _plain(measured: Measured) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, Errors) else value for name, value in measured._asdict().items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with ``--write`` update the contract."""
    parser = Parser("calibrate.py", "Measure the errors of plain PyTorch for the accuracy rows of the contract.")
    parser.add_argument("--write", action="store_true", help="write the numbers into tolerance_contract.json")
    parser.add_argument("--seeds", type=count(1), default=3, help="number of draws of each case (default: 3)")
    parser.add_argument("--suite", choices=("quick", "full"), default="full", help="default: full")
    args = parser.parse_args(argv)
    if not kernel_registry.names():
        parser.error("no operator is installed; for example: pip install -e packages/fused-logp")
    # PyTorch's order of a sum depends on the number of threads; with one, the file is reproducible.
    torch.set_num_threads(1)
    seeds = tuple(range(FIRST_SEED, FIRST_SEED + args.seeds))
    console = Console()
    every = list(cells(args.suite, seeds))
    bar = track(every, "measuring", console=console, transient=True, disable=not console.is_terminal)
    measured = summary(sample for cell in bar for sample in measure(cell))
    Console(width=None if console.is_terminal else WIDTH).print(table(measured))
    if args.write:
        calibration = Calibration(torch.__version__, DEVICE, args.suite, seeds)
        document = json.loads(FILE.read_text(encoding="utf-8"))
        FILE.write_text(written(document, measured, calibration), encoding="utf-8")
    for row, errors_of_row in measured.items():
        if errors_of_row.eager.share >= 1:
            console.print(f"Plain PyTorch leaves the fence of {' / '.join(row)}: see {errors_of_row.eager.case}.")


if __name__ == "__main__":
    main()
