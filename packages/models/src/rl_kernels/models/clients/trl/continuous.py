"""Log-probabilities of tokens from continuous batching: the model runner returns ours instead of its own.

Hidden states of several requests come in any batch, on another thread, and in CUDA graphs that are replayed. Only the
runner knows the request of a row, and it returns the log-probability with the token: the second row of its output, to
which a third is added for the smallest kept logit. Written for transformers 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_kernels.models.clients.trl.head import Head
from rl_kernels.models.clients.trl.kept import KeptLogp, record_kept
from rl_kernels.models.clients.trl.rollout import Around, Sampled
from rl_kernels.models.head import inputs_of, unrounded
from rl_kernels.models.swap import replaced

KNOWN = "5.17 to 5.24"
"""The versions of transformers that have this model runner."""
METHOD = "_forward_process_and_sample"
TAKES = ("self", "model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids")


def check_settings(trainer: Any) -> None:
    """Refuse continuous batching in which tokens cannot be scored in the pass that samples them.

    Raises:
        ValueError: its batches are compiled, or the model has recurrent layers, which it does not run.
        TypeError: transformers has another model runner.
    """
    names = ("varlen_compile_config", "decode_compile_config", "default_compile_level")
    settings = [getattr(trainer.continuous_batching_config, name, None) for name in names]
    # Continuous batching falls back to the compile_config of these.
    configs = (trainer.generation_config, trainer.model.config, trainer.model.config.get_text_config())
    if any([*settings, *(getattr(config, "compile_config", None) for config in configs)]):
        raise ValueError("transformers_continuous_batching_config: expected no compilation, to record what is sampled")
    if "linear_attention" in (getattr(trainer.model.config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            "use_transformers_continuous_batching: expected False for a hybrid, its cache has no place for the states "
            "of recurrent layers"
        )
    runner = _runner()
    method = getattr(runner, METHOD, None)
    if method is None or tuple(inspect.signature(method).parameters) != TAKES:
        raise TypeError(f"trainer: expected the continuous batching of transformers {KNOWN}, this has another runner")


def recorded(
    sample: Callable[..., Any], head: Head, model: Any, around: Around, config: Any, refusal: str | None = None
) -> Callable[..., Sampled]:
    """Return ``GRPOTrainer._generate_single_turn`` with the log-probability of each token that it sampled.

    Args:
        sample: TRL's method.
        head: the head of the model.
        model: the model that generates, without wrappers.
        around: context of training passes, such as autocast.
        config: the continuous batching config.
        refusal: why the sampler may not drop tokens, or None.
    """

    def sampled(prompts: Any, *args: Any, **options: Any) -> Sampled:
        results: list[Any] = []

        def generate_batch(*args: Any, **options: Any) -> Any:
            outputs = original(*args, **options)
            results.extend(outputs.values())
            return outputs

        original = model.generate_batch
        with (
            _logprobs_enabled(config),
            record_kept(model, refusal) as smallest,
            _runner_with_head(head, around, smallest),
            _room_for_min_logit(),
            replaced(model, "generate_batch", generate_batch),
        ):
            ids, _ = sample(prompts, *args, **options)
            if len(results) != len(prompts):
                raise RuntimeError(f"rollout: continuous batching answered {len(results)} of {len(prompts)} prompts")
            for output, tokens in zip(results, ids, strict=True):
                if output.error is not None or len(output.logprobs) != len(tokens):
                    reason = output.error or "it lost log-probabilities"
                    raise RuntimeError(f"rollout: continuous batching failed: {reason}")
        return ids, [output.logprobs for output in results]

    return sampled


def _runner() -> Any:
    try:
        from transformers.generation.continuous_batching.model_runner import ModelRunner
    except ImportError:
        return None
    return ModelRunner


@contextmanager
def _logprobs_enabled(config: Any) -> Iterator[None]:
    """Make the runner allocate room for log-probabilities."""
    previous, config.return_logprobs = config.return_logprobs, True
    try:
        yield
    finally:
        config.return_logprobs = previous


@contextmanager
def _room_for_min_logit() -> Iterator[None]:
    """Add a row to the output of each batch, for the smallest kept logits, and return these with log-probabilities."""
    from transformers.generation.continuous_batching import input_outputs

    outputs: Any = input_outputs.ContinuousBatchingIOs
    set_up, update = outputs._setup_static_tensors, outputs.prepare_batch_update

    def widened(self: Any, *args: Any, **options: Any) -> None:
        set_up(self, *args, **options)
        ids = self.output_ids
        shape, kind = (3, ids.shape[1]), {"dtype": ids.dtype, "device": ids.device}
        self.output_ids = torch.zeros(shape, **kind, pin_memory=ids.is_pinned())

    def updated(self: Any) -> tuple[Any, list[int], list[float]]:
        requests, tokens, logps = update(self)
        smallest = self.output_ids[2, : len(tokens)].view(torch.float32).tolist()
        pairs = zip(logps, smallest, strict=True)
        return requests, tokens, [logp if least == -torch.inf else KeptLogp(logp, least) for logp, least in pairs]

    outputs._setup_static_tensors, outputs.prepare_batch_update = widened, updated
    try:
        yield
    finally:
        outputs._setup_static_tensors, outputs.prepare_batch_update = set_up, update


@contextmanager
def _runner_with_head(head: Head, around: Around, smallest: list[torch.Tensor]) -> Iterator[None]:
    """Make the runner's passes through the model of a head write our log-probabilities, and what ``smallest`` gets."""
    runner = _runner()
    original = getattr(runner, METHOD)

    def forward(
        self: Any,
        model: Any,
        batch_data: dict[str, Any],
        carry_over_ids: torch.Tensor,
        prev_output_ids: torch.Tensor,
        output_ids: torch.Tensor,
    ) -> None:
        arguments = (model, batch_data, carry_over_ids, prev_output_ids, output_ids)
        if model.get_output_embeddings() is not head.module:
            original(self, *arguments)
            return
        with inputs_of(head.module) as passes, unrounded(head.module):
            original(self, *arguments)
        (hidden,), places = passes, batch_data["logits_indices"]
        rows = hidden[0] if "logits_to_keep" in batch_data else hidden[0, places]
        min_logit = smallest.pop() if smallest else None
        with around():
            logps = head.logps(rows, output_ids[0, : len(rows)].long(), min_logit)
        # The runner stores them as int32 bits, beside the tokens.
        output_ids[1, : len(rows)].copy_(logps.view(torch.int32))
        least = torch.full_like(logps, -torch.inf) if min_logit is None else min_logit
        output_ids[2, : len(rows)].copy_(least.view(torch.int32))

    setattr(runner, METHOD, forward)
    try:
        yield
    finally:
        setattr(runner, METHOD, original)
