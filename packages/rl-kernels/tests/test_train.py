import pytest
import torch

from rl_kernels.demo import task
from rl_kernels.demo.numerics import OURS_BF16, OURS_FP32, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.plain import PLAIN
from rl_kernels.demo.tokenizer import EOS
from rl_kernels.demo.train import Settings, Trainer
from rl_kernels.det_gemm import DetLinear

SMALL = Settings(steps=3, prompts=4, samples_per_prompt=8)


def test_a_run_repeats_bit_for_bit():
    runs = []
    for _ in range(2):
        trainer = Trainer(SMALL)
        history = trainer.run(lambda metrics: None)
        runs.append(([metrics.reward for metrics in history], list(trainer.policy.parameters())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_what_is_watched_changes_nothing():
    watched, alone = (Trainer(SMALL, watched=numerics) for numerics in ((OURS_BF16, PLAIN_FP32, PLAIN_BF16), ()))
    history = [trainer.run(lambda metrics: None) for trainer in (watched, alone)]
    assert [metrics.reward for metrics in history[0]] == [metrics.reward for metrics in history[1]]
    assert all(torch.equal(a, b) for a, b in zip(watched.policy.parameters(), alone.policy.parameters(), strict=True))


def test_numerics_are_watched_in_the_first_of_every_few_steps():
    settings = Settings(steps=4, prompts=2, samples_per_prompt=4, watch_every=3)
    history = Trainer(settings, watched=(OURS_FP32, PLAIN_BF16)).run(lambda metrics: None)
    names = [OURS_FP32.name, PLAIN_BF16.name]
    assert [list(metrics.watched) for metrics in history] == [names, [], [], names]
    for metrics in (history[0], history[3]):
        # The rollout of the training itself, decoded again: the same weights, the same tokens, the same bits.
        assert metrics.watched[OURS_FP32.name] == metrics.gap
        assert metrics.watched[PLAIN_BF16.name].tokens == metrics.gap.tokens


@pytest.mark.parametrize(("rollout", "off"), [(PLAIN_FP32, 1e-4), (PLAIN_BF16, 0.2)], ids=lambda each: str(each)[:30])
def test_rollout_and_training_may_compute_in_other_ways(rollout, off):
    history = Trainer(SMALL, rollout, PLAIN).run(lambda metrics: None)
    for metrics in history:
        assert metrics.gap.mismatches > 0
        assert 0 < metrics.gap.kl < off**2
        assert 0 < metrics.gap.largest < off
    assert len({metrics.reward for metrics in history}) > 1


def test_old_log_probs_that_are_computed_again_hide_the_mismatch():
    taken, again = (Trainer(SMALL, PLAIN_BF16, PLAIN, recompute=recompute).step(1) for recompute in (False, True))
    assert taken.gap == again.gap
    assert again.gap.mismatches > 0
    settings = Settings(steps=1, prompts=4, samples_per_prompt=8, clip_eps=1e-5)
    taken, again = (Trainer(settings, PLAIN_BF16, PLAIN, recompute=recompute).step(1) for recompute in (False, True))
    assert taken.clipped_at_once > 0.1
    assert again.clipped_at_once == 0


def test_the_reference_stays_and_the_policy_leaves_it():
    trainer = Trainer(SMALL)
    initial = [weight.clone() for weight in trainer.reference.parameters()]
    trainer.run(lambda metrics: None)
    assert all(torch.equal(a, b) for a, b in zip(initial, trainer.reference.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(initial, trainer.policy.parameters(), strict=True))


def test_several_updates_on_one_batch_reach_the_clip():
    trainer = Trainer(Settings(steps=1, prompts=8, samples_per_prompt=16, epochs=6, learning_rate=0.3))
    (metrics,) = trainer.run(lambda metrics: None)
    assert metrics.clip_fraction > 0
    assert metrics.kl > 0
    assert metrics.gap.mismatches == metrics.clipped_at_once == 0


def test_answers_end_with_the_end_or_at_their_longest():
    prompts, rollout = Trainer(SMALL).sample(4)
    assert len(prompts) == len(rollout.answers) == 32
    for row, prompt in enumerate(prompts):
        places = rollout.mask[row].nonzero()[:, 0].tolist()
        assert places == list(range(len(prompt) - 1, len(prompt) - 1 + len(places)))
        drawn = rollout.targets[row, places].tolist()
        assert EOS not in drawn[:-1]
        assert drawn[-1] == EOS or len(drawn) == task.ANSWER_TOKENS
        assert (rollout.tokens[row, places[-1] + 2 :] == EOS).all()
        assert rollout.tokens[row, 1:][places].tolist() == drawn
    assert (rollout.logps[rollout.mask] < 0).all()
    assert (rollout.logps[~rollout.mask] == 0).all()


@pytest.mark.parametrize("name", ["qkv", "mix", "up", "down"])
def test_every_linear_layer_is_an_operator(name):
    policy = Trainer(SMALL).policy
    assert all(isinstance(getattr(block, name), DetLinear) for block in policy.blocks)
    assert isinstance(policy.head, DetLinear)
