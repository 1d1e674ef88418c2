"""Recognize a decoder layer of Llama's form by its results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_kernels.models.fused.swaps import PROBE, ROTARY, Scaled, gated
from rl_kernels.models.swap import shallow_copy

LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
"""Parts of an attention that normalizes the heads of queries and keys, as Qwen3's does."""
OWN = {"config", "head_dim", "layer_idx", "scaling"}
"""Attributes of an attention."""
MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
IMPLEMENTATION = "rl_kernels_probe"
"""Name under which transformers finds the probe's attention, while it runs."""
HEADS, SIZE = 3, 4
"""Heads of the probe, and numbers of a head."""
WINDOWS = {"module": 1001, "config": 1002}
"""Sizes of the window that the probe finds in the module, and in its config."""


class Attending(NamedTuple):
    """What was found out about a class of attention.

    Attributes:
        window: who holds the size of the window: the module, its config, or None.
        forward: of the class when it was looked at; another one may have replaced it since.
    """

    window: str | None
    forward: Callable[..., Any]


attentions: dict[type, Attending] = {}
"""Classes of attention of that form."""


def is_decoder_layer(module: nn.Module) -> bool:
    """Say whether a module computes ``y = x + attention(norm(x))`` and ``y + mlp(norm(y))``, as Llama's layers do.

    The attention projects to queries, keys and values, may normalize the heads of the first two, rotates, adds to a
    cache, and projects what attends; it gets what a model hands on by name. What is found out about its class is kept
    in ``attentions``. Both forwards must be those of transformers: others may depend on more than a probe shows.
    """
    parts = dict(module.named_children())
    if parts.keys() != set(LAYER):
        return False
    attention = parts["self_attn"]
    if set(attention._modules) not in (set(ATTENTION), {*ATTENTION, *HEAD_NORMS}) or not vars(attention).keys() >= OWN:
        return False
    if not all(type(part).forward.__module__.startswith("transformers.") for part in (module, attention)):
        return False
    if gated(parts["mlp"]) is None or not _adds_both(module):
        return False
    # Each module, because a config may add a step to the formula of its class.
    if _attends(attention, {}) is None:
        return False
    found = [holder for holder, size in WINDOWS.items() if _attends(attention, {holder: size}) == size]
    attending = Attending(found[0] if found else None, type(attention).forward)
    return attentions.setdefault(type(attention), attending) == attending


class _Probe(nn.Module):
    """Stands in for an attention: returns a multiple of its rows, and keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        self.options = options
        return hidden_states * 3, None


def _adds_both(layer: nn.Module) -> bool:
    attention = _Probe()
    twin = shallow_copy(layer)
    parts = (attention, Scaled(0.5), Scaled(2.0), Scaled(-1.5))
    twin.__dict__["_modules"] = dict(zip(LAYER, parts, strict=True))
    x = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0), **PROBE)
    given = {name: object() for name in ("attention_mask", "position_ids", "past_key_values", "position_embeddings")}
    try:
        with torch.no_grad():
            found = type(layer).forward(twin, x, **given, use_cache=True)
    except Exception:  # it takes other arguments, so it is another kind of layer
        return False
    y = x + x * 2.0 * 3
    is_equal = isinstance(found, torch.Tensor) and torch.equal(found, y + y * -1.5 * 0.5)
    return is_equal and attention.options == {**given, "use_cache": True}


class _Cache:
    """Stands in for a cache of transformers; keeps nothing."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer is self._layer
        return key * 2, value * 4


class _Config:
    """Stands in for the config of an attention; only the window and the implementation differ."""

    def __init__(self, config: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(own, _config=config, _attn_implementation=IMPLEMENTATION)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Attended(NamedTuple):
    window: Any


def _attends(module: Any, holders: dict[str, int]) -> Any:
    """Return the window that an attention hands on, if it is of that form; ``_Attended(None)`` for no window.

    holders: who has a window of which size.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    generator = torch.Generator().manual_seed(0)
    width = HEADS * SIZE
    twin = shallow_copy(module)
    factors = (0.5, -1.5, 2.0, 3.0)
    twin.__dict__["_modules"] = {name: Scaled(factor) for name, factor in zip(ATTENTION, factors, strict=True)}
    scales = [torch.rand(SIZE, generator=generator, **PROBE) for _ in HEAD_NORMS]
    if HEAD_NORMS[0] in module._modules:
        twin.__dict__["_modules"] |= {name: Scaled(scale) for name, scale in zip(HEAD_NORMS, scales, strict=True)}
    else:
        scales = [torch.ones(SIZE, **PROBE) for _ in HEAD_NORMS]
    layer, seen = object(), SimpleNamespace()
    twin.__dict__.update(head_dim=SIZE, layer_idx=layer, scaling=0.25, training=False)
    config = {"sliding_window": holders.get("config")}
    twin.__dict__["config"] = _Config(module.config, config)
    if "sliding_window" in vars(module) or "module" in holders:
        twin.__dict__["sliding_window"] = holders.get("module")
    x = torch.randn(2, 1, width, generator=generator, **PROBE)
    angles = tuple(torch.randn(2, 1, SIZE, generator=generator, **PROBE) for _ in range(2))
    mask = object()

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        seen.arguments, seen.options = (module, query, key, value, mask), options
        return query.transpose(1, 2) * 0.5, None

    ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = attend
    try:
        with torch.no_grad():
            given = {"attention_mask": mask, "past_key_values": _Cache(layer), "position_ids": 5, "use_cache": True}
            found, _ = type(module).forward(twin, hidden_states=x, position_embeddings=angles, **given)
        rotate = getattr(sys.modules[type(module).__module__], ROTARY)
        heads = [(x * factor).view(2, 1, HEADS, SIZE).transpose(1, 2) for factor in factors[:3]]
        q, k = rotate(*(x * scale for x, scale in zip(heads[:2], scales, strict=True)), *angles)
        expected = q, k * 2, heads[2] * 4
        got_module, *got, got_mask = seen.arguments
        same = all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        options = dict(seen.options)
        window = options.pop("sliding_window", None)
        known = {"dropout": 0.0, "scaling": 0.25, "position_ids": 5, "use_cache": True}
        is_same = got_module is twin and got_mask is mask and options == known
        is_projected = torch.equal(found, (q.transpose(1, 2) * 0.5).reshape(2, 1, width) * factors[3])
    except Exception:  # it takes other arguments, so it is another kind of attention
        return None
    finally:
        del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    if not (same and is_same and is_projected):
        return None
    return _Attended(None) if window is None else window
