"""Measure the memory of a layer of experts: `python tools/moe_memory.py --json FILE` on a GPU.

For each model of the benchmark: what the forward pass keeps for the backward pass, and the most that both passes need,
beside their inputs, output and gradients. SonicMoE's rule, beside them, is that the forward pass keeps its input and
both outputs of the first product, gate and up, and nothing else; its input is there anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.arena import Arena
from rl_kernels.lab.bench.environment import environment
from rl_kernels.moe import experts
from rl_kernels.moe.spec.bench import BENCH, MODELS
from rl_kernels.moe.spec.cases import SPEC
from rl_kernels.moe.spec.cases_dimensions import sizes

PACKAGES = ("rl-kernels-core", "rl-kernels-moe", "liger-kernel")
PEERS = ("eager", "grouped", "liger")
MIB = 2**20
Layer = Callable[..., torch.Tensor]


def kept_and_most(layer: Layer, arena: Arena) -> tuple[float, float]:
    """Return MiB that a forward pass keeps, and the most of both passes, beside output and gradients."""
    inputs = {**arena.inputs, **{name: arena.inputs[name].detach().requires_grad_() for name in arena.leaves}}
    leaves = [inputs[name] for name in arena.leaves]
    upstream = torch.randn_like(arena.inputs["hidden"])
    gradients = sum(leaf.nbytes for leaf in leaves)
    for _ in range(2):
        # The first call compiles.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = layer(**inputs)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        torch.autograd.grad(out, leaves, upstream)
        most = torch.cuda.max_memory_allocated() - before - out.nbytes - gradients
        del out
    return kept / MIB, most / MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table."""
    parser = Parser("moe_memory.py", __doc__)
    parser.add_argument("--tokens", type=count(1), nargs="+", default=[8192, 32768], metavar="T", help="8192 32768")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS), help="all of the benchmark")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    device = torch.device("cuda")
    layers: dict[str, Layer] = {"rl-kernels": experts}
    for name in PEERS:
        make = BENCH.peers[name].make
        assert make is not None
        try:
            layers[name] = make()
        except ImportError as error:
            print(f"{name}: {error}")
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        for model in args.models:
            width, inner, number, slots = MODELS[model]
            case = Case(model, sizes(tokens, width, inner, number, slots), {"weights": torch.bfloat16})
            arena = Arena(SPEC, case, "bf16", device)
            row: dict[str, Any] = {"model": model, "tokens": tokens, "rule": tokens * slots * 2 * inner * 2 / MIB}
            for name, layer in layers.items():
                kept, most = kept_and_most(layer, arena)
                row[name] = {"kept": round(kept, 1), "most": round(most, 1)}
            rows.append(row)
            print(row, flush=True)
            del arena
            torch.cuda.empty_cache()
    if args.json:
        write_json(args.json, {"version": 1, "environment": environment(device, PACKAGES), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
