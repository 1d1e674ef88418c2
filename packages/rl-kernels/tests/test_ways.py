"""The task; both ways to compute draw, score and lose alike but for rounding; what is measured of log-probs."""

import random
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.testing import bits_of
from rl_kernels.demo import task
from rl_kernels.demo.task import CPU, GPU
from rl_kernels.demo.train import clip_fraction, gap
from rl_kernels.demo.ways import IGNORE, Batch, Ours, Stock

pytestmark = pytest.mark.smoke
WAYS = pytest.mark.parametrize("way", [Ours(), Stock()], ids=lambda way: way.name)
VOCAB = 12


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@WAYS
@torch.no_grad()
def test_tokens_are_drawn_in_proportion_to_their_probabilities(way):
    head, count = torch.nn.Linear(8, 5, bias=False), 40_000
    head.weight.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0, -40.0])[:, None] / 8)
    ids, _ = way.draw(head, torch.ones(count, 8), torch.empty(count, 5).exponential_(generator=seeded()))
    shares, expected = ids.bincount(minlength=5) / count, head.weight.sum(1).softmax(0)
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()


@WAYS
@torch.no_grad()
def test_drawn_tokens_come_with_the_log_probabilities_of_training(way):
    head = torch.nn.Linear(16, VOCAB, bias=False)
    head.weight.normal_(generator=seeded())
    head, hidden = head.bfloat16(), torch.randn(40, 16, generator=seeded(1)).bfloat16()
    noise = torch.empty(40, VOCAB).exponential_(generator=seeded(2))
    ids, logps = way.draw(head, hidden, noise)
    exact = (hidden.double() @ head.weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(logps.double(), exact.gather(-1, ids[:, None])[:, 0], rtol=0, atol=0.05)
    assert (ids == (exact - noise.double().log()).argmax(-1)).float().mean() > 0.9
    targets = torch.where(torch.arange(40) % 3 == 0, IGNORE, ids)
    scored = way.logps(head, hidden.view(4, 10, 16), targets.view(4, 10)).view(-1)
    assert torch.equal(bits_of(scored), bits_of(torch.where(targets == IGNORE, 0.0, logps)))


def test_both_losses_are_one_formula():
    old = -torch.rand(8, 9, generator=seeded())
    targets = torch.where(torch.rand(8, 9, generator=seeded(1)) < 0.7, 1, IGNORE)
    rewards = torch.tensor([0.1, 0.5, 0.5, 1.0, 0.3, 0.3, 0.3, 0.3])  # the second group teaches nothing
    batch, settings, found = Batch(targets, targets, old, [], rewards, old), replace(GPU, samples_per_prompt=4), []
    for way in (Ours(), Stock()):
        current = (old + 0.4 * torch.randn(8, 9, generator=seeded(2))).requires_grad_()
        loss = way.loss(current, batch, settings, None)
        loss.backward()
        found.append((loss.detach(), current.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)
    gradient = found[0][1]
    assert gradient[:4][batch.mask[:4]].abs().max() > 0.01
    assert (gradient[:4][batch.mask[:4]] == 0).any()  # clipped
    assert gradient[4:].abs().max() < 1e-7
    doubled = Ours().loss(current.detach(), batch, settings, 2 * batch.mask.sum())
    torch.testing.assert_close(2 * doubled, found[0][0])


def test_a_gap_counts_bits_and_ratios():
    rollout = torch.tensor([-1.0, -2.0, -1.0, -1e-9, 0.0])
    training = rollout.clone()
    assert gap(rollout, training) == dict(tokens=5, mismatches=0, kl=0.0, largest=0.0, ratios_off=0)
    training[1] += 0.1
    training[3] = torch.nextafter(training[3], torch.tensor(-1.0))  # a ratio next to 1 is rounded to it
    training[4] = -0.0
    found = gap(rollout, training)
    assert (found["tokens"], found["mismatches"], found["ratios_off"]) == (5, 3, 1)
    assert found["largest"] == pytest.approx(0.1051709, rel=1e-5)
    assert found["kl"] == pytest.approx((1.1051709 - 1 - 0.1) / 5, rel=1e-4)


def test_the_clip_fraction_counts_what_the_clip_holds_back():
    old, rewards = torch.zeros(2, 4), torch.tensor([1.0, 0.0])  # advantages 1 and -1
    current = torch.tensor([[0.3, -0.3, 0.1, 0.3], [0.1, -0.3, 0.1, -0.3]])
    targets = torch.tensor([[1, 1, 1, IGNORE], [1, 1, 1, 1]])
    batch, settings = Batch(targets, targets, old, [], rewards, old), replace(GPU, samples_per_prompt=2, clip_eps=0.2)
    assert clip_fraction(current, batch, settings) == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1249", 1.0),
        ("1294", (4 + 2) / 8),  # all digits, two in place
        ("4192", (4 + 0) / 8),  # the prompt itself
        ("1111", (1 + 1) / 8),  # a digit counts once
        ("12", (2 + 2) / 8),  # too short
        ("12499", (4 + 4) / 10),  # too long
        ("=", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_mean_of_the_shares_in_common_and_in_place(answer, expected):
    assert task.reward("4192=", answer) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["cpu", "gpu"])
def test_prompts_survive_the_round_trip_through_tokens(settings):
    source = random.Random(0)
    prompts = {task.draw_prompt(source, settings) for _ in range(500)}
    assert {len(prompt) - 1 for prompt in prompts} == set(range(settings.shortest, settings.longest + 1))
    for prompt in prompts:
        assert len(set(prompt)) == len(prompt)
        ids = settings.encode(prompt)
        assert settings.decode([IGNORE, *ids, settings.end, IGNORE]) == prompt
    assert settings.end == len(settings.characters)
