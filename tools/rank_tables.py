"""The tables of `docs/many-gpus.md`: what `ranks.py` measured, and what follows for more ranks by counting bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tool_tables import NOTHING, filled, ran_on

from rl_kernels.lab.bench.report import as_table, digits
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.linear_logp.vocabulary import UNIT

OURS, NCCL = "ours", "NCCL, BF16"
TITLES = {
    "exchanges": "Sums of FP32 parts, rounded to BF16; sizes are those of a part",
    "layers": "Row-parallel layers of Llama 3.1 with 8 segments, beside cuBLAS and NCCL's reduction of BF16",
    "heads": "linear_logp over the vocabulary, beside one GPU, and beside logits that are cut as Megatron cuts them",
}
NETWORK = 50e9
"""Bytes per second of one GPU's share of a network of 400 Gb/s, one way: assumed, not measured."""
HIDDEN, ROWS, VOCAB = 8192, 8192, 128256
"""Llama 3.1 70B, and the tokens of a step."""
PARAMETERS = 70e9
LARGE = 1 << 28
"""Bytes of the part whose measured time gives the bandwidth of the estimates."""


def measured(files: Iterable[Path]) -> str:
    """Return the tables of the measured parts."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for part, title in TITLES.items():
            parts.append(f"{title}, microseconds:\n\n{as_table(_timed(found['parts'][part]))}")
        parts.append(f"Training steps of a Llama with the widths of 8B and four layers:\n\n{as_table(_steps(found))}")
        where = found["environment"]
        parts.append(f"{ran_on(where)}, ranks {where['ranks']}, NCCL {where['nccl']}")
    return filled(parts)


def _timed(found: Mapping[str, Any]) -> list[list[str]]:
    others = list(dict.fromkeys(name for each in found.values() for name in each["eager"] if name != OURS))
    ratios = [f"/ {name}" for name in others]
    rows = [["", "bits that differ", "graph", *ratios, "eager", *ratios]]
    for name, each in found.items():
        cells = [name, "" if each["differing"] is None else str(each["differing"])]
        for way in ("graph", "eager"):
            times = each[way]
            ratios = (f"{times[OURS] / times[who]:.2f}" if who in times else "" for who in others)
            cells += [digits(times[OURS]), *ratios]
        rows.append(cells)
    return rows


def _steps(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "log-probs that differ from one GPU", "ms", "peak GiB"]]
    for name, each in found["parts"]["training"].items():
        differing = "" if each["differing"] is None else f"{each['differing']:,}"
        rows.append([name, differing, digits(each["ms"]), digits(each["peak_gib"])])
    return rows


def estimates(files: Iterable[Path]) -> str:
    """Return the table of exchanges for TP 8 and for 64 nodes, computed from bytes and bandwidths."""
    file = next(iter(files), None)
    if file is None:
        return NOTHING
    found = json.loads(file.read_text(encoding="utf-8"))["parts"]["exchanges"]
    name = f"{LARGE >> 10} KiB"
    whole, piece = (found[f"{what}, {name}"]["graph"] for what in ("all-reduce", "reduce-scatter"))
    # With two ranks, half of a part goes each way: 4 bytes a number here, and 2 of the rounded sum come back.
    count = LARGE / 4
    ours = (count / 2 * 4 + count / 2 * 2) / (whole[OURS] * 1e-6)
    nccl = 2 * count / 2 * 2 / (whole[NCCL] * 1e-6)
    scattered = count / 2 * 4 / (piece[OURS] * 1e-6)
    numbers, share = ROWS * HIDDEN, 7 / 8
    tp = "one row-parallel layer, TP 8"
    nodes = "gradients of 70B, BF16, data parallel over 64 nodes"
    # A rank has an eighth of the parameters; their gradients go out to be added, and come back as sums.
    gradients = PARAMETERS / 8 * 2 * 63 / 64
    states = 8 * sum(-(-(stop - start) // UNIT) for start, stop in vocab_shards(VOCAB, 8)) * ROWS * 7 / 8
    rows = [
        ["exchange", "bytes a rank receives", "bandwidth", "ms", "usual reduction: bytes", "ms"],
        _row(f"{tp}, all-reduce", numbers * share * 6, ours, numbers * share * 4, nccl),
        _row(f"{tp}, reduce-scatter", numbers * share * 4, scattered, numbers * share * 2, nccl),
        _row("linear_logp, TP 8, states", states, ours, 3 * 4 * ROWS * 2 * share, nccl),
        _row("linear_logp, TP 8, gradient of hidden", ROWS * HIDDEN * share * 6, ours, numbers * share * 4, nccl),
        _row(f"{nodes}, in rank order", *(2 * gradients, NETWORK) * 2),
    ]
    return f"\n{as_table(rows)}\n\n"


def _row(name: str, size: float, rate: float, other: float, other_rate: float) -> list[str]:
    cells = [name, f"{size / 1e6:,.0f} MB", f"{rate / 1e9:.0f} GB/s", digits(size / rate * 1e3)]
    return [*cells, f"{other / 1e6:,.0f} MB", digits(other / other_rate * 1e3)]
