"""A small mixture of experts that TRL trains from nothing, three ways: `python tools/trl_mixture.py` on a CPU.

A Qwen3-MoE with random weights, in FP32 with passes in BF16, learns to answer with words of even numbers. Tokens come
from `generate`, in one batch; the update takes them in micro-batches, with the weights that sampled them. Each way
records the log-probability and the experts of every sampled token:

- stock: the model's own code on both sides.
- stock rollout, update with `routes`: only the update is under `invariant`, and sends tokens to the recorded experts,
  as trainers do whose engine has other bits.
- invariant: both sides under `invariant`.

Counted are tokens whose log-probability in the update is not bitwise identical to the recorded one, and tokens that go
to other experts in any layer; the largest ratio is that of the probabilities of the update and the rollout.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from model_bits import extent
from sections.training import mixture
from trl_step import PACKAGES, Task, trainer_of

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.lab.bench.environment import environment
from rl_kernels.models import invariant
from rl_kernels.models.clients import trl as client

STOCK, REPLAYED, ALIGNED = "stock", "stock rollout, update with `routes`", "invariant"
WAYS: dict[str, dict[str, bool]] = {STOCK: {"record": True}, REPLAYED: {"record": True}, ALIGNED: {"invariant": True}}
"""Way -> options of ``use_in``."""
STRETCH = 10
"""Steps whose rewards a record has the mean of."""
ROUTES = "routes"
MISSING = -1
"""Expert of a token whose route was not recorded: the last one of a sequence."""


class Run:
    """A trainer whose updates are compared with their rollouts, token by token."""

    def __init__(self, trainer: Any, *, replays: bool) -> None:
        self.trainer, self._replays = trainer, replays
        self.tokens = self.differing = self.rerouted = 0
        self._distances: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []
        self._logps: list[torch.Tensor] = []
        routers = [module for module in trainer.model.modules() if "router" in type(module).__name__.lower()]
        self._layers = len(routers)
        for module in routers:
            module.register_forward_hook(lambda *hook_args: self._chosen.append(hook_args[-1][2].detach()))
        self._generate = trainer.model.generate
        self._produce, self._loss = trainer._generate_and_score_completions, trainer._compute_loss
        self._scores = trainer._get_per_token_logps_and_entropies
        trainer.model.generate = self._generated
        trainer._generate_and_score_completions = self._produced
        trainer._compute_loss = self._compared
        trainer._get_per_token_logps_and_entropies = self._scored

    def _generated(self, *args: Any, **options: Any) -> torch.Tensor:
        self._chosen.clear()
        sequences: torch.Tensor = self._generate(*args, **options)
        # A prompt takes one pass, and each token but the last one more.
        passes = [self._chosen[first : first + self._layers] for first in range(0, len(self._chosen), self._layers)]
        routes = torch.cat(
            [torch.stack([ids.unflatten(0, (len(sequences), -1)) for ids in each], 2) for each in passes], 1
        )
        last = routes.new_full((len(sequences), sequences.shape[1] - routes.shape[1], *routes.shape[2:]), MISSING)
        self._routes = torch.cat((routes, last), 1)
        return sequences

    def _produced(self, inputs: Any) -> Any:
        batch = self._produce(inputs)
        assert self._routes.shape[1] == batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        # With the other tensors of the batch it is shuffled and split into micro-batches.
        return {**batch, ROUTES: self._routes}

    def _scored(self, *args: Any, **options: Any) -> Any:
        scored = self._scores(*args, **options)
        self._logps.append(scored[0].detach())
        return scored

    def _compared(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = dict(inputs)
        routes, mask = inputs.pop(ROUTES), inputs["completion_mask"].bool()
        is_token = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1).bool()
        self._chosen.clear()
        self._logps.clear()
        rows = [row[kept] for row, kept in zip(routes, is_token, strict=True)]
        with invariant(model, routes=rows) if self._replays else nullcontext():
            loss: torch.Tensor = self._loss(model, inputs)
        own = torch.stack([ids.unflatten(0, (len(mask), -1)) for ids in self._chosen[: self._layers]], 2)
        # A token is sampled where the token before it is read.
        read = slice(-mask.shape[1] - 1, -1)
        own, routes = (ids[:, : is_token.shape[1]][:, read].sort(-1).values for ids in (own, routes))
        self._count(mask, (own != routes).flatten(2).any(-1), self._logps[-1], inputs["sampling_per_token_logps"])
        return loss

    def _count(self, mask: torch.Tensor, is_other: torch.Tensor, logps: torch.Tensor, recorded: torch.Tensor) -> None:
        self.tokens += int(mask.sum())
        self.differing += int((logps != recorded)[mask].sum())
        self.rerouted += int(is_other[mask].sum())
        self._distances.append((logps - recorded)[mask].abs())
        self._others.append(is_other[mask])

    def results(self) -> dict[str, Any]:
        """Train; return rewards, counts, the largest ratio, and the mean and largest distance of log-probabilities."""
        self.trainer.train()
        rewards = [each["reward"] for each in self.trainer.state.log_history if "reward" in each]
        distances, others = torch.cat(self._distances), torch.cat(self._others)
        moves = {"other experts": extent(distances[others]), "the same experts": extent(distances[~others])}
        return {
            "reward": [round(fmean(rewards[at : at + STRETCH]), 4) for at in range(0, len(rewards), STRETCH)],
            **{"tokens": self.tokens, "differing": self.differing, "rerouted": self.rerouted},
            **{"largest_ratio": float(distances.max().exp()), "moves": moves},
        }


def even_words(args: argparse.Namespace) -> Task:
    """Return prompts of a few words; the reward is the share of an answer's words whose number is even."""
    source = random.Random(args.seed)
    words = [f"w{i}" for i in range(args.vocab - 2)]
    prompts = [source.choices(words, k=source.randint(1, args.prompt)) for _ in range(args.groups * args.steps)]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(word in words[::2] for word in answer.split()) / args.tokens for answer in completions]

    return Task([" ".join(prompt) for prompt in prompts], reward)


