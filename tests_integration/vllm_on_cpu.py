"""Run vLLM's engine on a CPU with the plugin; print how many log-probs differ from transformers', as JSON.

`python tests_integration/vllm_on_cpu.py` reads a request a line, JSON: `folder` has a config.json, `dtype`, `options`
and `environment`. Each runs in a copy of this process, because imports take longer than the rest. vLLM's compiled
library is not there: the few functions of it that a CPU worker calls are here, and all layers come from the plugin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import copied

PROMPTS = (range(3, 20), range(100, 145), (7, 8, 9), range(100, 150))
"""Of several lengths: longer than a step takes, and one that begins as another does."""
ANSWER, PAGE, STEP = 12, 32, 40
"""Tokens of an answer, keys of a page, tokens of a step."""
MASKED_FROM = 300
"""First token that `--masked` forbids."""
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.3, "min_p": 0.1},
    {"top_k": 5},
    {"temperature": 0.0},
)
"""What `--kept` asks for, in one batch."""


def slot_mapping(
    kernel: Any,
    requests: int,
    count: int,
    most: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    stride: int,
    slots: torch.Tensor,
    page: int,
    *ranks: int,
) -> None:
    """Stand for vLLM's kernel that says where the keys of new tokens go."""
    slots.fill_(-1)
    for row, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        own = positions[first:last]
        slots[first:last] = table[row][own // page].long() * page + own % page


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Stand for vLLM's kernel that samples a token of each row."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits.softmax(-1) / noise).argmax(-1)


LIBRARY = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": gumbel_argmax,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
}
"""Functions of vLLM's compiled library."""


def stand_in() -> None:
    """Give what vLLM's library would, before an engine is made."""
    library = globals()["_library"] = torch.library.Library("_C", "FRAGMENT")
    for schema, function in LIBRARY.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        # The second runner's own kernels are interpreted; ours read the variable when they are imported.
        import rl_kernels.core.triton_lib.launch  # noqa: F401

        os.environ["TRITON_INTERPRET"] = "1"
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
        from vllm.v1.worker.gpu.sample import sampler

        # Their kernel does not run in the interpreter.
        sampler.apply_top_k_top_p = apply_top_k_top_p_pytorch
    from vllm.model_executor.models import registry
    from vllm.v1.worker import block_table

    block_table.ComputeSlotMappingKernel.__call__ = slot_mapping
    # In a process of its own vLLM would import everything again, to look at a class.
    registry._run_in_subprocess = lambda function: function()


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights by the names that transformers has."""
    source = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        scale = 0.2 if value.ndim == 1 else 2.0 / value.shape[-1] ** 0.5
        drawn = torch.randn(value.shape, generator=source) * scale
        yield name, (drawn + 1.0 if value.ndim == 1 else drawn).to(value.dtype)


def mask_logits(model: Any) -> None:
    """Mask the last logits in place, as verl does behind the tokenizer's vocabulary."""
    compute_logits = model.compute_logits

    def masked(*args: Any, **options: Any) -> torch.Tensor:
        logits = compute_logits(*args, **options)
        logits[..., MASKED_FROM:] = -torch.inf
        return logits

    model.compute_logits = masked


