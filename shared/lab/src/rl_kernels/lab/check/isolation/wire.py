"""Messages between the checker and a candidate's process: plain values and tensors, as bytes prefixed by their length.

A tensor is sent as its whole storage with size, strides and offset, so that gaps and overlaps stay as they were; two
tensors of one storage share it again. Reading a message never runs code from it: only plain values and tensors are
accepted.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import IO, Any

import torch

LENGTH = struct.Struct("<Q")
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=5)
        self._sent: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return "dtype", str(value)
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()
        key = storage._cdata
        held_bytes = None if key in self._sent else content(storage)
        self._sent[key] = storage
        place = tuple(value.size()), value.stride(), value.storage_offset()
        attributes = {name: attribute for name, attribute in vars(value).items() if isinstance(attribute, torch.Tensor)}
        return "tensor", str(value.dtype), str(value.device), place, key, held_bytes, attributes


def content(storage: torch.UntypedStorage) -> bytes:
    """Return all bytes of a storage."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return raw.cpu().numpy().tobytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a message may hold plain values and tensors, not {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "dtype":
            return DTYPES[pid[1]]
        _, dtype, device, (size, stride, offset), key, held_bytes, attributes = pid
        if held_bytes is not None:
            raw = torch.frombuffer(bytearray(held_bytes or b"\0"), dtype=torch.uint8).to(device)
            self._storages[key] = raw.untyped_storage()
        value = torch.empty(0, dtype=DTYPES[dtype], device=device).set_(self._storages[key], offset, size, stride)
        for name, attribute in attributes.items():
            setattr(value, name, attribute)
        return value


def packed(message: Any) -> memoryview:
    """Return the bytes of a message: plain values, containers of them, dtypes and strided tensors."""
    buffer = io.BytesIO()
    buffer.seek(LENGTH.size)
    _Pickler(buffer).dump(message)
    length = buffer.tell() - LENGTH.size
    buffer.seek(0)
    buffer.write(LENGTH.pack(length))
    return buffer.getbuffer()


def write(file: IO[bytes], message: Any) -> None:
    """Write a message."""
    file.write(packed(message))
    file.flush()


def parse(message: bytes) -> Any:
    """Return the message that these bytes hold.

    Raises:
        pickle.UnpicklingError: they hold something other than plain values and tensors.
    """
    return _Unpickler(io.BytesIO(message)).load()


def answer(message: Any) -> dict[str, Any]:
    """Return an answer of a candidate's process if it has one of the three known forms, else raise ``ValueError``."""
    if not isinstance(message, dict) or not message.keys() & {"value", "misbehaved", "unusable"}:
        raise ValueError("expected a value or an error")
    return message


def read(file: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: the other end is closed.
    """
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return parse(file.read(LENGTH.unpack(head)[0]))
