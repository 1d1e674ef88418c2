"""The output of a run: the table of its steps, two runs side by side, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from rich.progress import track

from rl_kernels.core.command import table
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import Ours

ROWS, SHOWN = 10, 8
"""Largest number of rows of the table of steps, each a mean since the row before, and of printed answers."""
CAPTION = """Tokens whose log-prob differs in any bit between rollout and training, with rl-kernels
(ours) and in stock PyTorch, and their KL. The last kind trains and is compared in every step,
the others in one of"""
NEXT = """next    your model: rl-kernels audit path/to/model
        one operator: pip install ./shared/core ./packages/linear-logp
        TRL: docs/recipes/trl.md; your own loop: docs/recipes/your-own-loop.md"""
QUOTIENT = "ours / stock"
MARGIN = 0.5  # by which the mean reward, which lies between 0 and 1, must have risen


def judged(ours: Sequence[Record], cases: Sequence[Record], needed: int) -> tuple[Record, str]:
    """Return the verdict on a run, and its text: no bit differs, and the reward has risen in the ``needed`` steps."""
    gaps = [*ours, *(case["gap"] for case in cases if case["numerics"].startswith(Ours.way))]
    gaps += [gap for step in ours for name, gap in step["watched"].items() if name.startswith(Ours.way)]
    compared, mismatches = (sum(gap[count] for gap in gaps) for count in ("tokens", "mismatches"))
    tenth, enough, mark = max(1, len(ours) // 10), len(ours) >= needed, {True: "ok    ", False: "FAILED"}
    first, last = mean("reward", ours[:tenth]), mean("reward", ours[-tenth:])
    rewards, risen = f"{first:.3f} in the first tenth of the steps, {last:.3f} in the last", last >= first + MARGIN
    shown = f"shown   reward: {rewards}; judged from {needed} steps on\n"
    text = f"{mark[risen]}  reward risen by at least {MARGIN}: {rewards}\n" if enough else shown
    text += f"{mark[mismatches == 0]}  log-probs through the operators that differ: "
    text += f"{mismatches:,} of {compared:,}, in FP32 and BF16"
    record = {"first_reward": first, "last_reward": last, "compared": compared, "mismatches": mismatches}
    return {**record, "enough": enough, "passed": mismatches == 0 and (risen or not enough)}, text


def train(trainer: Trainer) -> list[Record]:
    """Take all steps of a trainer; print a table of them, a progress bar below it, and some answers."""
    history, every = list[Record](), -(-trainer.settings.steps // ROWS)
    numerics = "".join(f"{way.short} {way.dtype}".rjust(11) for way in (*trainer.watched, trainer.own))
    print(f"step  reward  solved{numerics}       KL  ms: rollout  update")
    for step in track(range(1, trainer.settings.steps + 1), "training"):
        history.append(trainer.step(step))
        if step % every and step < trainer.settings.steps:
            continue
        latest = history[(step - 1) // every * every :]
        gaps = [[record["watched"][way.name] for record in latest if record["watched"]] for way in trainer.watched]
        shares = "".join((share(records) if records else "").rjust(11) for records in (*gaps, latest))
        rates = f"{mean('reward', latest):8.3f}{mean('solved', latest):8.0%}{shares}{small(mean('kl', latest)):>9}"
        times = f"{1000 * mean('rollout_seconds', latest):13,.0f}{1000 * mean('update_seconds', latest):8,.0f}"
        print(f"{step:4}{rates}{times}")
    answers = [(*pair, f"{reward:.2f}") for *pair, reward in trainer.answers[:: -(-len(trainer.answers) // SHOWN)]]
    print(f"{CAPTION} {trainer.settings.measure_every}.\n\n{table(('prompt', 'answer', 'reward'), answers)}\n")
    return history


def mean(name: str, records: Sequence[Record]) -> float:
    """Return the mean of the records' values by this name."""
    return fmean(record[name] for record in records)


def small(value: float) -> str:
    """Return a number as a power of ten, and 0 as such."""
    return f"{value:.1e}" if value else "0"


def share(gaps: Sequence[Record]) -> str:
    """Return the share of the tokens that differ in any bit."""
    value = sum(gap["mismatches"] for gap in gaps) / sum(gap["tokens"] for gap in gaps)
    return f"{value:.2%}" if value else "0"


def comparison(cases: Sequence[Record]) -> str:
    """Return a table of how the log-probs of decoding and training compare, in all numerics."""
    header = "decoded, and by one training pass", "at once", "tokens", "bits differ", "|ratio - 1|"
    rows = [(case["numerics"], str(case["sequences"]), case["gap"]) for case in cases]
    return table(header, [(*cells, f"{gap['tokens']:,}", share([gap]), small(gap["largest"])) for *cells, gap in rows])


def side_by_side(runs: Mapping[str, Sequence[Record]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: label, text of each run, and the quotient of their times."""
    for (label, our_text, ours), (_, stock_text, stock) in zip(*map(_summary, runs.values()), strict=True):
        yield label, our_text, stock_text, f"{ours / stock:.2f}" if stock else ""


def _summary(steps: Sequence[Record]) -> Iterator[tuple[str, str, float]]:
    """Yield label, text, and the value of a time, or 0. Times skip the first step, in which kernels are compiled."""
    last, warm = steps[-max(1, len(steps) // 10) :], steps[1:] or steps
    for kind, gaps in {"": steps, ", FP32": [gap for step in steps for gap in step["watched"].values()]}.items():
        if gaps:
            yield f"log-probs that differ in any bit{kind}", share(gaps), 0
            yield f"KL, nats a token{kind}", small(mean("kl", gaps)), 0
            yield f"largest distance of a ratio from 1{kind}", small(max(gap["largest"] for gap in gaps)), 0
    yield "tokens with a ratio other than 1", f"{mean('ratios_off', steps) / mean('tokens', steps):.2%}", 0
    yield "clip fraction", f"{mean('clip_fraction', steps):.2%}", 0
    yield "reward, last tenth of the steps", f"{mean('reward', last):.3f}", 0
    yield "solved, last tenth of the steps", f"{mean('solved', last):.0%}", 0
    for part in ("rollout", "update"):
        seconds = [step[f"{part}_seconds"] for step in warm]
        yield f"{part}, ms a step", f"{1000 * median(seconds):,.0f}", median(seconds)
        yield f"{part}, s", f"{sum(seconds):.1f}", sum(seconds)
    for label, part_of_steps in (("all steps but the first, s", warm), ("the first, s", steps[:1])):
        total = sum(step["seconds"] for step in part_of_steps)
        yield label, f"{total:.1f}", total
