"""The router of a mixture: recognized by what it computes for random rows, and computed by the operator ``route``.

A family keeps its own definition: which scores, whether logits are rounded to the weights' dtype before they are
scored, whether weights add up to 1, and which of its results are FP32.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_kernels.core.torchlib.autocast import autocast_dtype
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models.mixtures.replay import LAYER
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import original_of, shallow_copy
from rl_kernels.moe import route
from rl_kernels.moe.choice import SCORINGS

SAMPLED = ("PhimoeTopKRouter",)
"""Routers with a formula of their own, which draw experts at random in training."""
CORRECTION, GROUPS, SCALE = "e_score_correction_bias", ("num_group", "topk_group"), "routed_scaling_factor"
"""Attributes of the routers of DeepSeek-V3 and GLM-4.5."""
AGREES, CLOSE = 0.98, 1e-5
"""Smallest share of a probe's weights that are this close; in BF16 these are equal."""
SAME_CHOICE = 0.7
"""Smallest share of a probe's rows with the same experts: where rounded logits are equal, models choose any of them."""
ROWS = 64
Key = tuple[Any, ...]


class Form(NamedTuple):
    """The definition of a router.

    Attributes:
        scoring: as in ``route``.
        normalize: whether weights are divided by their sum.
        rounds: whether logits are rounded to the dtype of the weights.
        places: where logits, weights and ids stand in the result.
        wide: whether logits and weights are returned in FP32, where the router's weights are BF16.
        has: which of a bias, a correction bias, groups and a scale the module has.
    """

    scoring: str
    normalize: bool
    rounds: bool
    places: tuple[int, int, int]
    wide: tuple[bool, bool]
    has: tuple[bool, bool, bool, bool]


_forms: dict[Key, Form | None] = {}
"""Forms of the routers that were recognized: the layers of a model have equal ones."""


def is_router(module: nn.Module) -> bool:
    """Say whether a module is a router of transformers, by its name and its weight ``[E, D]``."""
    weight = getattr(module, "weight", None)
    is_named = "router" in type(module).__name__.lower() and hasattr(module, "top_k")
    return is_named and isinstance(weight, torch.Tensor) and weight.ndim == len("ED")


def router_module(module: Any) -> tuple[type[nn.Module] | None, str]:
    """Return the class that computes a router by ``route``, or None and the reason against it."""
    kind = type(module)
    if kind.__name__ in SAMPLED and isinstance(module, nn.Linear):
        # Its own forward calls that of nn.Linear, where DetLinear now stands.
        return subclass(kind, (), _refusing_training(kind), bases=(kind, DetLinear)), ""
    form = form_of(module)
    if form is None:
        return None, f"{kind.__name__} is an unknown kind of router"
    return subclass(kind, form, _forward(form)), ""


def can_replay(module: nn.Module) -> bool:
    """Say whether the router of a swapped model can take recorded routes."""
    return original_of(module).__name__ not in SAMPLED


