"""Roll out in vLLM three ways and compare with training: `python tools/vllm_rollout.py` on a GPU.

The model has random weights: a Llama with the widths of Llama 3.1 8B, a small Qwen3, or a mixture of experts with the
widths of Qwen3-30B-A3B. vLLM runs stock, in its own batch-invariant mode, and with the plugin of rl-kernels-models,
each in processes of its own; all are there at once. A way that cannot start, or ends, is left out.

bits: prompts of several lengths are answered, and the log-probabilities of the sampled tokens are compared with those
of a training pass: the same model in transformers, as it comes with `log_softmax`, and under `invariant()` with
`head_logp`. A token counts where any bit differs.

speed: tokens a second for several numbers of sequences, with log-probabilities of the sampled tokens. The ways take
turns while the others wait; the ratio to stock is of medians.

Exit status: 1 if a token of the plugin differs from training under `invariant()`; 2 if nothing could run, or not the
plugin that was asked for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from vllm_engines import OURS, STOCK, WAYS, Answers, Engines

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.environment import environment

PACKAGES = ("vllm", "transformers", "rl-kernels-models", "rl-kernels-attention", "rl-kernels-linear-logp")
ROPE = {"rope_type": "default", "rope_theta": 1e6}
OF_LLAMA = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_LLAMA |= {"original_max_position_embeddings": 8192}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"vocab_size": 128256, "rope_parameters": OF_LLAMA, "architectures": ["LlamaForCausalLM"]},
    },
    "qwen3": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"vocab_size": 151936, "rope_parameters": ROPE, "architectures": ["Qwen3ForCausalLM"]},
    },
    "qwen3_moe": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"vocab_size": 151936, "rope_parameters": ROPE, "architectures": ["Qwen3MoeForCausalLM"]},
    },
}
LONGEST, PART = 1500, 8
"""Tokens of the longest prompt; sequences of a training pass."""


def make(folder: str, name: str, layers: int, device: str) -> None:
    """Save a model whose weights are normal with a spread of 0.02; its head gives logits with a spread of 2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"head_dim": 128, "num_hidden_layers": layers, "max_position_embeddings": 32768, "hidden_act": "silu"}
    config = AutoConfig.for_model(name, **MODELS[name], **sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for place, weight in sorted(model.named_parameters()):
            spread = 2.0 * weight.shape[-1] ** -0.5 if place == "lm_head.weight" else 0.02
            # Norms about 1.
            weight.normal_(1.0, 0.1) if weight.ndim == 1 else weight.normal_(0.0, spread)
    model.save_pretrained(folder)


def prompts(number: int, longest: int, vocab: int, seed: int) -> list[list[int]]:
    """Draw prompts of 16 tokens to ``longest``; each fourth one begins as the one before it."""
    source, result = random.Random(seed), []
    for index in range(number):
        ids = [source.randrange(vocab) for _ in range(source.randint(16, longest))]
        if index % 4 == 3:
            ids = (result[-1][: len(result[-1]) * 3 // 4] + ids)[:longest]
        result.append(ids)
    return result


def speeds(engines: Engines, args: argparse.Namespace, vocab: int, number: int) -> dict[str, list[float]]:
    """Return tokens a second with a number of sequences by way, a rate for each round."""
    rates: dict[str, list[float]] = {way: [] for way in engines.ways}
    for turn in range(-1, args.rounds):
        for way in engines.ways[:: 1 if turn % 2 else -1]:
            ids = prompts(number, 128, vocab, turn * 1000 + number)
            answers = engines.answer(way, ids, args.tokens // 2)
            if answers is None:
                del rates[way]
            elif turn >= 0:
                rates[way].append(round(sum(map(len, answers[1])) / answers[0], 1))
    shown = {way: statistics.median(of) for way, of in rates.items()}
    print(f"{number} sequences, tokens a second: {shown}", flush=True)
    return rates


def trained(model: Any, sequences: Sequence[list[int]], starts: Sequence[int], stock: bool) -> torch.Tensor:
    """Return the log-probabilities of the tokens from ``starts`` on, of padded batches, as a trainer takes them."""
    from rl_kernels.models import head_logp

    logps = []
    for first in range(0, len(sequences), PART):
        part, device = sequences[first : first + PART], model.device
        width = max(map(len, part))
        rows = torch.tensor([ids + [0] * (width - len(ids)) for ids in part], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in part], device=device)
        hidden = model.model(rows, attention_mask=mask, use_cache=False).last_hidden_state
        for row, ids in enumerate(part):
            start = starts[first + row]
            states, tokens = hidden[row, start - 1 : len(ids) - 1], rows[row, start : len(ids)]
            if stock:
                logits = model.lm_head(states).float()
                logps.append(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
            else:
                logps.append(head_logp(model.lm_head, states, tokens))
    return torch.cat(logps).cpu()


def trainer(folder: str, device: str) -> Any:
    """Return the model as training has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()


def compare(model: Any, way: str, answers: Answers, ids: list[list[int]]) -> list[dict[str, Any]]:
    """Return, for a way and each training, the number of log-probabilities that differ, and the largest difference."""
    from rl_kernels.models import invariant

    _, tokens, logprobs = answers
    sequences = [prompt + answer for prompt, answer in zip(ids, tokens, strict=True)]
    starts = [len(of) for of in ids]
    rolled = torch.tensor([value for of in logprobs for value in of], dtype=torch.float32)
    with torch.no_grad():
        passes = {STOCK: trained(model, sequences, starts, stock=True)}
        with invariant(model):
            passes["invariant"] = trained(model, sequences, starts, stock=False)
    records = []
    for training, value in passes.items():
        differ = int((bits_of(value) != bits_of(rolled)).sum())
        largest = float((value - rolled).abs().max())
        records.append({"way": way, "training": training, "tokens": len(rolled), "differ": differ, "max": largest})
        print(f"{way}, training {training}: {differ} of {len(rolled)} differ, by {largest:.3g} at most", flush=True)
    return records


def measure(folder: str, args: argparse.Namespace, document: dict[str, Any], keep: Callable[[], None]) -> None:
    """Add the results to a document, and call ``keep`` after each; ``args.ways`` become those that answered."""
    vocab, engines = MODELS[args.model]["vocab_size"], Engines(folder, args)
    try:
        # While engines start.
        model = trainer(folder, args.device) if "bits" in args.parts else None
        args.ways = engines.ready()
        if model is not None:
            document["bits"], ids = [], prompts(args.prompts, LONGEST, vocab, 0)
            for way in [*engines.ways]:
                answers = engines.answer(way, ids, args.tokens)
                document["bits"] += [] if answers is None else compare(model, way, answers, ids)
                keep()
            del model
        if "speed" in args.parts:
            document["speed"] = {}
            for number in args.sequences if engines.ways else ():
                document["speed"][str(number)] = speeds(engines, args, vocab, number)
                keep()
    finally:
        engines.close()


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("vllm_rollout.py", "Roll out in vLLM, stock and on our operators; compare with training, and time.")
    cli.add_argument("--model", choices=list(MODELS), default="llama", help="default: llama")
    numbers = {"layers": 8, "prompts": 64, "tokens": 512, "rounds": 5, "cache_gib": 5}
    for name, default in numbers.items():
        flag = "--" + name.replace("_", "-")
        cli.add_argument(flag, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--runner", type=int, choices=(1, 2), default=2, help="vLLM's model runner; default: 2")
    cli.add_argument("--eager", action="store_true", help="without vLLM's compilation and CUDA graphs")
    cli.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    cli.add_argument("--parts", nargs="+", choices=("bits", "speed"), default=["bits", "speed"], help="default: both")
    cli.add_argument("--sequences", nargs="+", type=count(1), default=[1, 16, 64, 256], metavar="N", help="to time")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    args.ways = list(dict.fromkeys(args.ways))
    for name in ("transformers", "vllm"):
        if find_spec(name) is None:
            cli.error(f"{name} is not installed")
    if args.device == "cuda" and not torch.cuda.is_available():
        cli.error("this PyTorch sees no GPU")
    with tempfile.TemporaryDirectory() as folder:
        make_arguments = (folder, args.model, args.layers, args.device)
        # In a process of its own, which gives all its memory back.
        maker = multiprocessing.get_context("spawn").Process(target=make, args=make_arguments)
        maker.start()
        maker.join()
        if maker.exitcode:
            return 2
        document = {"environment": environment(torch.device(args.device), PACKAGES)}

        def keep() -> None:
            document["settings"] = {name: value for name, value in vars(args).items() if name != "json"}
            if args.json:
                write_json(args.json, document)

        chosen = args.ways
        measure(folder, args, document, keep)
    if not args.ways or (OURS in chosen and OURS not in args.ways):
        return 2
    ours = [record for record in document.get("bits", []) if record["way"] == OURS and record["training"] != STOCK]
    return int(any(record["differ"] for record in ours))


if __name__ == "__main__":
    sys.exit(main())
