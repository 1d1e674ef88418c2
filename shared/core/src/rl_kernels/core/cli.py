"""The command ``rl-kernels``: its own sub-commands, and those that packages add (group ``rl_kernels.commands``)."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec

import torch

from rl_kernels.core.command import Parser, print_anything, table
from rl_kernels.core.contract import DTYPES, contract
from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.dispatch import EnvironmentMistake, check_environment, explain_call
from rl_kernels.core.operator import Call, Operator, arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry

GROUP = "rl_kernels.commands"
OTHERS = {
    "check": ("rl-kernels-lab", "hold backends, or your own implementation, to the tolerance contract"),
    "bench": ("rl-kernels-lab", "time operators beside their peers; no speed for a wrong result"),
    "audit": ("rl-kernels-models", "find the first module of a model whose output depends on the batch"),
    "demo": ("rl-kernels", "train a small model through the operators"),
}
"""Commands of other packages of this project: the package, and what the command does."""
Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command named by the first argument; return the exit status."""
    print_anything()
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    commands = _commands()
    if name in ("-h", "--help"):
        _help(commands)
        return 0
    if name == "--version":
        print(version("rl-kernels-core"))
        return 0
    if name not in commands:
        hint = f"pip install {OTHERS[name][0]}" if name in OTHERS else f"known: {', '.join(commands)}"
        print(f"rl-kernels: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        check_environment()
        status = commands[name][1]()(rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the output has enough of it, as ``head`` does; the flush at exit must find somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except EnvironmentMistake as error:
        print(f"rl-kernels {name}: {error}", file=sys.stderr)
        return 2


def _commands() -> dict[str, tuple[str, Callable[[], Command]]]:
    own = {
        "list": ("installed operators and their backends", lambda: list_operators),
        "explain": ("which backend a call would take, and why not the others", lambda: explain),
        "doctor": ("what is installed and what can run here", lambda: doctor),
        "compile": ("compile CUDA kernels before they are needed", lambda: _command("precompile")),
    }
    added = {point.name: (_summary(point), point.load) for point in entry_points(group=GROUP)}
    return {**added, **own}


def _summary(point: EntryPoint) -> str:
    return OTHERS[point.name][1] if point.name in OTHERS else f"from {point.value.split(':')[0]}"


def _command(module: str) -> Command:
    # Imported only when asked for: it imports every operator.
    return importlib.import_module(f"rl_kernels.core.{module}").main


def _help(commands: dict[str, tuple[str, Callable[[], Command]]]) -> None:
    print("usage: rl-kernels COMMAND [options]\n")
    for name, (summary, _) in commands.items():
        print(f"  {name:<10} {summary}")
    print("\nrl-kernels COMMAND --help tells a command's options")


def list_operators(argv: Sequence[str]) -> int:
    """Print the installed operators."""
    Parser("rl-kernels list").parse_args(argv)
    operators = [kernel_registry.load(name) for name in kernel_registry.names()]
    rows = [
        (each.name, ", ".join(each.aliases), ", ".join(backend.name for backend in each.backends), each.summary)
        for each in operators
    ]
    print(table(("operator", "aliases", "backends", "what it computes"), rows))
    return 0


def explain(argv: Sequence[str]) -> int:
    """Print the verdict on every backend for a described call."""
    parser = Parser("rl-kernels explain")
    parser.add_argument("op")
    parser.add_argument("--shape", help="sizes joined by x or commas, in the operator's order (e.g. 4096x151936)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arch", help="of the device, as in the tolerance contract (e.g. sm90)")
    given = parser.parse_args(argv)
    try:
        operator = kernel_registry.load(given.op)
        call = _described(operator, given)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels explain: {error}", file=sys.stderr)
        return 2
    for verdict in explain_call(operator, call):
        print(verdict)
    return 0


def _described(operator: Operator, given: argparse.Namespace) -> Call:
    order = "x".join(operator.shape)
    sizes: list[int] = []
    if given.shape is not None:
        parts = given.shape.replace(",", "x").split("x")
        if len(parts) != len(operator.shape) or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"--shape: expected {order}, sizes >= 1, got {given.shape!r}")
        sizes = [int(part) for part in parts]
    traits = {name: size for name, size in zip(operator.shape, sizes, strict=False) if name not in operator.rows}
    device = torch.device(given.device)
    if given.arch is not None and given.arch not in contract().archs:
        raise ValueError(f"--arch: expected one of {', '.join(contract().archs)}, got {given.arch!r}")
    if given.arch is None and given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--arch: needed to explain a call on a GPU that is not here (e.g. --arch sm90)")
    return Call(device, DTYPES[given.dtype], given.arch or arch_of(device.type, device.index), traits)


def doctor(argv: Sequence[str]) -> int:
    """Print versions, devices, and every backend of every operator with the reason if it cannot run here."""
    Parser("rl-kernels doctor").parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arch = arch_of(device.type, device.index)
    facts = [
        ("rl-kernels-core", version("rl-kernels-core")),
        ("python, torch", f"{platform.python_version()}, {torch.__version__}"),
        ("triton", version("triton") if find_spec("triton") else "not installed"),
        *_cuda(),
        ("device", f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'} ({arch})"),
        ("arch in the tolerance contract", "yes" if arch in contract().archs else "no: checks need --arch-key"),
        *((name, os.environ.get(name, "not set")) for name in ("RL_KERNELS_BACKEND", "RL_KERNELS_STRICT")),
    ]
    backends = [
        (name, verdict.backend, str(verdict).partition(": ")[2])
        for name in kernel_registry.names()
        for verdict in explain_call(kernel_registry.load(name), Call(device, torch.float32, arch))
    ]
    print(table(("what", "found"), facts), table(("operator", "backend", "here"), backends), sep="\n\n")
    return 0


def _cuda() -> list[tuple[str, str]]:
    """Return what there is for CUDA C++: the compiler, or what to do about it, and the cache."""
    reason = toolchain.why_no_compiler()
    compiler = reason or "CUDA " + ".".join(map(str, toolchain.nvrtc_version()))
    held = cache.trouble()
    if held is None:
        sizes = [size for _, size, _ in cache.contents(cache.folder())]
        held = f"{cache.folder()}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB, can be written"
    driver = toolchain.driver_major() if toolchain.bindings_version() else None
    return [
        ("driver", "not asked: no GPU, or no cuda-bindings" if driver is None else f"CUDA {driver}"),
        ("cuda-bindings", toolchain.bindings_version() or "not installed"),
        ("NVRTC", compiler),
        ("cache of kernels", held),
    ]
