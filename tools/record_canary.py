"""Put the recorded bits of GPUs into the packages' canary files: `python tools/record_canary.py FILE ...`.

The files are of `rl-kernels doctor --canary --json`, made on GPUs on which `rl-kernels check --check-grad` passes with
every backend. Nothing is written if two files differ in the bits of one architecture. Those of `native` are left out:
they are PyTorch's, and may change with each of its versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_kernels.core.canary import file_of
from rl_kernels.core.command import Parser, write_json
from rl_kernels.core.registry import kernel_registry


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the records of all documents, by operator and architecture; ``ValueError`` if two differ."""
    by_operator: dict[str, Any] = {}
    for document in documents:
        for arch, operators in document.items():
            for name, backends in operators.items():
                known = by_operator.setdefault(name, {}).setdefault(arch, {})
                for backend, dtypes in backends.items():
                    if backend == "native":
                        continue
                    if known.setdefault(backend, dtypes) != dtypes:
                        raise ValueError(f"{backend} of {name} on {arch}: the files have different bits")
    return by_operator


def main(argv: Sequence[str] | None = None) -> int:
    """Write the records; return the exit status."""
    parser = Parser("record_canary.py", __doc__ or "")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        records_by_operator = merged([json.loads(file.read_text(encoding="utf-8")) for file in args.files])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, records in records_by_operator.items():
        file = file_of(kernel_registry.load(name).canary)
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        write_json(file, {**known, **records})
        print(f"{file}: {', '.join(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