class Found(NamedTuple):
    """A request: prompt, answer, log-probs, temperature, and the smallest kept logits, which may be none."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    temperature: float
    min_logit: list[float] | None


def sampled(folder: str, trainer: Any, chosen: list[str]) -> list[Found]:
    """Return what was sampled; penalties are refused where log-probs are processed."""
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"enforce_eager": True}
    if {"--compiled", "--pieces"} & set(chosen):
        how = {"compilation_config": {"mode": 3, "cudagraph_mode": "NONE"}}
    if "--pieces" in chosen:
        fusions = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant"), False)
        how["compilation_config"] |= {"backend": "eager", "pass_config": fusions}
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=trainer.dtype,
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=STEP,
        block_size=PAGE,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs" if {"--processed", "--kept"} & set(chosen) else "raw_logprobs",
        **how,
    )
    is_second = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert engine.llm_engine.vllm_config.use_v2_model_runner == is_second
    # What a trainer looks for.
    assert engine.llm_engine.vllm_config.additional_config == {"rl_kernels": True}
    # As trainers push them: a head that is tied to the embedding once.
    pushed = dict(trainer.named_parameters())
    engine.apply_model(lambda model: model.load_weights(iter(pushed.items())))
    engine.reset_prefix_cache()
    if "--masked" in chosen:
        engine.apply_model(mask_logits)
    # Some with the most probable tokens too, often the sampled one among them.
    how = {"max_tokens": ANSWER, "ignore_eos": True, "detokenize": False}
    if "--prompts" in chosen:
        how["prompt_logprobs"] = 0
    asks = {"extra_args": {"rl_kernels_min_logit": True}}
    own = [{**each, **asks} for each in SAMPLERS] if "--kept" in chosen else [{}] * len(PROMPTS)
    options = [SamplingParams(logprobs=count, **how, **each) for count, each in zip((0, 5, 0, 3), own, strict=True)]
    if "--processed" in chosen:
        with pytest.raises(ValueError, match=r"repetition_penalty: expected 1\.0"):
            engine.generate({"prompt_token_ids": [5]}, SamplingParams(repetition_penalty=1.5, logprobs=0))
    requests = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    found = []
    for request, params in zip(engine.generate(requests, options, use_tqdm=False), options, strict=True):
        tokens = list(request.outputs[0].token_ids)
        logprobs = [of[token].logprob for of, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
        assert "--masked" not in chosen or max(tokens) < MASKED_FROM
        prompt = list(request.prompt_token_ids)
        if "--prompts" in chosen:
            # As if all but the first token had been sampled.
            later = zip(request.prompt_logprobs[1:], prompt[1:], strict=True)
            logprobs = [*(of[token].logprob for of, token in later), *logprobs]
            prompt, tokens = prompt[:1], prompt[1:] + tokens
        smallest = [of[-1].logprob for of in request.outputs[0].logprobs if -1 in of]
        assert len(smallest) in (0, len(tokens))
        found.append(Found(prompt, tokens, logprobs, params.temperature or 1.0, smallest or None))
    if "--kept" in chosen:
        assert [each.min_logit is not None for each in found] == [True, True, True, False]
    return found


def differing(trainer: Any, found: list[Found]) -> int:
    """Return how many log-probs are not those of a pass of the trainer over the whole sequence."""
    from rl_kernels.models import head_logp
    from rl_kernels.models.logits import logit_options

    count = 0
    for prompt, tokens, logprobs, temperature, smallest in found:
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            hidden = trainer.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            options = {"temperature": temperature, **logit_options(trainer), "validate": False}
            options["min_logit"] = None if smallest is None else torch.tensor(smallest)
            expected = head_logp(trainer.lm_head, hidden, ids[0, len(prompt) :], **options)
        count += int((expected != torch.tensor(logprobs)).sum())
    return count


def counts(folder: str, dtype: str, options: list[str], environment: dict[str, str]) -> int:
    """Roll out, train, and print the counts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rl_kernels.models import invariant

    os.environ.update(environment)
    trainer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    trainer.load_state_dict(dict(weights(trainer)))
    found = sampled(folder, trainer, options)
    result = {"tokens": sum(len(each.tokens) for each in found), "stock": differing(trainer, found)}
    with invariant(trainer):
        result["invariant"] = differing(trainer, found)
    print(json.dumps(result))
    return 0


def prepare() -> None:
    """Import and compile what every request needs."""
    import transformers.models.auto  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.sample.sampler import Sampler

    import rl_kernels.models.clients.vllm.attention  # noqa: F401

    Sampler.gather_logprobs(torch.randn(3, 5).log_softmax(-1), 2, torch.tensor([0, 1, 2]))
    # vLLM collects garbage often.
    gc.freeze()


def main() -> None:
    """Answer each request by the exit status, and by what the copy printed last."""
    stand_in()
    prepare()
    for line in sys.stdin:
        request = json.loads(line)
        done = copied(partial(counts, **request), Path(request["folder"]))
        print(json.dumps({"status": done.returncode, "out": done.stdout, "err": done.stderr[-4000:]}), flush=True)


if __name__ == "__main__":
    main()
