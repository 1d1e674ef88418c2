"""The attention of invariant(): det_attention behind transformers' interfaces of attention and of masks.

transformers makes a mask once per forward pass, from a function of indices, and passes it to all layers of one kind.
Ours holds the few integers that det_attention needs, in four dims, so that transformers takes it as a finished mask:

- None: each query sees all keys that causality and the layer's window allow;
- int32 ``[1, 1, 1, B]``: k_start, the first key of each sequence;
- int32 ``[2, 1, 1, B]``: k_start, and seqused_k of a cache with room for more keys;
- int32 ``[3, 1, longest, N + 1]``: cu_seqlens of N packed sequences, expanded so that the shape holds the longest;
- int32 ``[4, 1, longest, N + 1]``: cu_seqlens_q twice and cu_seqlens_k twice, and the longest sequence of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rl_kernels.attention import det_attention
from rl_kernels.core.torchlib.autocast import autocast_dtype
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.models import paged
from rl_kernels.models.context_ranks import CONTEXT

MaskFunction = Callable[..., torch.Tensor]
"""Takes broadcast indices (sequence, head, query, key); returns whether the query sees the key."""

UNSUPPORTED = -(2**31)
"""k_start of a sequence with an unsupported mask, set where the mask's values cannot be read."""
OURS = "a causal mask (with a window, padding or packed sequences) or a bidirectional one (with padding)"
PACKED = 3
"""First dim of a mask that holds cu_seqlens shared by queries and keys."""
APART = 4
"""First dim of a mask that holds separate cu_seqlens of queries and of keys."""


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask for layers of one kind, with the signature of transformers' AttentionMaskInterface.

    Args:
        batch_size: number of sequences, B.
        q_length: number of queries.
        kv_length: number of keys, unused room of a cache included.
        q_offset: index of the first query.
        kv_offset: index of the first key: the cache of a sliding window drops the keys before it.
        mask_function: the pattern, a function of absolute indices; None is causal.
        attention_mask: ``[B, S]``, bool: False for padding.
        local_size: size of the sliding window, or None; 0 gives an empty mask, which no layer can use.
        use_vmap: transformers' mark for a pattern that the model adds to.
        device: device of the mask.
        options: options of other attention implementations; ignored.

    Returns:
        None or an int32 mask of four dims, as the module docstring lists them.

    Raises:
        ValueError: det_attention does not support the pattern or the padding.
    """
    if use_vmap:
        raise ValueError(f"attention_mask: expected {OURS}; this model adds a pattern of its own")
    if local_size == 0:
        # Qwen2-MoE makes this mask although no layer has a window; a layer that takes it raises.
        return torch.empty(0, dtype=torch.int32, device=device)
    layer_types = getattr(options.get("config"), "layer_types", None) or ()
    ends_real = q_length == 1 and "linear_attention" in layer_types
    first_keys = None if attention_mask is None else _first_keys(attention_mask, ends_real)
    # transformers passes this option for bidirectional masks only.
    if "allow_is_bidirectional_skip" in options:
        if first_keys is None or attention_mask is None:
            return None
        if attention_mask.shape != (batch_size, kv_length) or (local_size is not None and kv_length != q_length):
            raise ValueError(f"attention_mask: expected shape {(batch_size, kv_length)} for bidirectional attention")
        return _packed_mask_with_padding(first_keys, attention_mask, q_length if local_size is None else None)
    supported = None
    if not _is_causal(mask_function):
        assert mask_function is not None
        begins, supported = _probe_pattern(mask_function, batch_size, q_length, q_offset, local_size, device)
        if begins is not None:
            if first_keys is not None or kv_length != q_length or kv_offset:
                raise ValueError("attention_mask: expected packed sequences without padding or a cache")
            return _packed_mask(begins.flatten().nonzero().flatten(), batch_size * q_length)
    keys_used = q_offset + q_length - kv_offset
    if isinstance(keys_used, torch.Tensor):
        counts = keys_used.to(device).expand(batch_size)
    elif keys_used != kv_length:
        # Filled on the device: a CUDA graph cannot hold a copy from the host.
        counts = torch.full((batch_size,), keys_used, device=device)
    elif first_keys is None and supported is None and not kv_offset:
        return None
    else:
        counts = None
    start = torch.zeros(batch_size, dtype=torch.int64, device=device) if first_keys is None else first_keys
    if kv_offset:
        # Keeps UNSUPPORTED, and stays within int32.
        start = (start - kv_offset).clamp(min=UNSUPPORTED)
    if supported is not None:
        start = torch.where(supported, start, UNSUPPORTED)
    rows = start[None] if counts is None else torch.stack((start, counts))
    return rows[:, None, None].int()


def _is_causal(mask_function: MaskFunction | None) -> bool:
    from transformers import masking_utils

    plain: Any = masking_utils.causal_mask_function
    return mask_function is None or mask_function is plain


def _first_keys(mask: torch.Tensor, ends_real: bool) -> torch.Tensor | None:
    """Return the first key after the padding of each sequence, or None if there is no padding.

    ends_real: raise if a last key is padding: transformers does not tell recurrent layers about single tokens.
    """
    # Few launches, because this runs for each token that generate samples.
    length, tokens = mask.shape[1], mask.view(torch.uint8)
    first, behind, count = tokens.argmax(1), tokens.flip(1).argmax(1), tokens.sum(1)
    if values_hidden(mask):
        contiguous = (first + count + behind == length) | (count == 0)
        return torch.where(contiguous, torch.where(count > 0, first, length), UNSUPPORTED)
    firsts, behinds, counts = torch.stack((first, behind, count)).cpu().numpy()
    empty = counts == 0
    if not ((firsts + counts + behinds == length) | empty).all():
        raise ValueError("attention_mask: expected padding before or after a sequence, got some between its tokens")
    if ends_real and (empty | (behinds > 0)).any():
        raise ValueError(
            "attention_mask: expected no padding among tokens that come one at a time; pass several at once"
        )
    if empty.any():
        first = torch.where(count > 0, first, length)
    return None if (counts == length).all() else first


def _probe_pattern(
    mask_function: MaskFunction,
    batch: int,
    count: int,
    offset: int | torch.Tensor,
    window: int | None,
    device: torch.device | str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Probe a pattern at each query's neighbors and at both ends of the range that the query should see.

    Returns:
        a pair: the queries that begin a sequence, ``[B, T]``, bool, or None if only the first do; and whether the
        pattern is causal within one sequence, as a tensor if its values cannot be read now, else None.

    Raises:
        ValueError: the pattern is not causal in packed sequences.
    """
    row = torch.arange(batch, device=device)[:, None]
    query = (torch.arange(count, device=device) + offset).expand(batch, count)
    last = query[:, -1:]

    def sees(key: torch.Tensor) -> torch.Tensor:
        visible = mask_function(row, torch.zeros_like(row), query, key.clamp(min=0).minimum(last))
        return visible.expand(batch, count) & (key >= 0) & (key <= last)

    begins = ~sees(query - 1)
    start = torch.where(begins, query, 0).cummax(1).values
    oldest = start if window is None else torch.maximum(start, query - window + 1)
    fits = (sees(query) & sees(oldest) & ~sees(query + 1) & ~sees(oldest - 1)).all()
    single = ~(begins & (query > 0)).any()
    if values_hidden(query):
        return None, fits & single
    is_supported, is_single = torch.stack((fits, single)).tolist()
    if not is_supported:
        raise ValueError(f"attention_mask: expected {OURS}; this model has another pattern")
    return (None, None) if is_single else (begins, None)


