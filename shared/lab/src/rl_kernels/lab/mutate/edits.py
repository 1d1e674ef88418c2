"""The edits of a source: each replaces the text of one node of its syntax tree by the text of a changed one."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift},
    **{ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And},
}
COMPARISONS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
PAIRS = (("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("any", "all"), ("zeros", "ones"))
OTHER_NAME = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
COMMUTATIVE = {"min", "max", "minimum", "maximum"}
NO_CHANGE = {"check=False"}
"""Keywords that change no result: defaults."""
SCHEDULES = {"Schedule", "Tile", "KeyTile"}
OPTIONS = {"num_warps", "num_stages", "strict"}
"""Calls and keywords of tiles, warps and stages, which change only the speed on a GPU; and a guard of what is so."""
LEFT_ALONE = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.AnnAssign)
"""Nodes that hold nothing a call computes: messages, imports and types."""


class Edit(NamedTuple):
    """One edit: the bytes from ``start`` to ``end`` of the source, which are ``old``, become ``new``."""

    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        """Return the source with the edit."""
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()


def edits_of(source: str) -> list[Edit]:
    """Return every edit of a source, in the order of the nodes."""
    text = source.encode()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    edits = []
    for node in _walk(ast.parse(source)):
        for kind, place, new in _changes(node):
            start = lines[place.lineno - 1] + place.col_offset
            end = lines[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            edits.append(Edit(kind, place.lineno, start, end, text[start:end].decode(), new))
    return edits


def drawn(sources: Mapping[str, str], seed: int) -> Iterator[tuple[str, Edit]]:
    """Yield the edits of the modules, by module name, in an order that the seed gives.

    The place of an edit depends on the seed, its module, the code of its line and what it changes there: an edit of
    another line leaves it among those that are drawn.
    """
    every = []
    for name, source in sources.items():
        lines, occurrences = source.splitlines(), Counter[tuple[str, ...]]()
        for edit in edits_of(source):
            form = lines[edit.line - 1].strip(), edit.kind, edit.old, edit.new
            occurrences[form] += 1
            text = json.dumps((seed, name, *form, occurrences[form]))
            every.append((hashlib.sha256(text.encode()).digest(), name, edit))
    for _, name, edit in sorted(every):
        yield name, edit


def statement_at(source: str, line: int) -> range | None:
    """Return the lines of the smallest statement at a line of a function; ``None`` if importing the module runs it.

    Of a statement with a body, these are the lines before its body.
    """
    at_line = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and line in _lines_of(node, whole=True)
    ]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if not any(isinstance(node, functions) and line >= node.body[0].lineno for node in at_line):
        return None
    smallest = _lines_of(min(at_line, key=lambda node: len(_lines_of(node, whole=True))), whole=False)
    return smallest if line in smallest else range(line, line + 1)


def _lines_of(node: ast.stmt, *, whole: bool) -> range:
    body = getattr(node, "body", None)
    if whole or not body or body[0].lineno == node.lineno:
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(node.lineno, body[0].lineno)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or _is_of_types(node, name):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, LEFT_ALONE) and not _is_skipped(child):
                yield from _walk(child)


def _is_skipped(node: ast.AST) -> bool:
    """Say whether a node is an overload, which is for type checkers, or a schedule."""
    if isinstance(node, ast.FunctionDef):
        return "overload" in map(ast.unparse, node.decorator_list)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SCHEDULES
    return isinstance(node, ast.keyword) and node.arg in OPTIONS


def _is_of_types(node: ast.AST, name: str) -> bool:
    """Say whether a field of a node is read by type checkers alone."""
    if isinstance(node, ast.ClassDef):
        return name == "keywords"
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield (kind, the node that is replaced, its new text)."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield "operator", node, _changed(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", node, _changed(node, ops=[COMPARISONS[type(node.ops[0])]()])
        if isinstance(node.ops[0], ORDERED):
            yield from _off_by_one("bound", node.comparators[0])
    if isinstance(node, ast.Slice) and node.upper is not None:
        yield from _off_by_one("bound", node.upper)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield "operator", node, f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.IfExp):
        yield "branch", node, f"({ast.unparse(node.body)})"
        yield "branch", node, f"({ast.unparse(node.orelse)})"
    if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield "branch", node.test, "True"
        yield "branch", node.test, "False"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "statement", node, "pass"
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    if isinstance(node, ast.Call):
        yield from _calls(node)


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.expr, str]]:
    if isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, str(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant", node, repr(node.value * 2 or 1.0)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.expr, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for index, keyword in enumerate(node.keywords):
        if keyword.arg not in OPTIONS and ast.unparse(keyword) not in NO_CHANGE:
            yield "argument", node, _changed(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
    if len(node.args) > 1 and name not in COMMUTATIVE and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        yield "argument", node, _changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if isinstance(node.func, ast.Name) and node.func.id == "range":
        yield from _off_by_one("bound", node.args[min(len(node.args) - 1, 1)])
    if name in OTHER_NAME:
        field = "attr" if isinstance(node.func, ast.Attribute) else "id"
        yield "name", node.func, _changed(node.func, **{field: OTHER_NAME[name]})
    if isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
        yield "call", node, ast.unparse(node.func.value)


def _off_by_one(kind: str, node: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    if not isinstance(node, ast.Starred | ast.Constant):
        yield kind, node, f"({ast.unparse(node)} + 1)"
        yield kind, node, f"({ast.unparse(node)} - 1)"


def _changed(node: ast.expr | ast.stmt, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    text = ast.unparse(other)
    return f"({text})" if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare) else text
