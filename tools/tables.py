"""Write the committed results into the docs: `python tools/tables.py`, `--check` to compare.

What `SECTIONS` lists stands between two markers of a page: the tables of all files of results of that name. READMEs
and pages of benchmarks have those of `rl-kernels bench --json`, in packages/X/benchmarks/results. A few lines of all
are in README.md and docs/benchmarks/index.md. Where there are no results, a page says so. The pictures of the
first pages are drawn too; docs/pictures.py draws the others where the site is built.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sections import (
    delta,
    demo,
    experiment,
    front,
    hardware,
    mismatch,
    mixtures,
    models,
    operators,
    products,
    ranks,
    rollouts,
    training,
)
from sections.text import filled, picture

from rl_kernels.demo import report
from rl_kernels.lab.bench.record import read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "tools/results"
FRONT = {"README.md": front.first_table, "docs/benchmarks/index.md": front.front_table}
"""Pages with a few lines of all results."""


def load(file: Path) -> Any:
    """Return the parsed content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


class Section(NamedTuple):
    """The text between two markers of a page: a table for each file of results, maybe with a picture of {file}."""

    page: str
    name: str
    files: str
    table: Callable[[Any], str]
    read: Callable[[Path], Any] = load
    picture: str = ""

    def text(self, root: Path) -> str:
        """Return the tables, by the name of their file."""
        texts = []
        for file in sorted((root / RESULTS).glob(self.files)):
            texts += [self.table(self.read(file)), self.picture.format(file=file.stem)]
        return filled(list(filter(None, texts)))


TWINS = "![Both twins, step by step]({file}.svg)"
ROLLOUT = "![Tokens whose log-prob differs between rollout and training, and by how much]({file}.svg)"
HEADS = picture(f"{RESULTS}/{{file}}.json", "Time over memory")
MODELS = "packages/models/benchmarks/README.md"
SECTIONS = (
    Section(MODELS, "model step", "h?00-*model*.json", models.steps),
    Section(MODELS, "model bits", "*-model-bits.json", models.bits),
    Section(MODELS, "cpu model", "cpu-model.json", models.on_cpu),
    Section(MODELS, "batch_invariant_ops", "*-client-calls.json", models.products),
    Section(MODELS, "flash attention", "*-client-calls.json", models.attention),
    Section("docs/recipes/trl.md", "trl step", "*-trl-step*.json", training.trl),
    Section(MODELS, "trl mixture", "trl-mixture.json", training.mixture),
    Section("docs/recipes/vllm-sglang.md", "trl step with vllm", "*-trl-with-vllm.json", training.trl_with_vllm),
    Section("docs/recipes/vllm-sglang.md", "vllm rollout", "*-vllm-*.json", training.rollouts),
    Section("docs/objectives.md", "differences", "trl-objectives.json", training.trl_objectives),
    Section("docs/demo.md", "demo", "*-demo.json", demo.section, picture=TWINS),
    Section("docs/sampling.md", "samplers", "sampler-bias.json", training.samplers),
    Section("docs/mismatch.md", "rollout", "*-rollout.json", rollouts.section, picture=ROLLOUT),
    Section("docs/mismatch.md", "mismatch", "mismatch.json", mismatch.section),
    Section("docs/experiment.md", "experiment", "experiment", experiment.section, experiment.read),
    Section("docs/benchmarks/grpo-step.md", "grpo step", "*-grpo-step*.json", training.grpo),
    Section("docs/benchmarks/host-time.md", "host time", "*-host.json", operators.host, read),
    Section("docs/call.md", "call path", "call-path.json", operators.call_paths),
    Section("docs/many-gpus.md", "ranks", "*-ranks.json", ranks.measured),
    Section("docs/many-gpus.md", "shards", "*-shards.json", ranks.shards),
    Section("docs/many-gpus.md", "estimates", "h?00-ranks.json", ranks.estimates),
    Section("packages/linear-logp/GUIDE.md", "head", "*-head.json", products.heads, picture=HEADS),
    Section("packages/linear-logp/GUIDE.md", "sampler", "*-sampler.json", operators.in_turn),
    Section("packages/fused-logp/GUIDE.md", "thresholds", "*-fused_logp-thresholds.json", operators.in_turn),
    Section("packages/linear-logp/GUIDE.md", "thresholds", "*-linear_logp-thresholds.json", operators.in_turn),
    Section("packages/attention/benchmarks/README.md", "wide heads", "*-wide-heads.json", operators.in_turn),
    Section("packages/moe/GUIDE.md", "layouts", "*-moe-layouts.json", mixtures.layouts),
    Section("packages/moe/GUIDE.md", "memory", "*-moe-memory.json", mixtures.memory),
    Section("packages/gated-delta/benchmarks/README.md", "delta rule", "*-delta-rule.json", delta.rule),
    Section("packages/det-gemm/GUIDE.md", "segments", "*-segments.json", products.segments),
    Section("packages/det-gemm/GUIDE.md", "chains", "*-chain-error.json", products.chains),
    Section("docs/hardware.md", "compiled", "triton-compiled.json", products.compiled),
    Section("docs/hardware.md", "schedules", "*-schedules.json", products.schedules),
    Section("docs/hardware.md", "checks", "*-checks.json", hardware.checks_and_tests),
)


