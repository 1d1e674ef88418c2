"""The keys of a layer in transformers' continuous batching, in the layout that det_attention takes.

Continuous batching packs the new tokens of all requests, a chunk of a prompt or one token each, in one row. Its cache
stores the new keys and gathers the keys of every request, one request after the other: packed sequences, for attention
with ``cu_seq_lens``. The pages of the cache are not read in place: only FlashAttention's ``flash_attn_with_kvcache``
receives a page table; every other attention receives an index for each key.

The cache of a sliding window drops keys, and a query's bits depend on the positions of its keys. So keys of such a
layer are copied to pages of our own, at their positions in the sequence modulo whole segments. Positions of dropped
keys are in the page table only.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from rl_kernels.core.constants import KEY_SEGMENT

PAGE = 64
"""Keys of a page: one block, so that TMA can load it."""

LocatedKeys = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Keys, values, and the arguments of det_attention that locate each sequence in them."""


def keys_of(
    layer: nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Any,
    sliding_window: int | None,
    options: dict[str, Any],
) -> LocatedKeys:
    """Store the new keys of a layer in a ``PagedAttentionCache``, and return all keys that its queries see.

    Args:
        layer: the attention module; the cache uses its ``layer_idx``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        cache: holds the earlier keys and values.
        sliding_window: size of the layer's window, or None.
        options: the arguments of continuous batching: lengths, indices and positions.

    Raises:
        ValueError: a layer with a sliding window got no ``position_ids``.
    """
    arguments = dict(options)
    index: Any = layer.layer_idx
    if _takes_keyword_indices(cache.__class__):
        key, value = cache.update(key, value, index, arguments)
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    else:
        key, value = cache.update(key, value, index, arguments["read_index"], arguments["write_index"])
        # These are dicts only if there are layers of several kinds.
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        for name, source_name in (("cu_seq_lens_k", "cu_seq_lens_k"), ("max_length_k", "max_seqlen_k")):
            lengths = arguments[source_name]
            arguments[name] = lengths[kind] if isinstance(lengths, dict) else lengths
        arguments["max_length_q"] = arguments["max_seqlen_q"]
    cu_seqlens_q, cu_seqlens_k = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"]
    longest = arguments["max_length_k"]
    query_arguments = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": arguments["max_length_q"]}
    if sliding_window is None:
        return key, value, {**query_arguments, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": longest}
    positions = arguments.get("position_ids")
    if positions is None:
        raise ValueError("position_ids: expected the positions of the tokens: the cache of a sliding window drops keys")
    # Empty sequences, which pad a batch to a fixed size, begin after the last token.
    begins = positions.flatten()[cu_seqlens_q[:-1].long().clamp(max=positions.numel() - 1)]
    dropped = (begins + cu_seqlens_q.diff() - cu_seqlens_k.diff()).clamp(min=0)
    source, table, used = page_layout(cu_seqlens_k.long(), dropped.long(), key.shape[0], longest)
    key, value = (x.index_select(0, source).unflatten(0, (-1, PAGE)) for x in (key, value))
    return key, value, {**query_arguments, "block_table": table, "seqused_k": used}


@functools.cache
def _takes_keyword_indices(kind: type) -> bool:
    """Say whether ``update`` of a cache takes the keyword arguments, reads indices from them and adds lengths."""
    return "kwargs" in inspect.signature(kind.update).parameters  # type: ignore[attr-defined]


def page_layout(
    ends: torch.Tensor, dropped: torch.Tensor, total: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors: for each key of the pages its index among ``total`` packed keys, block_table, seqused_k.

    Sizes depend on ``total`` and ``longest`` alone, so that nothing waits for a GPU. Positions of dropped keys read the
    sequence's own first page: no query sees them, but the values must be finite.

    Args:
        ends: ``[B + 1]``, int64: cumulative lengths of the packed keys.
        dropped: ``[B]``, int64: number of dropped keys before each sequence.
        total: number of packed keys.
        longest: at least the length of the longest sequence.
    """
    skipped, lead, lengths = dropped % KEY_SEGMENT // PAGE, dropped % PAGE, ends.diff()
    pages = (lead + lengths + PAGE - 1) // PAGE
    first = pages.cumsum(0) - pages
    count = total // PAGE + 2 * len(dropped)
    row = torch.arange(count * PAGE, device=ends.device)
    sequence = torch.searchsorted(first, row // PAGE, right=True) - 1
    source = ends[sequence] + (row - first[sequence] * PAGE - lead[sequence]).clamp(min=0)
    width = (KEY_SEGMENT + longest) // PAGE + 1
    table = first[:, None] + (torch.arange(width, device=ends.device) - skipped[:, None]).clamp(min=0)
    return source.clamp(max=total - 1), table.clamp(max=count - 1).int(), (dropped % KEY_SEGMENT + lengths).int()