def trained(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train in one way from the same weights and draws."""
    from transformers import PrinterCallback

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            args,
            Path(folder),
            family="Qwen3Moe",
            task=even_words(args),
            optim="adamw_torch",
            learning_rate=args.learning_rate,
            per_device_train_batch_size=args.groups * args.samples // args.micro_batches,
            gradient_accumulation_steps=args.micro_batches,
            gradient_checkpointing=False,
            router_aux_loss_coef=0.0,
            logging_steps=1,
        )
        # It prints what is logged.
        trainer.remove_callback(PrinterCallback)
        client.use_in(trainer, compute_dtype=torch.bfloat16, **WAYS[way])
        return Run(trainer, replays=way == REPLAYED).results()


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("trl_mixture.py", __doc__.splitlines()[0])
    sizes = {"layers": 3, "hidden": 64, "between": 32, "heads": 4, "kv_heads": 2, "vocab": 34, "experts": 32}
    sizes |= {"chosen": 4, "groups": 4, "samples": 8, "micro_batches": 4, "prompt": 6, "tokens": 8, "steps": 50}
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        cli.add_argument(option, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--learning-rate", type=float, default=3e-3, help="default: 3e-3")
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    cli.set_defaults(device="cpu", dtype="fp32")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if a bit of the invariant way differs."""
    cli = parser()
    args = cli.parse_args(argv)
    for name in ("trl", "transformers", "datasets"):
        if find_spec(name) is None:
            cli.error(f"{name} is not installed: pip install {name}")
    ways = {way: trained(args, way) for way in WAYS}
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    machine = environment(torch.device("cpu"), (*PACKAGES, "rl-kernels-moe"))
    document = {"version": 1, "environment": machine, "settings": settings, "ways": ways}
    if args.json is not None:
        write_json(args.json, document)
    print(mixture(document))
    return int(ways[ALIGNED]["differing"] + ways[ALIGNED]["rerouted"] > 0)


if __name__ == "__main__":
    sys.exit(main())
