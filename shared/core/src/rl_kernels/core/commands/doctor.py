"""The command ``rl-kernels doctor``: what is installed, what can run here, and with which bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec

import torch

from rl_kernels.core import canary, products
from rl_kernels.core.command import json_parser, print_json, table
from rl_kernels.core.commands.explain import as_json, as_table, verdicts_of
from rl_kernels.core.contract import DTYPES, contract
from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.operator import INVARIANT, Call, arch_of
from rl_kernels.core.registry import kernel_registry

VARIABLES = ("RL_KERNELS_BACKEND", "RL_KERNELS_STRICT", canary.ACTION, canary.RECORD)


def doctor(argv: Sequence[str]) -> int:
    """Print versions, devices, and for every backend of every operator whether it can run here, or why not."""
    parser = json_parser("doctor", "Print what is installed, what can run here, and why the rest cannot.")
    parser.add_argument(
        "--canary",
        action="store_true",
        help="make small calls with every backend instead, and compare their bits with those recorded; with --json "
        f"print them as a record, which {canary.RECORD} may name",
    )
    args = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    arch = arch_of(device.type, device.index)
    if args.canary:
        return _print_canaries(device, arch, as_record=args.json)
    facts = [
        ("rl-kernels-core", version("rl-kernels-core")),
        ("python, torch", f"{platform.python_version()}, {torch.__version__}"),
        ("triton", version("triton") if find_spec("triton") else "not installed"),
        *_cuda_facts(),
        ("device", f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'} ({arch})"),
        ("products of the CPU", products.tried()),
        ("arch in the tolerance contract", "yes" if arch in contract().archs else "no: checks need --arch-key"),
        *((name, os.environ.get(name, "not set")) for name in VARIABLES),
    ]
    verdicts = verdicts_of(Call(device, torch.float32, arch))
    if args.json:
        backends = {name: [as_json(verdict) for verdict in per_backend] for name, per_backend in verdicts.items()}
        print_json({"found": dict(facts), "operators": backends})
        return 0
    print(table(("what", "found"), facts), as_table(verdicts, "here"), sep="\n\n")
    return 0


def _print_canaries(device: torch.device, arch: str, *, as_record: bool) -> int:
    """Print the digests of all canaries; return 1 if one differs from its record."""
    rows, status = [], 0
    record: dict[str, dict[str, dict[str, canary.Digests]]] = {}
    for operator, backend, dtype, digests in _measured_digests(device):
        known = canary.recorded(kernel_registry.load(operator), arch, backend, DTYPES[dtype])
        same = _compared(digests, known)
        status = max(status, int(same.startswith("other")))
        rows.append((operator, backend, dtype, *(digests[name][:12] for name in canary.PASSES), same))
        record.setdefault(operator, {}).setdefault(backend, {})[dtype] = digests
    if as_record:
        print_json({arch: record})
    else:
        print(table(("operator", "backend", "dtype", *canary.PASSES, f"on {arch}"), rows))
    return status


def _compared(digests: canary.Digests, known: canary.Digests | None) -> str:
    """Say how digests compare with a record, which may have one pass alone."""
    if not known:
        return "not recorded"
    if any(digests.get(name) != value for name, value in known.items()):
        return "other bits than recorded"
    return "as recorded" if len(known) == len(digests) else f"{', '.join(known)} as recorded"


def _measured_digests(device: torch.device) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Yield operator, backend, dtype and digests of what can run here and promises its bits."""
    for name in kernel_registry.names():
        operator = kernel_registry.load(name)
        for backend in operator.backends if operator.canary else ():
            if not backend.promises.get(device.type, frozenset()) >= INVARIANT:
                continue
            for dtype in canary.BITS:
                try:
                    digests = canary.measured(operator, backend.name, dtype, device)
                except BackendUnavailable:
                    continue
                yield name, backend.name, next(key for key in DTYPES if DTYPES[key] == dtype), digests


def _cuda_facts() -> list[tuple[str, str]]:
    """Return the facts about CUDA C++: driver, compiler (or how to get one) and kernel cache."""
    reason = toolchain.why_no_compiler()
    compiler = reason or "CUDA " + ".".join(map(str, toolchain.nvrtc_version()))
    cache_state = cache.trouble()
    if cache_state is None:
        sizes = [size for _, size, _ in cache.contents(cache.folder())]
        cache_state = f"{cache.folder()}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB, can be written"
    driver = toolchain.driver_major() if toolchain.bindings_version() else None
    return [
        ("driver", "not asked: no GPU, or no cuda-bindings" if driver is None else f"CUDA {driver}"),
        ("cuda-bindings", toolchain.bindings_version() or "not installed"),
        ("NVRTC", compiler),
        ("kernel cache", cache_state),
    ]
