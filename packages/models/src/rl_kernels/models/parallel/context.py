"""``parallelize_context(model, mesh)``: a model whose sequences are cut over ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core.distributed import group_of
from rl_kernels.models import pretrained
from rl_kernels.models.context_ranks import CONTEXT, CheckedCall, ContextRanks

SEEING = {"full_attention", "sliding_attention"}
"""Types of layers in which tokens meet through ``det_attention`` alone."""
BY_LENGTH = ("dynamic", "longrope")
"""In names of rotary embeddings whose frequencies depend on the largest position that a rank has."""


def parallelize_context(model: Any, mesh: DeviceMesh | ProcessGroup) -> None:
    """Let the attention of a model see the tokens of all ranks, of which each has its rows of every sequence.

    Call it with ``cut_context(ids, mesh)`` and ``position_ids=cut_context(positions, mesh)``, the function of
    ``rl_kernels.attention``; positions are 0, 1, 2, ... of the whole sequences. A token's hidden states, logits and
    log-probs have the bits of one process. A weight's gradient is a sum over the tokens of this rank: add it over the
    ranks, as ``ordered_gradients`` does. All ranks make the same calls, forward and backward. It cannot be undone.

    Args:
        model: a decoder for text of transformers, after ``invariant(model)``, before wrappers and the optimizer.
        mesh: the ranks: a mesh with one dim, or a group.

    Raises:
        TypeError, ValueError: ``mesh`` is neither; or the model is no such decoder, has other layers (recurrent,
            convolutions), an attention that ``invariant`` left alone, or a rotary embedding that depends on lengths
            (dynamic NTK, longrope), or is cut by ``parallelize``. A call raises ``ValueError`` for a mask, a cache,
            packed sequences, other positions, ``labels`` without ``shift_labels``, and another attention.
    """
    ranks = ContextRanks(group_of(mesh, "mesh", sizes=None))
    if not pretrained.is_pretrained(model):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise TypeError(f"model: expected a decoder for text alone, got {type(model).__name__}")
    if config._attn_implementation != pretrained.name():
        raise TypeError("model: expected attention that invariant(model) swapped")
    others = set(getattr(config, "layer_types", None) or ()) - SEEING
    if others:
        raise TypeError(
            f"model: expected attention in all layers, which alone sees tokens of other ranks; got {sorted(others)}"
        )
    if any(kind in str(getattr(module, "rope_type", "")) for module in model.modules() for kind in BY_LENGTH):
        raise TypeError(f"model: expected a rotary embedding of positions alone, not one of {BY_LENGTH}")
    if any(type(module).__module__ == "rl_kernels.models.parallel.layers" for module in model.modules()):
        raise TypeError("model: expected whole weights: parallelize cut this one")
    for module in model.modules():
        vars(module)[CONTEXT] = ranks
        if pretrained.is_pretrained(module):
            module.register_forward_pre_hook(CheckedCall(ranks, module), prepend=True, with_kwargs=True)
