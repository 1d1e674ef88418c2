"""The choice of experts: the definition, ties by construction, rows without a number, rows alone, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.moe import reference, route
from rl_kernels.moe.op import OPERATOR, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call(torch.device(DEVICE), torch.float32, "cpu", {})
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
FORMS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {"bias": True, "scale": 0.5},
    "olmoe": {"normalize": False},
    "deepseek-v3": {"scoring": "sigmoid", "correction_bias": True, "groups": (4, 2), "scale": 2.5},
    "glm": {"scoring": "sigmoid", "correction_bias": True, "normalize": False},
    "groups-of-one": {"scoring": "sigmoid", "groups": (12, 5)},
    "gpt-oss": {"scoring": "softmax_of_chosen", "bias": True},
}
TOKENS, WIDTH, COUNT, TOP_K = 37, 24, 12, 4
each_form, each_backend = pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("backend", BACKENDS)


def operands(form: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return hidden, weight and options; a correction bias is as large as scores."""
    draw, options = Draw(dtype, DEVICE), dict(FORMS[form])
    if options.pop("bias", False):
        options["bias"] = draw.normal(COUNT)
    if options.pop("correction_bias", False):
        options["correction_bias"] = draw.normal(COUNT, dtype=torch.float32)
    return draw.normal(TOKENS, WIDTH), draw.normal(COUNT, WIDTH, scale=WIDTH**-0.5), options


def wide(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()
    }


