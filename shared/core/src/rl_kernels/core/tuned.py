"""Values tuned on a GPU and frozen in a package's ``tuned/h200.json``. Nothing is timed at run time."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class MalformedTable(ValueError):
    """A tuned table lacks a value or has a wrong one; the message names the file, the key and what was expected."""


@functools.cache
def tuned(package: str) -> dict[str, Any]:
    """Return the launch configurations of a package, measured on an H200.

    Raises:
        MalformedTable: the file holds no JSON object.
    """
    try:
        table = json.loads(_file(package).read_text(encoding="utf-8"))
    except ValueError as error:
        raise MalformedTable(f"{_file(package)}: expected JSON: {error}") from error
    return _checked(package, "", table, dict)


def entry(package: str, *keys: str, kind: type[T]) -> T:
    """Return the value under nested keys of a package's table, as ``kind``.

    Args:
        package: import path of the package.
        keys: from the outermost to the innermost.
        kind: ``int``, ``float``, ``bool``; a dataclass of such fields; a tuple of one kind, or a dict of names to one.

    Raises:
        MalformedTable: the value is missing, or of another kind.
    """
    value: Any = tuned(package)
    for depth, key in enumerate(keys):
        place = ".".join(keys[:depth])
        if key not in _checked(package, place, value, dict):
            raise MalformedTable(f"{_file(package)}: {place or 'the table'}: expected a key {key!r}")
        value = value[key]
    return _parsed(package, ".".join(keys), value, kind)


def _parsed(package: str, place: str, value: Any, kind: Any) -> Any:
    """Return a value of the table as ``kind``."""
    if get_origin(kind) is tuple:
        items = enumerate(_checked(package, place, value, list))
        return tuple(_parsed(package, f"{place}[{index}]", item, get_args(kind)[0]) for index, item in items)
    if get_origin(kind) is dict:
        values = _checked(package, place, value, dict)
        return {key: _parsed(package, f"{place}.{key}", item, get_args(kind)[1]) for key, item in values.items()}
    if not is_dataclass(kind):
        return _checked(package, place, value, kind)
    values, expected = _checked(package, place, value, dict), {member.name: member for member in fields(kind)}
    missing = [name for name, member in expected.items() if name not in values and member.default is MISSING]
    unknown = [name for name in values if name not in expected]
    if missing or unknown:
        raise MalformedTable(
            f"{_file(package)}: {place}: expected the keys {', '.join(expected)}, got {', '.join(values) or 'none'}"
        )
    hints, make = get_type_hints(kind), cast(Callable[..., Any], kind)
    return make(**{name: _parsed(package, f"{place}.{name}", item, hints[name]) for name, item in values.items()})


def _checked(package: str, place: str, value: Any, kind: type) -> Any:
    """Return a value if it is of that kind: an integer is a float too; true and false are not numbers."""
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        noun = {dict: "an object", list: "a list", int: "an integer", float: "a number", bool: "true or false"}[kind]
        raise MalformedTable(f"{_file(package)}: {place or 'the table'}: expected {noun}, got {json.dumps(value)[:40]}")
    return value


def _file(package: str) -> Any:
    return files(package) / "tuned" / "h200.json"
