"""Operators behind one another, on a CPU and on a GPU, each with its default backends.

Logits through fused_logp into grpo_loss, with gradients back to the logits; experts beside det_linear.
"""

from dataclasses import replace

import pytest
import torch

from rl_kernels.core.testing import make_synthetic_rl_kernel_batch
from rl_kernels.det_gemm import det_linear
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.reference import fused_logp as logps_in_fp64
from rl_kernels.grpo_loss import Normalizer, grpo_loss
from rl_kernels.grpo_loss.reference import grpo_loss as loss_in_fp64
from rl_kernels.lab.check.compare import bits
from rl_kernels.moe import experts

IGNORED = -100
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


def through_operators(logits, batch, rows=slice(None), operators=(fused_logp, grpo_loss), **options):
    logps_of, loss_of = operators
    old, ref, mask = batch.old_logps[rows], batch.ref_logps[rows], batch.completion_mask[rows]
    logps = logps_of(logits[rows], batch.token_ids[rows].masked_fill(~mask, IGNORED), ignore_index=IGNORED)
    options |= {"samples_per_prompt": SAMPLES, "clip_eps": 0.2, "beta": 0.04}
    return loss_of(logps, old, ref, batch.rewards[rows], mask, **options)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-3)])
def test_a_batch_is_exact_and_a_prompt_alone_has_its_bits(device, dtype, most):
    batch, logits = drawn(device, *SIZES[device])
    # Close to on-policy: with random old log-probs nearly every ratio would be clipped.
    near = logps_in_fp64(logits.double(), batch.token_ids).float()
    batch = replace(batch, old_logps=near + 0.1 * batch.old_logps.sin(), ref_logps=near + 0.1 * batch.ref_logps.cos())
    leaf = logits.to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    count = {"normalizer": Normalizer(num_tokens=batch.completion_mask.sum())}
    output = through_operators(leaf, batch, **count)
    expected = through_operators(exact, batch, operators=(logps_in_fp64, loss_in_fp64)).loss
    torch.testing.assert_close(output.loss.double(), expected, atol=1e-6, rtol=1e-5)
    found, gold = gradient(output.loss, leaf), gradient(expected, exact)
    assert (found.double() - gold).norm() <= most * gold.norm()
    assert gold.any()
    # The loss counts the tokens itself too.
    torch.testing.assert_close(through_operators(leaf, batch).loss, output.loss, atol=1e-6, rtol=1e-5)

    prompt = slice(SAMPLES, 2 * SAMPLES)
    alone = gradient(through_operators(leaf, batch, prompt, **count).loss, leaf)
    assert bits(alone[prompt], found[prompt]).passed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_route_of_experts_has_the_bits_of_det_linear(device, dtype):
    """Gates are at their bound, whose sigmoid rounds to 1, so the activation ``7 (up + 1)`` needs no library."""
    generator = torch.Generator().manual_seed(2)
    tokens, width, inner, count = 70, 96, 40, 3

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hidden, gate_up, down = normal(tokens, width), normal(count, 2 * inner, width), normal(count, width, inner)
    bias = normal(count, 2 * inner)
    bias[:, :inner] = 1000
    ids = torch.randint(count, (tokens, 1), generator=generator).to(device)
    ones, options = torch.ones(tokens, 1, device=device), {"gate_up_bias": bias, "activation": "clamped_swiglu"}
    out = experts(hidden, gate_up, down, ids, ones, **options)
    for token in range(0, tokens, 7):
        expert = ids[token, 0]
        up = det_linear(hidden[token], gate_up[expert], bias[expert])[inner:].clamp(-7, 7)
        assert torch.equal(out[token], det_linear((up + 1) * 7, down[expert])), token
