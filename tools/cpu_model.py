"""A small Llama on the CPU, stock and under `invariant()`, in turn: `python tools/cpu_model.py`.

The model has the widths of SmolLM2-135M and random weights. Timed are forward passes, `generate`, and training steps:
with the model's own loss, and with log-probabilities (`head_logp` beside `log_softmax` of the logits). Times are
medians of rounds in which both take turns; the ratios are of medians.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.contract import DTYPES
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.report import as_table, digits
from rl_kernels.models import head_logp, invariant

WIDTHS = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
FORWARD, PROMPT, NEW, STEP = (64, 512), 64, 16, 256
"""Tokens of forward passes, of the prompt and its answer, and of a training step."""
PACKAGES = ("transformers", "rl-kernels-models", "rl-kernels-det-gemm", "rl-kernels-attention", "rl-kernels-norm")
Call = Callable[[Any], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times and their ratios."""
    parser = Parser("cpu_model.py", __doc__)
    parser.add_argument("--layers", type=count(1), default=30, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=count(1), default=7, help="turns of each way (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    settings = {"layers": args.layers, "rounds": args.rounds, **WIDTHS}
    machine = environment(torch.device("cpu"), PACKAGES)
    record: dict[str, Any] = {"version": 1, "environment": machine, "settings": settings, "ms": {}}
    for name in args.dtype:
        record["ms"][name] = timed(args.layers, DTYPES[name], args.rounds)
        body = [row(call, ms) for call, ms in record["ms"][name].items()]
        print(as_table([["call", f"stock {name}, ms", "invariant, ms", "ratio"], *body]))
        if args.json:
            write_json(args.json, record)
    return 0


def row(call: str, ms: dict[str, float]) -> list[str]:
    """Return a row of the table: a call, both times, and their ratio."""
    return [call, digits(ms["stock"]), digits(ms["invariant"]), f"{ms['invariant'] / ms['stock']:.2f}"]


def timed(layers: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each call, stock and under ``invariant``."""
    torch.manual_seed(0)
    stock = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **WIDTHS)).to(dtype)
    own = copy.deepcopy(stock)
    medians = {}
    with invariant(own, strict=True):
        for name, (of_stock, of_own) in calls().items():
            spent: dict[str, list[float]] = {"stock": [], "invariant": []}
            for _ in range(rounds + 1):
                for way, call, model in (("stock", of_stock, stock), ("invariant", of_own, own)):
                    model.zero_grad()
                    start = time.perf_counter()
                    call(model)
                    spent[way].append((time.perf_counter() - start) * 1e3)
            # The first round prepares what later ones remember.
            medians[name] = {way: statistics.median(values[1:]) for way, values in spent.items()}
    return medians


def calls() -> dict[str, tuple[Call, Call]]:
    """Return the timed calls: of the stock model and of ours, by label."""
    ids = torch.randint(0, WIDTHS["vocab_size"], (1, max(*FORWARD, STEP)), generator=torch.Generator().manual_seed(0))
    result: dict[str, tuple[Call, Call]] = {}
    for tokens in FORWARD:
        result[f"forward of {tokens} tokens"] = (partial(_forward, ids[:, :tokens]),) * 2
    result[f"generate {NEW} tokens after {PROMPT}"] = (partial(_generate, ids[:, :PROMPT]),) * 2
    result[f"step of {STEP} tokens, the model's loss"] = (partial(_loss_step, ids[:, :STEP]),) * 2
    result[f"step of {STEP} tokens, log-probs"] = (
        partial(_logits_step, ids[:, :STEP]),
        partial(_head_step, ids[:, :STEP]),
    )
    return result


@torch.no_grad()
def _forward(ids: torch.Tensor, model: Any) -> None:
    model(ids)


def _generate(ids: torch.Tensor, model: Any) -> None:
    model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)


def _loss_step(ids: torch.Tensor, model: Any) -> None:
    model(ids, labels=ids).loss.backward()


def _logits_step(ids: torch.Tensor, model: Any) -> None:
    logps = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    logps.mean().neg().backward()


def _head_step(ids: torch.Tensor, model: Any) -> None:
    hidden = model.base_model(ids).last_hidden_state[:, :-1]
    head_logp(model.lm_head, hidden, ids[:, 1:]).mean().neg().backward()


if __name__ == "__main__":
    sys.exit(main())
