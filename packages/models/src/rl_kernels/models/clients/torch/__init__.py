"""PyTorch's flash attention on det_attention: ``activate()``, through the hook of ``torch.nn.attention``.

``scaled_dot_product_attention`` with its flash backend, ``varlen_attn``, and all code on top of them then run
det_attention on a GPU, forward and backward. Written for PyTorch 2.13.
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
"""Name of the implementation in ``current_flash_attention_impl()`` and ``list_flash_attention_impls()``."""
KNOWN = "2.11 to 2.13"
"""Versions of PyTorch with this hook; the ops of 2.11 do not take pages."""
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
"""Ops that the older of these versions lack."""

_active: list[Activation] = []
"""Activations that are not undone, in the order of ``activate``."""


class Registered:
    """Registration of our kernels in PyTorch's dispatcher, until ``remove``; the hook's handle."""

    def __init__(self, key: str = "CUDA") -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            # Overriding PyTorch's kernels is the purpose of the hook; the first override raises a warning.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in OPS.items():
                if hasattr(torch.ops.aten, name):
                    self._library.impl(name, kernel)

    def remove(self) -> None:
        """Restore PyTorch's kernels; a second call does nothing."""
        # A library removes its kernels from the dispatcher when its last reference is gone.
        self._library = None


class Activation:
    """Handle of the active implementation, until ``undo`` or the end of a ``with`` block.

    Attributes:
        before: name of the implementation that was active before; None is PyTorch's FlashAttention-2.
    """

    def __init__(self, before: str | None) -> None:
        self.before = before

    def undo(self) -> None:
        """Activate the implementation that was active before; a second call does nothing.

        Activations may be undone in any order; det_attention stays active until the last one is undone.
        """
        if self not in _active:
            return
        place = _active.index(self)
        del _active[place]
        if place == len(_active):
            _restore(self.before)
        elif _active[place].before == NAME:
            # The next activation replaced this one: it must restore what was active before this one.
            _active[place].before = self.before

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def activate() -> Activation:
    """Replace PyTorch's flash attention by det_attention, on every GPU of this process, until it is undone.

    Use it as ``with activate(): ...``, or as ``handle = activate()`` and later ``handle.undo()``. Calls nest. After the
    first call, the hook's ``activate_flash_attention_impl("rl_kernels")`` does the same.

    ``scaled_dot_product_attention`` uses flash attention for BF16 and FP16 without a mask; if causal, only with as many
    queries as keys. In all other cases it silently uses other code of PyTorch; within
    ``sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` it raises instead. Dropout in attention, ALiBi and gradients of a cache
    raise.

    Returns:
        a handle that undoes it; it is a context manager.

    Raises:
        RuntimeError: PyTorch has no such hook or sees no GPU; on a CPU its attention does not use the hook.
    """
    attention: Any = nn.attention
    missing = [f"torch.nn.attention.{name}" for name in HOOK if not hasattr(attention, name)]
    missing += [f"torch.ops.aten.{name}" for name in OPS if name not in LATER and not hasattr(torch.ops.aten, name)]
    if missing:
        raise RuntimeError(f"torch: expected a version with {missing[0]}, such as {KNOWN}, got {torch.__version__}")
    if not torch.cuda.is_available():
        raise RuntimeError("torch: expected one that sees a GPU; on a CPU its attention does not use this hook")
    before = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl(NAME, register_fn=Registered)
    try:
        attention.activate_flash_attention_impl(NAME)
    except BaseException:
        # By now the hook has deactivated the implementation before.
        _restore(before)
        raise
    handle = Activation(before)
    _active.append(handle)
    return handle


def _restore(name: str | None) -> None:
    """Activate an implementation, unless it is active."""
    attention: Any = nn.attention
    if attention.current_flash_attention_impl() == name:
        return
    if name is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(name)
