"""vLLM in several ways, each in processes of its own, alive at once: `vllm_rollout.py` has them answer in turn."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

STOCK, OURS = "stock", "rl-kernels"
WAYS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    STOCK: ({}, {}),
    "batch-invariant": ({"VLLM_BATCH_INVARIANT": "1"}, {"attention_backend": "FLASH_ATTN"}),
    OURS: ({"RL_KERNELS_VLLM": "1"}, {"attention_backend": "CUSTOM"}),
}
"""Environment variables and options of vLLM."""
Answers = tuple[float, list[list[int]], list[list[float]]]
"""Seconds, and the tokens and log-probabilities of each answer."""


def engine(way: str, folder: str, args: argparse.Namespace, calls: Any) -> None:
    """Run vLLM in a process of its own: answer ``(prompts, tokens)`` until None comes."""
    own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": str(args.runner - 1), **WAYS[way][0]}
    os.environ.update(own, VLLM_CACHE_ROOT=f"{folder}/cache of {way}")
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"enforce_eager": True} if args.eager else {}
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=args.cache_gib << 30,
        **WAYS[way][1],
        **how,
    )
    config = llm.llm_engine.vllm_config
    graphs, chunks = config.compilation_config.cudagraph_mode.name, config.scheduler_config.enable_chunked_prefill
    calls.send(f"ready, runner {config.use_v2_model_runner + 1}, CUDA graphs {graphs}, chunked prefill {chunks}")
    while (call := calls.recv()) is not None:
        ids, tokens = call
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": of} for of in ids], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        answers = [request.outputs[0] for request in outputs]
        logprobs = [
            [of[token].logprob for of, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers
        ]
        calls.send((seconds, [list(answer.token_ids) for answer in answers], logprobs))


class Engines:
    """vLLM in several ways, each waiting for calls.

    Attributes:
        ways: those that answer. One that cannot start, or ends by itself, has printed its own error.
    """

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        """Start them all at once."""
        context = multiprocessing.get_context("spawn")
        self.ways, self._ends, self._processes = list(args.ways), {}, []
        for way in self.ways:
            self._ends[way], other = context.Pipe()
            self._processes.append(context.Process(target=engine, args=(way, folder, args, other)))
            self._processes[-1].start()
            # So that the end of the process ends the pipe.
            other.close()

    def ready(self) -> list[str]:
        """Wait for all, and return the ways that could start."""
        for way in [*self.ways]:
            message = self._received(way)
            print(f"{way}: {message or 'could not start'}", flush=True)
        return self.ways

    def answer(self, way: str, ids: list[list[int]], tokens: int) -> Answers | None:
        """Return the answers of a way to these prompts, or None if it has ended."""
        # An error of a process that has ended is found below.
        with suppress(OSError):
            self._ends[way].send((ids, tokens))
        return self._received(way)

    def _received(self, way: str) -> Any:
        try:
            return self._ends[way].recv()
        except (EOFError, OSError):
            self.ways.remove(way)
            return None

    def close(self) -> None:
        """End them, and free their memory."""
        for end in self._ends.values():
            # One may have ended by itself, with an error of its own.
            with suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join()
