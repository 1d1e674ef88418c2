import math

import pytest
import torch

from rl_kernels.core.testing import (
    Draw,
    Drift,
    bits_of,
    drift,
    masked_mean,
    masked_sum,
    policy_ratio,
    reference_kl,
    selected_logprobs,
)

NAN, INF = math.nan, math.inf
MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_values_are_those_of_the_definitions():
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    logp = selected_logprobs(p.log() + 7, torch.tensor([2, 3]))
    torch.testing.assert_close(logp, torch.tensor([0.125, 0.4], dtype=torch.float64).log())
    logits = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    assert math.isclose(float(selected_logprobs(logits, torch.tensor(1), temperature=0.5)), math.log(0.9))
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    assert (masked_sum(values), masked_mean(values)) == (63, 10.5)
    assert (masked_sum(values, MASK), masked_mean(values, MASK)) == (3, 1.5)
    assert masked_sum(values, MASK, dim=1).tolist() == [3, 0]
    assert masked_mean(values, MASK, dim=1).tolist() == [1.5, 0]
    assert masked_mean(values, torch.zeros_like(MASK)) == 0
    current, old = torch.tensor([[0.0, -1.0, -2.0], [-1.0, -1.0, -1.5]], dtype=torch.float64)
    torch.testing.assert_close(policy_ratio(current, old), torch.tensor([math.e, 1.0, math.exp(-0.5)]).double())
    assert policy_ratio(current, old, torch.tensor([False, True, True]))[0] == 1


def test_reference_kl():
    for e in (-3.0, -0.1, 0.0, 0.5, 4.0):
        current = torch.tensor([-5.0], dtype=torch.float64)
        found = float(reference_kl(current, current + e))
        assert math.isclose(found, math.exp(e) - e - 1, rel_tol=1e-11, abs_tol=1e-15)
    e = torch.tensor([1e-4, -1e-4, 1e-3], dtype=torch.float64)
    series = e**2 / 2 + e**3 / 6 + e**4 / 24 + e**5 / 120
    torch.testing.assert_close(reference_kl(torch.zeros_like(e), e), series, rtol=1e-11, atol=0)


def test_values_are_worked_in_fp32_at_least():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        logits = Draw(dtype).normal(2, 3, 5)
        x = logits[..., 0]
        ids = torch.zeros(2, 3, dtype=torch.int32)
        results = masked_sum(x), masked_mean(x), policy_ratio(x, x), reference_kl(x, x), selected_logprobs(logits, ids)
        assert {result.dtype for result in results} == {expected}


FUNCTIONS = {
    "selected_logprobs": lambda x, mask: selected_logprobs(torch.stack((x, -x), -1), torch.zeros(2, 3).long(), mask),
    "masked_sum": masked_sum,
    "masked_mean": masked_mean,
    "masked_mean of rows": lambda x, mask: masked_mean(x, mask, 1),
    "ratio, current": lambda x, mask: policy_ratio(x, torch.ones(2, 3), mask),
    "ratio, old": lambda x, mask: policy_ratio(torch.ones(2, 3), x, mask),
    "kl, current": lambda x, mask: reference_kl(x, torch.ones(2, 3), mask),
    "kl, reference": lambda x, mask: reference_kl(torch.ones(2, 3), x, mask),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_masked_positions_reach_neither_values_nor_gradients(function):
    clean, results = Draw(torch.float32).normal(2, 3), []
    for garbage in (0.0, NAN, INF, -INF, 1e38):
        leaf = torch.where(MASK, clean, garbage).requires_grad_()
        out = function(leaf, MASK)
        out.sum().backward()
        results.append((out.detach(), leaf.grad))
    (out, grad), *poisoned = results
    for poisoned_out, poisoned_grad in poisoned:
        assert torch.equal(bits_of(poisoned_out), bits_of(out))
        assert torch.equal(bits_of(poisoned_grad), bits_of(grad))
    assert (grad[~MASK] == 0).all()
    assert (grad[MASK] != 0).all()


def test_a_mask_is_bool_and_of_the_shape_of_the_values():
    for bad in (MASK.float(), MASK[:, :2], MASK[0]):
        for call in (*FUNCTIONS.values(), lambda x, mask: drift(x, x, mask)):
            with pytest.raises(ValueError, match=r"mask: expected a bool tensor of shape \(2, 3\), got "):
                call(torch.ones(2, 3), bad)


def test_drift():
    values = torch.tensor([0.0, -0.0, 1.5, INF, -INF, NAN])
    assert drift(values, values.clone()) == Drift(max_abs=0.0, mean_abs=0.0, mismatched=0, compared=6)
    reference, candidate = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.5, 3.0, 3.75]])
    assert drift(candidate, reference) == Drift(max_abs=0.5, mean_abs=0.1875, mismatched=2, compared=4)
    mask = torch.tensor([True, False, True, True])
    assert drift(candidate, reference, mask) == Drift(max_abs=0.25, mean_abs=0.25 / 3, mismatched=1, compared=3)
    assert drift(torch.tensor([0.0]), torch.tensor([-0.0])) == Drift(0.0, 0.0, mismatched=1, compared=1)
    found = drift(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0]))
    assert math.isnan(found.max_abs)
    assert found.mismatched == 1
    assert drift(torch.tensor([INF, INF]), torch.tensor([INF, 1.0])).max_abs == INF
    for nothing in (None, torch.zeros(0, dtype=torch.bool)):
        assert drift(torch.ones(0), torch.ones(0), nothing) == Drift(0.0, 0.0, 0, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        step = torch.finfo(dtype).eps
        found = drift(torch.tensor([1.0, 1.0 + step, 1.0], dtype=dtype), torch.ones(3, dtype=dtype, requires_grad=True))
        assert (found.max_abs, found.mismatched) == (step, 1)
    with pytest.raises(ValueError, match=r"candidate: expected shape \(3,\), got \(2,\)"):
        drift(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"candidate: expected dtype torch.bfloat16, got torch.float32"):
        drift(torch.ones(2), torch.ones(2).bfloat16())


def test_bits_of_any_strides():
    values = torch.tensor([[1.0, -0.0], [0.0, NAN]])
    assert bits_of(values).tolist()[0] == [0x3F800000, -(2**31)]
    assert torch.equal(bits_of(values.t()), bits_of(values).t())
