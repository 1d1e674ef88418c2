"""Training of both models on the CPU: which bits differ, what is counted, and what a run follows from."""

from dataclasses import replace

import pytest
import torch

from rl_kernels.demo.measures import different
from rl_kernels.demo.rollout import IGNORE, decoded_logps, training_logps
from rl_kernels.demo.train import Trainer
from rl_kernels.demo.ways import OURS, STOCK, Numerics, Ours, Stock

OPERATORS = {"det_gemm", "grpo_loss", "linear_logp", "rms_norm"}


class Plain(Stock):
    """Stock PyTorch with a loss that takes a reference."""

    loss = Ours.loss


def test_not_one_bit_differs_through_the_operators(settings, run):
    trainer = Trainer(replace(settings, epochs=4, learning_rate=0.05), watched=[Numerics(OURS, "BF16")])
    history = run(trainer)
    for metrics in history:
        assert metrics.tokens > 0
        assert metrics.mismatches == metrics.ratios_off == metrics.kl == metrics.largest == metrics.clipped_at_once == 0
        assert metrics.clip_fraction > 0  # the weights do move
        assert 0 < metrics.rollout_seconds + metrics.update_seconds < metrics.seconds
    assert len({metrics.reward for metrics in history}) > 1
    assert trainer.backends.keys() == {trainer.own.name, "rl-kernels, BF16"}
    wanted = OPERATORS | ({"det_attention"} if settings.llama else set())
    assert trainer.backends[trainer.own.name] == dict.fromkeys(wanted, "native")


def test_stock_differs_and_counts_so(settings, run):
    watched = [Numerics(STOCK, "FP32"), Numerics(STOCK, "BF16")]
    for metrics in run(Trainer(replace(settings, beta=0.0), STOCK, watched=watched)):
        for found in [metrics, *metrics.watched.values()]:
            assert (found.mismatches > 0) == (found.kl > 0) == (found.largest > 0)
            assert found.ratios_off <= found.mismatches <= found.tokens == metrics.tokens
        assert metrics.mismatches > 0
        assert metrics.largest < 0.2


def test_a_run_repeats_bit_for_bit_whatever_is_watched(settings, run):
    watched = [Numerics(OURS, "BF16"), Numerics(STOCK, "FP32"), Numerics(STOCK, "BF16"), Numerics(OURS, "FP32")]
    trainers = [Trainer(settings), Trainer(replace(settings, measure_every=2), watched=watched)]
    histories = [run(trainer) for trainer in trainers]
    assert [metrics.reward for metrics in histories[0]] == [metrics.reward for metrics in histories[1]]
    assert all(torch.equal(*pair) for pair in zip(*(each.model.parameters() for each in trainers), strict=True))
    assert [len(metrics.watched) for metrics in histories[1]] == [4, 0, 4]
    for metrics in histories[1][::2]:
        assert [metrics.watched[f"rl-kernels, {dtype}"].mismatches for dtype in ("FP32", "BF16")] == [0, 0]
        # The rollout of the training itself, decoded again: the same weights, the same tokens, the same bits.
        assert vars(metrics.watched[trainers[1].own.name]).items() <= vars(metrics).items()
    other = Trainer(replace(settings, seed=1))
    assert not torch.equal(other.model.head.weight, Trainer(settings).model.head.weight)


def test_a_copy_has_the_weights_of_now_and_the_reference_those_at_first(settings, run):
    each = Numerics(STOCK, "FP32" if settings.llama else "BF16")
    trainer = Trainer(replace(settings, beta=0.1), watched=[each])
    before = [weight.clone() for weight in trainer.reference.parameters()]
    run(trainer)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.reference.parameters(), strict=True))
    for copied, master, first in zip(trainer.loaded(each).parameters(), trainer.optimizer.masters, before, strict=True):
        assert torch.equal(copied, master.to(copied.dtype))
        assert not torch.equal(master, first.float())


