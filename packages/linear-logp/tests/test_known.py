"""Logits that are kept and statistics that are known change no bit; known ones are compared with recomputed rows."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import (
    BitsDiffer,
    Known,
    Memory,
    known,
    linear_logp,
    linear_logp_from_known,
    linear_logp_known,
)
from rl_kernels.linear_logp.spec.raw import below_targets

PACKAGE = "rl_kernels.linear_logp"
MODULES = tuple(f"{PACKAGE}.{name}" for name in ("known", "arguments", "autograd", "api"))
BUGS = (
    Bug("another temperature in the check", "temperature=scale", "temperature=1.01 * scale"),
    Bug("a distance of one passes", "0, ulps(one, other)", "0, ulps(one, other) // 2"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_index": IGNORED, "return_stats": True, "temperature": "tensor", "bias": True},
    {"softcap": 15.0, "temperature": 0.7, "bias": True},
    {"bias": True, "vocab_segments": 8, "ignore_index": IGNORED, "return_stats": True, "main_grad": True},
    {"memory": Memory(1, 1), "main_grad": True, "join_tokens": 48},
    {"min_logit": True, "temperature": "tensor", "bias": True, "return_stats": True, "ignore_index": IGNORED},
)
SHAPES = ((1, 64, 300), (63, 72, 1025), (130, 128, 5003), (700, 64, 16500))


def drawn(shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of a call."""
    options, (rows, size, vocab) = dict(options), shape
    draw = Draw(dtype, seed=5, device=device)
    weight = draw.normal(vocab, size, scale=size**-0.5).requires_grad_()
    call = {"hidden": draw.normal(rows, size).requires_grad_(), "lm_head_weight": weight}
    if options.pop("bias", False):
        call["bias"] = draw.normal(vocab).requires_grad_()
    ids = draw.ids(vocab, rows)
    if "ignore_index" in options:
        ids[::3] = IGNORED
    if options.get("temperature") == "tensor":
        options["temperature"] = draw.uniform(0.5, 2.0, rows, dtype=torch.float32)
    if options.get("min_logit") is True:
        options["min_logit"] = below_targets(**{**call, **options, "target_ids": ids, "min_logit": None})
    if options.pop("main_grad", False) and dtype != torch.float64:
        weight.main_grad = torch.ones(vocab, size, device=device)
    return {**call, "target_ids": ids, **options}


def results(call: dict[str, Any], function: Callable[..., Any] = linear_logp, **more: Any) -> list[torch.Tensor]:
    """Return the results and gradients of a call, and of a second backward pass."""
    stats = function(**{**call, **more})
    outputs = [stats] if isinstance(stats, torch.Tensor) else list(stats)
    result = [value.detach() for value in outputs]
    upstream = [Draw(value.dtype, seed=3, device=value.device.type).normal(*value.shape) for value in outputs]
    for is_retained in (True, False):
        torch.autograd.backward(outputs, upstream, retain_graph=is_retained)
        for leaf in (call[name] for name in ("hidden", "lm_head_weight", "bias") if name in call):
            result += [value.clone() for value in (leaf.grad, getattr(leaf, "main_grad", None)) if value is not None]
    return result


def test_what_is_known_is_not_kept_alive() -> None:
    call = drawn(SHAPES[0], {}, torch.float32, "cpu")
    with torch.no_grad():
        known_values = linear_logp_known(**call)
        alive = weakref.ref(known_values.logp)
        linear_logp_from_known(**call, known=known_values)
    del known_values
    gc.collect()
    assert alive() is None


def same(result: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))


def check_case(
    shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype, device: str, backend: str
) -> None:
    options = {**options, "backend": backend}
    if "min_logit" in options:
        options["min_logit"] = drawn(shape, options, dtype, device)["min_logit"]
    plain = results(drawn(shape, options, dtype, device))
    limits = [options.get("memory", Memory())._replace(saved_mib=saved_mib) for saved_mib in (0, 1, 3, 4096)]
    for memory in (*limits, "fast"):
        same(results(drawn(shape, options, dtype, device), memory=memory), plain)
    call = drawn(shape, options, dtype, device)
    with torch.no_grad():
        stats = linear_logp_known(**call)
    if "ignore_index" in options:
        for value in filter(lambda value: value is not None, stats):
            value[call["target_ids"] == IGNORED] = torch.nan
    autograd = importlib.import_module(f"{PACKAGE}.autograd")
    for validate in (True, False):
        # Without the ops of the forward pass, unless rows are checked.
        taken = {name: op for name, op in autograd.ops.items() if name.startswith("backward") or validate}
        with patch.object(autograd, "ops", taken):
            call = drawn(shape, options, dtype, device)
            same(results(call, linear_logp_from_known, known=stats, validate=validate), plain)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.float32) for options in OPTIONS), (OPTIONS[3], torch.bfloat16), (OPTIONS[1], torch.float64)],
    ids=str,
)
def test_kept_logits_and_known_statistics_change_no_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_case((300, 8, 2300), options, dtype, "cpu", "native")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kept_logits_and_known_statistics_on_a_gpu(gpu_backend: str, options: dict[str, Any]) -> None:
    for shape in SHAPES:
        check_case(shape, options, torch.bfloat16, "cuda", gpu_backend)


