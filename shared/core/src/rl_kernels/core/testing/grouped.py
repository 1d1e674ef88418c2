"""Arguments that group others: a function takes ``objective=Objective(...)``, cases give its members one by one."""

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
    """Return the fields of a frozen dataclass or NamedTuple, with the default of each."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return dict(kind._field_defaults)  # type: ignore[attr-defined]


@functools.cache
def named_apart(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's own arguments."""
    return frozenset(inspect.signature(function).parameters)


def grouped(own: frozenset[str], groups: Mapping[str, type], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments given one by one into groups, for a function whose own arguments are ``own``.

    A member that is also an argument of the function stays one, unless its group is needed for another member.
    """
    found = dict(arguments)
    for name, kind in groups.items():
        given = [member for member in members(kind) if member in arguments]
        if name in own and any(member not in own for member in given):
            found[name] = _made(kind, {member: found.pop(member) for member in given})
    return found


def _made(kind: type, given: dict[str, Any]) -> Any:
    if any(isinstance(value, torch.Tensor) or not isinstance(value, Hashable) for value in given.values()):
        return kind(**given)
    # Made once, as users do, so that timings do not include it.
    return _once(kind, **given)


@functools.lru_cache(256, typed=True)
def _once(kind: type, **given: Any) -> Any:
    return kind(**given)


def spread(function: Callable[..., Any], groups: Mapping[str, type]) -> inspect.Signature:
    """Return the signature of a function with the members of each group in place of the group."""
    signature = inspect.signature(function)
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if name not in groups:
            found.setdefault(name, parameter)
            continue
        for member, default in members(groups[name]).items():
            found[member] = inspect.Parameter(member, KEYWORD, default=default)
    return signature.replace(parameters=list(found.values()))


def flat(function: Callable[..., Any], groups: Mapping[str, type]) -> Callable[..., Any]:
    """Return a function that takes the members of each group as arguments; ``function`` itself if it has no group."""
    own = named_apart(function)
    if not own & groups.keys():
        return function

    @functools.wraps(function)
    def call(*tensors: Any, **arguments: Any) -> Any:
        return function(*tensors, **grouped(own, groups, arguments))

    call.__signature__ = spread(function, groups)  # type: ignore[attr-defined]
    return call