def _packed_mask(first: torch.Tensor, total: int) -> torch.Tensor:
    """Return the mask of packed sequences that begin at the rows ``first``."""
    bounds = torch.cat((first, first.new_full((1,), total))).int()
    return bounds.expand(PACKED, 1, int(bounds.diff().max()), -1)


def _packed_mask_with_padding(first: torch.Tensor, mask: torch.Tensor, queries: int | None) -> torch.Tensor:
    """Return the mask of keys packed together with their padding.

    Args:
        first: the first key after the padding of each sequence.
        mask: ``[B, S]``: False for padding.
        queries: number of queries of each sequence, all of which see all keys but padding, as a decoder's queries see
            its encoder's keys. None: one query for each key, as a window needs it; padding attends to itself.
    """
    _require_supported(first)
    batch, length = mask.shape
    index = torch.arange(batch, device=mask.device)

    def ends(*parts: torch.Tensor, total: int) -> torch.Tensor:
        bounds = torch.stack(parts, 1).flatten()
        return torch.cat((bounds, bounds.new_full((1,), batch * total))).int()

    row = index * length
    keys = ends(row, row + first, row + first + mask.sum(1), total=length)
    if queries is None:
        return keys.expand(PACKED, 1, length, -1)
    row = index * queries
    both = torch.stack((ends(row, row, row + queries, total=queries), keys))
    return both.repeat_interleave(APART // 2, 0)[:, None, None].expand(-1, -1, length, -1)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention ``[B, T, H, Dv]`` and no weights, with the signature of transformers' AttentionInterface.

    Args:
        module: the layer; its ``is_causal`` counts if the argument is None.
        query: ``[B, H, T, D]``, FP32, BF16 or FP16; cast to the autocast dtype, or else to the dtype of value.
        key: ``[B, Hkv, S, D]``; cast like query.
        value: ``[B, Hkv, S, Dv]``.
        attention_mask: None, or a mask that ``attention_mask`` made.
        scaling: multiplies the scores; None is ``1 / sqrt(D)``.
        dropout: must be 0.
        is_causal: whether a query sees no key after its position.
        sliding_window: number of keys that a query sees on its left, the key at its position included; without
            causality also on its right.
        softcap: bound of the scores; None or 0 is no cap.
        s_aux: ``[H]``: a sink for each head, or None.
        cu_seq_lens_q: ``[N + 1]``: sequences packed in one row, as ``DataCollatorWithFlattening`` makes them.
        cu_seq_lens_k: the same for keys.
        max_length_q: length of the longest sequence.
        max_length_k: the same for keys.
        cache: of continuous batching; it returns the keys of its requests, and the mask is then ignored.
        options: options of other attention implementations and of continuous batching. ``position_bias`` and
            ``block_table`` would change the result and must be None.

    Raises:
        ValueError: det_attention has no such option, or ``attention_mask`` did not make the mask.
    """
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 under invariant(), got {dropout}: draws depend on the batch")
    for name in ("position_bias", "block_table"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: the attention of invariant() has no such option; keep the model's own")
    # Under autocast rotary embedding returns FP32, and a cache the widest dtype: cast them as SDPA does.
    dtype = autocast_dtype(value) or value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    side = None if sliding_window is None else sliding_window - 1
    arguments: dict[str, Any] = {
        "causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
        "scale": scaling,
        "window": None if side is None else (side, side),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "validate": False,
    }
    ranks = vars(module).get(CONTEXT)
    if ranks is not None:
        return ranks.attend(query, key, value, **arguments), None
    if cache is not None:
        lengths: dict[str, Any] = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        lengths |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        k, v, locations = paged.keys_of(module, key, value, cache, sliding_window, options | lengths)
        return det_attention(query[0].transpose(0, 1), k.to(dtype), v.to(dtype), **arguments, **locations)[None], None
    if cu_seq_lens_q is not None:
        longest = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
        arguments |= {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_k": cu_seq_lens_k, **longest}
    elif attention_mask is not None:
        arguments |= mask_arguments(attention_mask, query.shape[2])
    elif not arguments["causal"] and options.get("position_ids") is not None:
        _require_one_sequence(options["position_ids"])
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if "cu_seqlens_q" not in arguments:
        return det_attention(q, k, v, **arguments), None
    out = det_attention(*(x.flatten(0, 1) for x in (q, k, v)), **arguments)
    return out.unflatten(0, q.shape[:2]), None


def _require_one_sequence(positions: torch.Tensor) -> None:
    """Raise if only positions separate the sequences of a row: some models drop their mask for flash attention."""
    consecutive = (positions.diff(dim=-1) == 1).all()
    message = "position_ids: expected one sequence per row for bidirectional attention without a mask"
    if values_hidden(positions):
        torch._assert_async(consecutive, message)
    elif not consecutive:
        raise ValueError(f"{message}; keep the model's own attention")


def _require_supported(start: torch.Tensor) -> None:
    """Raise if a mask that could not be checked when it was made is unsupported: on a GPU this ends the process."""
    if values_hidden(start):
        torch._assert_async((start != UNSUPPORTED).all(), f"attention_mask: expected {OURS}")


def mask_arguments(mask: torch.Tensor, num_queries: int) -> dict[str, Any]:
    """Return the arguments of det_attention that our mask encodes, for rows of ``num_queries`` queries."""
    if mask.ndim != 4 or mask.dtype != torch.int32:
        got = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"attention_mask: expected [B, S], 0 for padding, or None; got {got}")
    kind, _, longest, _ = mask.shape
    if kind == PACKED:
        bounds = mask[0, 0, 0]
        return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    start = mask[0, 0, 0]
    if kind == APART:
        lengths = {"cu_seqlens_q": start, "cu_seqlens_k": mask[APART // 2, 0, 0], "max_seqlen_k": longest}
        return {**lengths, "max_seqlen_q": num_queries}
    _require_supported(start)
    return {"k_start": start} if kind == 1 else {"k_start": start, "seqused_k": mask[1, 0, 0]}
