"""One step of a decoder layer, one token of each sequence, as a row of launches without the layer's modules between.

In eager mode a small model decodes as fast as the host calls kernels. A layer of Llama's form has a dozen modules, each
of which checks its arguments and looks up its launches. Here this is done once for a layer: all launches of a step are
prepared for the kind of its input and of its weights (``core.calls``), and serve every layer of that kind. They are the
launches of the modules, so the bits are the same. The modules themselves run with gradients, hooks, autocast, adapters,
a compiler or a profiler, and where a part has another class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad

from rl_kernels.attention.api import choose_backend
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.attention.op import ops as attending
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import remembered
from rl_kernels.core.gpu import device_of
from rl_kernels.core.torchlib.observed import ops_are_observed
from rl_kernels.core.triton_lib.launch import INSTALLED
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models.attention import attention_forward, mask_arguments
from rl_kernels.models.fused import conditions
from rl_kernels.models.fused.decoders import ATTENTION, HEAD_NORMS, LAYER, MLP, Attending, attentions, is_decoder_layer
from rl_kernels.models.fused.steps import Plan, prepare
from rl_kernels.models.fused.swaps import is_gated, is_silu, rotates_as_ours
from rl_kernels.models.pretrained import Swapped
from rl_kernels.models.swap import SWAPPED, calls_own_forward

FORM = "rl_kernels_form"
"""Attribute of the forward of a swapped RMSNorm: its form, and the name of the attribute that holds its epsilon."""
HIDDEN_DIMS = 3
PARTS = 12
"""Number of the modules of a layer without norms of heads."""
PASSED = frozenset({"attention_mask", "past_key_values", "position_embeddings"})
"""Arguments of a layer that its attention does not hand on."""
ATTENDING = frozenset({"is_causal", "softcap", "s_aux", "cache", "dropout", "position_bias", "block_table"})
ATTENDING |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "scaling", "sliding_window"}
"""Arguments of a layer that change its attention."""
MEANING = "_rl_kernels_arguments"
"""Attribute of a mask: the arguments of ``det_attention`` that it stands for."""

_known: dict[tuple[type[nn.Module], ...], _Kinds | None] = {}
"""What was found out about classes of a layer's parts; None: their forwards must run."""


class _Kinds(NamedTuple):
    """What a step has to know of the classes of a layer's parts.

    Attributes:
        forms: of all norms, the options of the raw op.
        epsilons: of all norms, the name of the attribute that holds epsilon.
        attending: what is known of the attention.
        modeling: the file that has the rotary function of the attention.
    """

    forms: tuple[Any, ...]
    epsilons: tuple[str, ...]
    attending: Attending
    modeling: ModuleType


def decoder_layer(module: nn.Module) -> Callable[..., Any] | None:
    """Return a forward for a decoder layer of Llama's form, recognized by its result; None for any other module."""
    if not calls_own_forward(module) or not is_decoder_layer(module):
        return None
    original: Any = type(module).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        # Someone may have replaced the forward of the class since.
        own = getattr(type(self), SWAPPED).forward
        found = None if torch.is_grad_enabled() or own is not original else _step(self, args, options)
        return own(self, *args, **options) if found is None else found

    return forward


