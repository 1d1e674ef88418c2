"""The table of the gated delta rule beside flash-linear-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Results = Mapping[str, Any]


def rule(document: Results) -> str:
    """Return the tables of `delta_rule.py`: bits of layouts, errors at many tokens, and times of a decode step."""
    settings = document["settings"]
    key_heads, heads, size = settings["heads"]
    few = "{} key heads and {} value heads".format(*settings["few"])
    texts = {
        "layouts": f"{settings['layouts']:,} layouts of sequences, {few} of {size}: numbers that differ from the "
        "sequence alone.",
        "errors": f"L2 errors at {settings['tokens']:,} tokens, {few}, against the recurrence in FP64:",
        "decode": f"Microseconds of a decode step in a CUDA graph, {key_heads} and {heads} heads, the mean of 64 "
        "steps:",
    }
    # A run may have some parts only.
    tables = {"layouts": _layouts, "errors": _errors, "decode": _decode}
    shown = [text for part in texts if part in document for text in (texts[part], tables[part](document[part]))]
    return "\n\n".join([*shown, ran_on(document["environment"])])


def _layouts(counts: Results) -> str:
    own = {name: kinds for name, kinds in counts.items() if name != "fla"}
    kinds = [key.removesuffix(", numbers") for key in next(iter(own.values())) if key.endswith(", numbers")]
    rows = [["", *kinds]]
    for name, found in own.items():
        rows.append([f"`{name}`", *(of(found[f"{kind}, differ"], found[f"{kind}, numbers"]) for kind in kinds)])
    peer = counts.get("fla")
    note = f"\n\n- FLA's chunked and recurrent kernels: {of(peer['differ'], peer['numbers'])}" if peer else ""
    return as_table(rows) + note


def _errors(errors: Results) -> str:
    rows = [["", *next(iter(errors.values()))]]
    rows += [[name, *(f"{value:.1e}" for value in found.values())] for name, found in errors.items()]
    return as_table(rows)


def _decode(times: Results) -> str:
    rows = [["sequences", "ours", "FLA", "ours / FLA", "KiB of a cache", "of a recurrent state"]]
    for batch, found in times.items():
        kib = (f"{found[name] / 1024:,.0f}" for name in ("bytes of a cache", "bytes of a state"))
        peer = [digits(found["fla"]), f"{found['ours'] / found['fla']:.2f}"] if "fla" in found else ["", ""]
        rows.append([batch, digits(found["ours"]), *peer, *kib])
    return as_table(rows)
