"""The table, the picture and the record of an audit of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_kernels.core.command import table
from rl_kernels.models.rollouts.audit import RolloutAudit
from rl_kernels.models.rollouts.counts import DISTANCES, Mismatch

LOOKS = {"stock": ("#c0392b", 2.0), "invariant": ("#45c4b0", 6.0)}
"""Color and line width of each way; the line at 0 is wide, so that it is seen."""


def text(result: RolloutAudit, settings: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report: what was compared, a row for each training pass, the verdict."""
    each = [counts for by_batch in result.counts.values() for counts in by_batch.values()]
    (low, high), clip = settings["bounds"], settings["clip"]
    source = "recorded" if result.is_recorded else f"sampled with seed {settings['seed']}"
    header = ["rollout and training", "log-probs that differ", f"ratio outside {low:g} to {high:g}"]
    header += [f"clipped at {clip:g}", "largest, nats", "KL k1", "KL k3"]
    is_mixture = any(counts.rerouted is not None for counts in each)
    header += ["other experts"] if is_mixture else []
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['device']}: {result.samples} completions, {source}, "
        f"temperature {settings['temperature']:g}",
        "",
        table(header, _rows(result, is_mixture)),
        "",
        "Nothing was learned in between: without a mismatch every ratio is 1 and each number is 0.",
    ]
    ours = result.counts["invariant"].values()
    differ, tokens = sum(counts.differ for counts in ours), sum(counts.tokens for counts in ours)
    verdict = "PASSED" if result.passed else "FAILED"
    return [*lines, f"{verdict}: under invariant() {differ:,} of {tokens:,} log-probs of training differ"]


def _rows(result: RolloutAudit, is_mixture: bool) -> Iterator[list[str]]:
    for way, by_batch in result.counts.items():
        for name, counts in by_batch.items():
            shares = (_of(number, counts.tokens) for number in (counts.differ, counts.outside, counts.clipped))
            sizes = (f"{value:.2g}" if value else "0" for value in (counts.largest, counts.k1, counts.k3))
            experts = "not recorded" if counts.rerouted is None else _of(counts.rerouted, counts.tokens)
            yield [f"{way}, {name}", *shares, *sizes, *([experts] if is_mixture else [])]


def _of(some: int, every: int) -> str:
    share = 100 * some / every
    return f"{some:,} of {every:,}" + (f" ({share:.0f} %)" if share >= 9.5 else f" ({share:.2g} %)" if some else "")


def draw(result: RolloutAudit, settings: Mapping[str, Any], path: Path) -> None:
    """Write the picture: tokens that differ, and how far."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from rl_kernels.lab.bench.plot import save

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        shares, distances = figure.subplots(1, 2)
        names = list(result.counts["stock"])
        for place, (way, by_batch) in enumerate(result.counts.items()):
            color, width = LOOKS[way]
            heights = [100 * counts.differ / counts.tokens for counts in by_batch.values()]
            bars = shares.bar([i + 0.4 * place for i in range(len(names))], heights, 0.38, color=color, label=way)
            shares.bar_label(bars, [f"{counts.differ:,}" for counts in by_batch.values()], padding=2)
            for counts in by_batch.values():
                distances.plot(DISTANCES, _percent(counts), color=color, linewidth=width, clip_on=False)
        shares.set_xticks([i + 0.2 for i in range(len(names))], names)
        tokens = next(iter(result.counts["stock"].values())).tokens
        shares.set(title=f"Log-probs that differ, of {tokens:,}", ylabel="% of tokens", ylim=(0, 108))
        distances.set(title="Log-probs that differ by more", xscale="log", xlabel="nats", ylabel="% of tokens")
        distances.set_ylim(bottom=0)
        distances.grid(alpha=0.25)
        label = f"{settings['model']}, {settings['dtype']}, {settings['device']}: rollout and training, same weights"
        figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(label, size="medium")
        save(figure, path)


def _percent(counts: Mismatch) -> list[float]:
    return [100 * beyond / counts.tokens for beyond in counts.beyond]
