"""A GRPO step of TRL's GRPOTrainer, unchanged and on the operators: `python tools/trl_step.py` on a GPU.

The model is a Llama with random weights, by default of 8B widths with four layers. It learns nothing: the reward
depends only on the place in the batch. Each way trains a few steps from the same weights; the ways take turns for
several rounds, and the medians are over all steps but the first two of each round. `rollout` is everything before the
loss: sampling, rewards and advantages. `update` is the loss and its backward pass; its peak extra memory is beyond
parameters and inputs, and includes new gradients.

The largest batch is the largest number of whole groups whose update runs twice under a limit of all memory that PyTorch
reserves. A token of the first batch differs if its log-probability in training is not bitwise identical to the one
recorded when it was sampled; TRL's own scores are compared with the same record.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from grpo_step import largest, limit
from rich.console import Console
from rich.table import Table

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.report import digits
from rl_kernels.models.clients import trl as client

TRL, SCORED, ALIGNED = "TRL", "rl-kernels", "rl-kernels, invariant"
WAYS: dict[str, dict[str, bool] | None] = {TRL: None, SCORED: {"record": True}, ALIGNED: {"invariant": True}}
"""Way -> options of ``use_in``, or None if it is not called."""
WORDS = 64
"""Number of words in prompts; sampled ones may be any of the vocabulary."""
PACKAGES = ("trl", "transformers", "rl-kernels-models", "rl-kernels-linear-logp", "rl-kernels-grpo-loss")


class Watched:
    """A trainer whose steps are timed. ``counts`` is scorer -> (differing, all) tokens of the first batch."""

    def __init__(self, trainer: Any, options: dict[str, bool] | None) -> None:
        self.trainer, self.device = trainer, trainer.model.device
        self.rollouts: list[float] = []
        self.updates: list[float] = []
        self.extra: list[float] = []
        self.counts: dict[str, tuple[int, int]] = {}
        self.batch: dict[str, Any] = {}
        # TRL's replacement of the model's forward, which scores with its tiled head.
        theirs = trainer.model.forward
        if options is not None:
            client.use_in(trainer, **options)
        self._forwards = {TRL: theirs} | ({} if options is None else {SCORED: trainer.model.forward})
        self._start, self._base = 0.0, 0
        self._generate, self._loss, self._step = (
            trainer._generate_and_score_completions,
            trainer._compute_loss,
            trainer.training_step,
        )
        trainer._generate_and_score_completions = self._sampled
        trainer._compute_loss, trainer.training_step = self._of_batch, self._stepped

    def _sampled(self, inputs: Any) -> Any:
        start = self._now()
        samples = self._generate(inputs)
        self.rollouts.append(self._now() - start)
        return samples

    def _of_batch(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.batch:
            self.batch = dict(inputs)
            if "sampling_per_token_logps" in inputs:
                self.counts = {name: self._differing(model, inputs, way) for name, way in self._forwards.items()}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        self._start = self._now()
        loss: torch.Tensor = self._loss(model, inputs)
        return loss

    def _stepped(self, *arguments: Any) -> Any:
        loss = self._step(*arguments)
        self.updates.append(self._now() - self._start)
        if self.device.type == "cuda":
            self.extra.append((torch.cuda.max_memory_allocated() - self._base) / 2**20)
        return loss

    def _differing(self, model: Any, inputs: dict[str, Any], forward: Callable[..., Any]) -> tuple[int, int]:
        """Return the number of tokens of a batch whose scores differ in bits from the record, and of all its tokens."""
        mask = inputs["completion_mask"].bool()
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        trainer, before = self.trainer, self.trainer.model.forward
        trainer.model.forward = forward
        try:
            with torch.no_grad():
                scores, *_ = trainer._get_per_token_logps_and_entropies(model, ids, attention, mask.shape[1])
        finally:
            trainer.model.forward = before
        return int((scores != inputs["sampling_per_token_logps"])[mask].sum()), int(mask.sum())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def fits(self, groups: int, samples: int) -> bool:
        """Return whether an update of ``groups`` fits into memory twice in a row; free its memory."""
        fitted = self._attempt(groups * samples)
        gc.collect()
        torch.cuda.empty_cache()
        return fitted

    def _attempt(self, sequences: int) -> bool:
        there = len(self.batch["prompt_ids"])
        rows = torch.arange(sequences, device=self.device) % there
        try:
            inputs = {name: x[rows] if _is_rows(x, there) else x for name, x in self.batch.items()}
            for _ in range(2):
                self._loss(self.trainer.model_wrapped, inputs).backward()
        except torch.OutOfMemoryError:
            return False
        return True


def _is_rows(x: object, rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and len(x) == rows


class Task(NamedTuple):
    """Prompts of words w0, w1 and so on, and their reward, a function as TRL takes it."""

    prompts: list[str]
    reward: Callable[..., list[float]]


def trainer_of(
    args: argparse.Namespace, folder: Path, *, family: str = "Llama", task: Task | None = None, **more: Any
) -> Any:
    """Return TRL's trainer of a model of a family with random weights, with more options of ``GRPOConfig``.

    The folder gets the model's configuration and its tokenizer, which an engine reads. A mixture has the sizes
    ``args.experts`` and ``args.chosen``.
    """
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"<eos>": 0, "<pad>": 1, **{f"w{i}": i + 2 for i in range(args.vocab - 2)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    mixture = {} if family == "Llama" else {"num_experts": args.experts, "num_experts_per_tok": args.chosen}
    mixture |= {"moe_intermediate_size": args.between, "norm_topk_prob": True} if mixture else {}
    config = getattr(transformers, f"{family}Config")(
        **mixture,
        name_or_path=str(folder),
        architectures=[f"{family}ForCausalLM"],
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        head_dim=args.hidden // args.heads,
        intermediate_size=args.between,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    config.save_pretrained(folder)
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    usual = {
        "output_dir": str(folder),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.groups * args.samples,
        "num_generations": args.samples,
        "max_completion_length": args.tokens,
        "optim": "sgd",
        "learning_rate": 1e-4,
        "bf16": args.dtype != "fp32",
        "use_cpu": args.device == "cpu",
        "seed": args.seed,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 10**6,
    }
    options = GRPOConfig(**usual | more)
    task = task or learns_nothing(args)
    data = Dataset.from_dict({"prompt": task.prompts})
    return GRPOTrainer(model, task.reward, options, train_dataset=data, processing_class=tokenizer)


def learns_nothing(args: argparse.Namespace) -> Task:
    """Return prompts of several lengths and a reward that depends only on the place in the batch."""
    # Prompts are padded on the left so that all batches have one shape, because TRL compiles per shape.
    lengths = [max(args.prompt // (1 + i % args.groups), 1) for i in range(args.groups * args.steps)]
    prompts = [" ".join(f"w{(7 * i + j) % WORDS}" for j in range(length)) for i, length in enumerate(lengths)]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [i % args.samples / args.samples for i in range(len(completions))]

    return Task(prompts, reward)


def trained(args: argparse.Namespace, options: dict[str, bool] | None, *, last: bool) -> dict[str, Any]:
    """Train in one way; return times, memory and counts, and in the last round the largest batch."""
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(trainer_of(args, Path(folder)), options)
        watched.trainer.train()
        sought = last and args.device == "cuda" and args.limit_gib
        largest_fitting = largest_batch(watched, args) if sought else None
    return {
        "rollout_ms": [1e3 * seconds for seconds in watched.rollouts[2:]],
        "update_ms": [1e3 * seconds for seconds in watched.updates[2:]],
        "extra_mib": watched.extra[2:],
        "differing": watched.counts,
        "largest": largest_fitting,
    }


def largest_batch(watched: Watched, args: argparse.Namespace) -> int:
    """Return the sequences of the largest batch whose update fits under the memory limit."""
    watched.trainer.model.train()
    torch.cuda.empty_cache()
    share = args.limit_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        return args.samples * largest(lambda groups: watched.fits(groups, args.samples))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every way, in turn; return medians over all rounds; the last round gives `largest` and `differing`."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for number in range(args.rounds):
        for name, options in WAYS.items():
            rounds[name].append(trained(args, options, last=number == args.rounds - 1))
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    results = {}
    for name, records in rounds.items():
        pooled = {
            key: [x for record in records for x in record[key]] for key in ("rollout_ms", "update_ms", "extra_mib")
        }
        medians = {key: statistics.median(values) if values else None for key, values in pooled.items()}
        results[name] = medians | {key: records[-1][key] for key in ("largest", "differing")}
    return results


def show(document: dict[str, Any]) -> None:
    """Print the results and the environment."""
    settings, ways = document["settings"], document["ways"]
    sizes = f"{settings['layers']} layers, hidden {settings['hidden']}, vocabulary {settings['vocab']}"
    print(f"Llama with random weights: {sizes}")
    sequences = f"{settings['groups']} groups of {settings['samples']}, prompts of up to {settings['prompt']} tokens"
    print(f"{sequences}, completions of {settings['tokens']}, {settings['dtype']}")
    print("ran on " + ", ".join(f"{name} {value}" for name, value in document["environment"].items()))
    for scorer, (differing, tokens) in ways[SCORED]["differing"].items():
        print(f"scored by {scorer}, the model as it comes: {differing:,} of {tokens:,} tokens differ from the rollout")
    differing, tokens = ways[ALIGNED]["differing"][SCORED]
    print(f"scored by {ALIGNED}: {differing:,} of {tokens:,} tokens differ from the rollout")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(("", *ways)):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    labels = {"rollout_ms": "rollout, ms", "update_ms": "update, ms", "extra_mib": "update, peak extra MiB"}
    labels["largest"] = f"sequences that fit in {settings['limit_gib']:g} GiB"
    for key, label in labels.items():
        values = [way[key] for way in ways.values()]
        table.add_row(
            label, *("not measured" if x is None else f"{x:,}" if key == "largest" else digits(x) for x in values)
        )
    Console(width=110).print(table)


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("trl_step.py", "Time a GRPO step of TRL, unchanged and on the operators, and compare bits.")
    sizes = {"layers": 4, "hidden": 4096, "between": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
    sizes |= {"groups": 2, "samples": 8, "prompt": 128, "tokens": 256}
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        cli.add_argument(option, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--steps", type=count(3), default=6, metavar="N", help="default: 6")
    cli.add_argument("--rounds", type=count(1), default=3, metavar="N", help="rounds of training (default: 3)")
    kinds = "autocast: weights in FP32 under BF16 autocast, as TRL loads a model by its name (default: bf16)"
    cli.add_argument("--dtype", choices=("bf16", "autocast", "fp32"), default="bf16", help=kinds)
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    most = "memory limit for the search of the largest batch; 0: no search (default: 40)"
    cli.add_argument("--limit-gib", type=limit, default=40.0, metavar="GIB", help=most)
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if a bit of the invariant way differs."""
    cli = parser()
    args = cli.parse_args(argv)
    for name in ("trl", "transformers", "datasets"):
        if find_spec(name) is None:
            cli.error(f"{name} is not installed: pip install {name}")
    if args.device == "cuda" and not torch.cuda.is_available():
        cli.error("--device: this PyTorch sees no GPU")
    if args.device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory / 2**30
        if args.limit_gib > there:
            cli.error(f"--limit-gib: expected at most the {there:.1f} GiB of this GPU, got {args.limit_gib:g}")
    ways = measured(args)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    machine = environment(torch.device(args.device), PACKAGES)
    document = {"version": 1, "environment": machine, "settings": settings, "ways": ways}
    if args.json is not None:
        write_json(args.json, document)
    show(document)
    return int(ways[ALIGNED]["differing"][SCORED][0] > 0)


if __name__ == "__main__":
    sys.exit(main())
