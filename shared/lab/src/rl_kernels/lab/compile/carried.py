"""Refuse loops in which Triton's compiler loses a value.

Triton takes a name for carried by a loop if its value differs after one pass over the body. With ``a = b = zero``
before a loop and ``a, b = new, a`` in it, ``b`` is zero before that pass and after it: it stays zero in all steps,
without an error. The interpreter runs Python and is right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


class LostValue(RuntimeError):
    """A name is assigned in a loop, and Triton takes it for a constant."""


@contextmanager
def refusing() -> Iterator[None]:
    """Let the compilation of a kernel with such a loop raise ``LostValue``, which keeps it out of Triton's cache."""
    from triton.compiler import code_generator

    generator, handles = code_generator.CodeGenerator, code_generator.flatten_values_to_ir
    if not hasattr(generator, "_find_carries"):
        # An older Triton compares values in another place.
        yield
        return
    find, visit = generator._find_carries, generator.visit_compound_statement

    def find_carries(self: Any, node: ast.For | ast.While, liveins: dict[str, Any], *args: Any, **names: Any) -> Any:
        # The values before the pass: it may change them in place.
        before = {name: handles([value]) for name, value in liveins.items() if code_generator._is_triton_value(value)}

        def visit_body(self: Any, statements: list[ast.stmt]) -> None:
            if statements is not node.body:
                return visit(self, statements)
            self.local_defs = {}
            visit(self, statements)
            lost = [name for name in self.local_defs if name in before and handles([self.lscope[name]]) == before[name]]
            if lost:
                place = f"{self.file_name}:{self.begin_line + node.lineno}"
                raise LostValue(f"{place}: Triton takes {', '.join(lost)} for constant in this loop")

        with patch.object(generator, "visit_compound_statement", visit_body):
            return find(self, node, liveins, *args, **names)

    with patch.object(generator, "_find_carries", find_carries):
        yield
