"""The command ``rl-kernels``: its own sub-commands, and sub-commands of packages (group ``rl_kernels.commands``).

This module does not import torch, so ``--help`` and ``--version`` are fast, and a command that needs torch can say that
it is missing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

from rl_kernels.core.command import install_hint, print_anything

GROUP = "rl_kernels.commands"
EXTENSIONS = {
    "check": ("rl-kernels-lab", "check backends, or your own implementation, against the tolerance contract"),
    "bench": ("rl-kernels-lab", "time operators against other implementations; wrong results get no time"),
    "compile": ("rl-kernels-lab", "compile kernels before they are needed"),
    "completion": ("rl-kernels-lab", "print a script that completes this command in a shell"),
    "audit": ("rl-kernels-models", "find the first module of a model whose output depends on the batch"),
    "demo": ("rl-kernels", "train a small model through the operators"),
}
"""Commands of other packages of this project: the package, and what the command does."""
NEEDED = ("torch", "numpy")
USAGE, READER_LEFT = 2, 141
Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command named by the first argument; return the exit status."""
    print_anything()
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    commands = installed()
    if name in ("-h", "--help"):
        _help(commands)
        return 0
    if name == "--version":
        print(version("rl-kernels-core"))
        return 0
    if name not in commands:
        hint = install_hint(EXTENSIONS[name][0]) if name in EXTENSIONS else f"known: {', '.join(commands)}"
        print(f"rl-kernels: unknown command {name!r}; {hint}", file=sys.stderr)
        return USAGE
    try:
        status = _run(name, commands[name][1], arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe, as ``head`` does. Redirect stdout, or the flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        print(f"rl-kernels {name}: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
        return USAGE


def _run(name: str, command: Callable[[], Command], arguments: Sequence[str]) -> int:
    from rl_kernels.core.dispatch import EnvironmentMistake, check_environment

    try:
        check_environment()
        return command()(arguments)
    except EnvironmentMistake as error:
        print(f"rl-kernels {name}: {error}", file=sys.stderr)
        return USAGE


def installed() -> dict[str, tuple[str, Callable[[], Command]]]:
    """Return the installed sub-commands by name: a summary, and what loads the command."""
    own = {
        "list": ("installed operators and their backends", lambda: _command("listing", "list_operators")),
        "explain": ("which backend a call would use, and why not the others", lambda: _command("explain", "explain")),
        "doctor": ("what is installed and what can run here", lambda: _command("doctor", "doctor")),
    }
    added = {point.name: (_summary(point), point.load) for point in entry_points(group=GROUP)}
    return {**added, **own}


def _summary(point: EntryPoint) -> str:
    return EXTENSIONS[point.name][1] if point.name in EXTENSIONS else f"from {point.value.split(':')[0]}"


def _command(module: str, function: str) -> Command:
    command: Command = getattr(importlib.import_module(f"rl_kernels.core.commands.{module}"), function)
    return command


def _help(commands: dict[str, tuple[str, Callable[[], Command]]]) -> None:
    print("usage: rl-kernels COMMAND [options]\n")
    for name, (summary, _) in commands.items():
        print(f"  {name:<10} {summary}")
    print("\nrl-kernels COMMAND --help lists a command's options; rl-kernels --version prints the version")
