"""Operators behind one another: logits through fused_logp into grpo_loss, with gradients back to the logits."""

import math

import pytest
import torch

from rl_kernels.core.testing import make_synthetic_rl_kernel_batch
from rl_kernels.fused_logp import fused_logp
from rl_kernels.grpo_loss import grpo_loss
from rl_kernels.lab.check.compare import bits

IGNORED = -100
BETA, CLIP = 0.04, 0.2


@pytest.fixture
def batch():
    return make_synthetic_rl_kernel_batch(
        num_prompts=3, samples_per_prompt=4, prompt_len=2, completion_len=9, vocab_size=50, valid_density=0.7, seed=5
    )


@pytest.fixture
def logits(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch.token_ids.shape, 50, generator=generator)


def through_operators(logits, batch):
    mask = batch.completion_mask
    ids = batch.token_ids.masked_fill(~mask, IGNORED)
    logps = fused_logp(logits, ids, ignore_index=IGNORED)
    return grpo_loss(
        logps, batch.old_logps, batch.ref_logps, batch.rewards, mask, samples_per_prompt=4, clip_eps=CLIP, beta=BETA
    )


def in_eager(logits, batch):
    """The same loss written out in plain PyTorch, in the dtype of the logits."""
    mask = batch.completion_mask
    logps = torch.log_softmax(logits, -1).gather(-1, batch.token_ids[..., None]).squeeze(-1)
    groups = batch.rewards.to(logits.dtype).view(-1, 4)
    std = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    advantages = ((groups - groups.mean(1, keepdim=True)) / std).view(-1, 1)
    ratio = (logps - batch.old_logps).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    log_ratio = batch.ref_logps - logps
    terms = policy + BETA * (log_ratio.exp() - log_ratio - 1)
    return torch.where(mask, terms, 0).sum() / mask.sum()


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def test_loss_and_gradient_equal_eager(batch, logits):
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    output, expected = through_operators(leaf, batch), in_eager(exact, batch)
    torch.testing.assert_close(output.loss.double(), expected, atol=1e-6, rtol=1e-5)
    found, gold = gradient(output.loss, leaf).double(), gradient(expected, exact)
    assert (found - gold).norm() <= 1e-6 * gold.norm()
    assert gold.abs().max() > 1e-3


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38])
def test_garbage_at_masked_positions_changes_nothing(batch, logits, garbage):
    dirty = logits.masked_fill(~batch.completion_mask[..., None], garbage)
    clean_leaf, dirty_leaf = logits.clone().requires_grad_(), dirty.requires_grad_()
    clean, found = through_operators(clean_leaf, batch), through_operators(dirty_leaf, batch)
    for value, expected in zip(found, clean, strict=True):
        assert bits(value, expected).passed
    assert bits(gradient(found.loss, dirty_leaf), gradient(clean.loss, clean_leaf)).passed


def test_five_steps_of_sgd_lower_the_loss(batch, logits):
    leaf = logits.clone().requires_grad_()
    optimizer = torch.optim.SGD([leaf], lr=20.0)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = through_operators(leaf, batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1e-3