def test_logits_are_kept_for_gradients_only() -> None:
    call = {**drawn((9, 8, 50), {}, torch.float32, "cpu"), "memory": Memory(saved_mib=4)}
    saved = linear_logp(**call).grad_fn.saved_tensors
    kept = [value for value in saved if value is not None and value.shape == (9, 256)]
    assert [value.dtype for value in kept] == [torch.float32]
    with torch.no_grad():
        assert linear_logp(**call).grad_fn is None


def test_known_statistics_from_inference_mode() -> None:
    options = {"return_stats": True, "temperature": "tensor"}
    plain = results(drawn(SHAPES[0], options, torch.float32, "cpu"))
    with torch.inference_mode():
        call = drawn(SHAPES[0], options, torch.float32, "cpu")
        stats = linear_logp_known(**call)
    of_update = drawn(SHAPES[0], options, torch.float32, "cpu")
    call |= {name: of_update[name] for name in ("hidden", "lm_head_weight")}
    same(results(call, linear_logp_from_known, known=stats), plain)


def no_gradients(options: dict[str, Any]) -> tuple[dict[str, Any], Known]:
    """Return the arguments of a call, and its statistics."""
    call = drawn((40, 16, 3000), options, torch.float32, "cpu")
    with torch.no_grad():
        return call, linear_logp_known(**call)


def test_ignored_rows_and_unneeded_statistics_are_not_read() -> None:
    """Ignored rows are neither read nor compared, statistics that are not asked for may be left out."""
    call, stats = no_gradients(OPTIONS[1])
    for name in Known._fields:
        wrong = getattr(stats, name).clone()
        wrong[33] = torch.nan
        result = linear_logp_from_known(**call, known=stats._replace(**{name: wrong}), check_rows=150)
        assert all(map(torch.equal, result, (stats.logp, stats.logsumexp, stats.entropy)))
    for name in ("logsumexp", "entropy"):
        result = linear_logp_from_known(**{**call, "return_stats": False}, known=stats._replace(**{name: None}))
        assert torch.equal(result, stats.logp)


def test_changed_weights_raise_only_if_rows_are_checked() -> None:
    call, stats = no_gradients({})
    call["lm_head_weight"] = (call["lm_head_weight"] * 1.0001).detach()
    with pytest.raises(BitsDiffer, match="and 8 of the 8 recomputed rows differ"):
        linear_logp_from_known(**call, known=stats)
    for more in ({"validate": False}, {"check_rows": 0}):
        assert torch.equal(linear_logp_from_known(**call, known=stats, **more), stats.logp)


