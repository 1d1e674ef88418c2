"""Operators behind one another: logits through fused_logp into grpo_loss, with gradients back to the logits.

On a CPU and on a GPU, each with its default backends.
"""

from dataclasses import replace

import pytest
import torch

from rl_kernels.core.testing import make_synthetic_rl_kernel_batch
from rl_kernels.fused_logp import fused_logp
from rl_kernels.grpo_loss import Normaliser, grpo_loss
from rl_kernels.lab.check.compare import bits

IGNORED = -100
BETA, CLIP = 0.04, 0.2
SAMPLES = 4
SIZES = {"cpu": (3, 9, 50), "cuda": (64, 16, 32768)}
"""Prompts, tokens of a completion and of the vocabulary, of a batch that each device can take."""


def drawn(device, prompts, length, vocab):
    """Return a batch and its logits."""
    batch = make_synthetic_rl_kernel_batch(
        num_prompts=prompts,
        samples_per_prompt=SAMPLES,
        prompt_len=2,
        completion_len=length,
        vocab_size=vocab,
        valid_density=0.7,
        device=device,
        seed=5,
    )
    generator = torch.Generator().manual_seed(1)
    return batch, torch.randn(*batch.token_ids.shape, vocab, generator=generator).to(device)


def through_operators(logits, batch, rows=slice(None), normaliser=None):
    old, ref, mask = batch.old_logps[rows], batch.ref_logps[rows], batch.completion_mask[rows]
    ids = batch.token_ids[rows].masked_fill(~mask, IGNORED)
    logps = fused_logp(logits[rows], ids, ignore_index=IGNORED)
    options = {"samples_per_prompt": SAMPLES, "clip_eps": CLIP, "beta": BETA, "normaliser": normaliser}
    return grpo_loss(logps, old, ref, batch.rewards[rows], mask, **options)


def logps_of(logits, batch):
    return torch.log_softmax(logits, -1).gather(-1, batch.token_ids[..., None]).squeeze(-1)


def in_eager(logits, batch):
    """The same loss written out in plain PyTorch, in the dtype of the logits."""
    mask = batch.completion_mask
    logps = logps_of(logits, batch)
    groups = batch.rewards.to(logits.dtype).view(-1, SAMPLES)
    std = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    advantages = ((groups - groups.mean(1, keepdim=True)) / std).view(-1, 1)
    ratio = (logps - batch.old_logps).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    log_ratio = batch.ref_logps - logps
    terms = policy + BETA * (log_ratio.exp() - log_ratio - 1)
    return torch.where(mask, terms, 0).sum() / mask.sum()


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-3)])
def test_a_batch_is_exact_and_a_prompt_alone_has_its_bits(device, dtype, most):
    batch, logits = drawn(device, *SIZES[device])
    # Close to on-policy: with random old log-probs nearly every ratio would be clipped.
    near = logps_of(logits.double(), batch).float()
    batch = replace(batch, old_logps=near + 0.1 * batch.old_logps.sin(), ref_logps=near + 0.1 * batch.ref_logps.cos())
    leaf = logits.to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    count = Normaliser(num_tokens=batch.completion_mask.sum())
    output, expected = through_operators(leaf, batch, normaliser=count), in_eager(exact, batch)
    torch.testing.assert_close(output.loss.double(), expected, atol=1e-6, rtol=1e-5)
    found, gold = gradient(output.loss, leaf), gradient(expected, exact)
    assert (found.double() - gold).norm() <= most * gold.norm()
    assert gold.any()
    # The loss counts the tokens itself too.
    torch.testing.assert_close(through_operators(leaf, batch).loss, output.loss, atol=1e-6, rtol=1e-5)

    prompt = slice(SAMPLES, 2 * SAMPLES)
    alone = gradient(through_operators(leaf, batch, prompt, count).loss, leaf)
    assert bits(alone[prompt], found[prompt]).passed
