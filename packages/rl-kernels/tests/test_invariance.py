"""The same tokens give the same bits however they are batched; the two arithmetics differ in rounding alone."""

import dataclasses

import pytest
import torch

from rl_kernels.demo.bits import different
from rl_kernels.demo.compare import compare, decode, gap_of
from rl_kernels.demo.invariant import INVARIANT
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.numerics import OURS_BF16, OURS_FP32, PLAIN_BF16, PLAIN_FP32, in_bf16
from rl_kernels.demo.plain import PLAIN
from rl_kernels.demo.rollout import training_logps


def differing(a, b):
    return int(different(a, b).sum())


@torch.no_grad()
def test_sampling_decoding_and_training_pass_give_the_same_bits(trained, threads):
    policy, rollout = trained
    training = training_logps(policy, rollout, INVARIANT, 1.0)
    assert rollout.mask.any()
    assert differing(training[rollout.mask], rollout.logps[rollout.mask]) == 0
    assert differing(training, decode(policy, rollout, INVARIANT, 1.0)) == 0


@torch.no_grad()
def test_a_sequence_alone_gives_the_bits_it_gives_in_the_batch(trained, threads):
    policy, rollout = trained
    training = training_logps(policy, rollout, INVARIANT, 1.0)
    for row in (0, 17):
        alone = rollout.row(row)
        assert differing(training[row : row + 1], decode(policy, alone, INVARIANT, 1.0)) == 0
        assert differing(training[row : row + 1], training_logps(policy, alone, INVARIANT, 1.0)) == 0


@torch.no_grad()
@pytest.mark.parametrize("missing", [1, 3])
def test_hidden_states_do_not_depend_on_the_padding(trained, missing):
    policy, rollout = trained
    whole = policy(rollout.tokens, INVARIANT)
    cut = policy(rollout.tokens[3:7, :-missing], INVARIANT)
    assert differing(cut, whole[3:7, :-missing]) == 0


@torch.no_grad()
def test_what_stands_in_the_padding_changes_no_bit(trained):
    policy, rollout = trained
    garbage = rollout.tokens.clone()
    for row, mask in enumerate(rollout.mask):
        garbage[row, int(mask.nonzero().max()) + 2 :] = 7
    assert not torch.equal(garbage, rollout.tokens)
    other = dataclasses.replace(rollout, tokens=garbage)
    assert (
        differing(training_logps(policy, other, INVARIANT, 1.0), training_logps(policy, rollout, INVARIANT, 1.0)) == 0
    )


@torch.no_grad()
def test_the_cache_takes_several_tokens_at_once(trained):
    policy, rollout = trained
    cache = policy.cache(len(rollout.tokens))
    parts = [policy(part, INVARIANT, cache) for part in (rollout.tokens[:, :4], rollout.tokens[:, 4:])]
    assert differing(torch.cat(parts, 1), policy(rollout.tokens, INVARIANT)) == 0


def test_both_arithmetics_compute_the_same_function_and_gradient(trained):
    policy, rollout = trained
    results = []
    for arithmetic in (INVARIANT, PLAIN):
        policy.zero_grad()
        logps = training_logps(policy, rollout, arithmetic, 0.7)
        (logps * torch.linspace(-1, 1, logps.shape[1])).sum().backward()
        results.append((logps.detach(), [weight.grad.clone() for weight in policy.parameters()]))
    (logps, gradients), (plain_logps, plain_gradients) = results
    torch.testing.assert_close(logps, plain_logps, rtol=0, atol=1e-5)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("numerics", [OURS_FP32, OURS_BF16], ids=lambda numerics: numerics.name)
def test_the_comparison_finds_nothing_in_ours(trained, threads, numerics):
    policy, rollout = trained
    together, alone = compare(policy, rollout, numerics, 1.0)
    assert together.gap == Gap(int(rollout.mask.sum()), 0, 0.0, 0.0)
    assert alone.gap.mismatches == 0
    assert gap_of(policy, rollout, numerics, 1.0) == together.gap


def test_the_comparison_counts_what_differs(trained):
    policy, rollout = trained
    fp32, bf16 = (compare(policy, rollout, numerics, 1.0)[0].gap for numerics in (PLAIN_FP32, PLAIN_BF16))
    assert fp32.tokens == bf16.tokens == int(rollout.mask.sum())
    # Which of the two differs depends on the CPU.
    assert 0 < max(fp32.mismatches, bf16.mismatches) <= bf16.tokens
    for found, kl, largest in ((fp32, 1e-10, 1e-4), (bf16, 1.0, 1.0)):
        assert (found.mismatches > 0) == (found.kl > 0) == (found.largest > 0)
        assert found.kl < kl
        assert found.largest < largest


@torch.no_grad()
def test_bf16_computes_in_bf16(trained):
    """Weights, activations and cache; log-probabilities are FP32, and near those of the FP32 weights."""
    policy, rollout = trained
    copy = in_bf16(policy)
    for arithmetic in (INVARIANT, PLAIN):
        cache = copy.cache(len(rollout.tokens))
        hidden = copy(rollout.tokens, arithmetic, cache)
        assert {hidden.dtype, cache.keys.dtype, cache.values.dtype} == {torch.bfloat16}
        rounded = training_logps(copy, rollout, arithmetic, 1.0)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, training_logps(policy, rollout, arithmetic, 1.0), rtol=0, atol=0.05)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}


def test_raw_bits_tell_zeros_apart():
    assert different(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])).tolist() == [True, False]
