"""Run vLLM's engine on a CPU with the plugin; print how many log-probs differ from transformers', as JSON.

`python tests_integration/vllm_on_cpu.py MODEL [--compiled] [--processed]`, MODEL a folder with a config.json. vLLM's
compiled library is not there: the few functions of it that a CPU worker calls are given here, and all layers come from
the plugin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

PROMPTS = (range(3, 20), range(100, 145), (7, 8, 9), range(100, 150))
"""Of several lengths: longer than a step takes, and one that begins as another does."""
ANSWER, PAGE, STEP = 12, 32, 40
"""Tokens of an answer, keys of a page, tokens of a step."""


class SlotMapping:
    """Stands for vLLM's kernel that says where the keys of new tokens go."""

    def __getitem__(self, grid: object) -> SlotMapping:
        return self

    def __call__(
        self,
        count: int,
        most: int,
        starts: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        stride: int,
        page: int,
        slots: torch.Tensor,
        **options: Any,
    ) -> None:
        slots.fill_(options.get("PAD_ID", -1))
        for row, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            own = positions[first:last]
            slots[first:last] = table[row][own // page].long() * page + own % page


def stand_in() -> None:
    """Give what vLLM's library would: before vLLM is imported, and its kernel after the engine's import."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    globals()["_library"] = library
    from vllm.v1.worker import block_table, cpu_model_runner

    def with_kernel(runner: Any) -> None:
        block_table._compute_slot_mapping_kernel = SlotMapping()

    cpu_model_runner.CPUModelRunner._postprocess_triton = with_kernel


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights by the names that transformers has."""
    source = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        scale = 0.2 if value.ndim == 1 else 2.0 / value.shape[-1] ** 0.5
        drawn = torch.randn(value.shape, generator=source) * scale
        yield name, (drawn + 1.0 if value.ndim == 1 else drawn).to(value.dtype)


def sampled(folder: str, trainer: Any, chosen: tuple[str, ...]) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompt, answer and log-probs of each request; processed ones with another temperature are refused."""
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"enforce_eager": True}
    if "--compiled" in chosen:
        how = {"compilation_config": {"mode": 3, "cudagraph_mode": "NONE"}}
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=STEP,
        block_size=PAGE,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs" if "--processed" in chosen else "raw_logprobs",
        **how,
    )
    pushed = trainer.state_dict()
    engine.apply_model(lambda model: model.load_weights(iter(pushed.items())))
    engine.reset_prefix_cache()
    # Some with the most probable tokens too, often the sampled one among them.
    options = [
        SamplingParams(max_tokens=ANSWER, logprobs=count, ignore_eos=True, detokenize=False) for count in (0, 5, 0, 3)
    ]
    if "--processed" in chosen:
        with pytest.raises(ValueError, match=r"temperature: expected 1\.0"):
            engine.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0.5, logprobs=0))
    requests = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    found = []
    for request in engine.generate(requests, options, use_tqdm=False):
        tokens = list(request.outputs[0].token_ids)
        logprobs = [of[token].logprob for of, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
        found.append((list(request.prompt_token_ids), tokens, logprobs))
    return found


def differing(trainer: Any, found: list[tuple[list[int], list[int], list[float]]]) -> int:
    """Return how many log-probs are not those of a pass of the trainer over the whole sequence."""
    from rl_kernels.models import head_logp

    count = 0
    for prompt, tokens, logprobs in found:
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            hidden = trainer.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            expected = head_logp(trainer.lm_head, hidden, ids[0, len(prompt) :])
        count += int((expected != torch.tensor(logprobs)).sum())
    return count


def main(folder: str, *options: str) -> None:
    """Roll out, train, and print the counts."""
    stand_in()
    from transformers import AutoConfig, AutoModelForCausalLM

    from rl_kernels.models import invariant

    trainer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    trainer.load_state_dict(dict(weights(trainer)))
    found = sampled(folder, trainer, options)
    counts = {"tokens": sum(len(tokens) for _, tokens, _ in found), "stock": differing(trainer, found)}
    with invariant(trainer):
        counts["invariant"] = differing(trainer, found)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