def test_log_probs_do_not_depend_on_batch_padding_or_cache(trainer):
    (batch,) = trainer.sample()
    with torch.no_grad():
        together = training_logps(trainer.model, batch, OURS)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert not different(together, batch.logps).any()
            assert not different(together, decoded_logps(trainer.model, batch, OURS, trainer.settings)).any()
            for row in (0, 13):
                alone = batch.row(row)
                assert not different(training_logps(trainer.model, alone, OURS), together[row : row + 1]).any()
                decoded = decoded_logps(trainer.model, alone, OURS, trainer.settings)
                assert not different(decoded, together[row : row + 1]).any()
        torch.set_num_threads(1)
        garbage = batch.tokens.clone()
        for row, mask in enumerate(batch.mask):
            garbage[row, int(mask.nonzero().max()) + 2 :] = 7
        assert not torch.equal(garbage, batch.tokens)
        assert not different(training_logps(trainer.model, batch._replace(tokens=garbage), OURS), together).any()
        cut = trainer.model(batch.tokens[3:7, :-3])
        assert torch.equal(cut, trainer.model(batch.tokens)[3:7, :-3])


def test_answers_end_with_the_end_or_at_their_longest(trainer):
    (batch,) = trainer.sample()
    end, longest = trainer.settings.vocabulary.end, trainer.settings.longest + 1
    assert len(batch.answers) == trainer.settings.prompts * trainer.settings.samples_per_prompt
    for row, (prompt, answer) in enumerate(batch.answers):
        places = batch.mask[row].nonzero()[:, 0].tolist()
        assert places == list(range(len(prompt) - 1, len(prompt) - 1 + len(places)))
        drawn = batch.targets[row, places].tolist()
        assert end not in drawn[:-1]
        assert drawn[-1] == end or len(drawn) == longest
        assert answer == trainer.settings.vocabulary.decode(drawn)
        assert batch.tokens[row, 1:][places].tolist() == drawn
        assert (batch.tokens[row, places[-1] + 2 :] == end).all()
    assert (batch.logps[batch.mask] < 0).all()
    assert (batch.logps[~batch.mask] == 0).all()


def test_both_ways_compute_the_same_function_and_gradient(small):
    results = []
    for way in (OURS, STOCK):
        trainer = Trainer(replace(small, beta=0.0), way)
        batch = Trainer(small).sample()[0]
        logps = training_logps(trainer.model, batch, way)
        (logps * torch.linspace(-1, 1, logps.shape[1])).sum().backward()
        results.append((logps.detach(), [weight.grad for weight in trainer.model.parameters()]))
    (logps, gradients), (stock_logps, stock_gradients) = results
    torch.testing.assert_close(logps, stock_logps, rtol=0, atol=1e-5)
    for gradient, stock in zip(gradients, stock_gradients, strict=True):
        torch.testing.assert_close(gradient, stock, rtol=1e-3, atol=1e-4 * float(stock.abs().max()))


@pytest.mark.parametrize("amount", [0, 1, 5])
def test_tokens_that_were_changed_are_counted(settings, amount):
    class Off(Ours):
        def logps(self, head, hidden, targets):
            found = super().logps(head, hidden, targets)
            change = torch.zeros_like(found)
            change.view(-1)[(targets != IGNORE).flatten().nonzero()[:amount, 0]] = 1e-3
            # In the passes over the whole batch alone.
            return found + change if found.ndim == 2 else found

    metrics = Trainer(settings, Off()).step(1)
    assert (metrics.mismatches, metrics.ratios_off) == (amount, amount)
    assert metrics.kl == pytest.approx(amount * 0.5e-6 / metrics.tokens, rel=0.01)


def test_old_log_probs_that_are_computed_again_hide_the_mismatch(small):
    settings = replace(small, clip_eps=1e-5)
    steps = [
        Trainer(settings, Plain(), rollout=Numerics(STOCK, "BF16"), recompute=recompute).step(1)
        for recompute in (False, True)
    ]
    assert steps[0].mismatches == steps[1].mismatches > 0
    assert steps[0].clipped_at_once > 0.1
    assert steps[1].clipped_at_once == 0
