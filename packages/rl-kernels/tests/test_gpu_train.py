"""The demo of a GPU with a tiny Llama on the CPU: both twins, what is counted, and what they start from."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console

from rl_kernels.demo import task
from rl_kernels.demo.bits import different
from rl_kernels.demo.gpu import ours, run
from rl_kernels.demo.gpu.ours import OURS
from rl_kernels.demo.gpu.rollout import decoded_logps, sample, training_logps
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.stock import STOCK
from rl_kernels.demo.gpu.train import Twin
from rl_kernels.demo.gpu.vocabulary import END, decode
from rl_kernels.demo.rollout import IGNORE
from rl_kernels.models import pretrained

pytest.importorskip("transformers")
CPU = torch.device("cpu")
# Sequences of fewer positions come out the same in stock PyTorch on many a CPU.
SHORT = Settings(steps=3, prompts=4, samples_per_prompt=4, shortest=6, longest=8, learning_rate=3e-3, warmup_steps=1)
TINY = ModelSizes(width=64, feed_forward=128, layers=2, heads=2, kv_heads=1)
OPERATORS = {"det_attention", "det_gemm", "grpo_loss", "linear_logp", "rms_norm"}


def trained(way, settings=SHORT):
    return run.train(settings, TINY, way, CPU, Console(quiet=True))


def step(way, settings=SHORT):
    twin = Twin(settings, TINY, way, CPU)
    with twin.taken():
        return twin.step(1)


@pytest.fixture(scope="module")
def history():
    return trained(OURS).history


def test_not_one_bit_differs_through_the_operators(history):
    assert [metrics.step for metrics in history] == [1, 2, 3]
    for metrics in history:
        assert metrics.tokens > 0
        assert (metrics.mismatches, metrics.ratios_off, metrics.kl, metrics.largest) == (0, 0, 0.0, 0.0)
        assert 0 < metrics.rollout_seconds + metrics.update_seconds < metrics.seconds


def test_stock_differs_and_counts_so(history):
    for metrics in trained(STOCK).history:
        assert metrics.mismatches >= metrics.ratios_off > 0
        assert metrics.kl > 0
        assert metrics.largest > 0
        assert metrics.mismatches <= metrics.tokens


def test_fp32_is_compared_in_some_steps_and_changes_nothing(history):
    settings = dataclasses.replace(SHORT, fp32_every=2)
    for way, differs in ((OURS, False), (STOCK, True)):
        measured = trained(way, settings).history
        assert [metrics.fp32 is not None for metrics in measured] == [False, True, False]
        found = measured[1].fp32
        assert found.tokens == measured[1].tokens
        assert (found.mismatches > 0) == (found.kl > 0) == (found.largest > 0) == differs
        assert found.kl < 1e-9
        if way is OURS:
            assert [metrics.reward for metrics in measured] == [metrics.reward for metrics in history]


@pytest.mark.parametrize("way", [OURS, STOCK], ids=lambda way: way.name)
def test_decoding_again_gives_the_bits_of_sampling(way):
    twin = Twin(SHORT, TINY, way, CPU)
    with twin.taken():
        prompts = ["1023456=", "102345=", "102345="]
        found = sample(twin.model, prompts, way, shortest=7, longest=9, generator=torch.Generator().manual_seed(1))
        assert not different(decoded_logps(twin.model, found, way, 7), found.logps).any()


def test_the_fp32_model_has_the_weights_of_now():
    twin = Twin(dataclasses.replace(SHORT, fp32_every=1), TINY, OURS, CPU)
    with twin.taken():
        twin.step(1)
        before = [weight.clone() for weight in twin.in_fp32.model.parameters()]
        masters = [weight.clone() for weight in twin.optimizer.masters]
        twin.step(2)
    weights = list(twin.in_fp32.model.parameters())
    assert all(weight.dtype == torch.float32 for weight in weights)
    assert all(torch.equal(*pair) for pair in zip(weights, masters, strict=True))
    assert not torch.equal(before[0], masters[0])


def test_a_run_repeats(history):
    again = trained(OURS).history
    assert [metrics.reward for metrics in again] == [metrics.reward for metrics in history]
    assert len({metrics.reward for metrics in history}) > 1


@pytest.mark.parametrize("amount", [0, 1, 5])
def test_tokens_that_were_changed_are_counted(amount):
    def logps(head, hidden, targets):
        found = ours.logps(head, hidden, targets)
        places = (targets != IGNORE).flatten().nonzero()[:amount, 0]
        change = torch.zeros_like(found)
        change.view(-1)[places] = 1e-3
        return found + change

    metrics = step(dataclasses.replace(OURS, logps=logps))
    assert (metrics.mismatches, metrics.ratios_off) == (amount, amount)
    assert metrics.kl == pytest.approx(amount * 0.5e-6 / metrics.tokens, rel=0.01)


@pytest.mark.parametrize(("scale", "ratios_off"), [(1.0, 1), (1e-3, 0)])
def test_the_last_bit_of_a_token_is_counted(scale, ratios_off):
    """A ratio next to 1 is rounded to it, so that bits may differ where it does not."""

    def draw(head, hidden, noise):
        ids, found = ours.draw(head, hidden, noise)
        return ids, found * scale

    def logps(head, hidden, targets):
        found = ours.logps(head, hidden, targets) * scale
        return torch.where(found == found.detach().min(), found - found.detach().abs() * 2**-23, found)

    metrics = step(dataclasses.replace(OURS, draw=draw, logps=logps))
    assert (metrics.mismatches, metrics.ratios_off) == (1, ratios_off)
    assert 0 < metrics.kl < 1e-12


def test_several_updates_on_one_batch_reach_the_clip():
    settings = dataclasses.replace(SHORT, epochs=4, learning_rate=0.03)
    assert step(STOCK, settings).clip_fraction > 0
    assert step(STOCK, dataclasses.replace(settings, epochs=1)).clip_fraction == 0


def test_twins_start_from_the_same_weights_and_prompts():
    twins = [Twin(SHORT, TINY, way, CPU) for way in (OURS, STOCK)]
    weights = [list(twin.model.parameters()) for twin in twins]
    assert all(weight.dtype == torch.bfloat16 for weight in weights[0])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    for twin in twins:
        twin.step(1)
    prompts = [[prompt for prompt, _, _ in twin.answers] for twin in twins]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == SHORT.prompts
    assert {len(prompt) for prompt in prompts[0]} <= {7, 8, 9}
    assert all(reward == task.reward(prompt, answer) for prompt, answer, reward in twins[0].answers)


def test_other_seeds_give_other_weights_and_prompts():
    twins = [Twin(dataclasses.replace(SHORT, seed=seed), TINY, STOCK, CPU) for seed in (0, 1)]
    assert not torch.equal(*(twin.model.lm_head.weight for twin in twins))
    for twin in twins:
        twin.step(1)
    assert twins[0].answers[0][0] != twins[1].answers[0][0]


def test_dispatch_is_recorded_in_the_first_step_alone():
    one, three = (trained(OURS, dataclasses.replace(SHORT, steps=steps)).choices["BF16"] for steps in (1, 3))
    assert {choice.operator for choice in one} == OPERATORS
    assert len(one) == len(three)


def test_the_model_is_given_back():
    twin = Twin(SHORT, TINY, OURS, CPU)
    models = (twin.model, twin.in_fp32.model)
    kinds = [type(module) for module in twin.model.modules()]
    with twin.taken():
        for model in models:
            assert [type(module) for module in model.modules()] != kinds
            assert model.config._attn_implementation == pretrained.name()
    for model in models:
        assert [type(module) for module in model.modules()] == kinds
        assert model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def rollout():
    """A model, and what it sampled for prompts of several lengths."""
    twin = Twin(SHORT, TINY, OURS, CPU)
    prompts = ["102345=", "98=", "98=", "5670=", "12345678="]
    with OURS.taken(twin.model):
        drawn = sample(twin.model, prompts, OURS, shortest=3, longest=9, generator=torch.Generator().manual_seed(1))
        yield twin.model, prompts, drawn


def test_answers_end_with_the_end_or_at_their_longest(rollout):
    _, prompts, found = rollout
    assert found.tokens.shape == (5, 18)
    assert found.targets.shape == found.logps.shape == (5, 17)
    for row, prompt in enumerate(prompts):
        assert decode(found.tokens[row, : len(prompt)].tolist()) == prompt
        places = found.mask[row].nonzero()[:, 0].tolist()
        assert places == list(range(len(prompt) - 1, len(prompt) - 1 + len(places)))
        drawn = found.targets[row, places].tolist()
        assert END not in drawn[:-1]
        assert drawn[-1] == END or len(drawn) == 9
        assert found.answers[row] == decode(drawn)
        assert found.tokens[row, 1:][places].tolist() == drawn
        assert (found.tokens[row, places[-1] + 2 :] == END).all()
    assert (found.logps[found.mask] < 0).all()
    assert (found.logps[~found.mask] == 0).all()


@torch.no_grad()
def test_a_sequence_alone_gives_the_bits_it_gives_in_the_batch(rollout):
    model, prompts, found = rollout
    together = training_logps(model, found, OURS)
    assert not different(together, found.logps).any()
    for row in range(len(prompts)):
        assert not different(training_logps(model, found.row(row), OURS), together[row : row + 1]).any()


@pytest.mark.gpu
def test_not_one_bit_differs_on_a_gpu(tmp_path):
    settings = Settings(steps=2, fp32_every=2)
    verdict = run.run(settings, ModelSizes(), torch.device("cuda"), tmp_path, quiet=True)
    assert verdict.compared > 0
    assert verdict.mismatches == 0
    twins = json.loads((tmp_path / "run.json").read_text())["twins"]
    assert all(metrics["kl"] == 0 for metrics in twins["rl-kernels"]["steps"])
    ours, stock = (twins[name]["steps"][1]["fp32"] for name in ("rl-kernels", "stock PyTorch"))
    assert ours["mismatches"] == ours["kl"] == ours["largest"] == 0
    assert stock["mismatches"] > 0
    assert all(metrics["ratios_off"] > 0 for metrics in twins["stock PyTorch"]["steps"])


@pytest.mark.gpu
def test_a_run_is_repeated_bit_for_bit_on_a_gpu():
    """Weights after some steps, of the embedding too, whose gradient PyTorch adds up in an order that varies."""

    def weights():
        twin = Twin(Settings(steps=4), ModelSizes(layers=4), OURS, torch.device("cuda"))
        with twin.taken():
            for step in range(1, 5):
                twin.step(step)
        return [weight.clone() for weight in twin.optimizer.masters]

    first = weights()
    for again in (weights(), weights()):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
