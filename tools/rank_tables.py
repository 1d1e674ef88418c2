"""The tables of what `ranks.py`, `shard_times.py` and `segment_times.py` measured, and of what follows by counting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tool_tables import NOTHING, filled, ran_on

from rl_kernels.lab.bench.report import as_table, digits
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.linear_logp.vocabulary import UNIT

SIZES = (2, 4, 8)
LAYERS = "Row-parallel layers, product of a rank + sum of its slice, microseconds"
HEADS = "linear_logp, states of the largest shard + their merge, and the backward pass of that shard, microseconds"
OURS, NCCL = "ours", "NCCL, BF16"
TITLES = {
    "exchanges": "Sums of FP32 parts, rounded to BF16; sizes are those of a part",
    "layers": "Row-parallel layers of Llama 3.1 with 8 segments, beside cuBLAS and NCCL's reduction of BF16",
    "heads": "linear_logp over the vocabulary, beside one GPU, and beside logits that are cut as Megatron cuts them",
}
STEPS = """Training steps of a Llama with the widths of 8B and four layers; stock TP leaves the head whole"""
LOOP = (
    """- log-probs that differ in each round of GRPO, with rollouts of a small Llama under TP and updates under FSDP2"""
)
NETWORK = 50e9
"""Bytes per second of one GPU's share of a network of 400 Gb/s, one way: assumed, not measured."""
HIDDEN, ROWS, VOCAB = 8192, 8192, 128256
"""Llama 3.1 70B, and the tokens of a step."""
PARAMETERS = 70e9
LARGE = 1 << 28
"""Bytes of the part whose measured time gives the bandwidth of the estimates."""


def measured(files: Iterable[Path]) -> str:
    """Return the tables of the parts that were measured."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        where, done = found["environment"], found["parts"]
        parts.append(f"### {where['ranks']} GPUs")
        for part, title in TITLES.items():
            if part in done:
                parts.append(f"{title}, microseconds:\n\n{as_table(_timed(done[part]))}")
        if "training" in done:
            parts.append(f"{STEPS}:\n\n{as_table(_steps(found))}")
        if "loop" in done:
            parts.append(f"{LOOP}: {_rounds(found)}.")
        parts.append(f"{ran_on(where)}, ranks {where['ranks']}, NCCL {where['nccl']}")
    return filled(parts)


def _timed(found: Mapping[str, Any]) -> list[list[str]]:
    others = list(dict.fromkeys(name for each in found.values() for name in each["eager"] if name != OURS))
    ratios = [f"/ {name}" for name in others]
    # Sizes of parts are known of exchanges, which are not compared with one GPU.
    known = any(each["bytes"] for each in found.values())
    rows = [["", "GB/s" if known else "bits that differ", "graph", *ratios, "eager", *ratios]]
    for name, each in found.items():
        rate = digits(each["bytes"] / each["graph"][OURS] / 1e3)
        cells = [name, rate if known else str(each["differing"])]
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


def _rounds(found: Mapping[str, Any]) -> str:
    rounds = found["parts"]["loop"].values()
    return ", ".join(f"{each['differing']:,} of {each['tokens']:,}" for each in rounds)


def shards(files: Iterable[Path]) -> str:
    """Return the tables of what each rank computes, on one GPU: layers, and linear_logp."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        times: dict[str, Mapping[str, float]] = found["us"]
        layers = {name: each for name, each in times.items() if "one GPU, plain" in each}
        heads = {name: each for name, each in times.items() if name not in layers}
        rows = [["", "plain", "8 segments", *(f"{size} ranks{what}" for size in SIZES for what in ("", ", / one"))]]
        rows += [
            [
                name,
                digits(each["one GPU, plain"]),
                digits(each["one GPU"]),
                *_of_sizes(each, "product", "sum", "one GPU"),
            ]
            for name, each in layers.items()
        ]
        of_heads = [["", "one GPU", *rows[0][3:]]]
        for name, each in heads.items():
            for what, names in {"forward": ("states", "merge"), "backward": ("backward", "")}.items():
                one = f"one GPU, {what}"
                of_heads.append([f"{name}, {what}", digits(each[one]), *_of_sizes(each, *names, one)])
        parts += [f"{title}:\n\n{as_table(each)}" for title, each in ((LAYERS, rows), (HEADS, of_heads))]
        parts.append(f"- numbers that differ from one GPU: {found['differing']}\n{ran_on(found['environment'])}")
    return filled(parts)


def _of_sizes(each: Mapping[str, float], first: str, second: str, one: str) -> list[str]:
    cells = []
    for size in SIZES:
        parts = [each[f"{size} ranks, {part}"] for part in (first, second) if part]
        cells += [" + ".join(map(digits, parts)), f"{sum(parts) / each[one]:.2f}"]
    return cells


def segments(files: Iterable[Path]) -> str:
    """Return the tables of products with segments beside cuBLAS and the plain product."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        shapes: dict[str, Mapping[str, Mapping[str, float]]] = found["us"]
        rows = [["N x K", "", *(f"M = {m}" for m in next(iter(shapes.values())))]]
        for shape, each in shapes.items():
            ways = [way for way in next(iter(each.values())) if way not in ("cuBLAS", "plain")]
            pairs = [("plain", "cuBLAS"), *((way, "plain") for way in ways), *((way, "cuBLAS") for way in ways[-1:])]
            for place, (ours, other) in enumerate(pairs):
                ratios = (f"{times[ours] / times[other]:.2f}" for times in each.values())
                rows.append(["" if place else shape.replace("x", " x "), f"{ours} / {other}", *ratios])
        parts.append(f"{as_table(rows)}\n\n{ran_on(found['environment'])}")
    return filled(parts)


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
