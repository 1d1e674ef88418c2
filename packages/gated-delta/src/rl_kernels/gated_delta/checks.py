"""Checks of the arguments: shapes and dtypes always, values of integer tensors only with ``validate``."""

from __future__ import annotations

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.constants import CHUNK, MOST_TOKENS
from rl_kernels.gated_delta.inputs import Inputs, state_dtype
from rl_kernels.gated_delta.layouts import check_bounds, check_layout

SIZES = (16, 32, 64, 128, 256)
"""Head sizes."""


def operands(call: Inputs) -> None:
    """Require operands of one dtype and device whose heads and sizes fit."""
    q, k, v, g, beta = call[:5]
    for name, value in (("q", q), ("k", k), ("v", v)):
        check.tensor(name, value, check.FLOATS, ndim=4)
        if value.shape[3] not in SIZES:
            raise ValueError(f"{name}: expected a head size (last dim) of {SIZES}, got shape {tuple(value.shape)}")
    check.shape("k", k, q.shape, "that of q")
    check.shape("v", v, (*q.shape[:2], *v.shape[2:]), "batch and tokens of q")
    if not k.shape[2] or not v.shape[2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"v: expected a number of heads (dim 2) that is a multiple of the {k.shape[2]} of q and k, got shape "
            f"{tuple(v.shape)}"
        )
    check.same_dtype(q=q, k=k, v=v)
    dtypes = check.FLOATS if q.dtype == torch.float64 else check.HALF_AND_FLOAT
    for name, value in (("g", g), ("beta", beta)):
        check.tensor(name, value, dtypes, ndim=3)
        check.shape(name, value, v.shape[:3], "batch, tokens and heads of v")
    check.same_device(q=q, k=k, v=v, g=g, beta=beta)


def layout(call: Inputs) -> None:
    """Require arguments that form one layout: a batch, a batch with left padding, or packed sequences."""
    q, *_, initial_state, cu_seqlens, start, _, _ = call
    check_layout("q", q, cu_seqlens, start)
    if initial_state is not None:
        check.tensor("initial_state", initial_state, (state_dtype(q.dtype),), ndim=4)
        check.shape("initial_state", initial_state, call.state_shape, "sequences, heads of v, Dk, Dv")
    check.same_device(q=q, initial_state=initial_state, cu_seqlens=cu_seqlens, start=start)


def cache(call: Inputs, given: DeltaCache, return_state: bool) -> None:
    """Require the cache of as many sequences, heads and sizes as the call has."""
    if call.initial_state is not None:
        raise ValueError("initial_state: expected None with cache, which holds the states")
    if return_state:
        raise ValueError("return_state: expected False with cache; its to_recurrent() returns the states")
    sequences, heads, size, value_size = call.state_shape
    dtype, state = call.q.dtype, state_dtype(call.q.dtype)
    tensors = {
        "state": (state, call.state_shape),
        "keys": (dtype, (sequences, call.k.shape[2], CHUNK, size)),
        "residuals": (dtype, (sequences, heads, CHUNK, value_size)),
        "decays": (state, (sequences, heads, CHUNK)),
        "inverse": (state, (sequences, heads, CHUNK, CHUNK)),
        "lengths": (torch.int32, (sequences,)),
    }
    for value, (name, (expected, shape)) in zip(given, tensors.items(), strict=True):
        check.tensor(f"cache.{name}", value, (expected,), ndim=len(shape))
        check.shape(f"cache.{name}", value, shape, "that of a cache for these sequences, heads and sizes")
        check.writable(f"cache.{name}", value)
        if not value.is_contiguous():
            raise ValueError(f"cache.{name}: expected a contiguous tensor, got strides {value.stride()}")
    check.same_device(q=call.q, **{f"cache.{name}": value for name, value in zip(given._fields, given, strict=True)})


def no_gradients(call: Inputs, given: DeltaCache) -> None:
    """Require operands and tensors of the cache that do not require grad."""
    if not torch.is_grad_enabled():
        return
    held = [f"cache.{name}" for name in given._fields]
    for name, x in zip((*call._fields[:5], *held), (*call[:5], *given), strict=True):
        if x.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad with cache; detach it")


def bounds(call: Inputs, given: DeltaCache | None) -> None:
    """Require integers within their tensors. Syncs with a GPU; skipped if values cannot be read now."""
    check_bounds("q", call.q, call.cu_seqlens, call.start)
    if given is not None and not values_hidden(call.q):
        check.ids_in_range("cache.lengths", given.lengths, MOST_TOKENS - call.q.shape[1], ignorable=False)
