"""Training of both models on the CPU: which bits differ, what is counted, and what a run follows from."""

import copy
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.testing import bits_of
from rl_kernels.demo.train import Trainer
from rl_kernels.demo.ways import IGNORE, Ours, Stock, decoded_logps, training_logps

OPERATORS = {"det_gemm", "grpo_loss", "linear_logp", "rms_norm"}


class Plain(Stock):
    """Stock PyTorch with a loss that takes a reference."""

    loss = Ours.loss


def same_bits(one, other):
    return torch.equal(bits_of(one), bits_of(other))


def run(trainer):
    return [trainer.step(step) for step in range(1, trainer.settings.steps + 1)]


@pytest.fixture(scope="module")
def trained(settings):
    """Return a trainer of weights that move a lot, its steps, and the reference's weights before."""
    watched = [Ours("BF16"), Stock("FP32"), Stock("BF16"), Ours("FP32")]
    settings = replace(settings, measure_every=2, epochs=3, learning_rate=0.05, beta=0.1)
    trainer = Trainer(settings, watched=watched)
    before = [weight.clone() for weight in trainer.reference.parameters()]
    return trainer, run(trainer), before


def test_not_one_bit_differs_through_the_operators(trained, settings):
    trainer, history, _ = trained
    for step in history:
        assert step["tokens"] > 0
        assert not any(step[name] for name in ("mismatches", "ratios_off", "kl", "largest", "clipped_at_once"))
        assert step["clip_fraction"] > 0  # the weights do move
        assert 0 < step["rollout_seconds"] + step["update_seconds"] < step["seconds"]
    assert len({step["reward"] for step in history}) > 1
    assert [len(step["watched"]) for step in history] == [4, 0, 4]
    for step in history[::2]:
        assert [step["watched"][f"rl-kernels, {dtype}"]["mismatches"] for dtype in ("FP32", "BF16")] == [0, 0]
        # The rollout of the training itself, decoded again: the same weights, the same tokens, the same bits.
        assert step["watched"][trainer.own.name].items() <= step.items()
    assert trainer.backends.keys() == {each.name for each in trainer.watched}
    wanted = OPERATORS | ({"det_attention"} if settings.llama else set())
    assert trainer.backends[trainer.own.name] == dict.fromkeys(wanted, "native")


def test_a_run_repeats_bit_for_bit_whatever_is_watched(trained):
    trainer, history, before = trained
    again = Trainer(trainer.settings)
    assert [step["reward"] for step in run(again)] == [step["reward"] for step in history]
    assert all(torch.equal(*pair) for pair in zip(again.model.parameters(), trainer.model.parameters(), strict=True))
    other = Trainer(replace(trainer.settings, seed=1))
    assert not torch.equal(next(other.model.parameters()), before[0])


def test_a_copy_has_the_weights_of_now_and_the_reference_those_at_first(trained):
    trainer, _, before = trained
    assert all(torch.equal(*pair) for pair in zip(before, trainer.reference.parameters(), strict=True))
    for each in trainer.watched[:3]:
        for copied, master, first in zip(trainer.loaded(each).parameters(), trainer.masters, before, strict=True):
            assert torch.equal(copied, master.to(copied.dtype))
            assert not torch.equal(master, first.float())


def test_log_probs_do_not_depend_on_batch_padding_or_cache(trained):
    trainer, *_ = trained
    batch = trainer.sample()
    with torch.no_grad():
        together = training_logps(trainer.model, batch, trainer.own)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert same_bits(together, batch.logps)
            assert same_bits(together, decoded_logps(trainer.model, batch, trainer.own, trainer.settings))
            for row in (slice(0, 1), slice(13, 14), slice(2, 9)):
                alone = batch.rows(row)
                assert same_bits(training_logps(trainer.model, alone, trainer.own), together[row])
                decoded = decoded_logps(trainer.model, alone, trainer.own, trainer.settings)
                assert same_bits(decoded, together[row])
        torch.set_num_threads(1)
        garbage = batch.tokens.clone()
        for row, mask in enumerate(batch.mask):
            garbage[row, int(mask.nonzero().max()) + 2 :] = 7
        assert not torch.equal(garbage, batch.tokens)
        assert same_bits(training_logps(trainer.model, batch._replace(tokens=garbage), trainer.own), together)
        cut = trainer.model(batch.tokens[3:7, :-3])
        assert torch.equal(cut, trainer.model(batch.tokens)[3:7, :-3])