def _step(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
    """Return the output of a layer for one token of each sequence, or None if its modules must compute it."""
    if torch.compiler.is_compiling() or not INSTALLED or len(args) != 1:
        return None
    hidden, cache, angles = args[0], options.get("past_key_values"), options.get("position_embeddings")
    if cache is None or angles is None or type(hidden) is not torch.Tensor:
        return None
    if hidden.ndim != HIDDEN_DIMS or hidden.shape[1] != 1 or not (hidden.is_cuda or conditions.INTERPRETED):
        return None
    if ops_are_observed() or torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0:
        return None
    parts = _parts(layer)
    kinds = None if parts is None else _kinds(parts)
    if kinds is None or parts is None:
        return None
    attention, norms = parts[0], parts[2:4] + parts[PARTS:]
    state = attention.__dict__
    # A config looks up its own attributes slowly.
    implementation = object.__getattribute__(state["config"], "__dict__").get("_attn_implementation_internal")
    if state["training"] or type(implementation) is not Swapped or not rotates_as_ours(kinds.modeling):
        return None
    if type(attention).forward is not kinds.attending.forward:
        return None
    try:
        scales = [norm._parameters["weight"] for norm in norms]
        operands = [(linear._parameters["weight"], linear._parameters["bias"]) for linear in parts[4 : PARTS - 1]]
    except KeyError:  # plain attributes, as in a replica of DataParallel
        return None
    epsilons = [getattr(norm, name) for norm, name in zip(norms, kinds.epsilons, strict=True)]
    (wq, bq), (wk, bk), (wv, bv), (wo, bo), (wg, bg), (wu, bu), (wd, bd) = operands
    weights, biases = (wq, wk, wv, wo, wg, wu, wd), (bq, bk, bv, bo, bg, bu, bd)
    plan = prepare(hidden, *angles, state["head_dim"], kinds.forms, *weights, *biases, *scales, *epsilons)
    if not isinstance(plan, Plan):
        return None
    (norm, norm_of_sum, *norms_of_heads), products, rotate, multiply, q_shape, k_shape = plan
    of_q, of_k, of_v, of_o, of_gate, of_up, of_down = products
    dtype, batch = hidden.dtype, hidden.shape[0]
    x = hidden.view(batch, -1)
    with device_of(hidden):
        rows = norm(x, scales[0], None, epsilons[0], *kinds.forms[0])[0]
        q, k, v = of_q(rows, wq, bq, dtype), of_k(rows, wk, bk, dtype), of_v(rows, wv, bv, dtype)
        if norms_of_heads:
            norm_of_q, norm_of_k = norms_of_heads
            q = norm_of_q(q.view(-1, q_shape[-1]), scales[2], None, epsilons[2], *kinds.forms[2])[0]
            k = norm_of_k(k.view(-1, k_shape[-1]), scales[3], None, epsilons[3], *kinds.forms[3])[0]
        q_out, k_out = q.new_empty(*q_shape), k.new_empty(*k_shape)
        rotate(q, k, *angles, q_out, k_out, angles[0])
        keys, values = cache.update(k_out, v.view(k_shape), state["layer_idx"])
        window = None
        if kinds.attending.window is not None:
            holder = attention if kinds.attending.window == "module" else state["config"]
            window = getattr(holder, "sliding_window", None)
        out = _attend(attention, q_out, keys, values, window, options)
        out = of_o(out.reshape(batch, -1), wo, bo, dtype)
        rows, x, *_ = norm_of_sum(out, x, scales[1], None, epsilons[1], *kinds.forms[1])
        gate, up = of_gate(rows, wg, bg, dtype), of_up(rows, wu, bu, dtype)
        both = torch.empty_like(gate)
        multiply(gate, up, both)
        return (x + of_down(both, wd, bd, dtype)).view(hidden.shape)


def _attend(
    attention: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """Return attention ``[B, 1, H, D]`` of ``q[B, 1, H, D]`` to a cache ``k, v[B, Hkv, S, D]``, as the module does."""
    mask, scale = options.get("attention_mask"), attention.__dict__["scaling"]
    is_plain = k.dtype == v.dtype == q.dtype and getattr(attention, "is_causal", True) is True and (window or 0) >= 0
    if not is_plain or not options.keys().isdisjoint(ATTENDING) or (mask is not None and len(mask) > 2):
        rest = {name: value for name, value in options.items() if name not in PASSED}
        rest |= {} if window is None else {"sliding_window": window}
        return attention_forward(attention, q.transpose(1, 2), k, v, mask, scaling=scale, **rest)[0]
    known: dict[str, torch.Tensor] = {}
    if mask is not None:
        # All layers of a step get one mask, which keeps what it means.
        known = getattr(mask, MEANING, known)
        if not known:
            # Of mask.data: a view of the mask would keep it alive, and the mask the view.
            known = mask_arguments(mask.data, 1)
            setattr(mask, MEANING, known)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    start, used = known.get("k_start"), known.get("seqused_k")
    ready, numbers = _prepare_attention(q, k, v, start, used, scale, UNLIMITED if window is None else window - 1)
    out: torch.Tensor = attending["output"].call(ready, q, k, v, None, None, None, start, None, used, None, *numbers)
    return out


@remembered
def _prepare_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor | None,
    used: torch.Tensor | None,
    scale: float,
    left: int,
) -> tuple[Ready, tuple[float, ...]]:
    """Check a step of attention, choose its backend and prepare its launches; return the numbers of ``Inputs`` too."""
    call = Inputs(q, k, v, None, None, None, start, None, used, None, None, None, scale, left, 0, 0.0)  # type: ignore[arg-type]
    name, inputs = choose_backend(call, None)
    return attending["output"].ready(*inputs, name), inputs.numbers


def _parts(layer: nn.Module) -> list[Any] | None:
    """Return the modules of a layer: attention, MLP, norms, the seven products, the activation, and norms of heads.

    None if there are others, or a call of one would run more than its forward.
    """
    modules = layer._modules
    try:
        parts = [modules[name] for name in LAYER]
        parts += [parts[0]._modules[name] for name in ATTENTION]  # type: ignore[union-attr]
        parts += [parts[1]._modules[name] for name in MLP]  # type: ignore[union-attr]
        if HEAD_NORMS[0] in parts[0]._modules:  # type: ignore[union-attr]
            parts += [parts[0]._modules[name] for name in HEAD_NORMS]  # type: ignore[union-attr]
    except KeyError:
        return None
    for part in parts:
        state = part.__dict__
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
            return None
        if "_compiled_call_impl" in state:
            return None
        if state.get("k_segments", 1) != 1:
            return None
    return None if torch.nn.modules.module._has_any_global_hook() else parts


def _kinds(parts: list[Any]) -> _Kinds | None:
    types = tuple([type(part) for part in parts])
    try:
        return _known[types]
    except KeyError:
        found = _known[types] = _look_at(types)
        return found


def _look_at(types: tuple[type[nn.Module], ...]) -> _Kinds | None:
    attention, mlp, linears, activation = *types[:2], types[4 : PARTS - 1], types[PARTS - 1]
    norms = types[2:4] + types[PARTS:]
    known: list[Any] = [getattr(kind.forward, FORM, None) for kind in norms]
    are_linear = all(getattr(kind.forward, "__wrapped__", None) is DetLinear.forward for kind in linears)
    if attention not in attentions or None in known or not are_linear or not is_gated(mlp) or not is_silu(activation):
        return None
    # A class that a parametrization puts on top has a weight of its own.
    if any(form.centered for form, _ in known) or not all(SWAPPED in vars(kind) for kind in norms + linears):
        return None
    forms, epsilons = zip(*known, strict=True)
    return _Kinds(forms, epsilons, attentions[attention], sys.modules[attention.__module__])
