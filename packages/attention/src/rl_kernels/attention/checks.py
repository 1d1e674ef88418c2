"""Checks of the arguments of det_attention: shapes and dtypes always, integer values only with ``validate``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rl_kernels.attention.inputs import INTEGER_TENSORS, UNLIMITED, Inputs
from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check

MULTIPLE = 8
"""Head sizes are multiples of this, so that rows begin at multiples of 16 bytes."""
PAGE = 16
"""Page sizes are multiples of this many keys."""
PACKED_DIMS, PADDED_DIMS = 3, 4
"""Dims of packed operands, and of padded or paged ones."""


def heads(call: Inputs) -> None:
    """Require operands of one dtype and device with matching heads."""
    q, k, v, sinks = call[:4]
    for name, value, bounds in (("q", q, call.cu_seqlens_q), ("k", k, call.cu_seqlens_k), ("v", v, call.cu_seqlens_k)):
        check.tensor(name, value, check.HALF_AND_FLOAT, ndim=PADDED_DIMS if bounds is None else PACKED_DIMS)
    if sinks is not None:
        check.tensor("sinks", sinks, check.HALF_AND_FLOAT, ndim=1)
    check.same_dtype(q=q, k=k, v=v)
    check.same_device(q=q, k=k, v=v, sinks=sinks)
    for name, value in (("q", q), ("v", v)):
        if not value.shape[-1] or value.shape[-1] % MULTIPLE:
            raise ValueError(
                f"{name}: expected a head size (last dim) that is a multiple of {MULTIPLE}, got shape "
                f"{tuple(value.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected head size {q.shape[-1]} (last dim, that of q), got shape {tuple(k.shape)}")
    check.shape("v", v, (*k.shape[:-1], v.shape[-1]), "that of k, but for the last dim")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2] or not q.shape[-2]:
        raise ValueError(
            f"k: expected a number of heads (dim -2) that divides the {q.shape[-2]} of q, got shape {tuple(k.shape)}"
        )
    if sinks is not None:
        check.shape("sinks", sinks, q.shape[-2:-1], "one for each head of q")


def layout(call: Inputs) -> None:
    """Require integer tensors of the right dtype and shape, and arguments that form one layout."""
    q, k, _ = call.operands
    integer_tensors = dict(zip(Inputs._fields[INTEGER_TENSORS], call.integer_tensors, strict=True))
    cu_seqlens_q, cu_seqlens_k, k_start, _, seqused_k, block_table = integer_tensors.values()
    for name, value in integer_tensors.items():
        if value is not None:
            check.tensor(name, value, check.INTEGERS, ndim=2 if name == "block_table" else 1)
    check.same_device(q=q, **integer_tensors)
    if cu_seqlens_q is not None and not cu_seqlens_q.shape[0]:
        raise ValueError("cu_seqlens_q: expected at least 1 number, got none")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        if cu_seqlens_q is None:
            raise ValueError("cu_seqlens_k: expected None without cu_seqlens_q: packed keys are for packed queries")
        for name in ("k_start", "seqused_k", "block_table"):
            if integer_tensors[name] is not None:
                raise ValueError(f"{name}: expected None with cu_seqlens_k, which says where sequences start and end")
        check.shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "that of cu_seqlens_q")
    elif block_table is not None:
        if seqused_k is None:
            raise ValueError("seqused_k: expected the number of keys in use of each sequence with block_table")
        if k_start is not None:
            raise ValueError("k_start: expected None with block_table: pages hold no left padding")
        if not k.shape[1] or k.shape[1] % PAGE:
            raise ValueError(
                f"k: expected a page size (dim 1) that is a multiple of {PAGE}, got shape {tuple(k.shape)}"
            )
        if block_table.shape[0] != batch:
            raise ValueError(
                f"block_table: expected {batch} rows, one for each sequence, got shape {tuple(block_table.shape)}"
            )
    elif k.shape[0] != batch:
        raise ValueError(f"k: expected {batch} sequences (dim 0), as q has, got shape {tuple(k.shape)}")
    for name in ("k_start", "seqused_q", "seqused_k"):
        value = integer_tensors[name]
        if value is not None:
            check.shape(name, value, (batch,), "one number for each sequence")


def window(value: tuple[int | None, int | None] | None, *, causal: bool, unlimited: int) -> tuple[int, int]:
    """Return the two sides of the window, each ``>= 0`` or ``unlimited``."""
    check.flag("causal", causal)
    sides = (None, None) if value is None else value
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"window: expected (left, right) or None, got {value!r}")
    limits = []
    for side in sides:
        if side is None or (side == unlimited and not isinstance(side, bool)):
            limits.append(unlimited)
            continue
        check.integer("window", side, least=0, most=check.INT32)
        limits.append(int(side))
    return limits[0], 0 if causal else limits[1]


def lengths(call: Inputs) -> None:
    """Require integers within the bounds of their tensors. Syncs with a GPU; skipped if values cannot be read now."""
    (q, k, _), (max_seqlen_q, max_seqlen_k, *_) = call.operands, call.numbers
    if values_hidden(q):
        return
    cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table = call.integer_tensors
    for name, value, total, most in (("q", cu_seqlens_q, q, max_seqlen_q), ("k", cu_seqlens_k, k, max_seqlen_k)):
        if value is not None:
            _check_cumulative(value, total.shape[0], f"cu_seqlens_{name}")
            if most is not None and value.shape[0] > 1:
                _check_longest(value, most, f"max_seqlen_{name}")
    capacity = k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1] * bool(k.shape[0])
    # With a window that is limited on the left, a cache may have dropped keys that no query sees.
    start = k_start if k_start is None or call.left == UNLIMITED else k_start.clamp(min=0)
    within = {"seqused_k": (seqused_k, capacity), "k_start": (start, capacity), "seqused_q": (seqused_q, q.shape[1])}
    for name, (value, most) in within.items():
        if value is not None and not (name == "seqused_q" and cu_seqlens_q is not None):
            check.ids_in_range(name, value, most + 1, ignorable=False)
    if k_start is not None and seqused_k is not None:
        _check_at_most(k_start, seqused_k, "k_start", "seqused_k: a sequence starts beyond its end")
    if seqused_q is not None and cu_seqlens_q is not None:
        _check_at_most(seqused_q, cu_seqlens_q.diff(), "seqused_q", "the length of its sequence")
    if block_table is not None and seqused_k is not None and k.shape[0]:
        pages = torch.arange(block_table.shape[1], device=q.device)
        used = pages < (seqused_k[:, None] + k.shape[1] - 1) // k.shape[1]
        check.ids_in_range("block_table", torch.where(used, block_table, 0), k.shape[0], ignorable=False)


def longest(value: int | None, cu_seqlens: torch.Tensor | None) -> int | None:
    """Return the length of the longest sequence: as given, or read from the device, or None if it cannot be read.

    Nothing is read of a tensor that ``layout`` refuses.
    """
    if value is not None or not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.is_meta:
        return value
    if cu_seqlens.dtype not in check.INTEGERS or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        return None
    if values_hidden(cu_seqlens) or isinstance(cu_seqlens, FakeTensor):
        return None
    return max(min(int(cu_seqlens.diff().max()), check.INT32), 0)


def with_longest(call: Inputs) -> Inputs:
    """Return a call with the lengths of its longest sequences, where ``longest`` returns any."""
    if call.max_seqlen_q is not None and call.max_seqlen_k is not None:
        return call
    most = longest(call.max_seqlen_q, call.cu_seqlens_q), longest(call.max_seqlen_k, call.cu_seqlens_k)
    return Inputs._make((*call[: INTEGER_TENSORS.stop], *most, *call[INTEGER_TENSORS.stop + 2 :]))


def at_most(name: str, value: int | None, cu_seqlens: torch.Tensor | None, most: int) -> int:
    """Check a length that bounds all sequences; return it, or ``most`` if it is larger or None."""
    if value is None:
        return most
    if cu_seqlens is None:
        raise ValueError(f"{name}: expected None without the cu_seqlens that it belongs to")
    check.integer(name, value, least=0, most=check.INT32)
    return most if cu_seqlens.shape[0] == 1 else min(int(value), most)


def no_gradients_of_a_cache(k: torch.Tensor, v: torch.Tensor) -> None:
    """Require keys and values of a cache that do not require grad."""
    for name, value in (("k", k), ("v", v)):
        if value.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that does not require grad with block_table or seqused_k; detach it"
            )


def _cumulative(value: torch.Tensor, total: int, name: str) -> None:
    bounds = value.tolist()
    if bounds[0] != 0 or bounds[-1] != total or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(
            f"{name}: expected numbers that ascend from 0 to {total} (the rows of its tensor), got {_shown(bounds)}"
        )


def _at_most(value: torch.Tensor, bound: torch.Tensor, name: str, what: str) -> None:
    if bool((value > bound).any()):
        raise ValueError(f"{name}: expected values of at most {what}, got {_shown(value.tolist())}")


def _long_enough(cu_seqlens: torch.Tensor, value: int, name: str) -> None:
    longest_length = int(cu_seqlens.diff().max())
    if value < longest_length:
        raise ValueError(f"{name}: expected at least {longest_length}, the length of the longest sequence, got {value}")


def _shown(values: list[int], most: int = 8) -> str:
    return str(values) if len(values) <= most else f"{values[: most - 1]} and more, the last {values[-1]}"


_check_cumulative = define_check("check_cumulative", "(Tensor value, SymInt total, str name)", _cumulative)
_check_at_most = define_check("check_at_most", "(Tensor value, Tensor bound, str name, str what)", _at_most)
_check_longest = define_check("check_longest", "(Tensor cu_seqlens, SymInt value, str name)", _long_enough)
