"""Write the committed results of the benchmarks into the docs: `python tools/bench_tables.py`, `--check` to compare.

Reads packages/*/benchmarks/results/*.json, which `rl-kernels bench --json` wrote. The tables of an operator go
between the markers of its README, which is its page in the docs too; the plots go into docs/ and are shown by
docs/benchmarks.md, which also has the table of the whole step that `tools/grpo_step.py --json` timed; that of whole
models, by `tools/model_step.py --json`, is in the README of models. Everything is derived from the results: where there
are none, a page says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rl_kernels.lab.bench.plot import draw
from rl_kernels.lab.bench.record import Document, read
from rl_kernels.lab.bench.report import as_table, digits, facts, remarks, tables

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/benchmarks.md"
PUBLISHED = "shared/core/src/rl_kernels/core/published.json"
STEP = "tools/results/h200-grpo-step.json"
MODELS, MODEL_STEPS = "packages/models/README.md", "tools/results/*-model-step.json"
BENCH, GRPO_STEP, MODEL_STEP = "bench results", "grpo step", "model step"
"""What markers in a page say."""
NOTHING = "\nNo results are committed yet.\n\n"
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
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NOTHING


def overview(packages: dict[str, dict[str, Document]]) -> str:
    """Return what stands between the markers of the page of all benchmarks."""
    lines = [
        f"![Share of the floor, {name}, {file}]({plot_name(name, file)})\n\nThe numbers: [{name}](operators/{name}.md)."
        for name, found in packages.items()
        for file in found
    ]
    return "\n" + "\n\n".join(lines) + "\n\n" if lines else NOTHING


def step(file: Path) -> str:
    """Return the table of a whole step, and what it was timed with."""
    if not file.exists():
        return NOTHING
    found = json.loads(file.read_text(encoding="utf-8"))
    given, steps, where = found["settings"], found["steps"], found["environment"]
    sizes = f"{given['layers']} layers, hidden {given['hidden']}, vocabulary {given['vocab']}, {given['dtype']}"
    batch = f"{given['prompts'] * given['samples']} sequences of {given['tokens']} tokens"
    labels = {"ms": "step, ms", "extra_mib": "peak extra memory, MiB"}
    labels["largest"] = f"sequences that fit in {given['limit_gib']:g} GiB"
    ways = list(steps)
    rows = [["", *ways, "gain"]]
    for key, label in labels.items():
        values = [steps[way][key] for way in ways]
        if None in values:
            continue
        cells = [str(value) if isinstance(value, int) else digits(value) for value in values]
        gain = values[1] / values[0] if key == "largest" else values[0] / values[1]
        rows.append([label, *cells, f"{gain:.2f}"])
    ran = ", ".join(f"{name} {where[name]}" for name in ("device", "date", "torch", "transformers", "triton"))
    return f"\nA Llama of {sizes}; {batch}:\n\n{as_table(rows)}\n\n- ran on {ran}\n\n"


def model_steps(files: Iterable[Path]) -> str:
    """Return the tables of whole models: milliseconds, and beside them their share of the stock model's."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, timed, where = found["settings"], found["ms"], found["environment"]
        ways = list(dict.fromkeys(way for each in timed.values() for way in each))
        rows = [["ms", *ways]]
        for label, each in timed.items():
            cells = [f"{digits(each[way])} ({each[way] / each[ways[0]]:.2f})" if way in each else "" for way in ways]
            rows.append([label, *cells])
        sizes = (
            f"{given['layers']} layers, hidden {given['hidden']}, {given['heads']} heads, {given['kv_heads']} of keys"
        )
        ran = ", ".join(f"{name} {where[name]}" for name in ("device", "date", "torch", "transformers", "triton"))
        parts.append(f"A Llama of {sizes}, {given['dtype']}, without its head:\n\n{as_table(rows)}\n\n- ran on {ran}")
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NOTHING


def plot_name(package: str, file: str) -> str:
    """Return the name of a picture in the docs."""
    return f"bench-{package}-{file}.svg"


def pages(root: Path, packages: dict[str, dict[str, Document]]) -> Iterator[tuple[Path, str]]:
    """Yield each page with the text that it should have."""
    for name, found in packages.items():
        page = root / "packages" / name / "README.md"
        yield page, _filled(page, {BENCH: section(found)}, root)
    steps = sorted(root.glob(MODEL_STEPS))
    yield root / MODELS, _filled(root / MODELS, {MODEL_STEP: model_steps(steps)}, root)
    yield root / PAGE, _filled(root / PAGE, {BENCH: overview(packages), GRPO_STEP: step(root / STEP)}, root)


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
    if given.check:
        stale = [page for page, text in wanted.items() if page.read_text(encoding="utf-8") != text]
        stale += [picture for picture in pictures if not picture.exists()]
        for page in stale:
            print(f"{page.relative_to(root)} is not up to date: python tools/bench_tables.py", file=sys.stderr)
        return 1 if stale else 0
    for page, text in wanted.items():
        page.write_text(text, encoding="utf-8")
    for picture, document in pictures.items():
        draw(document.records, picture, document.environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
