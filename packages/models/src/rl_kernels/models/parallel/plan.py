"""The plan of a parallel model: the modules to cut and their styles, from the model's own ``base_model_tp_plan``."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from rl_kernels.models import pretrained
from rl_kernels.models.parallel.layers import SHARED
from rl_kernels.models.parallel.ranks import Ranks
from rl_kernels.models.parallel.styles import ColumnParallel, HeadNorm, RowParallel, Style, TokenNorm, VocabParallel
from rl_kernels.models.swap import original_of

COLUMN, ROW, HEAD_NORM = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The styles of ``base_model_tp_plan`` that are known here."""


class Plan(NamedTuple):
    """The changes that ``parallelize`` makes to a model.

    Attributes:
        styles: the modules to change, by name.
        blocks: the modules whose inputs are gathered if tokens are cut: attentions and MLPs.
        first: the first layer, at which tokens are cut.
        last: the norm after the last layer, at which tokens are gathered.
        body: the model without its head.
    """

    styles: dict[str, Style]
    blocks: list[nn.Module]
    first: nn.Module
    last: nn.Module
    body: nn.Module


def plan_of(model: nn.Module, ranks: Ranks) -> Plan:
    """Return the plan of a model.

    Raises:
        TypeError: the model is not one ``PreTrainedModel`` of transformers.
        ValueError: it has no plan of tensor parallelism, or a plan with unknown styles; or with sequence parallelism a
            layer has other parameters than linear layers and norms.
    """
    body = _body(model)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is body)
    modules = dict(body.named_modules())
    styles: dict[str, Style] = {}
    blocks: dict[str, nn.Module] = {}
    for name, kind in _kinds(body, modules):
        if kind in (COLUMN, ROW):
            styles[prefix + name] = (ColumnParallel if kind == COLUMN else RowParallel)(ranks)
            parent = name.rpartition(".")[0]
            blocks[parent] = modules[parent]
    for name, module in modules.items():
        if "norm" not in type(module).__name__.lower() or not any(True for _ in module.parameters(recurse=False)):
            continue
        inside = name.rpartition(".")[0] in blocks
        styles[prefix + name] = HeadNorm(ranks) if inside else TokenNorm(ranks)
        if inside:
            _check_head_norm(name, module, body)
    layers, last = getattr(body, "layers", None), getattr(body, "norm", None)
    if not isinstance(layers, nn.ModuleList) or last is None or not len(layers):
        raise ValueError(f"model: expected layers and a last norm, as in Llama; {type(body).__name__} has others")
    if ranks.cuts_tokens:
        _check_layers(prefix, layers, styles, {id(module): name for name, module in model.named_modules()})
    head = _head(model)
    if head is not None:
        styles[head] = VocabParallel(ranks)
    _check_heads(body, ranks)
    return Plan(styles, list(blocks.values()), layers[0], last, body)


def _body(model: nn.Module) -> Any:
    parts = [module for module in model.modules() if pretrained.is_pretrained(module)]
    if not parts or parts[0] is not model:
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    body = getattr(model, "base_model", model)
    if any(part is not model and part is not body for part in parts):
        raise ValueError("model: expected a model of text alone, this one has several parts")
    return body


def _kinds(body: Any, modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the modules of the model's own plan with their styles."""
    patterns = getattr(body.config, "base_model_tp_plan", None)
    if not patterns:
        raise ValueError(f"model: expected a config with base_model_tp_plan, {type(body).__name__} has none")
    for pattern, kind in patterns.items():
        # A config may name parts that only some of its models have.
        matches = [name for name in modules if fnmatchcase(name, pattern)]
        if matches and kind not in (COLUMN, ROW, HEAD_NORM):
            raise ValueError(f"model: expected linear layers that are cut by columns or rows; {matches[0]} is {kind!r}")
        for name in matches:
            if hasattr(modules[name], SHARED):
                raise ValueError(f"model: expected a model that is whole; {name} is cut already")
            if kind != HEAD_NORM and original_of(modules[name]) is not nn.Linear:
                raise ValueError(f"model: expected an nn.Linear, {name} is a {original_of(modules[name]).__name__}")
            yield name, kind


def _check_head_norm(name: str, module: nn.Module, body: Any) -> None:
    size = getattr(body.config, "head_dim", None) or body.config.hidden_size // body.config.num_attention_heads
    if any(value.shape != (size,) for value in module.parameters()):
        raise ValueError(f"model: expected norms of single heads inside attention; {name} spans several heads")


def _check_layers(prefix: str, layers: nn.ModuleList, styles: dict[str, Style], names: dict[int, str]) -> None:
    for module in layers.modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and names[id(module)] not in styles:
            raise ValueError(
                f"sequence_parallel: expected linear layers of the plan and norms, {names[id(module)]} has {own[0]}"
            )


def _check_heads(body: Any, ranks: Ranks) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(body.config, name, None)
        if count is not None and count % ranks.size:
            raise ValueError(f"mesh: expected a number of ranks that divides {name} = {count}, got {ranks.size}")


def _head(model: Any) -> str | None:
    """Return the name of the head if its vocabulary is to be cut; a head tied to the embedding stays whole."""
    head = model.get_output_embeddings()
    if head is None or original_of(head) is not nn.Linear:
        return None
    inputs = model.get_input_embeddings()
    if inputs is not None and inputs.weight is head.weight:
        return None
    return next(name for name, module in model.named_modules() if module is head)
