"""Time exchanges and layers over the GPUs of one machine: `torchrun --nproc-per-node 2 tools/ranks.py`, over NCCL.

Parts: `exchanges`, the ordered all-reduce and reduce-scatter beside NCCL's; `layers`, row-parallel layers beside cuBLAS
and NCCL; `heads`, linear_logp over the vocabulary beside one GPU; `mixtures`, experts over ranks beside one GPU and a
plain dispatch in PyTorch; `training`, steps of a Llama with the widths of 8B and four layers under TP and FSDP2, beside
stock ones; `loop`, GRPO with rollouts under TP and updates under FSDP2.

Times are those of the slowest rank, eager calls with the host's work included, and replays of a CUDA graph; the ways
take turns, and each is the median of its rounds.

Exit status: 1 if a bit of ours differs from one GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rank_calls import OURS, Timed, exchanges, heads, layers
from rank_experts import mixtures
from rank_model import loop, training
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.report import digits

TIMED = {"exchanges": exchanges, "layers": layers, "heads": heads, "mixtures": mixtures}
MODELS = {"training": training, "loop": loop}
PACKAGES = ("rl-kernels-core", "rl-kernels-det-gemm", "rl-kernels-linear-logp", "rl-kernels-moe")
TURN = 0.03
"""Seconds of one turn of calls."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if a bit differs."""
    parser = Parser("ranks.py", __doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *TIMED, *MODELS], help="what to time (all)")
    parser.add_argument("--rounds", type=count(1), default=5, help="turns of each way (%(default)s)")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 tools/ranks.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group, leads = distributed.group.WORLD, distributed.get_rank() == 0
    machine = environment(torch.device("cuda"), PACKAGES) | {"ranks": str(distributed.get_world_size())}
    machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    record: dict[str, Any] = {"version": 1, "environment": machine, "parts": {}}
    wrong = 0
    for part in args.parts or [*TIMED, *MODELS]:
        for name, result in _results(part, args.rounds, group):
            wrong += result["differing"] or 0 if "stock" not in name else 0
            record["parts"].setdefault(part, {})[name] = result
            if leads:
                print(_line(name, result), flush=True)
                if args.json:
                    write_json(args.json, record)
    distributed.destroy_process_group()
    return 1 if wrong else 0


def _results(part: str, rounds: int, group: ProcessGroup) -> Iterator[tuple[str, dict[str, Any]]]:
    if part in MODELS:
        yield from MODELS[part](group)
    else:
        for timed in TIMED[part](group):
            yield timed.name, _timed(timed, rounds, group)


def _timed(timed: Timed, rounds: int, group: ProcessGroup) -> dict[str, Any]:
    eager = _in_turn(timed.calls, rounds, group)
    captured: dict[str, Callable[[], Any]] = {}
    for name, call in timed.calls.items():
        if name in timed.eager_only:
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        captured[name] = graph.replay
    graphs = _in_turn(captured, rounds, group)
    differing = timed.differing
    if differing is not None:
        sums = torch.tensor(differing, device="cuda")
        distributed.all_reduce(sums, group=group)
        differing = int(sums)
    return {"eager": eager, "graph": graphs, "differing": differing, "bytes": timed.bytes}


def _in_turn(calls: Any, rounds: int, group: ProcessGroup) -> dict[str, float]:
    """Return the microseconds of each call on the slowest rank."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        _run(call, 3)
        counts[name] = max(1, min(200, round(TURN / _slowest(_run(call, 1), group))))
    for _ in range(rounds):
        for name, call in calls.items():
            spent[name].append(_slowest(_run(call, counts[name]) / counts[name], group))
    return {name: statistics.median(values) * 1e6 for name, values in spent.items()}


def _run(call: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _slowest(seconds: float, group: ProcessGroup) -> float:
    slowest = torch.tensor(seconds, device="cuda", dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=group)
    return float(slowest)


def _line(name: str, result: dict[str, Any]) -> str:
    if "eager" not in result:
        return f"{name}: " + ", ".join(f"{key} {digits(value)}" for key, value in result.items() if value is not None)
    parts = []
    for way, times in (("eager", result["eager"]), ("graph", result["graph"])):
        if OURS not in times:
            continue
        ours = times[OURS]
        listed = ", ".join(
            f"{who} {digits(us)}" + (f" ({ours / us:.2f})" if who != OURS else "") for who, us in times.items()
        )
        parts.append(f"{way} {listed}")
    bits = "" if result["differing"] is None else f"; {result['differing']} differ"
    return f"{name}: {'; '.join(parts)}{bits}"


if __name__ == "__main__":
    sys.exit(main())