@each_form
@each_backend
def test_ids_weights_and_gradients_are_those_of_the_definition(backend: str, form: str) -> None:
    hidden, weight, options = operands(form)
    leaves = [x.requires_grad_() for x in (hidden, weight, *([options["bias"]] if "bias" in options else []))]
    routes = route(hidden, weight, TOP_K, **options, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = wide(options) | ({"bias": exact[2]} if "bias" in options else {})
    ids, weights, logits = reference.route(*exact[:2], TOP_K, **options)
    assert torch.equal(routes.ids, ids.int())
    torch.testing.assert_close(routes.weights.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routes.logits.double(), logits, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(weights), torch.randn_like(logits)
    ours = torch.autograd.grad(routes[1:], leaves, [x.float() for x in upstream])
    for found, expected in zip(ours, torch.autograd.grad((weights, logits), exact, upstream), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@each_form
@each_backend
def test_a_token_alone_has_the_bits_of_the_batch(backend: str, form: str) -> None:
    hidden, weight, options = operands(form)
    hidden[5], hidden[9] = torch.nan, torch.inf
    whole = route(hidden, weight, TOP_K, **options, backend=backend)
    grad = torch.randn_like(whole.weights)
    (gradient,) = torch.autograd.grad(
        route(hidden.requires_grad_(), weight, TOP_K, **options, backend=backend).weights, hidden, grad
    )
    for token in (0, 5, 9, 20, 36):
        row = hidden.detach()[token : token + 1].requires_grad_()
        alone = route(row, weight, TOP_K, **options, backend=backend)
        (row_gradient,) = torch.autograd.grad(alone.weights, row, grad[token : token + 1])
        for name, x, y in zip("iwlg", (*alone, row_gradient), (*whole, gradient), strict=True):
            assert torch.equal(x.nan_to_num(7.0), y[token : token + 1].nan_to_num(7.0)), (name, token)


@each_backend
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_equal_scores_are_ordered_by_id(backend: str, scoring: str) -> None:
    hidden, weight, _ = operands("qwen3", torch.float16)
    weight[[7, 3, 10]] = weight[1].clone()
    options = {"scoring": scoring, "logits_dtype": torch.bfloat16, "backend": backend}
    ids, weights, logits = route(hidden, weight, COUNT, **options)
    assert logits.dtype == torch.bfloat16
    z = logits.gather(1, ids.long()).float()
    is_descending = (z[:, 1:] < z[:, :-1]) | ((z[:, 1:] == z[:, :-1]) & (ids[:, 1:] > ids[:, :-1]))
    assert is_descending.all()
    assert (z[:, 1:] == z[:, :-1]).sum() >= 3 * TOKENS
    assert (weights[:, 1:] <= weights[:, :-1]).all()
    # Equal groups too: all of them here.
    groups = {"groups": (4, 2)} if scoring != "softmax_of_chosen" else {}
    assert route(hidden, torch.zeros_like(weight), 6, **options, **groups).ids.tolist() == [list(range(6))] * TOKENS


@each_form
@each_backend
def test_recorded_ids_give_the_same_bits(backend: str, form: str) -> None:
    hidden, weight, options = operands(form)
    chosen = route(hidden, weight, TOP_K, **options, backend=backend)
    for ids in (chosen.ids, chosen.ids.long().flip(1).contiguous().flip(1)):
        result = route(hidden, weight, TOP_K, ids=ids, **options, backend=backend)
        assert all(map(torch.equal, result, chosen))
        # The caller may write to either.
        assert result.ids.data_ptr() != ids.data_ptr()


@each_backend
def test_rows_without_a_number(backend: str) -> None:
    hidden, weight, _ = operands("qwen3")
    hidden[3, 2], hidden[8] = torch.nan, torch.inf
    for scoring in ("softmax", "sigmoid", "softmax_of_chosen"):
        ids, weights, _ = route(hidden, weight, TOP_K, scoring=scoring, backend=backend)
        assert ids[3].tolist() == list(range(TOP_K))
        assert weights[3].isnan().all()
        assert not weights[[0, 1, 2, 4]].isnan().any()
    bad = ids.clone()
    bad[0, 1], bad[-1, 0] = COUNT, -1
    weights = route(hidden, weight, TOP_K, ids=bad, validate=False, backend=backend).weights
    assert weights[[0, -1]].isnan().all()
    assert not weights[1].isnan().any()
    with pytest.raises(ValueError, match=r"ids: expected values in \[0, 12\)"):
        route(hidden, weight, TOP_K, ids=bad, validate=True, backend=backend)


@each_backend
def test_main_grad_continues_the_sum_of_the_router(backend: str) -> None:
    draw = Draw(torch.float32, DEVICE)
    hidden, weight, grad = draw.normal(128, WIDTH), draw.normal(COUNT, WIDTH).requires_grad_(), draw.normal(128, TOP_K)
    expected = torch.autograd.grad(route(hidden, weight, TOP_K, backend=backend).weights, weight, grad)
    weight.main_grad = torch.zeros(WIDTH, COUNT, device=DEVICE).t()
    # At a multiple of 16 tokens, and of the 64 that Triton's interpreter rounds at a time.
    for rows in (slice(64), slice(64, None)):
        route(hidden[rows], weight, TOP_K, backend=backend).weights.backward(grad[rows])
    assert weight.grad is None
    assert torch.equal(weight.main_grad, expected[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": torch.zeros(3)}, ValueError, "hidden: expected 2 dims"),
        ({"weight": torch.zeros(4, 5)}, ValueError, "weight: expected shape"),
        ({"weight": torch.zeros(0, WIDTH)}, ValueError, "weight: expected at least one expert"),
        ({"top_k": 0}, ValueError, "top_k: expected an integer >= 1"),
        ({"top_k": COUNT + 1}, ValueError, "top_k: expected an integer <= 12"),
        ({"scoring": "relu"}, ValueError, "scoring: expected one of"),
        ({"scoring": "softmax_of_chosen", "normalize": False}, ValueError, "scoring: expected softmax or sigmoid"),
        ({"bias": torch.zeros(3)}, ValueError, "bias: expected shape"),
        ({"correction_bias": torch.zeros(3)}, ValueError, "correction_bias: expected shape"),
        ({"groups": 4}, TypeError, "groups: expected None or"),
        ({"groups": (5, 2)}, ValueError, "groups: expected a divisor"),
        *(({"groups": cut}, ValueError, "groups: expected an integer") for cut in ((0, 1), (13, 1), (4, 0), (4, 5))),
        ({"groups": (12, 3)}, ValueError, "groups: expected a divisor of the 12 experts, and at least top_k = 4"),
        ({"normalize": 1}, TypeError, "normalize: expected a bool"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ({"logits_dtype": torch.int32}, ValueError, "logits_dtype: expected one of"),
        ({"ids": torch.zeros(TOKENS, 1, dtype=torch.int32)}, ValueError, "ids: expected shape"),
        ({"backend": "no-such"}, ValueError, "backend: experts has no backend"),
        *(
            ({name: torch.zeros(*shape, device="meta").to(dtype)}, ValueError, f"{name}: expected device")
            for name, shape, dtype in (
                *(("weight", (COUNT, WIDTH), torch.float32), ("bias", (COUNT,), torch.float32)),
                *(("correction_bias", (COUNT,), torch.float32), ("ids", (TOKENS, TOP_K), torch.int32)),
            )
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"hidden": torch.zeros(TOKENS, WIDTH), "weight": torch.zeros(COUNT, WIDTH), "top_k": TOP_K, **changes}
    with pytest.raises(error, match=message):
        route(**call)


def test_the_groups_that_are_kept_may_have_just_top_k_experts() -> None:
    hidden, weight, _ = operands("qwen3")
    for chosen in route(hidden, weight, TOP_K, scoring="sigmoid", groups=(6, 2)).ids:
        groups, sizes = torch.unique(chosen // 2, return_counts=True)
        assert (len(groups), sizes.tolist()) == (2, [2, 2])


def test_a_bad_buffer_is_named() -> None:
    hidden, weight, _ = operands("qwen3")
    weight.main_grad = torch.zeros(COUNT, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"weight\.main_grad: expected dtype"):
        route(hidden, weight.requires_grad_(), TOP_K)


@each_form
def test_the_first_call_may_be_compiled(form: str) -> None:
    hidden, weight, options = operands(form)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, weights, logits = route(hidden, weight, TOP_K, **options)
        return ids, weights.square().sum() + logits.sum()

    results = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        ids, value = function(*leaves)
        results.append((ids, *torch.autograd.grad(value, leaves)))
    assert all(map(torch.equal, *results))


def test_raw_ops_of_route_pass_opcheck() -> None:
    hidden, weight, _ = operands("qwen3")
    torch.library.opcheck(ops["route_logits"]._op, (hidden, weight, None, torch.float32, "native"))
    logits = route(hidden, weight, TOP_K).logits
    form = ("sigmoid", True, 1.0)
    choose = (logits, None, None, TOP_K, 4, 2, *form, "native")
    torch.library.opcheck(ops["route_choose"]._op, choose)
    ids, weights = ops["route_choose"]._op(*choose)
    arguments = (weights, None, hidden, weight, logits, ids, *form)
    torch.library.opcheck(ops["route_backward"]._op, (*arguments, [True, True, True], "native"))
    buffer = torch.zeros_like(weight)
    torch.library.opcheck(ops["route_backward_into"]._op, (*arguments, buffer, [True, False, True], "native"))


def test_derivatives_that_are_not_there_raise() -> None:
    hidden, weight, _ = operands("qwen3")
    weights = route(hidden.requires_grad_(), weight, TOP_K).weights
    (gradient,) = torch.autograd.grad(weights.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="forward-mode AD"):
        torch.func.jvp(lambda x: route(x, weight, TOP_K).weights, (hidden.detach(),), (hidden.detach(),))
