"""Agreement of ranks on a call before they exchange tensors: if they disagree, each rank raises the same error."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed.groups import gather_into, group_size

RECORD = 4096
"""Bytes that each rank sends."""
SHOWN = 60
"""Characters of a value that a message shows."""
TEXT = 1500
"""Largest number of bytes of an error that are sent to other ranks."""
FACTORS = (0x9E3779B1, 0x85EBCA77)
"""Factors of the weights of rows and of columns: different primes, so that rows and columns cannot be exchanged."""
KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}
"""Errors that keep their type on other ranks; any other becomes a RuntimeError."""

Validate = bool | Literal["ranks"]
"""True: check a call's arguments, and compare the first call of a kind over ranks; ``"ranks"`` compares every call."""
_agreed: WeakKeyDictionary[ProcessGroup, set[Hashable]] = WeakKeyDictionary()
"""Kinds of calls that the ranks of a group have compared."""


def agree_on_kind(
    name: str,
    group: ProcessGroup,
    validate: Validate,
    kind: Hashable,
    error: Exception | None,
    same: Callable[[], Mapping[str, object]],
    own: Mapping[str, int] | None = None,
    check: Callable[[list[dict[str, int]]], None] | None = None,
) -> None:
    """Compare a call on all ranks as ``agree`` does, if it is the first of its kind or every call is to be compared.

    An exchange at each call would cost more than most calls, so later ones are compared with ``validate="ranks"`` or
    under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` alone. An error of one rank is then raised there, and all other ranks wait
    for it, as in the collectives of PyTorch.

    Args:
        name: as in ``agree``.
        group: as in ``agree``.
        validate: False compares nothing.
        kind: must be the same on all ranks whose calls agree: no size of a rank's own shard.
        error: as in ``agree``.
        same: returns what ``agree`` compares.
        own: as in ``agree``.
        check: called with ``own`` of each rank; raises if they do not fit.

    Raises:
        TypeError, ValueError, RuntimeError: as in ``agree``.
    """
    known = _agreed.setdefault(group, set())
    if not validate or (kind in known and validate != "ranks" and not _debug_is_detail()):
        if error is not None:
            raise error
        return
    own_of_ranks = agree(name, group, error, {} if error is not None else same(), own)
    if check is not None:
        check(own_of_ranks)
    known.add(kind)


def _debug_is_detail() -> bool:
    return bool(distributed.get_debug_level() == distributed.DebugLevel.DETAIL)


def agree(
    name: str,
    group: ProcessGroup,
    error: Exception | None,
    same: Mapping[str, object],
    own: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """Compare a call on all ranks; raise the same error on each if one of them cannot run it, or if they disagree.

    It costs one all-gather of 4 KiB a rank, and on NCCL a sync of the GPU.

    Args:
        name: name of the function that runs, as users call it.
        group: process group of the call.
        error: the error of this rank's checks, or None.
        same: argument -> value, compared as text: must be equal on all ranks.
        own: name -> integer of this rank, which other ranks need.

    Returns:
        ``own`` of each rank.

    Raises:
        TypeError, ValueError: a rank has such an error, or values differ; the message says on which rank.
        RuntimeError: a rank has another error.
    """
    size = group_size(group)
    if size == 1:
        if error is not None:
            raise error
        return [dict(own or {})]
    record: dict[str, Any] = {"name": name, "error": None, "same": {}, "own": dict(own or {})}
    if error is not None:
        record["error"] = [_kind(error), str(error).encode()[:TEXT].decode(errors="ignore")]
    else:
        record["same"] = {key: str(value) for key, value in same.items()}
    records = _gathered_records(record, group, size)
    for rank, other in enumerate(records):
        if other["error"] is not None:
            kind, text = other["error"]
            raise KINDS.get(kind, RuntimeError)(f"{text} (on rank {rank} of process_group)") from error
    named = dict.fromkeys(key for other in records for key in other["same"])
    for key in ("name", *named):
        values = [other["name"] if key == "name" else other["same"].get(key) for other in records]
        if any(value != values[0] for value in values):
            called = "function" if key == "name" else key
            shown = ", ".join(f"{value if key == 'name' else (value or ['nothing'])[0]}" for value in values)
            raise ValueError(f"{called}: expected the same on every rank of process_group, got {shown}")
    return [other["own"] for other in records]


def fingerprint(x: torch.Tensor) -> int:
    """Return a number of 64 bits that differs, almost surely, between tensors of other bits; it syncs with a GPU."""
    if not x.numel():
        return 0
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    # Sums of integers wrap around, and have no order. Weights are odd, so that no bit of a number is lost.
    rows = x.detach().contiguous().view(bits).reshape(-1, x.shape[-1] if x.ndim else 1)
    down, along = (
        torch.arange(n, device=x.device) * 2 * factor + 1 for n, factor in zip(rows.shape, FACTORS, strict=True)
    )
    step = max(1, (1 << 22) // rows.shape[1])
    sums = [
        ((part.long() * along).sum(1) * weight).sum()
        for part, weight in zip(rows.split(step), down.split(step), strict=True)
    ]
    return int(torch.stack(sums).sum())


def _kind(error: Exception) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(error, kind)), type(error).__name__)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """Return a record of fixed size: of each value the part that a message shows, and a checksum of the whole."""
    for shown in (SHOWN, 0):
        same = {key: [value[:shown], zlib.crc32(value.encode())] for key, value in record["same"].items()}
        text = json.dumps({**record, "same": same}, ensure_ascii=False).encode()
        if len(text) <= RECORD:
            break
    assert len(text) <= RECORD, "only too many values do not fit"
    return text.ljust(RECORD)


def _gathered_records(record: Mapping[str, Any], group: ProcessGroup, size: int) -> list[dict[str, Any]]:
    kinds = {device.type for device in group._device_types}
    device = torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(list(_encoded(record)), dtype=torch.uint8, device=device)
    received = mine.new_empty(size * RECORD)
    gather_into(received, mine, group)
    content = received.cpu().numpy().tobytes()
    return [json.loads(content[rank * RECORD : (rank + 1) * RECORD]) for rank in range(size)]