@pytest.mark.smoke
def test_one_changed_bit_raises() -> None:
    call, stats = no_gradients(OPTIONS[1])
    for name in Known._fields:
        wrong = getattr(stats, name).clone()
        bits_of(wrong)[34] += 1
        with pytest.raises(RuntimeError, match=rf"known\.{name}: .*row 34 differs by 1 ULPs"):
            linear_logp_from_known(**call, known=stats._replace(**{name: wrong}), check_rows=200)
    call, stats = no_gradients({})
    wrong = stats.logp.clone()
    bits_of(wrong)[39] += 1

    def often() -> None:
        for _ in range(200):
            linear_logp_from_known(**call, known=stats._replace(logp=wrong), check_rows=4)

    # Each call takes other rows, so one of them takes this one.
    with pytest.raises(RuntimeError, match=r"known\.logp: .*row 39 differs by 1 ULPs"):
        often()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fails(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(MODULES, bug):
        api = importlib.import_module(f"{PACKAGE}.api")
        for function in ("linear_logp", "linear_logp_known", "linear_logp_from_known"):
            monkeypatch.setitem(globals(), function, getattr(api, function))
        with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
            test_one_changed_bit_raises() if bug is BUGS[-1] else check_case(
                SHAPES[1], OPTIONS[2], torch.float32, "cpu", "native"
            )


def test_checked_rows_vary_without_the_generator_of_pytorch() -> None:
    ids = torch.arange(100)
    ids[::2] = IGNORED
    state = torch.get_rng_state()
    taken = [known.rows_to_check(ids, IGNORED, 8, known.draw(None)) for _ in range(20)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(rows.tolist()) for rows in taken}) == 20
    assert all(len(rows) == 8 and bool((ids[rows] >= 0).all()) for rows in taken)
    # All active rows, also the first and the last one, can be drawn.
    assert {int(row) for row in known.rows_to_check(ids, IGNORED, 2000, 0)} == set(range(1, 100, 2))
    assert {int(row) for row in known.rows_to_check(ids, None, 4000, 0)} == set(range(100))
    assert known.rows_to_check(ids[:1], IGNORED, 2, 0).tolist() == [0, 0]


def test_no_rows_and_no_active_rows() -> None:
    call, stats = no_gradients({})
    some = {**call, "hidden": call["hidden"][:0], "target_ids": call["target_ids"][:0]}
    assert linear_logp_from_known(**some, known=Known(stats.logp[:0], stats.norm[:0])).shape == (0,)
    call["target_ids"].fill_(IGNORED)
    assert not linear_logp_from_known(**call, ignore_index=IGNORED, known=stats).any()


def test_ulp_distances() -> None:
    for dtype in (torch.float32, torch.float64):
        tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
        one = torch.tensor([1.0, -0.0, 0.0, torch.nan, -tiny, huge, torch.nan], dtype=dtype)
        other = torch.tensor([1.0, 0.0, 0.0, torch.nan, -tiny, -huge, 0.0], dtype=dtype)
        one[0] = torch.nextafter(one[0], one[1])
        distances = known._distances(one, other)
        assert distances[:5].tolist() == [1, 1, 0, 0, 0]
        assert bool((distances[5:] > 0).all())


def test_invalid_arguments_raise() -> None:
    call, stats = no_gradients({})
    for error, match, more in (
        (TypeError, "known: expected what linear_logp_known returns, got Tensor", {"known": stats.logp}),
        (TypeError, "known: expected what linear_logp_known returns, got NoneType", {"known": None}),
        (TypeError, r"memory: expected 'lean', 'fast' or Memory\(\.\.\.\), got int", {"known": stats, "memory": 64}),
        (ValueError, r"memory: expected .*, got 'quick'", {"known": stats, "memory": "quick"}),
        (TypeError, "unexpected keyword argument 'saved_mib'", {"known": stats, "saved_mib": 1}),
        (ValueError, "known: expected logsumexp with return_stats=True", {"known": stats, "return_stats": True}),
        (ValueError, r"known\.norm: expected shape", {"known": stats._replace(norm=stats.norm[:, 0])}),
        (TypeError, r"known\.logp: expected dtype", {"known": stats._replace(logp=stats.logp.double())}),
        (ValueError, r"known\.logp: expected device", {"known": stats._replace(logp=stats.logp.to("meta"))}),
        (ValueError, "check_rows: expected", {"known": stats, "check_rows": -1}),
    ):
        with pytest.raises(error, match=match):
            linear_logp_from_known(**call, **more)
    with pytest.raises(ValueError, match="linear_logp_known: expected no gradients"):
        linear_logp_known(**call)


def test_any_leading_shape_and_torch_compile() -> None:
    call, stats = no_gradients({})
    hidden = call["hidden"].detach().view(4, 2, 5, 16).requires_grad_()
    call |= {"hidden": hidden, "target_ids": call["target_ids"].view(4, 2, 5)}
    stats = Known(stats.logp.view(4, 2, 5), stats.norm.view(4, 2, 5, 2))
    reused = linear_logp_from_known
    compiled = torch.compile(reused, fullgraph=True, backend="aot_eager")
    grads = []
    for function, more in ((linear_logp, {}), (reused, {"known": stats}), (compiled, {"known": stats})):
        result = function(**call, **more)
        assert torch.equal(result, stats.logp)
        grads.append(torch.autograd.grad(result.square().sum(), call["lm_head_weight"])[0])
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
