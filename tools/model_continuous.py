"""Prompts and answers in continuous batching: `model_ways.py` compares their bits, `model_step.py` times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

ANSWER = 16
"""Tokens of each greedy answer."""
PAGE = 256
"""Default tokens of a page in transformers' cache."""
BATCH = 1024
"""Tokens of a timed batch."""


@torch.no_grad()
def answered(model: Any, each: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return prompts with their answers, and the last hidden states of all their tokens but the last.

    A batch has as many tokens as the longest prompt, so other prompts are split into chunks, next to tokens of answers.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(
        max_batch_tokens=max(map(len, each)),
        num_blocks=_pages(each, ANSWER),
        # Every token must be computed, so that the hook sees it.
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    greedy = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    states: dict[str, list[torch.Tensor]] = {str(place): [] for place in range(len(each))}
    answers: dict[str, Any] = {}
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=settings) as manager:

        def keep(*given: Any) -> None:
            requests = manager.batch_processor.inputs_and_outputs.requests_in_batch
            parts = given[-1].last_hidden_state[0].split([request.query_length for request in requests])
            for request, part in zip(requests, parts, strict=True):
                states[request.state.request_id].append(part.clone())

        hook = model.model.register_forward_hook(keep)
        for place, ids in enumerate(each):
            manager.add_request(ids.tolist(), request_id=str(place))
        while len(answers) < len(each):
            found = manager.get_result(timeout=1)
            if found is None and not manager.is_running():
                raise RuntimeError("continuous batching ended before all prompts were answered")
            if found is not None and found.error:
                raise RuntimeError(found.error)
            if found is not None and found.is_finished():
                answers[found.request_id] = found.generated_tokens
        hook.remove()
    whole = [torch.cat((ids, ids.new_tensor(answers[str(place)]))) for place, ids in enumerate(each)]
    return whole, [torch.cat(parts) for parts in states.values()]


def batched(model: Any, each: Sequence[torch.Tensor], tokens: int) -> Callable[[], Any]:
    """Return a call of ``generate_batch`` for greedy answers of ``tokens``, with defaults except a cache that fits."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(num_blocks=_pages(each, tokens), max_batch_tokens=BATCH)
    ids = [one.tolist() for one in each]

    def call() -> None:
        found = model.generate_batch(ids, generation_config=greedy, continuous_batching_config=settings)
        answered = sum(len(one.generated_tokens) for one in found.values())
        if answered != tokens * len(ids):
            raise RuntimeError(f"generate_batch gave {answered} of {tokens * len(ids)} tokens")

    return call


def _pages(each: Sequence[torch.Tensor], tokens: int) -> int:
    return sum((len(ids) + tokens) // PAGE + 1 for ids in each)
