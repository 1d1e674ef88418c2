"""The command ``rl-kernels demo``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from rl_kernels.core import BackendUnavailable
from rl_kernels.core.command import Parser, count, location, table, write_json
from rl_kernels.demo import parallel, report
from rl_kernels.demo.task import CPU, GPU, Settings
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import Ours, Stock
from rl_kernels.lab.bench.environment import environment

DESCRIPTION = """Train a small transformer with GRPO on the CPU, through the operators, and compare the log-probs of
rollout and training bit by bit. With --device cuda the model is a Llama of 104 million parameters on a GPU, trained a
second time in stock PyTorch beside it. With --parallel, under torchrun, it trains over ranks and again in one process,
and compares the weights. Exit status 1 if one bit differs, or if the reward has not clearly risen in the default number
of steps or more; a shorter run only shows it."""
WATCHED = (Stock("BF16"), Stock("FP32"), Ours("BF16"))  # beside the training of the small policy in FP32


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if its verdict is good, 1 if not, 2 for unusable arguments."""
    parser = Parser("rl-kernels demo", DESCRIPTION)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (%(default)s)")
    parser.add_argument("--out", type=location, default="rl-kernels-demo", help="folder to write to (%(default)s)")
    parser.add_argument(
        "--parallel", choices=tuple(parallel.RANKS), help="cut by tensors or data over torchrun's ranks"
    )
    default = f"of training ({CPU.steps}, on a GPU {GPU.steps}, with --parallel {parallel.STEPS})"
    parser.add_argument("--steps", type=count(1, 31), help=default)
    parser.add_argument("--seed", type=count(0, 63), default=CPU.seed, help="of weights and draws (%(default)s)")
    arguments = parser.parse_args(argv)
    if reason := unusable(arguments):
        parser.error(reason)
    settings = GPU if arguments.device == "cuda" else CPU
    steps = arguments.steps or (parallel.STEPS if arguments.parallel else settings.steps)
    settings = replace(settings, seed=arguments.seed, steps=steps)
    if not settings.llama:
        # With products this small, threads wait for each other longer than they work.
        torch.set_num_threads(1)
    try:
        if arguments.parallel:
            return 0 if parallel.run(settings, arguments.parallel) else 1
        return 0 if run(settings, arguments.device, arguments.out)["passed"] else 1
    except BackendUnavailable as error:
        parser.error(f"--device: {' '.join(str(error).split())}")


def unusable(arguments: argparse.Namespace) -> str | None:
    """Say which argument cannot be used here, and why; make the folder, before time is spent on training."""
    cuda, way, out = arguments.device == "cuda", arguments.parallel, arguments.out
    if way and cuda:
        return "--parallel: expected --device cpu; it shows bits, not speed"
    if way:
        allowed, ranks = parallel.RANKS[way], os.environ.get("WORLD_SIZE")
        if ranks is None:
            return "--parallel: start it with torchrun --nproc-per-node 2 --no-python rl-kernels demo --parallel ..."
        expected = f"expected one of {', '.join(map(str, allowed))} ranks with {way}"
        return None if int(ranks) in allowed else f"--parallel: {expected}, got {ranks}"
    if cuda and find_spec("transformers") is None:
        return "--device: transformers is not installed: pip install transformers"
    if cuda and not torch.cuda.is_available():
        return "--device: this PyTorch sees no GPU: install a build of it for yours, or leave the option out"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out: cannot write to {out}: {error.strerror}"
    return None if os.access(out, os.W_OK) else f"--out: cannot write to {out}: permission denied"


def run(settings: Settings, device: str, out: Path) -> Record:
    """Train, a Llama in stock PyTorch too; write ``curves.png`` and ``run.json`` into ``out``; return the verdict."""
    start, runs, backends = time.perf_counter(), dict[str, list[Record]](), dict[str, dict[str, str]]()
    for way in (Ours, Stock) if settings.llama else (Ours,):
        trainer = Trainer(settings, way, device, watched=[way("FP32")] if settings.llama else WATCHED)
        parameters = sum(weight.numel() for weight in trainer.model.parameters())
        batch = f"{settings.prompts} prompts x {settings.samples_per_prompt} samples a step"
        print(f"GRPO, {way.way}: {parameters:,} parameters, random weights at first, {batch}.")
        print("4192= asks for 1249, the digits in ascending order.\n")
        runs[way.way] = report.train(trainer)
        backends |= trainer.backends
    cases = [] if settings.llama else compared(trainer)
    verdict, text = report.judged(runs[Ours.way], cases, (GPU if settings.llama else CPU).steps)
    machine = environment(torch.device(device), ("rl-kernels", "transformers"))
    document: Record = {"model": {"parameters": parameters}, "environment": machine, "settings": asdict(settings)}
    document |= {"backends": backends, "verdict": verdict, "comparison": cases, "runs": runs}
    write_json(out / "run.json", document)
    report.draw(document, out / "curves.png")
    twice = ("the same run twice", *runs, report.QUOTIENT)
    print(table(twice, report.side_by_side(runs)) if settings.llama else report.comparison(cases))
    print(f"\n{text}")
    print(f"{out / 'curves.png'}, {out / 'run.json'} written; {time.perf_counter() - start:.0f} s\n{report.NEXT}")
    return verdict


def compared(trainer: Trainer) -> list[Record]:
    """Sample once more, and decode the tokens again in all numerics: all sequences together, and some alone."""
    batch = trainer.sample()
    size = len(batch.answers)
    return [
        {"numerics": numerics.name, "sequences": together, "gap": trainer.compare(numerics, batch, stride)}
        for numerics in (trainer.own, *trainer.watched[::-1])
        for together, stride in ((size, None), (1, -(-size // 16)))
    ]
