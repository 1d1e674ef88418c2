"""The table, the picture and the record of an audit of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_kernels.core.command import table
from rl_kernels.models.rollouts.audit import Counts, RolloutAudit
from rl_kernels.models.rollouts.counts import DISTANCES

LOOKS = {"stock": ("#c0392b", 2.0), "invariant": ("#45c4b0", 6.0)}
"""Color and line width of each way; the line at 0 is wide, so that it is seen."""


def text(result: RolloutAudit, settings: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report: what was compared, a row for each training pass, the verdict."""
    source = "recorded" if result.is_recorded else f"sampled with seed {settings['seed']}"
    header, *rows = cells(result.counts, settings)
    _, _, bounds, clipped, *_ = header[1:]
    ours = result.counts["invariant"].values()
    differ, tokens = sum(counts.differ for counts in ours), sum(counts.tokens for counts in ours)
    verdict = "PASSED" if result.passed else "FAILED"
    return [
        f"{settings['model']}, {settings['dtype']}, {settings['device']}: {result.samples} completions, {source}, "
        f"temperature {settings['temperature']:g}",
        "",
        table(header, rows),
        "",
        "differ: tokens whose log-prob in training is not the rollout's, with the same weights.",
        f"{bounds}: tokens whose ratio, training by rollout, is outside of that range.",
        f"{clipped}: tokens that PPO clips, if their advantage has the sign of ratio - 1.",
        "nats: the largest difference. KL: two estimates, nats a token. Without a mismatch all are 0.",
        f"{verdict}: under invariant() {differ:,} of {tokens:,} log-probs of training differ",
    ]


def cells(counts: Counts, settings: Mapping[str, Any]) -> list[list[str]]:
    """Return the table: a header, and a row for each way and training pass."""
    (low, high), clip = settings["bounds"], settings["clip"]
    is_mixture = any(each.rerouted is not None for by_batch in counts.values() for each in by_batch.values())
    header = [
        "",
        "tokens",
        "differ",
        f"off {low:g}-{high:g}",
        f"off {1 - clip:g}-{1 + clip:g}",
        "nats",
        "KL k1",
        "KL k3",
    ]
    rows = [header + ["other experts"] * is_mixture]
    for way, by_batch in counts.items():
        for name, each in by_batch.items():
            shares = (_share(number, each.tokens) for number in (each.differ, each.outside, each.clipped))
            sizes = (f"{value:.2g}" if value else "0" for value in (each.largest, each.k1, each.k3))
            experts = "not recorded" if each.rerouted is None else _share(each.rerouted, each.tokens)
            rows.append([f"{way}, {name}", f"{each.tokens:,}", *shares, *sizes, *[experts] * is_mixture])
    return rows


def _share(some: int, every: int) -> str:
    share = 100 * some / every
    if some < every and share >= 99.5:
        # Nearly all is not all.
        return f"{some:,} ({min(share, 99.9):.1f} %)"
    return f"{some:,}" + (f" ({share:.0f} %)" if share >= 9.5 else f" ({share:.2g} %)" if some else "")


def draw(counts: Counts, settings: Mapping[str, Any], path: Path) -> None:
    """Write the picture: tokens that differ, and how far."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from rl_kernels.lab.bench.plot import save

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        shares, distances = figure.subplots(1, 2)
        names = list(counts["stock"])
        for place, (way, by_batch) in enumerate(counts.items()):
            color, width = LOOKS[way]
            heights = [100 * each.differ / each.tokens for each in by_batch.values()]
            bars = shares.bar([i + 0.4 * place for i in range(len(names))], heights, 0.38, color=color, label=way)
            shares.bar_label(bars, [f"{each.differ:,}" for each in by_batch.values()], padding=2)
            for each in by_batch.values():
                shown = [100 * beyond / each.tokens for beyond in each.beyond]
                distances.plot(DISTANCES, shown, color=color, linewidth=width, clip_on=False)
        shares.set_xticks([i + 0.2 for i in range(len(names))], names)
        shares.set(title="Tokens whose log-prob differs", ylabel="% of tokens", ylim=(0, 108))
        distances.set(
            title="Tokens whose log-prob differs by more than x", xscale="log", xlabel="x, nats", ylabel="% of tokens"
        )
        distances.set_ylim(bottom=0)
        distances.grid(alpha=0.25)
        label = f"{settings['model']}, {settings['dtype']}, {settings['device']}: rollout and training, same weights"
        figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(label, size="medium")
        save(figure, path)
