"""Every backend of linear_logp that runs here, held to the rules of all operators, and what is special to this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.core.testing import IGNORED, Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.linear_logp import LogpStats, linear_logp
from rl_kernels.linear_logp.backends import native
from rl_kernels.linear_logp.op import OPERATOR, ops

OPERANDS = ("hidden", "lm_head_weight", "bias")


PLANTED = (
    Mutants(
        "native",
        (
            "rl_kernels.core.rowwise.operands",
            "rl_kernels.core.rowwise.sums",
            "rl_kernels.core.rowwise.ids",
            "rl_kernels.core.rowwise.softmax",
            "rl_kernels.core.rowwise.logp_gradient",
            *(
                f"rl_kernels.linear_logp.{name}"
                for name in ("vocabulary", "kept", "inputs", "packing", "tree", "sums", "backward", "backends.native")
            ),
        ),
        (
            Bug(
                "units follow the rows",
                "(block.weight), UNIT",
                "(block.weight), UNIT if block.hidden.shape[0] > 4 else 2 * UNIT",
            ),
            Bug(
                "logits rounded to BF16",
                "(block.hidden, block.weight[columns].t())",
                "(block.hidden, block.weight[columns].t()).bfloat16().float()",
            ),
            Bug("cap not differentiated", "block.cap is not None", "False"),
            Bug("mask missing in backward", "target_ids == block.ignore_index", "target_ids < -block.vocab"),
            Bug("dW does not continue its buffer", "part.start > 0 or sums", "sums"),
        ),
    ),
    Mutants(
        "triton",
        (
            "rl_kernels.core.triton_lib.softcap",
            *(
                f"rl_kernels.linear_logp.{name}"
                for name in (
                    *("vocabulary", "inputs", "packing", "tree", "sums", "backward", "backends.triton.kernels"),
                    *("backends.triton.tiles", "blocks", "backends.triton.backward", "backends.triton.backend"),
                )
            ),
        ),
        (
            Bug("columns beyond the vocabulary counted", "(columns < V)", "(columns < V + 1)"),
            Bug("selected logit of the row before", "lanes[None, :]", "lanes[None, :] + 1"),
            Bug("block states after the first lost", "+ UNIT // BLOCK", "+ 1"),
            Bug(
                "ignored rows have a gradient",
                "here & (id != ignore_index) if HAS_IGNORED else here\n        inv",
                "here\n        inv",
            ),
            Bug(
                "last column of dz not written",
                "here[:, None] & (columns < width)[None, :])",
                "here[:, None] & (columns < width - 1)[None, :])",
            ),
        ),
        ("bias", "temperature-per-token", "odd", "pad-token", "blocks"),
    ),
    Mutants(
        "triton",
        (
            "rl_kernels.core.triton_lib.softcap",
            *(
                f"rl_kernels.linear_logp.{name}"
                for name in (
                    *("vocabulary", "inputs", "packing", "tree", "sums", "backward", "backends.triton.kernels"),
                    *("backends.triton.tiles", "blocks", "backends.triton.backward", "backends.triton.backend"),
                )
            ),
        ),
        (Bug("cap applied twice", "(x, cap, rate) if", "(softcap.capped(x, cap, rate), cap, rate) if"),),
        ("softcap-small",),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    large = (
        Case("few-rows", {"batch": 1, "seq": 129, "hidden": 2048, "vocab": 32768}, {"return_stats": True}),
        Case(
            "many-rows", {"batch": 4, "seq": 512, "hidden": 1024, "vocab": 50257}, {"return_stats": True, "bias": True}
        ),
    )


def _call(dtype: torch.dtype = torch.float32, rows: int = 37, size: int = 24, vocab: int = 1500) -> dict[str, Any]:
    draw = Draw(dtype, seed=3)
    weight = draw.normal(vocab, size, scale=size**-0.5)
    operands = {"hidden": draw.normal(rows, size), "lm_head_weight": weight, "bias": draw.normal(vocab)}
    return {**operands, "target_ids": draw.ids(vocab, rows)}


def _gradients(call: dict[str, Any], wanted: tuple[str, ...] = OPERANDS, **options: Any) -> dict[str, torch.Tensor]:
    call = {**call, **{name: call[name].detach().clone().requires_grad_() for name in wanted}}
    stats = linear_logp(**call, return_stats=True, **options)
    upstream = [Draw(value.dtype, seed=9).normal(*value.shape) for value in stats]
    grads = torch.autograd.grad(stats, [call[name] for name in wanted], upstream)
    return dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("temperature", [0.7, "tensor"])
def test_gradcheck(temperature: float | str) -> None:
    call = _call(torch.float64, rows=3, size=5, vocab=11)
    if temperature == "tensor":
        temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    operands = [call[name].requires_grad_() for name in OPERANDS]

    def function(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> LogpStats:
        return linear_logp(hidden, weight, call["target_ids"], bias, temperature=temperature, return_stats=True)

    assert torch.autograd.gradcheck(function, operands, fast_mode=False)


@pytest.mark.parametrize("wanted", [("hidden",), ("lm_head_weight",), ("bias",), ("hidden", "bias")])
def test_gradient_does_not_depend_on_which_others_are_wanted(wanted: tuple[str, ...]) -> None:
    whole, part = _gradients(_call()), _gradients(_call(), wanted)
    for name, grad in part.items():
        assert torch.equal(grad, whole[name]), name


@pytest.mark.parametrize(
    ("frozen", "product"), [("lm_head_weight", "add_dweight"), ("hidden", "add_dhidden"), ("bias", None)]
)
def test_frozen_operand_costs_nothing(monkeypatch: pytest.MonkeyPatch, frozen: str, product: str | None) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("computed for an operand that needs no gradient")

    if product is not None:
        monkeypatch.setattr(native.Steps, product, refuse)
    else:
        dlogits = native.Steps.dlogits

        def watched(*args: Any) -> None:
            assert args[-2] is None
            dlogits(*args)

        monkeypatch.setattr(native.Steps, "dlogits", watched)
    wanted = tuple(name for name in OPERANDS if name != frozen)
    assert _gradients(_call(), wanted).keys() == {*wanted}


def test_raw_backward_returns_nothing_for_what_is_not_needed() -> None:
    call = _call()
    inputs = (call["hidden"], call["lm_head_weight"], call["target_ids"], call["bias"], torch.tensor(1.0), None, None)
    logp, norm, _ = ops["forward"](*inputs, 0, "native")
    for needed in ([True, False, False], [False, True, False], [False, False, True]):
        shard = 0, 1500, 1, False
        grads = ops["backward"](*inputs, norm, None, None, logp, None, None, *shard, 256, needed, None, "native")
        assert [bool(grad.numel()) for grad in grads] == needed


@pytest.mark.parametrize("chosen", LogpStats._fields)
def test_upstream_through_one_statistic(chosen: str) -> None:
    call = _call(torch.float64)
    call["hidden"].requires_grad_()
    stats = linear_logp(**call, return_stats=True)
    logits = F.linear(call["hidden"], call["lm_head_weight"], call["bias"])
    log_p = logits.log_softmax(-1)
    expected = {
        "logp": log_p.gather(1, call["target_ids"][:, None])[:, 0],
        "logsumexp": logits.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
    upstream = torch.linspace(-1, 1, 37, dtype=torch.float64)
    found, truth = (
        torch.autograd.grad(value[chosen], call["hidden"], upstream)[0] for value in (stats._asdict(), expected)
    )
    torch.testing.assert_close(found, truth)


def test_ignored_rows_of_nan_change_nothing() -> None:
    call = _call()
    call["target_ids"][::3] = IGNORED
    zero, nan = ({**call, "hidden": call["hidden"].clone()} for _ in range(2))
    zero["hidden"][::3] = 0
    nan["hidden"][::3] = torch.nan
    for name, grad in _gradients(nan, ignore_index=IGNORED).items():
        assert torch.equal(grad, _gradients(zero, ignore_index=IGNORED)[name]), name
    stats = linear_logp(**nan, ignore_index=IGNORED, return_stats=True)
    assert all((value[::3] == 0).all() and value.isfinite().all() for value in stats)


def test_nan_upstream_at_ignored_rows_changes_nothing() -> None:
    call = _call()
    call["target_ids"][::3] = IGNORED
    operands = [call[name].requires_grad_() for name in OPERANDS]
    upstream = torch.ones(37)
    expected = torch.autograd.grad(linear_logp(**call, ignore_index=IGNORED), operands, upstream)
    upstream[::3] = torch.nan
    found = torch.autograd.grad(linear_logp(**call, ignore_index=IGNORED), operands, upstream)
    assert all(torch.equal(value, truth) for value, truth in zip(found, expected, strict=True))


def test_ignored_row_has_zero_gradient_even_beside_a_broken_weight() -> None:
    call = _call()
    call["target_ids"][:5] = IGNORED
    call["lm_head_weight"][7] = torch.inf
    grad = _gradients(call, ("hidden",), ignore_index=IGNORED)["hidden"]
    assert (grad[:5] == 0).all()
    assert grad[5:].isnan().any()


@pytest.mark.parametrize("bad", [-1, 1500, -(2**62), 2**62])
def test_unchecked_bad_id_gives_nan_for_its_row_alone(bad: int) -> None:
    call = _call()
    good = linear_logp(**call)
    call["target_ids"][5] = bad
    found = linear_logp(**call, validate=False)
    assert found[5].isnan()
    assert torch.equal(found[torch.arange(37) != 5], good[torch.arange(37) != 5])
    grad = _gradients(call, ("hidden",), validate=False)["hidden"]
    assert grad[5].isnan().all()
    assert grad[:5].isfinite().all()


def test_target_without_probability() -> None:
    call = _call()
    call["bias"][int(call["target_ids"][0])] = -torch.inf
    stats = linear_logp(**call, return_stats=True)
    assert stats.logp[0] == -torch.inf
    assert stats.logsumexp.isfinite().all()
    assert stats.entropy.isfinite().all()


def test_row_of_nan_gives_nan_alone() -> None:
    call = _call()
    good = linear_logp(**call)
    call["hidden"][4, 0] = torch.nan
    found = linear_logp(**call)
    assert found[4].isnan()
    assert torch.equal(found[:4], good[:4])


def test_no_leading_dims_and_many() -> None:
    call = _call(rows=6)
    whole = linear_logp(**call)
    one = linear_logp(**{**call, "hidden": call["hidden"][2], "target_ids": call["target_ids"][2]})
    assert one.shape == ()
    assert torch.equal(one, whole[2])
    folded = {"hidden": call["hidden"].view(1, 2, 3, -1), "target_ids": call["target_ids"].int().view(1, 2, 3)}
    assert torch.equal(linear_logp(**{**call, **folded}), whole.view(1, 2, 3))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    call = _call()
    call |= {"hidden": torch.empty(*shape, 24), "target_ids": torch.empty(shape, dtype=torch.int64)}
    grads = _gradients(call)
    assert grads["hidden"].shape == (*shape, 24)
    assert not grads["lm_head_weight"].any()
    assert not grads["bias"].any()


def test_all_positions_ignored() -> None:
    call = _call()
    call["target_ids"][:] = IGNORED
    assert not linear_logp(**call, ignore_index=IGNORED).any()
    assert not any(grad.any() for grad in _gradients(call, ignore_index=IGNORED).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does(dtype: torch.dtype) -> None:
    call = _call()
    cast = {name: call[name].to(dtype) for name in OPERANDS}
    with torch.autocast("cpu", dtype):
        found, grads = linear_logp(**call), _gradients(call)
        mixed = linear_logp(**{**call, "lm_head_weight": cast["lm_head_weight"]})
    expected = linear_logp(**{**call, **cast})
    assert torch.equal(found, expected)
    assert torch.equal(mixed, expected)
    for name, grad in _gradients({**call, **cast}).items():
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], grad.float()), name


def test_autocast_leaves_fp64() -> None:
    call = _call(torch.float64)
    with torch.autocast("cpu"):
        assert torch.equal(linear_logp(**call), linear_logp(**call))
        assert linear_logp(**call).dtype == torch.float64
        with pytest.raises(TypeError, match="bias: expected dtype"):
            linear_logp(**{**call, "bias": call["bias"].float()})


@pytest.mark.parametrize(("dtype", "result"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_dtypes_of_results(dtype: torch.dtype, result: torch.dtype) -> None:
    call = _call(dtype)
    assert {value.dtype for value in linear_logp(**call, return_stats=True)} == {result}
    assert {grad.dtype for grad in _gradients(call).values()} == {dtype}


def test_no_graph_without_need() -> None:
    call = _call()
    call["hidden"].requires_grad_()
    with torch.no_grad():
        assert not linear_logp(**call).requires_grad
    assert linear_logp(**call).requires_grad


def test_no_features() -> None:
    hidden, weight = torch.zeros(2, 3, 0, requires_grad=True), torch.zeros(4, 0, requires_grad=True)
    logp = linear_logp(hidden, weight, torch.zeros(2, 3, dtype=torch.int64))
    torch.testing.assert_close(logp, torch.full((2, 3), 0.25).log())
    logp.sum().backward()
    assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
