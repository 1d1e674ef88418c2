"""Arguments that group options: a function takes ``objective=Objective(...)``, cases name the options separately."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

KEYWORD = inspect.Parameter.KEYWORD_ONLY


@functools.cache
def members(kind: type) -> dict[str, Any]:
    """Return the fields of a frozen dataclass or NamedTuple, with their defaults."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return dict(kind._field_defaults)  # type: ignore[attr-defined]


@functools.cache
def own_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's own arguments."""
    return frozenset(inspect.signature(function).parameters)


def grouped(own: frozenset[str], groups: Mapping[str, type], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments given one by one into groups, for a function whose own arguments are ``own``.

    A member that is also an argument of the function stays one, unless its group is needed for another member.
    """
    merged = dict(arguments)
    for name, kind in groups.items():
        present = [member for member in members(kind) if member in arguments]
        if name in own and any(member not in own for member in present):
            merged[name] = _make_group(kind, {member: merged.pop(member) for member in present})
    return merged


def _make_group(kind: type, arguments: dict[str, Any]) -> Any:
    if any(isinstance(value, torch.Tensor) or not isinstance(value, Hashable) for value in arguments.values()):
        return kind(**arguments)
    # Create the group once, as users do, so that timings do not include it.
    return _make_group_once(kind, **arguments)


@functools.lru_cache(256, typed=True)
def _make_group_once(kind: type, **arguments: Any) -> Any:
    return kind(**arguments)


def spread(function: Callable[..., Any], groups: Mapping[str, type]) -> inspect.Signature:
    """Return the signature of a function with the members of each group in place of the group."""
    signature = inspect.signature(function)
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.setdefault(name, parameter)
            continue
        for member, default in members(groups[name]).items():
            parameters[member] = inspect.Parameter(member, KEYWORD, default=default)
    return signature.replace(parameters=list(parameters.values()))


def flat(function: Callable[..., Any], groups: Mapping[str, type]) -> Callable[..., Any]:
    """Return a function that takes the members of each group as arguments; ``function`` itself if it has no group."""
    own = own_parameters(function)
    if not own & groups.keys():
        return function

    @functools.wraps(function)
    def call(*tensors: Any, **arguments: Any) -> Any:
        return function(*tensors, **grouped(own, groups, arguments))

    call.__signature__ = spread(function, groups)  # type: ignore[attr-defined]
    return call
