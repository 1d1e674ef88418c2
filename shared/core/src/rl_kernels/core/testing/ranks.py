"""Run a function in several processes over gloo, one for each rank; plant bugs there."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_kernels.core.testing.planted import Bug, planted

TIMEOUT = 240.0
PLANTED_TIMEOUT = datetime.timedelta(seconds=3)
PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils", "pytest")
"""Modules that take seconds to import; processes are forked from one that imports what the caller has of them."""


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = TIMEOUT, backend: str = "gloo"
) -> list[Any]:
    """Return the results of ``function(rank, *args)`` in ``world`` new processes, which form the default group.

    Args:
        function: at the top level of a file, which each process loads.
        world: number of ranks.
        args: picklable.
        backend: ``gloo``, or ``nccl`` with one GPU for each rank.
        timeout: seconds of a collective, and after which the processes are ended.

    Raises:
        RuntimeError: a rank raised, with its traceback, or ended without a result.
        TimeoutError: the processes did not end in time.
    """
    processes_of = context()
    target = inspect.getfile(function), function.__name__
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        outputs = [Path(folder, f"rank{rank}") for rank in range(world)]
        processes = [
            processes_of.Process(
                target=_run,
                args=(
                    target,
                    (rank, world),
                    (backend, str(store), str(outputs[rank])),
                    timeout,
                    args,
                    dict(os.environ),
                ),
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout)
                if process.is_alive():
                    raise TimeoutError(f"ranks did not end within {timeout:g} s")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _results(outputs)


def missed(bugs: Sequence[Bug], modules: Sequence[str], tried: Sequence[Callable[..., Any]], world: int) -> list[str]:
    """Return the names of planted bugs that no rank notices; each of the ``world`` ranks of the default group calls it.

    Args:
        bugs: planted one after the other in copies of ``modules`` (``planted``).
        tried: called with ``group=``; a rank notices a bug if one of them returns something true, or raises.

    Returns:
        the names, and ``"no bug"`` if something is noticed without one.
    """
    found = ["no bug"] if any(_noticed(each, world) for each in tried) else []
    for bug in bugs:
        with planted(modules, bug):
            found += [] if any(_noticed(each, world) for each in tried) else [bug.name]
    return found


def _noticed(tried: Callable[..., Any], world: int) -> bool:
    import torch
    from torch import distributed

    # A rank that raises leaves the others waiting, so each attempt gets a group of its own.
    group = distributed.new_group([*range(world)], timeout=PLANTED_TIMEOUT)
    try:
        noticed = bool(tried(group=group))
    except Exception:
        noticed = True
    every = torch.tensor(int(noticed))
    distributed.all_reduce(every)
    return bool(every)


def context() -> Any:
    """Return the context of ``multiprocessing`` that starts the ranks."""
    import torch

    # CUDA does not survive a fork.
    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", *(name for name in PRELOADED if name in sys.modules)])
    return server


def _results(outputs: list[Path]) -> list[Any]:
    """Return the results, or raise with the error of the rank that failed first: later ranks fail because of it."""
    results = {rank: pickle.loads(output.read_bytes()) for rank, output in enumerate(outputs) if output.exists()}
    failed = [rank for rank, (succeeded, _) in results.items() if not succeeded]
    if failed:
        first = min(failed, key=lambda rank: outputs[rank].stat().st_mtime_ns)
        raise RuntimeError(f"rank {first} raised:\n{results[first][1]}")
    for rank in range(len(outputs)):
        if rank not in results:
            raise RuntimeError(f"rank {rank} ended without a result")
    return [value for _, value in results.values()]


def _run(
    target: tuple[str, str],
    place: tuple[int, int],
    files: tuple[str, str, str],
    timeout: float,
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch
    from torch import distributed

    (rank, world), (backend, store, output) = place, files
    # Ranks share the cores of one machine.
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(rank), str(world), str(rank)
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        result = True, getattr(_loaded(target[0]), target[1])(rank, *args)
    except Exception:
        result = False, traceback.format_exc()
    # A rank that is still at work needs this one in the group, so the result is written first.
    partial = Path(output + ".part")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(output)
    distributed.destroy_process_group()


def _loaded(path: str) -> Any:
    """Return the module of a file, under a name of its own: pytest gives test modules names that do not import."""
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
