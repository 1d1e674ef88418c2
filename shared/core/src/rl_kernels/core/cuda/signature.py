"""Parameters of a kernel as bytes: a signature in the format of ``struct``, and the buffer of a launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

POINTER = "P"
MAP = "T"
"""A tensor map by value: ``const __grid_constant__ TensorMap``, 128 bytes at a multiple of 64."""
MAP_SIZE, MAP_ALIGNMENT = 128, 64
BRACKETS = "()"
WORD = 8
"""Bytes of which a struct's size and address are multiples."""
KNOWN = frozenset("PTbBhHiIlLqQfd?" + BRACKETS)

# What cuda.h calls CU_LAUNCH_PARAM_BUFFER_POINTER, ..._BUFFER_SIZE and ..._END.
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0


class Signature:
    """The parameters of a kernel, in their order: one letter of ``struct`` each, or ``T`` for a tensor map.

    Letters in parentheses are the members of one parameter, a struct that holds a pointer or a long long. Parameters
    are placed by their alignment, unless offsets are given: the compiler may place tensor maps differently.

    Attributes:
        text: the letters.
        places: (offset, size) of each parameter, as the compiler lays them out.
        size: bytes of all parameters.
        struct: packs them.
        pointers: which of them are addresses.
    """

    def __init__(self, text: str, offsets: Sequence[int] = ()) -> None:
        unknown = sorted(set(text) - KNOWN)
        if unknown:
            raise ValueError(f"signature: expected letters of {''.join(sorted(KNOWN))}, got {''.join(unknown)!r}")
        self.text = text
        form, places = self._laid_out(text, offsets)
        self.places = tuple(places)
        self.struct = struct.Struct(form)
        self.size = self.struct.size
        members = [letter for letter in text if letter not in BRACKETS]
        self.pointers = tuple(place for place, letter in enumerate(members) if letter == POINTER)

    def numbers(self, args: tuple[Any, ...]) -> list[Any]:
        """Return arguments as they are packed: tensors by address, None as 0, all others unchanged.

        Raises:
            IndexError: there are too few.
        """
        values = list(args)
        for place in self.pointers:
            value = values[place]
            # First, because isinstance of a tensor takes three times as long.
            if type(value) is int:
                continue
            if value is None:
                values[place] = 0
            elif isinstance(value, torch.Tensor):
                values[place] = value.data_ptr()
        return values

    @staticmethod
    def _laid_out(text: str, offsets: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        places: list[tuple[int, int]] = []
        form, begin = "@", -1
        for letter in text:
            piece = {MAP: f"{MAP_SIZE}s", "(": "", ")": ""}.get(letter, letter)
            size, filled = struct.calcsize(piece), struct.calcsize(form)
            alignment = {MAP: MAP_ALIGNMENT, "(": WORD, ")": WORD}.get(letter, size)
            offset = -(-filled // alignment) * alignment
            if offsets and begin < 0:
                offset = offsets[len(places)]
            form += "x" * (offset - filled) + piece
            if letter == "(" and begin < 0:
                begin = offset
            elif letter == ")" and begin >= 0:
                places.append((begin, offset - begin))
                begin = -1
            elif letter in BRACKETS:
                raise ValueError(f"signature: a parenthesis too many in {text!r}")
            elif begin < 0:
                places.append((offset, size))
        if begin >= 0:
            raise ValueError(f"signature: a parenthesis is not closed in {text!r}")
        return form, places


class Buffer:
    """Memory for the parameters of one launch at a time; one per kernel and host thread.

    Attributes:
        address: address of the list that a launch takes as ``extra``.
    """

    def __init__(self, signature: Signature) -> None:
        self._pack_into = signature.struct.pack_into
        self._bytes = (ctypes.c_char * max(signature.size, 1))()
        self._size = ctypes.c_size_t(signature.size)
        words = (BUFFER_POINTER, ctypes.addressof(self._bytes), BUFFER_SIZE, ctypes.addressof(self._size), END)
        self._extra = (ctypes.c_void_p * len(words))(*words)
        self.address = ctypes.addressof(self._extra)

    def fill(self, numbers: Sequence[int | float | bytes]) -> None:
        """Pack the parameters of the next launch.

        Raises:
            TypeError, struct.error: they do not fit.
        """
        self._pack_into(self._bytes, 0, *numbers)
