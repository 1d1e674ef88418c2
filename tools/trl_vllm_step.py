"""Steps of TRL with vLLM in its process, stock, batch-invariant and on the operators: `python tools/trl_vllm_step.py`.

The model is a Llama with random weights, by default of 8B widths with eight layers; the reward depends on the place in
the batch alone. Each way has a process of its own, with a model and an engine; all are there at once and take turns, a
step each. Times of a step, with the GPU waited for: sampling, the sync of weights, TRL's pass for old log-probs, and
the whole step. Medians are over all turns but the first two.

A token differs if its log-prob in the first training pass does not have the bits of vLLM's. Memory is the peak of what
PyTorch allocated in the process, the engine's cache included.

Exit status: 1 if a token of ours differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sections.training import PARTS, trl_with_vllm
from trl_step import trainer_of
from vllm_engines import OURS, WAYS

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.environment import environment

PACKAGES = ("trl", "vllm", "transformers", "rl-kernels-models", "rl-kernels-attention", "rl-kernels-linear-logp")
PORT = 29610
"""Of the first way; an engine's process group listens on it."""


class Meter:
    """Seconds of a trainer's parts, step by step, and counts of tokens."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._latest = trainer, torch.empty(0)
        self.seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        self.tokens = self.differ = 0
        generation, score, loss = (
            trainer.vllm_generation,
            trainer._get_per_token_logps_and_entropies,
            trainer._compute_loss,
        )
        generation.generate = self._timed("rollout", generation.generate)
        generation.sync_weights = self._timed("sync", generation.sync_weights)
        scoring = self._timed("scoring", score)

        def scored(*args: Any, **options: Any) -> Any:
            result = (score if torch.is_grad_enabled() else scoring)(*args, **options)
            self._latest = result[0].detach()
            return result

        def compared(model: Any, inputs: dict[str, Any]) -> Any:
            result, mask = loss(model, inputs), inputs["completion_mask"].bool()
            differ = bits_of(self._latest) != bits_of(inputs["sampling_per_token_logps"])
            self.tokens += int(mask.sum())
            self.differ += int((differ & mask).sum())
            return result

        trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, compared

    def begin(self) -> None:
        """Begin a step."""
        for seconds in self.seconds.values():
            seconds.append(0.0)
        self._begun = self._now()

    def end(self) -> None:
        """End a step."""
        self.seconds["step"][-1] = self._now() - self._begun

    def results(self) -> dict[str, Any]:
        """Return seconds, counts and memory so far."""
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.trainer.model.device.type == "cuda" else None
        runner = 1 + self.trainer.vllm_generation.llm.llm_engine.vllm_config.use_v2_model_runner
        counts = {"tokens": self.tokens, "differ": self.differ}
        return {"seconds": self.seconds, **counts, "peak_mib": peak, "runner": runner}

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = self._now()
            result = call(*args, **options)
            self.seconds[part][-1] += self._now() - begun
            return result

        return timed

    def _now(self) -> float:
        if self.trainer.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(way: str, args: argparse.Namespace, calls: Any) -> None:
    """Train in one way, a step for each message, which the results so far answer and whether they are all."""
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + list(WAYS).index(way))}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ.update(own | WAYS[way][0])
    with tempfile.TemporaryDirectory() as name:
        os.environ["VLLM_CACHE_ROOT"] = str(Path(name) / "cache")
        meter = Meter(trainer_with_engine(way, args, Path(name)))
        trainer = meter.trainer
        trainer.add_callback(turns(meter, calls))
        trainer.train()
    calls.send((meter.results(), True))


def trainer_with_engine(way: str, args: argparse.Namespace, folder: Path) -> Any:
    """Return a trainer whose engine has random weights until the first sync."""
    import vllm
    from trl.generation import vllm_generation

    options: dict[str, Any] = {"load_format": "dummy", **WAYS[way][1]}
    if args.device == "cuda":
        # Of the others' memory, vLLM would take a share into account.
        options["kv_cache_memory_bytes"] = args.cache_gib << 30
    vllm_generation.LLM = partial(vllm.LLM, **options)
    trainer = trainer_of(
        args,
        folder,
        max_steps=args.steps if way == OURS else args.turns,
        per_device_train_batch_size=args.groups * args.samples // args.parts,
        gradient_accumulation_steps=args.parts,
        bf16=False,
        learning_rate=1.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=args.prompt + args.tokens,
    )
    if way == OURS:
        from rl_kernels.models.clients import trl

        trl.use_in(trainer, invariant=True, record=False)
    return trainer


def turns(meter: Meter, calls: Any) -> Any:
    """Return a callback that waits for a message before each step, and answers after it."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **options: Any) -> None:
            calls.send((meter.results(), False))
            calls.recv()
            meter.begin()

        def on_step_end(self, *_: Any, **options: Any) -> None:
            meter.end()

    return Turns()


def measured(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, dict[str, Any]]:
    """Train in all ways, in turn; return their results, and keep them after each turn."""
    context = multiprocessing.get_context("spawn")
    ends, processes = {}, []
    for way in args.ways:
        ends[way], other = context.Pipe()
        processes.append(context.Process(target=train, args=(way, args, other)))
        processes[-1].start()
        # So that the end of the process ends the pipe.
        other.close()
    try:
        answers = {way: end.recv() for way, end in ends.items()}
        while going := [way for way, (_, over) in answers.items() if not over]:
            for way in going:
                ends[way].send("go")
                answers[way] = ends[way].recv()
            keep({way: result for way, (result, _) in answers.items()})
    finally:
        for process in processes:
            process.kill()
    return {way: result for way, (result, _) in answers.items()}


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("trl_vllm_step.py", "Time steps of TRL with vLLM in its process, and count tokens that differ.")
    sizes = {"layers": 8, "hidden": 4096, "between": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
    sizes |= {"groups": 8, "samples": 8, "prompt": 128, "tokens": 256, "parts": 4, "cache_gib": 5}
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        cli.add_argument(option, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--steps", type=count(3), default=50, metavar="N", help="steps of ours (default: 50)")
    cli.add_argument("--turns", type=count(3), default=20, metavar="N", help="steps of the others (default: 20)")
    cli.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    cli.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    for name in ("trl", "vllm", "datasets"):
        if find_spec(name) is None:
            cli.error(f"{name} is not installed: pip install {name}")
    if args.device == "cuda" and not torch.cuda.is_available():
        cli.error("--device: this PyTorch sees no GPU")
    args.ways = list(dict.fromkeys(args.ways))
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    machine = environment(torch.device(args.device), PACKAGES)

    def keep(ways: dict[str, Any]) -> None:
        if args.json:
            write_json(args.json, {"version": 1, "environment": machine, "settings": settings, "ways": ways})

    ways = measured(args, keep)
    print(trl_with_vllm({"environment": machine, "settings": settings, "ways": ways}))
    return int(OURS in ways and ways[OURS]["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
