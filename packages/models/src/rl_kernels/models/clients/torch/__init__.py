"""PyTorch's flash attention on det_attention: ``activate()``, through the hook of ``torch.nn.attention``.

``scaled_dot_product_attention``, where it takes its flash backend, and ``varlen_attn`` then run det_attention on a GPU,
forward and backward, and so does what is built on them. Read off PyTorch 2.13.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rl_kernels.models.clients.torch import overloads

__all__ = ["NAME", "Activation", "activate"]

NAME = "rl_kernels"
"""The implementation, as ``current_flash_attention_impl()`` and ``list_flash_attention_impls()`` call it."""
KNOWN = "2.11 to 2.13"
"""The versions of PyTorch that have this hook; the ops of 2.11 know no pages."""
HOOK = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)
OPS = {
    "_flash_attention_forward": overloads.flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": overloads.flash_attention_forward_inplace,
    "_flash_attention_backward": overloads.flash_attention_backward,
    "_scaled_dot_product_flash_attention": overloads.sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": overloads.sdpa_backward,
}
LATER = frozenset({"_flash_attention_forward_no_dropout_inplace"})
"""What some of these versions do not have yet."""

_active: list[Activation] = []
"""What is not undone, in the order of ``activate``."""


class Registered:
    """Our kernels in PyTorch's dispatcher, until ``remove``; what the hook calls a handle."""

    def __init__(self, key: str = "CUDA") -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            # To override PyTorch's kernels is what the hook is for; it warns of the first one.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in OPS.items():
                if hasattr(torch.ops.aten, name):
                    self._library.impl(name, kernel)

    def remove(self) -> None:
        """Give the ops back to what PyTorch has for them; a second call does nothing."""
        # A library takes its kernels out of the dispatcher when nobody holds it any more.
        self._library = None


class Activation:
    """What ``activate`` did, until ``undo`` or the end of a ``with`` block.

    Attributes:
        before: the implementation that was active before; None is PyTorch's own, FlashAttention-2.
    """

    def __init__(self, before: str | None) -> None:
        self.before = before

    def undo(self) -> None:
        """Activate the implementation that was active before; a second call does nothing.

        Of several activations that are undone in another order than the reverse, ours stays until the last is.
        """
        if self not in _active:
            return
        place = _active.index(self)
        del _active[place]
        if place == len(_active):
            _restore(self.before)
        elif _active[place].before == NAME:
            # The next one found what this one had activated, and takes over what to give back.
            _active[place].before = self.before

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def activate() -> Activation:
    """Let PyTorch's flash attention be det_attention, on every GPU of this process, until it is undone.

    ``with activate(): ...`` for a while, or ``handle = activate()`` and ``handle.undo()`` when it pleases. Calls nest.
    The hook's own ``activate_flash_attention_impl("rl_kernels")`` does the same from then on.

    ``scaled_dot_product_attention`` takes flash attention for BF16 and FP16 without a mask, and where it is causal only
    if there are as many queries as keys; elsewhere it goes on to other code of PyTorch without a word. Within
    ``sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` it raises instead. Dropout in attention and ALiBi raise, and so do the
    gradients of a cache.

    Returns:
        a handle that undoes it, and is a context manager.

    Raises:
        RuntimeError: PyTorch has no such hook, or no GPU: on a CPU attention does not go through it.
    """
    attention: Any = nn.attention
    missing = [f"torch.nn.attention.{name}" for name in HOOK if not hasattr(attention, name)]
    missing += [f"torch.ops.aten.{name}" for name in OPS if name not in LATER and not hasattr(torch.ops.aten, name)]
    if missing:
        raise RuntimeError(f"torch: expected a version with {missing[0]}, such as {KNOWN}, got {torch.__version__}")
    if not torch.cuda.is_available():
        raise RuntimeError("torch: expected one that sees a GPU; on a CPU its attention does not go through this hook")
    before = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl(NAME, register_fn=Registered)
    try:
        attention.activate_flash_attention_impl(NAME)
    except BaseException:
        # The hook has let go of what was active by then.
        _restore(before)
        raise
    handle = Activation(before)
    _active.append(handle)
    return handle


def _restore(name: str | None) -> None:
    """Make an implementation the active one, unless it is."""
    attention: Any = nn.attention
    if attention.current_flash_attention_impl() == name:
        return
    if name is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(name)
