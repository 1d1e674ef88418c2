"""The parts of the demo of a GPU that need no model: draws, loss, optimiser, measures, tokens, settings."""

import pytest
import torch

from rl_kernels.demo.gpu import ours, stock
from rl_kernels.demo.gpu.optimizer import MasterAdamW
from rl_kernels.demo.gpu.settings import Settings
from rl_kernels.demo.gpu.vocabulary import END, VOCAB, decode, encode
from rl_kernels.demo.gpu.way import race
from rl_kernels.demo.measures import clip_fraction, gap, kl
from rl_kernels.demo.rollout import IGNORE
from rl_kernels.demo.schedule import learning_rate

WAYS = pytest.mark.parametrize("way", [ours.OURS, stock.STOCK], ids=lambda way: way.name)


def head(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.Linear(16, VOCAB, bias=False)
    with torch.no_grad():
        made.weight.normal_(generator=generator)
    return made.to(dtype), torch.randn(40, 16, generator=generator).to(dtype)


def test_a_race_draws_in_proportion_to_the_probabilities():
    logits, count = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf]), 40_000
    noise = torch.empty(count, 5).exponential_(generator=torch.Generator().manual_seed(0))
    shares = race(logits.expand(count, 5), noise).bincount(minlength=5) / count
    expected = logits.softmax(0)
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()


@WAYS
def test_drawn_tokens_come_with_the_log_probabilities_of_training(way):
    layer, hidden = head()
    noise = torch.empty(40, VOCAB).exponential_(generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ids, logps = way.draw(layer, hidden, noise)
        exact = (hidden.double() @ layer.weight.double().t()).log_softmax(-1)
        assert torch.equal(way.logps(layer, hidden, ids), logps)
    assert len(set(ids.tolist())) > 3
    torch.testing.assert_close(logps.double(), exact.gather(-1, ids[:, None])[:, 0], rtol=0, atol=0.05)
    assert logps.dtype == torch.float32
    agreeing = ids == race(exact, noise.double())
    assert agreeing.float().mean() > 0.9


@WAYS
def test_ignored_targets_give_zero(way):
    layer, hidden = head()
    targets = torch.arange(40) % VOCAB
    targets[::3] = IGNORE
    logps = way.logps(layer, hidden.view(4, 10, 16), targets.view(4, 10)).view(-1)
    assert (logps[::3] == 0).all()
    assert (logps[targets != IGNORE] < 0).all()


def test_both_losses_are_one_formula():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 9, generator=generator)
    mask = torch.rand(8, 9, generator=generator) < 0.7
    rewards = torch.tensor([0.1, 0.5, 0.5, 1.0, 0.3, 0.3, 0.3, 0.3])  # the second group teaches nothing
    found = []
    for way in (ours.OURS, stock.STOCK):
        current = (old + 0.4 * torch.randn(8, 9, generator=torch.Generator().manual_seed(1))).requires_grad_()
        loss = way.loss(current, old, rewards, mask, 4, 0.2)
        loss.backward()
        found.append((loss.detach(), current.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)
    assert found[0][1][:4][mask[:4]].abs().max() > 0.01
    assert (found[0][1][:4][mask[:4]] == 0).any()  # clipped
    assert found[0][1][4:].abs().max() < 1e-7


def test_masters_keep_updates_that_bf16_would_lose():
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer, before = MasterAdamW([weight]), weight.detach().clone()
    for _ in range(30):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step(1e-4)
        assert weight.grad is None
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((8,), 1 - 30e-4), rtol=0, atol=1e-5)
    assert torch.equal(weight, optimizer.masters[0].bfloat16())
    assert not torch.equal(weight, before)


def test_gradients_are_clipped_together():
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MasterAdamW(weights)
    for gradient in (1.0, 300.0):
        for weight in weights:
            weight.grad = torch.full_like(weight, gradient)
        optimizer.step(1.0)
    # As both steps' gradients were clipped to the same, so are Adam's two steps.
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((1,), -2.0), rtol=0, atol=1e-3)


def test_kl_is_zero_for_equal_tokens_alone():
    logps = -torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert kl(logps, logps.clone()) == 0.0
    other = logps.clone()
    other[7] += 0.1
    assert kl(logps, other) == pytest.approx((1.1051709 - 1 - 0.1) / 50, rel=1e-5)
    other = logps.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(-9.0))
    assert 0 < kl(logps, other) < 1e-14


def test_a_gap_counts_and_measures_the_masked_tokens_alone():
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -4.0]])
    training = rollout.clone()
    training[0, 1] += 0.1
    training[1, 0] = torch.nextafter(training[1, 0], torch.tensor(0.0))
    training[1, 2] = 9.0
    mask = torch.tensor([[True, True, False], [True, True, False]])
    found = gap(rollout, training, mask)
    assert (found.tokens, found.mismatches) == (4, 2)
    assert found.largest == pytest.approx(0.1051709, rel=1e-5)
    assert found.kl == pytest.approx((1.1051709 - 1 - 0.1) / 4, rel=1e-4)


def test_the_clip_fraction_counts_what_the_clip_holds_back():
    old, rewards = torch.zeros(2, 4), torch.tensor([1.0, 0.0])  # advantages 1 and -1
    current = torch.tensor([[0.3, -0.3, 0.1, 0.3], [0.3, -0.3, 0.1, -0.3]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    found = clip_fraction(current, old, rewards, mask, samples_per_prompt=2, clip_eps=0.2)
    assert found == pytest.approx(3 / 7)


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    rates = [learning_rate(step, steps=100, peak=2.0, warmup_steps=10) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == pytest.approx(2.0 * (1 - 0.9 * 9 / 100))
    assert rates[-1] == pytest.approx(2.0 * (1 - 0.9 * 99 / 100))


def test_a_text_of_the_task_survives_the_round_trip():
    assert decode(encode("0123456789=")) == "0123456789="
    assert decode([*encode("12"), END, *encode("3")]) == "12"
    assert {*encode("0123456789="), END} == set(range(VOCAB))
    with pytest.raises(ValueError, match="substring"):
        encode("a")


@pytest.mark.parametrize("digits", [(0, 4), (5, 4), (2, 11)])
def test_prompts_that_cannot_be_drawn_are_refused(digits):
    with pytest.raises(ValueError, match="shortest, longest"):
        Settings(shortest=digits[0], longest=digits[1])
