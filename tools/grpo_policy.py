"""The model that `grpo_step.py` measures: transformers' Llama with random weights, a batch, and the ways of a step."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.testing import IGNORED
from rl_kernels.grpo_loss import Normalizer, group_advantages, grpo_loss, sequence_losses
from rl_kernels.grpo_loss.spec.bench import eager as eager_loss
from rl_kernels.lab.bench.arena import DeviceDraw
from rl_kernels.lab.check.guard import Results
from rl_kernels.linear_logp import (
    Chunk,
    Known,
    Memory,
    linear_logp,
    linear_logp_from_known,
    linear_logp_known,
    linear_logp_loss,
)
from rl_kernels.linear_logp.spec.bench import eager as eager_logp

BETA = 0.04
"""Nonzero, so that the reference log-probabilities are read; other options have the defaults of `grpo_loss`."""
DRIFTS, SPREAD = (-0.4, -0.08, 0.08, 0.4), 0.05
"""Offsets of old log-probabilities: no ratio is near a clip bound, where rounding would decide about a gradient."""


@dataclass(frozen=True)
class Batch:
    """Tokens, their targets ``[B, T]`` (``IGNORED`` where the mask is False), and the other inputs of the loss."""

    ids: torch.Tensor
    targets: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    rewards: torch.Tensor
    mask: torch.Tensor


class Policy:
    """The model with its gradient buffers, and the ways through a step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.model = llama(args)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @property
    def mib(self) -> float:
        """Memory of parameters and gradients, in MiB."""
        return float(sum(2 * parameter.nbytes for parameter in self.model.parameters())) / 2**20

    def batch(self, prompts: int) -> Batch:
        """Draw groups of completions of many lengths, and log-probabilities of old and reference policies near ours."""
        args, draw = self.args, DeviceDraw(torch.float32, self.device, self.args.seed)
        rows, length = prompts * args.samples, args.tokens
        starts = draw.ids(length // 2, prompts).repeat_interleave(args.samples)[:, None]
        ends = length - draw.ids(max(length // 4, 1), rows)[:, None]
        at = torch.arange(length + 1, device=self.device)
        prompt = draw.ids(args.vocab, prompts, length + 1).repeat_interleave(args.samples, 0)
        tokens = torch.where(at <= starts, prompt, draw.ids(args.vocab, rows, length + 1))
        mask = (at[:-1] >= starts) & (at[:-1] < ends)
        ids, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(~mask, IGNORED)
        with torch.no_grad():
            # One group at a time, so that this does not limit the largest batch.
            groups = zip(ids.split(args.samples), targets.split(args.samples), strict=True)
            now = torch.cat([self.logps(*group) for group in groups])
        drift = torch.tensor(DRIFTS, device=self.device)[draw.ids(len(DRIFTS), rows, length)]
        old = now - drift - draw.uniform(-SPREAD, SPREAD, rows, length)
        return Batch(ids, targets, old, now + draw.normal(rows, length, scale=0.2), draw.uniform(0, 1, rows), mask)

    def eager(self, batch: Batch) -> torch.Tensor:
        """Take a step in plain PyTorch; return the loss."""
        hidden, weight = self._hidden(batch.ids), self.model.lm_head.weight
        return self._backward(batch, eager_loss, eager_logp(hidden, weight, batch.targets, ignore_index=IGNORED))

    def ours(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Take a step through the operators; return the loss."""
        return self._backward(batch, grpo_loss, self.logps(batch.ids, batch.targets, temperature))

    def saved_logits(self, batch: Batch) -> torch.Tensor:
        """Take a step that keeps all logits from forward to backward."""
        return self._backward(batch, grpo_loss, self.logps(batch.ids, batch.targets, memory=Memory(saved_mib=1 << 20)))

    def known(self, batch: Batch, statistics: Known) -> torch.Tensor:
        """Take a step whose log-probabilities an earlier pass gave (``statistics``)."""
        return self._backward(batch, grpo_loss, self.logps(batch.ids, batch.targets, known=statistics))

    def statistics(self, batch: Batch) -> Known:
        """Return the log-probabilities of a pass without gradients, as a rollout or an old policy's pass gives them."""
        with torch.no_grad():
            hidden, weight = self._hidden(batch.ids), self.model.lm_head.weight
            options = {"ignore_index": IGNORED, "backend": self.args.backend}
            return linear_logp_known(hidden, weight, batch.targets, **options)

    def chunks(self, batch: Batch) -> torch.Tensor:
        """Take a step that computes loss and gradients of the head in chunks of sequences."""
        advantages = group_advantages(batch.rewards, samples_per_prompt=self.args.samples)
        normalizer = Normalizer(num_tokens=batch.mask.sum())

        def losses(logps: torch.Tensor, chunk: Chunk) -> torch.Tensor:
            tensors = (batch.old, batch.ref, advantages, batch.mask)
            part = (value[chunk.sequences] for value in tensors)
            # Checking the count would wait for the GPU in every chunk.
            return sequence_losses(logps, *part, beta=BETA, normalizer=normalizer, validate=False)

        options = {"ignore_index": IGNORED, "backend": self.args.backend}
        hidden, weight = self._hidden(batch.ids), self.model.lm_head.weight
        return self._differentiated(linear_logp_loss(hidden, weight, batch.targets, losses, **options))

    def logps(self, ids: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, **form: Any) -> torch.Tensor:
        """Return our log-probabilities of the targets ``[B, T]``."""
        options = {"temperature": temperature, "ignore_index": IGNORED, "backend": self.args.backend, **form}
        function = linear_logp_from_known if "known" in form else linear_logp
        logps: torch.Tensor = function(self._hidden(ids), self.model.lm_head.weight, targets, **options)
        return logps

    def gradients(self) -> Results:
        """Return the gradient buffers, as the last step left them."""
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.model(input_ids=ids, use_cache=False).last_hidden_state

    def _backward(self, batch: Batch, loss_of: Callable[..., Any], logps: torch.Tensor) -> torch.Tensor:
        groups = {"samples_per_prompt": self.args.samples, "beta": BETA}
        return self._differentiated(loss_of(logps, batch.old, batch.ref, batch.rewards, batch.mask, **groups).loss)

    def _differentiated(self, loss: torch.Tensor) -> torch.Tensor:
        # Keep the buffers, as gradient accumulation does.
        self.model.zero_grad(set_to_none=False)
        loss.backward()
        return loss.detach()


def llama(args: argparse.Namespace) -> Any:
    """Return the model; its weights give logits a variance near 1 at any size."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=math.gcd(args.heads, 8),
        max_position_embeddings=args.tokens,
        initializer_range=args.hidden**-0.5,
    )
    torch.manual_seed(args.seed)
    before = torch.get_default_dtype()
    # Made directly in its dtype on its device: copies would fragment the memory that is measured.
    torch.set_default_dtype(DTYPES[args.dtype])
    try:
        with torch.device(args.device):
            model = LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
