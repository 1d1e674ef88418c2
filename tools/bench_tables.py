"""Write the committed results of the benchmarks into the docs: `python tools/bench_tables.py`, `--check` to compare.

Reads packages/*/benchmarks/results/*.json, which `rl-kernels bench --json` wrote. The tables of an operator go
between the markers of its README, which is its page in the docs too; the plots go into docs/ and are shown by
docs/benchmarks.md, which also has the table of the whole step that `tools/grpo_step.py --json` timed, and what the host
takes for small calls, by `rl-kernels bench --set host`; those of whole models, by `tools/model_step.py --json`, are in
the README of models with the calls of `tools/client_calls.py`, that of TRL by `tools/trl_step.py` on its recipe, and
that of `rl-kernels demo --device cuda`, with its picture, in the README of rl-kernels. The README of the repository has
a few lines of them all.
Everything is derived from the results: where there are none, a page says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from summary_table import summary
from tool_tables import client_calls, demos, filled, hosts, model_bits, model_steps, step, trl_steps

from rl_kernels.demo.gpu import plot, record
from rl_kernels.lab.bench.plot import draw
from rl_kernels.lab.bench.record import Document, read
from rl_kernels.lab.bench.report import as_table, facts, remarks, tables

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = "docs/benchmarks.md", "tools/results"
PUBLISHED = "shared/core/src/rl_kernels/core/published.json"
STEP = "h200-grpo-step.json"
MODELS, MODEL_STEPS, MODEL_BITS = "packages/models/README.md", "*-model-step.json", "*-model-bits.json"
DEMO, DEMOS = "packages/rl-kernels/README.md", "*-demo.json"
HOSTS = "*-host.json"
TRL, TRL_STEPS = "docs/recipes/trl.md", "*-trl-step*.json"
CALLS = "*-client-calls.json"
FRONT, SUMMARY = "README.md", "summary"
BENCH, GRPO_STEP, HOST = "bench results", "grpo step", "host time"
MODEL_STEP, BITS, TWINS, TRL_STEP = "model step", "model bits", "demo", "trl step"
PRODUCTS, ATTENTION = "batch_invariant_ops", "flash attention"
"""What markers in a page say."""
LONGEST = 100
"""Rows of a table that a page shows; of a longer one it shows the geometric means alone."""


def results(package: Path) -> dict[str, Document]:
    """Return the committed results of a package by the name of their file; records of other operators are left out."""
    published = json.loads((ROOT / PUBLISHED).read_text(encoding="utf-8"))
    own = {name for name, each in published.items() if each["distribution"] == f"rl-kernels-{package.name}"}
    found = {}
    for file in sorted(package.glob("benchmarks/results/*.json")):
        document = read(file)
        found[file.stem] = replace(document, records=[each for each in document.records if each.operator in own])
    return found


def section(found: dict[str, Document]) -> str:
    """Return what stands between the markers of a package's README."""
    parts = []
    for document in found.values():
        for title, rows in tables(document):
            parts.append(f"{title}:\n\n{as_table(rows)}" if len(rows) <= LONGEST else f"{title}: {len(rows) - 1} rows.")
        parts.append("\n".join(f"- {line}" for line in (*remarks(document.records), *facts(document))))
    return filled(parts)


def overview(packages: dict[str, dict[str, Document]]) -> str:
    """Return what stands between the markers of the page of all benchmarks."""
    lines = [
        f"![Share of the floor, {name}, {file}]({plot_name(name, file)})\n\nThe numbers: [{name}](operators/{name}.md)."
        for name, found in packages.items()
        for file in found
    ]
    return filled(lines)


def plot_name(package: str, file: str) -> str:
    """Return the name of a picture in the docs."""
    return f"bench-{package}-{file}.svg"


def pages(root: Path, packages: dict[str, dict[str, Document]]) -> Iterator[tuple[Path, str]]:
    """Yield each page with the text that it should have."""
    for name, found in packages.items():
        page = root / "packages" / name / "README.md"
        yield page, _filled(page, {BENCH: section(found)}, root)
    files = root / RESULTS
    steps, bits, twins = (sorted(files.glob(names)) for names in (MODEL_STEPS, MODEL_BITS, DEMOS))
    calls = sorted(files.glob(CALLS))
    of_models = {MODEL_STEP: model_steps(steps), BITS: model_bits(bits)}
    of_models |= {PRODUCTS: client_calls(calls, "products"), ATTENTION: client_calls(calls, "attention")}
    yield root / MODELS, _filled(root / MODELS, of_models, root)
    yield root / TRL, _filled(root / TRL, {TRL_STEP: trl_steps(sorted(files.glob(TRL_STEPS)))}, root)
    yield root / DEMO, _filled(root / DEMO, {TWINS: demos(twins)}, root)
    yield root / FRONT, _filled(root / FRONT, {SUMMARY: summary(files, packages)}, root)
    whole = {BENCH: overview(packages), GRPO_STEP: step(files / STEP), HOST: hosts(sorted(files.glob(HOSTS)))}
    yield root / PAGE, _filled(root / PAGE, whole, root)


def _filled(page: Path, bodies: dict[str, str], root: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for name, body in bodies.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"{page.relative_to(root)}: expected the markers of {name}")
        text = marked.sub(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
    return text


def main(argv: list[str] | None = None) -> int:
    """Write or check the pages; return the exit status: 1 if a page is not up to date."""
    parser = argparse.ArgumentParser(description="Write the committed results of the benchmarks into the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (default: this one)")
    given = parser.parse_args(argv)
    root = given.root
    folders = sorted(file.parents[4] for file in root.glob("packages/*/src/rl_kernels/*/spec/bench.py"))
    try:
        packages = {folder.name: results(folder) for folder in folders}
        wanted = dict(pages(root, packages))
    except (OSError, ValueError) as error:
        print(f"bench_tables: {error}", file=sys.stderr)
        return 1
    pictures = {
        root / "docs" / plot_name(name, file): document
        for name, found in packages.items()
        for file, document in found.items()
    }
    runs = {root / "docs" / f"{file.stem}.svg": record.read(file) for file in root.glob(f"{RESULTS}/{DEMOS}")}
    if given.check:
        stale = [page for page, text in wanted.items() if page.read_text(encoding="utf-8") != text]
        stale += [picture for picture in (*pictures, *runs) if not picture.exists()]
        for page in stale:
            print(f"{page.relative_to(root)} is not up to date: python tools/bench_tables.py", file=sys.stderr)
        return 1 if stale else 0
    for page, text in wanted.items():
        page.write_text(text, encoding="utf-8")
    for picture, document in pictures.items():
        draw(document.records, picture, document.environment)
    for picture, run in runs.items():
        plot.draw(run.histories, run.summaries, run.parameters, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
