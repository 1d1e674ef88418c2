"""What a run prints: the table of its steps, two runs side by side, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.progress import track

from rl_kernels.core.command import table
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import OURS, Numerics

ROWS, SHOWN = 10, 8
"""Most rows of the table of steps, each the mean since the row before, and of answers that are printed."""
CAPTION = """Tokens whose log-prob differs in any bit between rollout and training, with rl-kernels
(ours) and in stock PyTorch, and their KL. The last kind trains and is compared in every step,
the others in one of"""
NEXT = """next    your model: rl-kernels audit path/to/model
        one operator: pip install ./shared/core ./packages/linear-logp
        TRL: docs/recipes/trl.md; your own loop: docs/recipes/your-own-loop.md"""
QUOTIENT = "ours / stock"
MARGIN = 0.5
"""By how much the mean reward, which lies between 0 and 1, must have risen."""


@dataclass(frozen=True)
class Verdict:
    """What a run showed."""

    first_reward: float  # mean of the first tenth of the steps
    last_reward: float
    compared: int  # tokens that were compared through the operators
    mismatches: int
    enough: bool  # whether the run was long enough for its reward to be judged

    @property
    def risen(self) -> bool:
        """Whether the reward has risen by the margin."""
        return self.last_reward >= self.first_reward + MARGIN

    @property
    def passed(self) -> bool:
        """Whether no bit differed, and the reward has risen if it is judged."""
        return (self.risen or not self.enough) and self.mismatches == 0

    def told(self, needed: int) -> str:
        """Return whether the run showed what it is for; the reward is judged from ``needed`` steps on."""
        rewards = f"{self.first_reward:.3f} in the first tenth of the steps, {self.last_reward:.3f} in the last"
        shown = f"shown   reward: {rewards}; judged from {needed} steps on"
        if self.enough:
            shown = f"{'ok    ' if self.risen else 'FAILED'}  reward risen by at least {MARGIN}: {rewards}"
        counts = f"{self.mismatches:,} of {self.compared:,}, in FP32 and BF16"
        kind = "FAILED" if self.mismatches else "ok    "
        return f"{shown}\n{kind}  log-probs through the operators that differ: {counts}"


def judged(ours: Sequence[Record], cases: Sequence[Record], needed: int) -> Verdict:
    """Judge a run by every comparison through the operators, and by its rewards if it has the ``needed`` steps."""
    gaps = [*ours, *(case["gap"] for case in cases if case["numerics"].startswith(OURS.name))]
    gaps += [gap for step in ours for name, gap in step["watched"].items() if name.startswith(OURS.name)]
    window, rewards = max(1, len(ours) // 10), [step["reward"] for step in ours]
    first, last = (sum(part) / window for part in (rewards[:window], rewards[-window:]))
    tokens, mismatches = (sum(gap[count] for gap in gaps) for count in ("tokens", "mismatches"))
    return Verdict(first, last, tokens, mismatches, len(rewards) >= needed)


def train(trainer: Trainer) -> list[Record]:
    """Take all steps of a trainer; print a table of them, a progress bar below it, and some answers."""
    steps, shown, history = trainer.settings.steps, (*trainer.watched, trainer.own), list[Record]()
    numerics, stretch = "".join(f"{each.way.short} {each.dtype}".rjust(11) for each in shown), -(-steps // ROWS)
    print(f"step  reward  solved{numerics}       KL  ms: rollout  update")
    for step in track(range(1, steps + 1), "training"):
        history.append(trainer.step(step))
        if step % stretch == 0 or step == steps:
            print(_row(history[(step - 1) // stretch * stretch :], shown))
    answers = [(*pair, f"{reward:.2f}") for *pair, reward in trainer.answers[:: -(-len(trainer.answers) // SHOWN)]]
    print(f"{CAPTION} {trainer.settings.measure_every}.\n\n{table(('prompt', 'answer', 'reward'), answers)}\n")
    return history


def _row(steps: Sequence[Record], shown: Sequence[Numerics]) -> str:
    names = "reward", "solved", "kl", "rollout_seconds", "update_seconds"
    reward, solved, kl, rollout, update = (fmean(step[name] for step in steps) for name in names)
    gaps = [[step["watched"][each.name] for step in steps if step["watched"]] for each in shown[:-1]]
    cells = "".join((share(found) if found else "").rjust(11) for found in [*gaps, steps])
    times = f"{1000 * rollout:13,.0f}{1000 * update:8,.0f}"
    return f"{steps[-1]['step']:4}{reward:8.3f}{solved:8.0%}{cells}{small(kl):>9}{times}"


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
    found = [(case["gap"], case["numerics"], str(case["sequences"])) for case in cases]
    return table(header, [(*of, f"{gap['tokens']:,}", share([gap]), small(gap["largest"])) for gap, *of in found])


def side_by_side(runs: Mapping[str, Sequence[Record]]) -> Iterator[tuple[str, ...]]:
    """Yield what each row that was measured says of both runs, and of the quotient of their times."""
    for (label, one, ours), (_, other, stock) in zip(*map(_summary, runs.values()), strict=True):
        yield label, one, other, f"{ours / stock:.2f}" if stock else ""


def _summary(steps: Sequence[Record]) -> Iterator[tuple[str, str, float]]:
    """Yield label, text, and the value of a time. Kernels are compiled in the first step, which times leave out."""
    last, warm = steps[-max(1, len(steps) // 10) :], steps[1:] or steps
    fp32 = [gap for step in steps for gap in step["watched"].values()]
    both: dict[str, Sequence[Record]] = {"": steps, ", FP32": fp32} if fp32 else {"": steps}

    def mean(name: str, of: Sequence[Record] = steps) -> float:
        return fmean(each[name] for each in of)

    yield from ((f"log-probs that differ in any bit{dtype}", share(gaps), 0) for dtype, gaps in both.items())
    yield "reward, last tenth of the steps", f"{mean('reward', last):.3f}", 0
    yield "solved, last tenth of the steps", f"{mean('solved', last):.0%}", 0
    yield from ((f"KL, nats a token{dtype}", small(mean("kl", gaps)), 0) for dtype, gaps in both.items())
    yield "tokens with a ratio other than 1", f"{mean('ratios_off') / mean('tokens'):.2%}", 0
    for dtype, gaps in both.items():
        yield f"largest distance of a ratio from 1{dtype}", small(max(gap["largest"] for gap in gaps)), 0
    yield "clip fraction", f"{mean('clip_fraction'):.2%}", 0
    times: dict[str, list[float]] = {name: [step[f"{name}_seconds"] for step in warm] for name in ("rollout", "update")}
    yield from ((f"{name}, ms a step", f"{1000 * median(of):,.0f}", median(of)) for name, of in times.items())
    totals = {f"{name}, s": sum(of) for name, of in times.items()}
    totals |= {"all steps but the first, s": sum(each["seconds"] for each in warm), "the first, s": steps[0]["seconds"]}
    yield from ((label, f"{seconds:.1f}", seconds) for label, seconds in totals.items())
