"""The parameters of a CUDA kernel as its source declares them, for tests: names, letters of the signature, types."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import NamedTuple

import torch

from rl_kernels.core.cuda.program import Program

LETTERS = {"i64": "q", "int": "i", "float": "f", "TensorMap": "T"}
POINTED = {
    **{"i64": torch.int64, "int": torch.int32, "float": torch.float32, "signed char": torch.int8},
    "Norm": torch.float32,
}
"""The dtype behind a typed pointer (``Norm``: pairs of it); ``char`` and ``void`` pointers have none."""
DECLARED = re.compile(r"(?:const )?(?:__grid_constant__ )?(signed char|\w+)\s*(.*)")

INCLUDED = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
FLAGGED = re.compile(r"^#if (\w+)\n((?:(?!#else).)*?)^#endif\n", re.DOTALL | re.MULTILINE)


class Parameter(NamedTuple):
    """One parameter, or one member of a parameter that is a struct.

    Attributes:
        name: name in the source.
        letter: letter in the signature.
        points_to: dtype that a typed pointer points to.
    """

    name: str
    letter: str
    points_to: torch.dtype | None


def parameters_of(program: Program, entry: str) -> list[Parameter]:
    """Return the parameters of a kernel in order, with each struct replaced by its members."""
    return [member for members in _declared_parameters(program, entry) for member in members]


def signature_of(program: Program, entry: str) -> str:
    """Return the signature with which a kernel must be loaded."""
    signature = ""
    for members in _declared_parameters(program, entry):
        letters = "".join(member.letter for member in members)
        signature += f"({letters})" if len(members) > 1 else letters
    return signature


@functools.cache
def _declared_parameters(program: Program, entry: str) -> list[list[Parameter]]:
    file, defines = program.file, dict(program.defines)
    # Drop the code that unset flags leave out.
    text = FLAGGED.sub(lambda block: block[2] if defines.get(block[1]) else "", _source(program.package, file))
    match = re.search(rf'extern "C" __global__[^;{{]*?\b{entry}\(([^)]*)\)', text)
    assert match is not None, f"{file} has no kernel {entry}"
    return [_parameter(text, " ".join(declared.split())) for declared in match[1].split(",")]


def _parameter(text: str, declared: str) -> list[Parameter]:
    match = DECLARED.fullmatch(declared)
    assert match is not None, declared
    if match[1] not in {*LETTERS, *POINTED, "char", "void"}:
        return _members(text, match[1])
    return [_plain_parameter(match[1], match[2])]


def _members(text: str, name: str) -> list[Parameter]:
    struct = re.search(rf"struct {name}(?: : (\w+))? {{(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    assert struct is not None, name
    parameters = _members(text, struct[1]) if struct[1] else []
    for line in map(str.strip, struct[2].splitlines()):
        if "(" in line:
            # Methods follow the members.
            break
        match = DECLARED.fullmatch(line.removesuffix(";")) if line else None
        if match is not None:
            parameters += [_plain_parameter(match[1], declared) for declared in match[2].split(",")]
    return parameters


def _plain_parameter(kind: str, declared: str) -> Parameter:
    name = declared.strip(" *")
    return Parameter(name, "P", POINTED.get(kind)) if "*" in declared else Parameter(name, LETTERS[kind], None)


def _source(package: str, file: str) -> str:
    """Return a file and the headers of its package that it includes, without comments."""
    names, texts = [file], []
    # The list grows as headers include others.
    for name in names:
        texts.append((files(package) / name).read_text(encoding="utf-8"))
        names += [header for header in INCLUDED.findall(texts[-1]) if header not in names]
    return re.sub(r"//.*", "", "\n".join(texts))
