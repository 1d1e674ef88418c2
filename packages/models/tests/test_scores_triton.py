"""Log-probs and ranks of sampled tokens in one launch: the bits of `linear_logits`, and PyTorch's count."""

import pytest
import torch

from rl_kernels.linear_logp import linear_logits
from rl_kernels.models.fused import scores

pytest.importorskip("triton")
kernels = pytest.importorskip("rl_kernels.models.fused.kernels")


@pytest.fixture
def step(triton_on):
    """Return logits whose rows lie apart, their two statistics, and the id of a token in each row."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(triton_on) for n in (5, 90))
    made = linear_logits(hidden, weight)
    # A tie counts; the largest logit's log-prob may not be above 0.
    made.logits[2, 7] = made.logits[2, 3]
    wide = torch.full((5, 101), torch.inf, device=triton_on)
    wide[:, :90] = made.logits
    ids = torch.tensor([0, 89, 3, int(made.logits[3].argmax()), 5], device=triton_on)
    return made._replace(logits=wide[:, :90]), ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_scores_have_the_bits_of_linear_logits(step, dtype, monkeypatch):
    made, ids = step
    # Several blocks, the last one in part.
    monkeypatch.setattr(scores, "BLOCK", 32)
    expected = made.logp(ids), (made.logits >= made.logits.gather(1, ids[:, None])).sum(-1)
    for norm in (made.norm, None):
        logps, ranks = scores.score_tokens(made.logits, norm, ids.to(dtype).repeat_interleave(2)[::2])
        assert (logps is None) is (norm is None)
        assert logps is None or torch.equal(logps, expected[0])
        assert torch.equal(ranks, expected[1])
        assert ranks.dtype == torch.int64


def test_a_log_prob_is_at_most_0(step):
    made, ids = step
    norm = made.norm.clone()
    norm[:, 1] = -100.0
    assert scores.score_tokens(made.logits, norm, ids)[0].tolist() == [0.0] * 5


def test_an_id_outside_of_the_vocabulary_has_no_score(step):
    made, ids = step
    ids[1], ids[3] = -1, 90
    logps, ranks = scores.score_tokens(made.logits, made.norm, ids)
    assert logps.isnan().tolist() == [False, True, False, True, False]
    assert ranks[[1, 3]].tolist() == [0, 0]
    assert (ranks[[0, 2, 4]] > 0).all()


def test_both_ways_agree(step, monkeypatch):
    made, ids = step
    assert scores.fits(made.logits)
    launched = scores.score_tokens(made.logits, made.norm, ids)
    monkeypatch.setattr(scores, "fits", lambda *_: False)
    monkeypatch.setattr(kernels, "score_tokens", None)
    assert all(map(torch.equal, scores.score_tokens(made.logits, made.norm, ids), launched))
