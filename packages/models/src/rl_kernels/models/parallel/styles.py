"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that leave plain local shards in a module.

PyTorch's own styles put DTensors into modules, and its reductions have no fixed order. These cut a module's parameters
and swap its class; a mesh with one dim is the group of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from rl_kernels.det_gemm.segments import STEP
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.models.parallel.layers import (
    HEADS,
    SHARED,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
    cut_norm,
)
from rl_kernels.models.parallel.ranks import TOKENS, Ranks

CUT = "_rl_kernels_cut"
"""Attribute of a parallel module: name of a parameter -> (dim that is cut, its whole size)."""
_shards_allowed: ContextVar[bool] = ContextVar("shards_allowed", default=False)


class Style(ParallelStyle):
    """A style for modules of one model.

    Args:
        ranks: shared by the styles of a model; None makes them from the mesh and ``segments``.
        segments: 2, 4 or 8, at least the number of ranks: models with the same number have the same bits.
    """

    def __init__(self, ranks: Ranks | None = None, *, segments: int = 8) -> None:
        self.ranks, self.segments = ranks, segments

    def apply(self, module: nn.Module) -> nn.Module:
        """Change a module; only for styles with ``ranks``."""
        return self._apply(module, None)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        ranks = self.ranks or Ranks(device_mesh, self.segments, cuts_tokens=False)
        self.check(module, ranks)
        self.cut(module, ranks)
        setattr(module, SHARED, ranks)
        return module

    def check(self, module: nn.Module, ranks: Ranks) -> None:
        """Raise if the module does not fit; it is not changed."""

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Keep this rank's part of the parameters, and swap the class of the module."""
        raise NotImplementedError


class ColumnParallel(Style):
    """Cuts the outputs of a linear layer, such as q_proj, k_proj, v_proj, gate_proj and up_proj."""

    def check(self, module: nn.Module, ranks: Ranks) -> None:
        """Raise if the outputs are not whole segments."""
        _check_size("out_features", _linear(module).out_features, ranks)

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Keep this rank's rows of the weight and its part of the bias."""
        linear = _linear(module)
        size = linear.out_features // ranks.size
        for name in ("weight", "bias"):
            _keep_part(linear, name, 0, (size * ranks.rank, size * (ranks.rank + 1)), ranks)
        linear.out_features = size
        module.__class__ = ColumnParallelLinear


class RowParallel(Style):
    """Cuts the inputs of a linear layer, such as o_proj and down_proj; each rank keeps the whole bias."""

    def check(self, module: nn.Module, ranks: Ranks) -> None:
        """Raise if the inputs are not whole segments."""
        _check_size("in_features", _linear(module).in_features, ranks)

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Keep this rank's columns of the weight."""
        linear = _linear(module)
        size = linear.in_features // ranks.size
        _keep_part(linear, "weight", 1, (size * ranks.rank, size * (ranks.rank + 1)), ranks)
        linear.in_features = size
        module.__class__ = RowParallelLinear


class VocabParallel(Style):
    """Cuts the vocabulary of a head by ``vocab_shards``."""

    def check(self, module: nn.Module, ranks: Ranks) -> None:
        """Raise if the module is no linear layer."""
        _linear(module)

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Keep this rank's rows of the weight and its part of the bias."""
        head = _linear(module)
        vocab = head.out_features
        start, stop = vocab_shards(vocab, ranks.size)[ranks.rank]
        for name in ("weight", "bias"):
            _keep_part(head, name, 0, (start, stop), ranks)
        head.out_features = stop - start
        module.__class__ = VocabParallelHead
        module.vocab_size = vocab  # type: ignore[assignment]


class TokenNorm(Style):
    """For norms of hidden states, whose tokens are cut with sequence parallelism."""

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Swap the class; the parameters stay whole."""
        module.__class__ = cut_norm(type(module), TOKENS)  # type: ignore[arg-type]


class HeadNorm(Style):
    """For norms of queries and keys, whose heads are cut."""

    def cut(self, module: nn.Module, ranks: Ranks) -> None:
        """Swap the class; the parameters stay whole."""
        module.__class__ = cut_norm(type(module), HEADS)  # type: ignore[arg-type]


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"module: expected an nn.Linear, got {type(module).__name__}")
    if hasattr(module, SHARED):
        raise ValueError("module: expected a linear layer that is whole, this one is cut already")
    for name, value in module.named_parameters():
        if getattr(value, "main_grad", None) is not None:
            raise ValueError(f"{name}.main_grad: expected none yet; make it after the weight is cut")
    return module


def _check_size(name: str, size: int, ranks: Ranks) -> None:
    if size % (STEP * ranks.segments):
        raise ValueError(
            f"{name}: expected a multiple of {STEP * ranks.segments} (16 for each of {ranks.segments} segments), "
            f"got {size}"
        )


def _keep_part(module: nn.Module, name: str, dim: int, span: tuple[int, int], ranks: Ranks) -> None:
    """Replace a parameter by a copy of this rank's part, so that the whole one can be freed."""
    old = getattr(module, name)
    if old is None or ranks.size == 1:
        return
    start, stop = span
    part = old.detach().narrow(dim, start, stop - start).clone()
    setattr(module, name, nn.Parameter(part, requires_grad=old.requires_grad))
    if not hasattr(module, CUT):
        module.register_state_dict_pre_hook(_refuse_to_save)
        module.register_load_state_dict_pre_hook(_refuse_whole)
    setattr(module, CUT, {**getattr(module, CUT, {}), name: (dim, old.shape[dim])})


@contextmanager
def shards_allowed() -> Iterator[None]:
    """Let ``state_dict`` return this rank's shards."""
    token = _shards_allowed.set(True)
    try:
        yield
    finally:
        _shards_allowed.reset(token)


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse to return one rank's shards as the model's weights; every way of saving calls ``state_dict``."""
    if not _shards_allowed.get():
        raise RuntimeError(
            f"state_dict: {prefix}{next(iter(getattr(module, CUT)))} is cut over ranks. Call "
            "rl_kernels.models.parallel.full_state_dict(model) on all ranks for whole weights; to save them: "
            "model.save_pretrained(folder, state_dict=...). named_parameters() gives this rank's shards"
        )


def _refuse_whole(module: nn.Module, state: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
    """Report an error that names ``load_full_state_dict`` if a weight to load is whole."""
    errors: list[str] = arguments[-1]
    for name, (dim, whole) in getattr(module, CUT).items():
        value = state.get(prefix + name)
        if value is not None and value.ndim > dim and value.shape[dim] == whole:
            text = f"{prefix}{name} is cut over ranks, and the given weight is whole"
            errors.append(f"{text}: call rl_kernels.models.parallel.load_full_state_dict(model, state)")