def test_answers_end_with_the_end_or_at_their_longest(trained):
    trainer, *_ = trained
    settings, batch = trainer.settings, trainer.sample()
    assert len(batch.answers) == settings.prompts * settings.samples_per_prompt
    for row, (prompt, answer) in enumerate(batch.answers):
        places = batch.mask[row].nonzero()[:, 0].tolist()
        assert places == list(range(len(prompt) - 1, len(prompt) - 1 + len(places)))
        drawn = batch.targets[row, places].tolist()
        assert settings.end not in drawn[:-1]
        assert drawn[-1] == settings.end or len(drawn) == settings.longest + 1
        assert answer == settings.decode(drawn)
        assert batch.tokens[row, 1:][places].tolist() == drawn
        assert (batch.tokens[row, places[-1] + 2 :] == settings.end).all()
    assert (batch.logps[batch.mask] < 0).all()
    assert (batch.logps[~batch.mask] == 0).all()


def test_micro_batches_are_parts_of_one_batch_and_add_up(small, monkeypatch):
    """Two of half the prompts in one process, as two ranks would have them."""
    monkeypatch.setattr(Trainer, "update", lambda self, rate: None)
    whole, halves = (Trainer(replace(small, prompts=4 // parts, epochs=1), parts=parts) for parts in (1, 2))
    assert torch.equal(whole.sample().tokens, halves.sample().tokens)
    assert whole.step(1)["reward"] == halves.step(1)["reward"]
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5 * float(one.grad.abs().max()))


def test_stock_differs_and_counts_so(settings):
    watched = [Stock("FP32"), Stock("BF16")]
    for step in run(Trainer(replace(settings, beta=0.0, steps=2), Stock, watched=watched)):
        for found in [step, *step["watched"].values()]:
            assert (found["mismatches"] > 0) == (found["kl"] > 0) == (found["largest"] > 0)
            assert found["ratios_off"] <= found["mismatches"] <= found["tokens"] == step["tokens"]
        assert step["mismatches"] > 0
        assert step["largest"] < 0.2


@pytest.mark.smoke
def test_both_ways_compute_the_same_function_and_gradient(small):
    results, batch = [], Trainer(small).sample()
    for way in (Ours, Stock):
        trainer = Trainer(replace(small, beta=0.0), way)
        logps = training_logps(trainer.model, batch, trainer.own)
        (logps * torch.linspace(-1, 1, logps.shape[1])).sum().backward()
        results.append((logps.detach(), [weight.grad for weight in trainer.model.parameters()]))
    (logps, gradients), (stock_logps, stock_gradients) = results
    assert same_bits(logps, batch.logps)
    torch.testing.assert_close(logps, stock_logps, rtol=0, atol=1e-5)
    for gradient, stock in zip(gradients, stock_gradients, strict=True):
        torch.testing.assert_close(gradient, stock, rtol=1e-3, atol=1e-4 * float(stock.abs().max()))


def test_tokens_that_were_changed_are_counted(small):
    class Off(Ours):
        def logps(self, head, hidden, targets):
            found = super().logps(head, hidden, targets)
            change = torch.zeros_like(found)
            change.view(-1)[(targets != IGNORE).flatten().nonzero()[:5, 0]] = 1e-3
            # In the passes over the whole batch alone.
            return found + change if found.ndim == 2 else found

    step = Trainer(small, Off).step(1)
    assert (step["mismatches"], step["ratios_off"]) == (5, 5)
    assert step["kl"] == pytest.approx(5 * 0.5e-6 / step["tokens"], rel=0.01)


def test_a_rollout_in_other_numerics_is_clipped_before_any_update(small):
    step = Trainer(replace(small, clip_eps=1e-5), Plain, rollout=Stock("BF16")).step(1)
    assert step["mismatches"] > 0
    assert step["clipped_at_once"] > 0.1


@pytest.mark.smoke
def test_updates_are_kept_that_bf16_would_lose_and_gradients_clipped(small):
    trainer = Trainer(replace(small, dtype="BF16", beta=0.0), Stock)
    before = copy.deepcopy(trainer.masters)
    for step in range(30):
        for weight in trainer.model.parameters():
            weight.grad = torch.full_like(weight, (0.5, 300.0)[step % 2])
        trainer.update(1e-4)
    # The gradients of all steps were clipped to the same, so all of Adam's steps are as long as the rate.
    for weight, master, first in zip(trainer.model.parameters(), trainer.masters, before, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(master.detach(), first.detach() - 30e-4, rtol=0, atol=1e-5)
        assert torch.equal(weight, master.bfloat16())
        assert weight.dtype == torch.bfloat16
