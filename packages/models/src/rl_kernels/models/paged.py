"""The keys of a layer in transformers' continuous batching, as det_attention takes them.

Continuous batching packs what each request adds, a chunk of its prompt or a token, in one row. Its cache writes the new
keys and gathers those of every request, one request behind the other: so transformers has it for attentions with
sequences in ``cu_seq_lens``, and packed sequences they are here too. Its own pages are not read in place: which they
are is told only to FlashAttention's ``flash_attn_with_kvcache``, elsewhere there is an index for each key.

The cache of a sliding window drops keys, and a query's bits follow from where in the sequence its keys stand. Keys of
such a layer are laid in pages of our own, at their places in the sequence. What is before them, but for whole segments,
is in the table alone.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

SEGMENT = 1024
"""Keys of a segment in the canonical order of det_attention: one that no query sees changes nothing."""
PAGE = 64
"""Keys of a page, those of a block: what Hopper's copy engine can bring."""

Kept = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Keys and values, and the arguments of det_attention that say where in them a sequence's are."""


def keys_of(
    layer: nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Any,
    sliding_window: int | None,
    options: dict[str, Any],
) -> Kept:
    """Give a ``PagedAttentionCache`` the new keys of a layer, and return all that its queries see.

    Args:
        layer: the attention module, whose ``layer_idx`` the cache goes by.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        cache: keeps those that came before.
        sliding_window: of the layer.
        options: what continuous batching gives an attention: lengths, indices and positions.

    Raises:
        ValueError: a layer with a sliding window was given no ``position_ids``.
    """
    given = dict(options)
    index: Any = layer.layer_idx
    if _says_where(cache.__class__):
        key, value = cache.update(key, value, index, given)
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    else:
        key, value = cache.update(key, value, index, given["read_index"], given["write_index"])
        # With layers of one kind these are no dicts.
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        for name, found in (("cu_seq_lens_k", given["cu_seq_lens_k"]), ("max_length_k", given["max_seqlen_k"])):
            given[name] = found[kind] if isinstance(found, dict) else found
        given["max_length_q"] = given["max_seqlen_q"]
    of_queries, of_keys, longest = given["cu_seq_lens_q"], given["cu_seq_lens_k"], given["max_length_k"]
    where = {"cu_seqlens_q": of_queries, "max_seqlen_q": given["max_length_q"]}
    if sliding_window is None:
        return key, value, {**where, "cu_seqlens_k": of_keys, "max_seqlen_k": longest}
    positions = given.get("position_ids")
    if positions is None:
        raise ValueError("position_ids: expected those of the tokens, for the cache of a sliding window drops keys")
    # Sequences that fill up a batch of a fixed size have no tokens, and begin behind the last one.
    begins = positions.flatten()[of_queries[:-1].long().clamp(max=positions.numel() - 1)]
    gone = (begins + of_queries.diff() - of_keys.diff()).clamp(min=0)
    source, table, used = placed(of_keys.long(), gone.long(), key.shape[0], longest)
    key, value = (x.index_select(0, source).unflatten(0, (-1, PAGE)) for x in (key, value))
    return key, value, {**where, "block_table": table, "seqused_k": used}


@functools.cache
def _says_where(kind: type) -> bool:
    """Say whether a cache finds a layer's indices in the keyword arguments itself, and puts lengths into them."""
    return "kwargs" in inspect.signature(kind.update).parameters  # type: ignore[attr-defined]


def placed(
    ends: torch.Tensor, gone: torch.Tensor, total: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where in ``total`` packed keys each key of a page comes from, ``block_table`` and ``seqused_k``.

    Sizes follow from ``total`` and ``longest`` alone, so that nothing waits for a GPU. What is before the keys of a
    sequence is read from its own first page: no query sees it, but it must be finite.

    Args:
        ends: ``[B + 1]``, int64: the sequences of the packed keys.
        gone: ``[B]``, int64: keys that were dropped in front of each.
        total: packed keys.
        longest: no less than any sequence has.
    """
    skipped, lead, held = gone % SEGMENT // PAGE, gone % PAGE, ends.diff()
    pages = (lead + held + PAGE - 1) // PAGE
    first = pages.cumsum(0) - pages
    count = total // PAGE + 2 * len(gone)
    row = torch.arange(count * PAGE, device=ends.device)
    own = torch.searchsorted(first, row // PAGE, right=True) - 1
    source = ends[own] + (row - first[own] * PAGE - lead[own]).clamp(min=0)
    width = (SEGMENT + longest) // PAGE + 1
    table = first[:, None] + (torch.arange(width, device=ends.device) - skipped[:, None]).clamp(min=0)
    return source.clamp(max=total - 1), table.clamp(max=count - 1).int(), (gone % SEGMENT + held).int()
