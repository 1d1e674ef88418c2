"""The states of a Gated DeltaNet in a cache of transformers, in the place of its own layer for linear attention.

That layer keeps the recurrent state after the last token, which a chunk of prefill does not have. Ours keeps a
``DeltaCache``, and the last three inputs of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from rl_kernels.gated_delta import DeltaCache, causal_conv1d
from rl_kernels.gated_delta.conv_inputs import PAST
from rl_kernels.models.hybrids.rule import delta_rule

FOREIGN = "past_key_values: expected a cache that the model itself filled under the same invariant(), its layer {} {}"


class DeltaLayer(LinearAttentionLayer):
    """The states of one layer for the sequences of a batch; tensors stay where they are, so CUDA graphs may hold them.

    Attributes:
        inputs: ``[B, 3, D]``: the last inputs of the convolution; more of them after ``activate_past_recording``.
        delta: the cache of the gated delta rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: torch.Tensor | None = None
        self.delta: DeltaCache | None = None

    def fill(self, net: Any, mixed: torch.Tensor) -> None:
        """Make empty states for the sequences of ``mixed[B, T, D]``."""
        batch, device = mixed.shape[0], mixed.device
        self.dtype, self.device = mixed.dtype, device
        self.inputs = mixed.new_zeros(batch, PAST, mixed.shape[2])
        sizes = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
        self.delta = DeltaCache.empty(batch, *sizes, dtype=mixed.dtype, device=device)
        if not torch.compiler.is_compiling():
            for tensor in (self.inputs, *self.delta):
                torch._dynamo.mark_static_address(tensor)

    def convolve(
        self, mixed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: dict[str, Any]
    ) -> torch.Tensor:
        """Return the convolution of new inputs ``[B, T, D]``, and keep the last ones."""
        assert self.inputs is not None
        # Without a state nothing is saved for backward that changes in place.
        state = self.inputs[:, -PAST:] if self.has_previous_state[0] else None
        out, last = causal_conv1d(mixed, weight, bias, state=state, return_state=True, **layout)
        if self.record_past:
            self.inputs = torch.cat((self.inputs, _without_padding(mixed.detach(), layout.get("start"))), 1)
        else:
            self.inputs.copy_(last.detach())
        return out

    def attend(self, operands: tuple[torch.Tensor, ...], layout: dict[str, Any]) -> torch.Tensor:
        """Return the output of the gated delta rule for new tokens, and keep what the next ones need."""
        assert self.delta is not None
        self.has_previous_state[0] = True
        if not torch.is_grad_enabled() or not _requires_grad(*operands):
            return delta_rule(*operands, cache=self.delta, **layout)
        with torch.no_grad():
            delta_rule(*(x.detach() for x in operands), cache=self.delta, **layout)
        # The same bits as with the cache.
        return delta_rule(*operands, **layout)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, if none of them is older than the open chunk of 64.

        Raises:
            RuntimeError: ``activate_past_recording`` was not called before.
            ValueError: the number is above 0, or the states hold older tokens in sum alone.
        """
        if not self.record_past:
            raise RuntimeError("crop: expected activate_past_recording() on the cache before the tokens to forget came")
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected the number of tokens to forget, negative, got {tokens_to_remove}"
            )
        if self.inputs is None or self.delta is None:
            return
        kept = self.inputs.shape[1] + tokens_to_remove
        if kept < PAST:
            raise ValueError(
                f"tokens_to_remove: expected at most {self.inputs.shape[1] - PAST} tokens, got {-tokens_to_remove}"
            )
        self.delta.crop(self.delta.lengths + tokens_to_remove)
        self.inputs = self.inputs[:, kept - PAST : kept].contiguous()

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can forget any number of tokens: never, older chunks are part of a state."""
        return False

    def reset(self) -> None:
        """Forget all tokens; the tensors stay."""
        self.has_previous_state[0] = False
        if self.inputs is not None and self.delta is not None:
            self.inputs = self.inputs[:, -PAST:]
            for tensor in (self.inputs, *self.delta):
                tensor.zero_()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these sequences, in this order; one that comes twice is forked."""
        if self.inputs is not None and self.delta is not None:
            index = beam_idx.to(self.inputs.device)
            self.inputs, self.delta = self.inputs.index_select(0, index), self.delta.select(index)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.inputs is not None:
            self.reorder_cache(torch.arange(len(self.inputs), device=self.inputs.device).repeat_interleave(repeats))

    def offload(self) -> None:
        """Move the states to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the states back to the layer's device."""
        self._move(self.device)

    def _move(self, device: Any) -> None:
        if self.inputs is not None and self.delta is not None:
            self.inputs = self.inputs.to(device, non_blocking=True)
            self.delta = DeltaCache(*(x.to(device, non_blocking=True) for x in self.delta))

    def update_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse transformers' own layers, whose states these are not."""
        raise ValueError("past_key_values: expected a new cache, this one was made under invariant()")

    update_recurrent_state = update_conv_state


def states_of(cache: Any, net: Any, mixed: torch.Tensor) -> DeltaLayer:
    """Return the states of a layer in a cache, empty ones before the first tokens ``mixed[B, T, D]``.

    Args:
        cache: of transformers; a layer for linear attention in it is replaced by ours.
        net: the Gated DeltaNet.
        mixed: the inputs of its convolution.

    Raises:
        ValueError: the cache has no layer for linear attention there, transformers' own code filled it, or it holds
            tokens and gradients are computed, or the batch or dtype is another one.
    """
    index: int = net.layer_idx
    layers = cache.layers
    layer: Any = layers[index] if index < len(layers) else None
    if type(layer) is not DeltaLayer:
        if type(layer) is not LinearAttentionLayer:
            kind = "missing" if layer is None else f"a {type(layer).__name__}"
            raise ValueError(
                "past_key_values: expected a cache made with the model's config, such as DynamicCache(config=config), "
                f"its layer {index} is {kind}"
            )
        if layer.has_previous_state[0]:
            raise ValueError(FOREIGN.format(index, "was filled by transformers' own code"))
        own = DeltaLayer()
        own.record_past = layer.record_past
        layers[index] = layer = own
    if layer.inputs is None or (len(layer.inputs), layer.inputs.dtype) != (len(mixed), mixed.dtype):
        if layer.inputs is not None and layer.has_previous_state[0]:
            raise ValueError(
                f"past_key_values: expected a cache of {len(mixed)} sequences in {mixed.dtype}, got one of "
                f"{len(layer.inputs)} in {layer.inputs.dtype}"
            )
        layer.fill(net, mixed)
    if layer.has_previous_state[0] and torch.is_grad_enabled() and _requires_grad(mixed, *net.parameters()):
        raise ValueError(
            "past_key_values: expected none, or an empty one, where gradients are computed: they do not pass through "
            "the states of Gated DeltaNet layers; use torch.no_grad()"
        )
    return layer


def _requires_grad(*tensors: torch.Tensor) -> bool:
    return any([x.requires_grad for x in tensors])


def _without_padding(inputs: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """Return ``inputs[B, T, D]`` with zeros before ``start[B]``, where the convolution reads zeros too."""
    if start is None:
        return inputs
    place = torch.arange(inputs.shape[1], device=inputs.device)
    return torch.where((place >= start[:, None])[..., None], inputs, 0.0)
