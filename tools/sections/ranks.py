"""The tables of the measurements of `ranks.py` and `shard_times.py`, and of estimates that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import ran_on

from rl_kernels.core.constants import UNIT
from rl_kernels.lab.bench.report import as_table, digits
from rl_kernels.linear_logp import vocab_shards

SIZES = (2, 4, 8)
LAYERS = "Row-parallel layers, product of a rank + sum of its slice, microseconds"
HEADS = "linear_logp, states of the largest shard + their merge, and the backward pass of that shard, microseconds"
OURS, NCCL = "ours", "NCCL, BF16"
TITLES = {
    "exchanges": "Sums of FP32 parts, rounded to BF16; sizes are those of a part",
    "layers": "Row-parallel layers of Llama 3.1 with 8 segments, beside cuBLAS and NCCL's reduction of BF16",
    "heads": "linear_logp over the vocabulary, beside one GPU, and beside logits that are cut as Megatron cuts them",
    "mixtures": "Experts of Qwen3-30B-A3B over ranks; tokens are those of all ranks, and one GPU has them all",
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


def measured(document: Mapping[str, Any]) -> str:
    """Return the tables of the parts that were measured."""
    machine, done = document["environment"], document["parts"]
    only = f": {next(iter(done))}" if len(done) == 1 else ""
    parts = [f"### {machine['ranks']} of {machine['device']}{only}"]
    for part, title in TITLES.items():
        if part in done:
            parts.append(f"{title}, microseconds:\n\n{as_table(_timed(done[part]))}")
    if "training" in done:
        parts.append(f"{STEPS}:\n\n{as_table(_steps(done['training']))}")
    if "loop" in done:
        rounds = ", ".join(f"{entry['differing']:,} of {entry['tokens']:,}" for entry in done["loop"].values())
        parts.append(f"{LOOP}: {rounds}.")
    return "\n\n".join([*parts, f"{ran_on(machine)}, ranks {machine['ranks']}, NCCL {machine['nccl']}"])


def _timed(entries: Mapping[str, Any]) -> list[list[str]]:
    other_ways = list(dict.fromkeys(name for entry in entries.values() for name in entry["eager"] if name != OURS))
    ratios = [f"/ {name}" for name in other_ways]
    # Sizes of parts are known of exchanges, which are not compared with one GPU.
    known = any(entry["bytes"] for entry in entries.values())
    rows = [["", "GB/s" if known else "bits that differ", "graph", *ratios, "eager", *ratios]]
    for name, entry in entries.items():
        cells = [name, digits(entry["bytes"] / entry["graph"][OURS] / 1e3) if known else str(entry["differing"])]
        for way in ("graph", "eager"):
            times = entry[way]
            is_timed = [OURS in times and who in times for who in other_ways]
            pairs = zip(other_ways, is_timed, strict=True)
            ratios = [f"{times[OURS] / times[who]:.2f}" if timed else "" for who, timed in pairs]
            cells += [digits(times[OURS]) if OURS in times else "", *ratios]
        rows.append(cells)
    return rows


def _steps(entries: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "log-probs that differ from one GPU", "ms", "peak GiB"]]
    for name, entry in entries.items():
        differing = "" if entry["differing"] is None else f"{entry['differing']:,}"
        rows.append([name, differing, digits(entry["ms"]), digits(entry["peak_gib"])])
    return rows


def shards(document: Mapping[str, Any]) -> str:
    """Return the tables of each rank's share of the work, timed on one GPU: layers, and linear_logp."""
    columns = [f"{size} ranks{suffix}" for size in SIZES for suffix in ("", ", / one")]
    layers, heads = [["", "plain", "8 segments", *columns]], [["", "one GPU", *columns]]
    for name, times in document["us"].items():
        if "one GPU, plain" in times:
            one_gpu = [digits(times["one GPU, plain"]), digits(times["one GPU"])]
            layers.append([name, *one_gpu, *_of_sizes(times, "product", "sum", "one GPU")])
            continue
        for direction, names in {"forward": ("states", "merge"), "backward": ("backward", "")}.items():
            alone = f"one GPU, {direction}"
            heads.append([f"{name}, {direction}", digits(times[alone]), *_of_sizes(times, *names, alone)])
    tables = [f"{title}:\n\n{as_table(rows)}" for title, rows in ((LAYERS, layers), (HEADS, heads))]
    note = f"- numbers that differ from one GPU: {document['differing']}\n{ran_on(document['environment'])}"
    return "\n\n".join([*tables, note])


def _of_sizes(times: Mapping[str, float], first: str, second: str, alone: str) -> list[str]:
    cells = []
    for size in SIZES:
        parts = [times[f"{size} ranks, {part}"] for part in (first, second) if part]
        cells += [" + ".join(map(digits, parts)), f"{sum(parts) / times[alone]:.2f}"]
    return cells


def estimates(measured: Mapping[str, Any]) -> str:
    """Return the table of exchanges for TP 8 and for 64 nodes, computed from bytes and bandwidths."""
    exchanges = measured["parts"]["exchanges"]
    name = f"{LARGE >> 10} KiB"
    whole, piece = (exchanges[f"{exchange}, {name}"]["graph"] for exchange in ("all-reduce", "reduce-scatter"))
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
    return as_table(rows)


def _row(name: str, size: float, rate: float, other: float, other_rate: float) -> list[str]:
    cells = [name, f"{size / 1e6:,.0f} MB", f"{rate / 1e9:.0f} GB/s", digits(size / rate * 1e3)]
    return [*cells, f"{other / 1e6:,.0f} MB", digits(other / other_rate * 1e3)]
