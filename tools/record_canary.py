"""Record the bits of det_gemm's canary for the architecture of this GPU: `python tools/record_canary.py [--out FILE]`.

Nothing is written unless all backends that promise the canonical chain agree, and the product is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from rl_kernels.core.command import Parser
from rl_kernels.core.dispatch import reason_against
from rl_kernels.core.operator import arch_of
from rl_kernels.core.validate import HALF_AND_FLOAT
from rl_kernels.det_gemm.canary import digest, name_of, operands, recorded, versions
from rl_kernels.det_gemm.op import OPERATOR, describe, ops


def record(device: torch.device) -> dict[str, str]:
    """Return the digest for each dtype on a device; ``ValueError`` if backends disagree or a product is wrong."""
    found = {}
    for dtype in HALF_AND_FLOAT:
        a, b = operands(dtype, device)
        able = [one.name for one in OPERATOR.backends if reason_against(one, describe(a, b)) is None]
        digests = {backend: digest(dtype, device, backend) for backend in able}
        if len(set(digests.values())) != 1:
            raise ValueError(f"{name_of(dtype)}: expected backends that agree, got {digests or 'none that runs here'}")
        gold = a.double() @ b.double()
        error = (ops["forward"](a, b, None, torch.float32, able[0]).double() - gold).abs().max()
        if error > 1e-5 * gold.abs().max():
            raise ValueError(f"{name_of(dtype)}: {able[0]} is off by {float(error):.3g}")
        found[name_of(dtype)] = digests[able[0]]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record the bits of this GPU; return the exit status."""
    parser = Parser("record_canary", "Record the bits of det_gemm's canary on this GPU.")
    parser.add_argument("--out", type=Path, help="the file to write (default: canary.json of the package)")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        found = record(device)
    except ValueError as error:
        parser.error(str(error))
    out = given.out or Path(str(files("rl_kernels.det_gemm") / "canary.json"))
    merged = {**recorded(), arch_of(device.type, device.index): found}
    out.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{out} ({versions()}):\n{json.dumps(merged, indent=2, sort_keys=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
