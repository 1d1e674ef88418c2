"""Write the committed results of the benchmarks into the docs: `python tools/bench_tables.py`, `--check` to compare.

Reads packages/*/benchmarks/results/*.json, which `rl-kernels bench --json` wrote. The tables of an operator go
between the markers of its README, which is its page in the docs too; the plots go into docs/ and are shown by
docs/benchmarks.md, which also has the table of the whole step that `tools/grpo_step.py --json` timed, and what the host
takes for small calls, by `rl-kernels bench --set host`; those of whole models, by `tools/model_step.py --json`, are in
the README of models, and that of `rl-kernels demo --device cuda`, with its picture, in the README of rl-kernels.
Everything is derived from the results: where there are none, a page says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_kernels.demo.gpu import plot, record
from rl_kernels.demo.gpu.report import QUOTIENT, side_by_side
from rl_kernels.lab.bench.plot import draw
from rl_kernels.lab.bench.record import Document, Measured, read
from rl_kernels.lab.bench.report import as_table, digits, facts, remarks, tables

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = "docs/benchmarks.md", "tools/results"
PUBLISHED = "shared/core/src/rl_kernels/core/published.json"
STEP = "h200-grpo-step.json"
MODELS, MODEL_STEPS, MODEL_BITS = "packages/models/README.md", "*-model-step.json", "*-model-bits.json"
DEMO, DEMOS = "packages/rl-kernels/README.md", "*-demo.json"
HOSTS = "*-host.json"
BENCH, GRPO_STEP, HOST = "bench results", "grpo step", "host time"
MODEL_STEP, BITS, TWINS = "model step", "model bits", "demo"
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
    return filled(parts)


def overview(packages: dict[str, dict[str, Document]]) -> str:
    """Return what stands between the markers of the page of all benchmarks."""
    lines = [
        f"![Share of the floor, {name}, {file}]({plot_name(name, file)})\n\nThe numbers: [{name}](operators/{name}.md)."
        for name, found in packages.items()
        for file in found
    ]
    return filled(lines)


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
    return f"\nA Llama of {sizes}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(where)}\n\n"


def hosts(files: Iterable[Path]) -> str:
    """Return the tables of what the host takes for small calls."""
    parts = []
    for file in files:
        document = read(file)
        timed = [each for each in document.records if each.passes]
        passes = list(dict.fromkeys(name for each in timed for name in each.passes))
        rows = [["operator", "shape", "", *(f"{name}{what}" for name in passes for what in (", us", ", / ours"))]]
        for each in timed:
            cells = [cell for name in passes for cell in _call(each.passes.get(name))]
            rows.append([each.operator, each.shape, each.name, *cells])
        parts.append(f"{as_table(rows)}\n\n- {next(facts(document))}")
    return filled(parts)


def _call(measured: Measured | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    return f"{measured.timing.call_us:.0f}", "" if measured.call_ratio is None else f"{measured.call_ratio:.2f}"


def ran_on(where: Mapping[str, str]) -> str:
    """Return the line under a table that says what it was measured on."""
    named = ("device", "date", "torch", "transformers", "triton")
    return f"- ran on {', '.join(f'{name} {where[name]}' for name in named)}"


def sizes_of(settings: Mapping[str, Any]) -> str:
    """Return what a model of `tools/model_step.py` is."""
    widths = f"{settings['layers']} layers, hidden {settings['hidden']}, {settings['heads']} heads"
    return f"A Llama of {widths}, {settings['kv_heads']} of keys, {settings['dtype']}"


def filled(parts: Sequence[str]) -> str:
    """Return what stands between markers."""
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NOTHING


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
        parts.append(f"{sizes_of(given)}, without its head:\n\n{as_table(rows)}\n\n{ran_on(where)}")
    return filled(parts)


def model_bits(files: Iterable[Path]) -> str:
    """Return the tables of how many logits, log-probabilities and gradients differ from those of prompts alone."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, ways = found["settings"], found["bits"]
        rows = [["that differ", *(f"{way}: {what}" for way in ways for what in ("logits", "log-probabilities"))]]
        for label in ways["stock"]["prompts"]:
            each = [ways[way]["prompts"][label] for way in ways]
            counts = [(found[what], found[f"of_{what}"]) for found in each for what in ("logits", "logps")]
            rows.append([label, *(of(*count) for count in counts)])
        gradients = [(way, *each["gradients"].values()) for way, each in ways.items()]
        prompts = f"{given['prompts']} prompts of up to {given['longest']} tokens, each compared with itself alone"
        parts.append(
            f"{sizes_of(given)}; {prompts}:\n\n{as_table(rows)}\n\n- gradients of the prompts packed that differ from "
            f"those padded: {', '.join(f'{way} {of(*counts)}' for way, *counts in gradients)}\n"
            f"{ran_on(found['environment'])}"
        )
    return filled(parts)


def of(some: int, every: int) -> str:
    """Return how many of all, and their share where there is one."""
    return f"{some:,} of {every:,}" + (f" ({some / every:.0%})" if some else "")


def demos(files: Iterable[Path]) -> str:
    """Return the tables of both twins of the demo on a GPU, with their pictures."""
    parts = []
    for file in files:
        found = record.read(file)
        rows = [["", *found.summaries, QUOTIENT], *map(list, side_by_side(found.summaries))]
        picture = f"![Both twins, step by step](../../docs/{file.stem}.svg)"
        parts.append(f"{as_table(rows)}\n\n{ran_on(found.environment)}\n\n{picture}")
    return filled(parts)


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
    yield root / MODELS, _filled(root / MODELS, {MODEL_STEP: model_steps(steps), BITS: model_bits(bits)}, root)
    yield root / DEMO, _filled(root / DEMO, {TWINS: demos(twins)}, root)
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