def pages(root: Path) -> dict[str, dict[str, str]]:
    """Return the texts between the markers of each page, by page and marker."""
    bodies: dict[str, dict[str, str]] = {}
    packages = {}
    for folder in sorted(file.parents[4] for file in root.glob("packages/*/src/rl_kernels/*/spec/bench.py")):
        home = f"packages/{folder.name}"
        results = {file.stem: read(file) for file in sorted(folder.glob("benchmarks/results/*.json"))}
        packages[folder.name] = results
        bodies[f"{home}/README.md"] = {"bench summary": operators.readme_table(results)}
        page = operators.benchmark_page(results, f"{home}/benchmarks/results")
        bodies[f"{home}/benchmarks/README.md"] = {"bench results": page}
    for section in SECTIONS:
        bodies.setdefault(section.page, {})[section.name] = section.text(root)
    return bodies | {page: {"summary": table(root / RESULTS, packages)} for page, table in FRONT.items()}


def pictures(root: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Yield each committed picture, with what draws it."""
    if (root / RESULTS / front.ROLLOUT).exists():
        yield root / "docs/steps.svg", partial(front.draw, root / RESULTS)
    for file in (root / RESULTS).glob("*-demo.json"):
        yield root / "docs" / f"{file.stem}.svg", partial(report.draw, load(file))
    for file in (root / RESULTS).glob("*-rollout.json"):
        yield root / "docs" / f"{file.stem}.svg", partial(rollouts.draw, load(file))
    for file in (root / RESULTS).glob("mismatch.json"):
        yield root / "docs/mismatch.svg", partial(mismatch.draw, load(file))


def replaced(root: Path, path: str, bodies: dict[str, str]) -> str:
    """Return a page with these texts between its markers."""
    text = (root / path).read_text(encoding="utf-8")
    for name, body in bodies.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"{path}: expected the markers of {name}")
        text = marked.sub(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
    return text


def main(argv: list[str] | None = None) -> int:
    """Write or check the pages; return the exit status: 1 if a page is not up to date."""
    parser = argparse.ArgumentParser(description="Write the committed results into the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (default: this one)")
    args = parser.parse_args(argv)
    root = args.root
    try:
        texts = {root / page: replaced(root, page, bodies) for page, bodies in pages(root).items()}
    except (OSError, ValueError) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 1
    if args.check:
        stale = [page for page, body in texts.items() if page.read_text(encoding="utf-8") != body]
        stale += [picture for picture, _ in pictures(root) if not picture.exists()]
        for page in stale:
            print(f"{page.relative_to(root)} is not up to date: python tools/tables.py", file=sys.stderr)
        return 1 if stale else 0
    for page, body in texts.items():
        page.write_text(body, encoding="utf-8")
    for path, draw in pictures(root):
        draw(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