def _refusing_training(kind: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if self.training:
            raise ValueError(
                f"model: expected eval() for a {kind.__name__} under invariant(): in training it draws experts at "
                "random"
            )
        return kind.forward(self, hidden_states)

    return forward


def routed(
    form: Form, hidden_states: torch.Tensor, weight: torch.Tensor, top_k: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits ``[T, E]``, weights and ids ``[T, k]`` of rows by the definition of a router.

    Args:
        form: the definition.
        hidden_states: ``[T, D]``.
        weight: ``[E, D]``.
        top_k: number of experts of a token.
        options: those of ``route`` that the form does not have.
    """
    wide_logits, wide_weights = form.wide
    dtype = autocast_dtype(weight) or weight.dtype
    # A router that does not round casts both to FP32.
    hidden = hidden_states if form.rounds or hidden_states.dtype == dtype else hidden_states.to(dtype)
    options |= {"scoring": form.scoring, "normalize": form.normalize, "logits_dtype": dtype if form.rounds else None}
    ids, weights, logits = route(hidden, weight, top_k, **options)
    if not wide_weights:
        weights = weights.to(hidden_states.dtype if wide_logits else logits.dtype)
    return logits.float() if wide_logits else logits, weights, ids


def _forward(form: Form) -> Any:
    has_bias, has_correction, has_groups, has_scale = form.has

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        options: dict[str, Any] = {
            "bias": self.bias if has_bias else None,
            "correction_bias": getattr(self, CORRECTION) if has_correction else None,
            "groups": (getattr(self, GROUPS[0]), getattr(self, GROUPS[1])) if has_groups else None,
            "scale": getattr(self, SCALE) if has_scale else 1.0,
        }
        layer = vars(self).get(LAYER)
        if layer is not None:
            with torch.no_grad():
                options["ids"] = layer.choose(routed(form, hidden, self.weight, self.top_k, **options)[2])
        results = dict(zip(form.places, routed(form, hidden, self.weight, self.top_k, **options), strict=True))
        return results[0], results[1], results[2]

    return forward


def form_of(module: Any) -> Form | None:
    """Return the definition of a router, which may be on the meta device; None if its class is unknown."""
    simple = {name: x for name, x in vars(module).items() if isinstance(x, (int, float, str)) and name != "training"}
    key = (type(module), tuple(module.weight.shape), *sorted(simple.items(), key=str))
    if key not in _forms:
        _forms[key] = _recognized(module)
    return _forms[key]


def _recognized(module: Any) -> Form | None:
    """Return the form whose experts, weights and logits are those of the module's class, for random rows."""
    # Those of a child too: a twin has random values for its own alone.
    values = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    if not values <= {"weight", "bias", CORRECTION}:
        return None
    has = tuple(getattr(module, name, None) is not None for name in ("bias", CORRECTION, GROUPS[0], SCALE))
    twins = [_twin(module, dtype) for dtype in (torch.float32, torch.bfloat16)]
    probes = [_probe(module.weight.shape[1], twin.weight.dtype) for twin in twins]
    try:
        with torch.no_grad():
            expected = [type(module).forward(twin, probe) for twin, probe in zip(twins, probes, strict=True)]
        places = _places(expected[1], module)
    except Exception:  # it takes more than rows, or has weights of other names
        return None
    if places is None:
        return None
    wide = expected[1][places[0]].dtype == torch.float32, expected[1][places[1]].dtype == torch.float32
    best, most = None, 0.0
    for scoring, normalize, rounds in product(SCORINGS, (True, False), (True, False)):
        if scoring == "softmax_of_chosen" and not (normalize and not has[1] and not has[2]):
            continue
        form = Form(scoring, normalize, rounds, places, wide, has)  # type: ignore[arg-type]
        with torch.no_grad():
            results = [_forward(form)(twin, probe) for twin, probe in zip(twins, probes, strict=True)]
        shares = [_shares(*pair, places) for pair in zip(results, expected, strict=True)]
        (_, exact), (close, _) = shares
        # The last bits of FP32 tell softmax_of_chosen from a softmax that is normalized.
        if close >= AGREES and exact >= most:
            best, most = form, exact
    return best


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a router with random weights on the CPU."""
    generator = torch.Generator().manual_seed(0)
    twin = shallow_copy(module)
    for kind in ("_parameters", "_buffers"):
        values = {name: x for name, x in vars(module)[kind].items() if x is not None}
        twin.__dict__[kind] = {
            name: _random(x.shape, dtype if kind == "_parameters" else torch.float32, generator)
            for name, x in values.items()
        }
    return twin


def _random(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _probe(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows with two elements that are not 0, so that their products are rounded once in any order of a sum."""
    rows, generator = torch.zeros(ROWS, width, dtype=dtype, device="cpu"), torch.Generator().manual_seed(1)
    for value in (1.0, 2.0**-4):
        rows.scatter_(1, torch.randint(width, (ROWS, 1), generator=generator, device="cpu"), value)
    return rows


def _places(results: Any, module: Any) -> tuple[int, int, int] | None:
    """Return where logits ``[T, E]``, weights and ids ``[T, k]`` stand in the result of a router, or None."""
    chosen, every = (ROWS, module.top_k), (ROWS, module.weight.shape[0])
    if not isinstance(results, tuple) or len(results) != len(("logits", "weights", "ids")):
        return None
    ids = [place for place, x in enumerate(results) if not x.is_floating_point() and x.shape == chosen]
    floats = [place for place, x in enumerate(results) if x.is_floating_point()]
    for logits, weights in (floats, floats[::-1]) if len(ids) == 1 else ():
        if results[logits].shape == every and results[weights].shape == chosen:
            return logits, weights, ids[0]
    return None


def _shares(result: Any, expected: Any, places: tuple[int, int, int]) -> tuple[float, float]:
    """Return the shares of close weights, and of equal ones, among rows with the same experts; 0 if these are few."""
    logits, weights, ids = places
    (own, order), (theirs, others) = (x[ids].long().sort(-1) for x in (result, expected))
    is_same = (own == theirs).all(-1)
    if not torch.equal(result[logits], expected[logits]) or float(is_same.double().mean()) < SAME_CHOICE:
        return 0.0, 0.0
    value, other = (x[weights].gather(1, at)[is_same].double() for x, at in ((result, order), (expected, others)))
    return float(((value - other).abs() <= CLOSE * other.abs()).double().mean()), float(
        (value == other).double().mean()
    )
