"""Write the committed results of the benchmarks into the docs: `python tools/bench_tables.py`, `--check` to compare.

| results | made by | shown in |
|---|---|---|
| packages/X/benchmarks/results/ | `rl-kernels bench --json` | packages/X/README.md and benchmarks/README.md |
| tools/results/*-model-*.json | `tools/model_step.py` | packages/models/benchmarks/README.md |
| tools/results/cpu-model.json | `tools/cpu_model.py` | packages/models/benchmarks/README.md |
| tools/results/*-client-calls.json | `tools/client_calls.py` | packages/models/benchmarks/README.md |
| tools/results/*-grpo-step*.json | `tools/grpo_step.py` | docs/benchmarks/grpo-step.md |
| tools/results/*-host.json | `rl-kernels bench --set host` | docs/benchmarks/host-time.md |
| tools/results/*-trl-step*.json | `tools/trl_step.py` | docs/recipes/trl.md |
| tools/results/*-vllm-*.json | `tools/vllm_rollout.py` | docs/recipes/vllm-sglang.md |
| tools/results/*-ranks.json | `tools/ranks.py` | docs/many-gpus.md |
| tools/results/*-shards.json | `tools/shard_times.py` | docs/many-gpus.md |
| tools/results/*-segments.json | `tools/segment_times.py` | packages/det-gemm/GUIDE.md |
| tools/results/*-chain-error.json | `tools/chain_error.py` | packages/det-gemm/GUIDE.md |
| tools/results/*-head.json | `tools/head_times.py` | packages/linear-logp/GUIDE.md, with a picture |
| tools/results/*-checks.json | `run.py --record`, of `nox -s gpu` | docs/hardware.md |
| tools/results/*-demo.json | `rl-kernels demo --device cuda` | docs/demo.md, with a picture |
| tools/results/*-schedules.json | `tools/tune_matmul.py --beside --json` | docs/hardware.md |
| tools/results/triton-compiled.json | `rl-kernels compile --backend triton --json` | docs/hardware.md |
| tools/results/mismatch.json | `tools/mismatch.py` | docs/demo.md, with a picture |

A few lines of them all are in README.md and docs/benchmarks/index.md. Where there are no results, a page says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpu_tables import evidence
from head_tables import draw as draw_head
from head_tables import heads
from mismatch_plot import draw as draw_mismatch
from operator_tables import benchmark_page, readme_table
from rank_tables import estimates, measured, segments, shards
from summary_table import front_table
from tool_tables import (
    chains,
    client_calls,
    compiled,
    cpu_models,
    demos,
    hosts,
    mismatch,
    model_bits,
    model_steps,
    rollouts,
    schedules,
    steps,
    trl_steps,
)

from rl_kernels.demo.gpu import plot, record
from rl_kernels.lab.bench.plot import draw
from rl_kernels.lab.bench.record import Document, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = "tools/results", "docs/benchmarks"
PUBLISHED = "shared/core/src/rl_kernels/core/published.json"
FRONT = ("README.md", "docs/benchmarks/index.md")
"""Pages with a few lines of all results."""
MODELS, DEMO, TRL = "packages/models/benchmarks/README.md", "docs/demo.md", "docs/recipes/trl.md"
VLLM = "docs/recipes/vllm-sglang.md"
RANKS, SEGMENTS = "docs/many-gpus.md", "packages/det-gemm/GUIDE.md"
HARDWARE = "docs/hardware.md"
GRPO_STEP, HOST = "docs/benchmarks/grpo-step.md", "docs/benchmarks/host-time.md"
HEAD, OF_HEAD = "packages/linear-logp/GUIDE.md", "*-head.json"
DEMOS, MISMATCH = "*-demo.json", "mismatch.json"


def results(package: Path) -> dict[str, Document]:
    """Return the committed results of a package by the name of their file; records of other operators are left out."""
    published = json.loads((ROOT / PUBLISHED).read_text(encoding="utf-8"))
    own = {name for name, each in published.items() if each["distribution"] == f"rl-kernels-{package.name}"}
    found = {}
    for file in sorted(package.glob("benchmarks/results/*.json")):
        document = read(file)
        found[file.stem] = replace(document, records=[each for each in document.records if each.operator in own])
    return found


def plot_name(package: str, file: str) -> str:
    """Return the name of a picture in the docs."""
    return f"{package}-{file}.svg"


def pages(root: Path, packages: dict[str, dict[str, Document]]) -> Iterator[tuple[Path, str]]:
    """Yield each page with the text that it should have."""
    for name, found in packages.items():
        pictures = {file: f"../../../{PICTURES}/{plot_name(name, file)}" for file in found}
        for path, marked in (
            (f"packages/{name}/README.md", {"bench summary": readme_table(found)}),
            (f"packages/{name}/benchmarks/README.md", {"bench results": benchmark_page(found, pictures)}),
        ):
            yield root / path, _replaced(root, path, marked)
    files = root / RESULTS

    def named(pattern: str) -> list[Path]:
        return sorted(files.glob(pattern))

    calls = named("*-client-calls.json")
    of_head = [(file, f"{PICTURES}/{file.stem}.svg") for file in named(OF_HEAD)]
    of_models = {
        "model step": model_steps(named("*-model-step.json")),
        "model bits": model_bits(named("*-model-bits.json")),
        "cpu model": cpu_models(named("cpu-model.json")),
        "batch_invariant_ops": client_calls(calls, "products"),
        "flash attention": client_calls(calls, "attention"),
    }
    marked_pages = {
        MODELS: of_models,
        TRL: {"trl step": trl_steps(named("*-trl-step*.json"))},
        VLLM: {"vllm rollout": rollouts(named("*-vllm-*.json"))},
        DEMO: {"demo": demos(named(DEMOS)), "mismatch": mismatch(files / MISMATCH)},
        GRPO_STEP: {"grpo step": steps(named("*-grpo-step*.json"))},
        RANKS: {
            "ranks": measured(named("*-ranks.json")),
            "shards": shards(named("*-shards.json")),
            "estimates": estimates(named("*-ranks.json")),
        },
        HEAD: {"head": heads(named(OF_HEAD), {file.stem: f"../../{picture}" for file, picture in of_head})},
        SEGMENTS: {
            "segments": segments(named("*-segments.json")),
            "chains": chains(named("*-chain-error.json")),
        },
        HOST: {"host time": hosts(named("*-host.json"))},
        HARDWARE: {
            "compiled": compiled(named("triton-compiled.json")),
            "schedules": schedules(named("*-schedules.json")),
            "checks": evidence(named("*-checks.json")),
        },
        **{path: {"summary": front_table(files, packages)} for path in FRONT},
    }
    for path, marked in marked_pages.items():
        yield root / path, _replaced(root, path, marked)


def pictures(root: Path, packages: dict[str, dict[str, Document]]) -> dict[Path, Callable[[Path], None]]:
    """Return each picture, with what draws it."""
    drawn: dict[Path, Callable[[Path], None]] = {
        root / PICTURES / plot_name(name, file): partial(_draw_bench, document)
        for name, found in packages.items()
        for file, document in found.items()
    }
    for file in (root / RESULTS).glob(DEMOS):
        drawn[root / "docs" / f"{file.stem}.svg"] = partial(_draw_demo, record.read(file))
    for file in (root / RESULTS).glob(OF_HEAD):
        document = json.loads(file.read_text(encoding="utf-8"))
        drawn[root / PICTURES / f"{file.stem}.svg"] = partial(draw_head, document)
    mismatched = root / RESULTS / MISMATCH
    if mismatched.exists():
        drawn[root / "docs" / "mismatch.svg"] = partial(
            draw_mismatch, json.loads(mismatched.read_text(encoding="utf-8"))
        )
    return drawn


def _draw_bench(document: Document, path: Path) -> None:
    draw(document.records, path, document.environment)


def _draw_demo(run: record.Recorded, path: Path) -> None:
    plot.draw(run.histories, run.summaries, run.parameters, path)


def _replaced(root: Path, path: str, bodies: dict[str, str]) -> str:
    text = (root / path).read_text(encoding="utf-8")
    for name, body in bodies.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"{path}: expected the markers of {name}")
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
    drawn = pictures(root, packages)
    if given.check:
        stale = [page for page, text in wanted.items() if page.read_text(encoding="utf-8") != text]
        stale += [picture for picture in drawn if not picture.exists()]
        for page in stale:
            print(f"{page.relative_to(root)} is not up to date: python tools/bench_tables.py", file=sys.stderr)
        return 1 if stale else 0
    for page, text in wanted.items():
        page.write_text(text, encoding="utf-8")
    for picture, draw_it in drawn.items():
        draw_it(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
