"""The tables of mixtures of experts: what a batch changes, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Results = Mapping[str, Any]
DIFFERENT = {
    "experts": "other experts",
    "weights": "other weights",
    "output": "other output",
    "gradient": "other gradient",
}
"""What is counted by `moe_layouts.py`, and its column."""


def layouts(document: Results) -> str:
    """Return the table of `moe_layouts.py`: tokens that differ from themselves alone, and those of `torch.topk`."""
    settings, topk = document["settings"], dict(document["topk"])
    rows = [["tokens with", *DIFFERENT.values()]]
    for name, counts in document["counts"].items():
        whole = {"gradient": counts["gradients"]}
        rows.append([name, *(of(counts[key], whole.get(key, counts["tokens"])) for key in DIFFERENT)])
    tokens = topk.pop("tokens")
    places = [key.partition(", ")[2] for key in topk if key.startswith("experts")]
    chosen = "; ".join(
        f"on {place}, other experts for {of(topk[f'experts, {place}'], tokens)} tokens, another order for "
        f"{of(topk[f'order, {place}'], tokens)}"
        for place in places
    )
    widths = (
        f"hidden {settings['hidden']}, {settings['chosen']} of {settings['experts']} experts of {settings['inner']}"
    )
    title = f"{settings['layouts']:,} layouts of up to {settings['longest']} tokens, {widths}, {settings['dtype']}:"
    return f"{title}\n\n{as_table(rows)}\n\n- `torch.topk` of equal logits: {chosen}\n{ran_on(document['environment'])}"


def memory(document: Results) -> str:
    """Return the table of `moe_memory.py`: MiB kept for the backward pass, and the most of both passes."""
    names = [name for name in document["rows"][0] if isinstance(document["rows"][0][name], Mapping)]
    rows = [["MiB", "SonicMoE's rule", *(f"{name}: {part}" for name in names for part in ("kept", "most"))]]
    for row in document["rows"]:
        cells = (digits(row[name][part]) for name in names for part in ("kept", "most"))
        rows.append([f"{row['model']}, {row['tokens']:,} tokens", digits(row["rule"]), *cells])
    return f"{as_table(rows)}\n\n{ran_on(document['environment'])}"
