"""Code shared by the project's commands: a wrong argument gives a one-line error and exit status 2."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn


def install_hint(distribution: str) -> str:
    """Return the advice to install a package of this project: from a clone, or from an index."""
    folder = distribution.removeprefix("rl-kernels-")
    paths = f"./{'shared' if folder in ('core', 'lab') else 'packages'}/{folder}"
    if folder in ("models", "rl-kernels"):
        # These require all other packages, which pip finds on no index before a release.
        paths = "./shared/core ./shared/lab ./packages/*"
    return f"from a clone: pip install {paths}; once it is released: pip install {distribution}"


def print_anything() -> None:
    """Print characters that the terminal cannot encode as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as columns, each as wide as its widest entry."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    joined = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in joined)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, one record a line."""
    path.write_text(json_rows(value) + "\n", encoding="utf-8")


def json_rows(value: Any, indent: str = "") -> str:
    """Return strict JSON, one record a line: below the top, only objects and lists of objects and lists span lines."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not items or not isinstance(items, (list, tuple)):
        return json.dumps(value, allow_nan=False)
    if indent and not all(isinstance(item, (dict, list, tuple)) for item in items):
        return json.dumps(value, allow_nan=False)
    names = [f"{json.dumps(str(name))}: " for name in value] if isinstance(value, dict) else [""] * len(items)
    within = f"{indent} "
    lines = (f"\n{within}{name}{json_rows(item, within)}" for name, item in zip(names, items, strict=True))
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{','.join(lines)}\n{indent}{last}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage; options cannot be abbreviated."""

    def __init__(self, prog: str, description: str | None = None, *, add_help: bool = True) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=add_help)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def json_parser(name: str, description: str) -> Parser:
    """Return the parser of a command that can print JSON."""
    parser = Parser(f"rl-kernels {name}", description)
    parser.add_argument("--json", action="store_true", help="print strict JSON, and nothing else")
    return parser


def print_json(value: Any) -> None:
    """Print strict JSON."""
    print(json_rows(value))


def count(least: int, bits: int | None = None) -> Callable[[str], int]:
    """Return an argument type: an integer that is at least ``least``, and below ``2^bits`` where given."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
        if bits is not None and value >= 1 << bits:
            raise argparse.ArgumentTypeError(f"expected an integer below 2^{bits}, got {text!r}")
        return value

    return parse


def location(text: str) -> Path:
    """Return a path with ``~`` expanded: an argument type."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}: {error}") from error


def number(*, least: float | None = None, above: float | None = None) -> Callable[[str], float]:
    """Return an argument type: a finite number, at least ``least`` or greater than ``above`` where one is given."""
    bound = f" >= {least:g}" if least is not None else f" > {above:g}" if above is not None else ""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (least is None or value >= least) and (above is None or value > above)
        if not (math.isfinite(value) and inside):
            raise argparse.ArgumentTypeError(f"expected a finite number{bound}, got {text!r}")
        return value

    return parse


def writable(text: str) -> Path:
    """Return the path of a file that can be written: an argument type."""
    path = location(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return path
