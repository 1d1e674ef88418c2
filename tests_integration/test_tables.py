"""The pages of the docs hold what the committed results say; tools/tables.py makes them so.

The committed pages pin every table: any other text is not up to date. The rest is of what no committed result has, and
of numbers that are worked out here again.
"""

import contextlib
import importlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import imported

from rl_kernels.lab.bench.definition import Work
from rl_kernels.lab.bench.measure import GRAPH, Ceilings, Timing
from rl_kernels.lab.bench.record import OURS, Document, Measured, Record

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
CEILINGS = Ceilings(4.28e12, 750e12, "1024 MiB, read and written", "8192^3, bf16, torch.matmul")
READ = ("packages/*/src/rl_kernels/*/spec/bench.py", "packages/*/*.md", "packages/*/benchmarks/**/*.*", "docs/**/*.md")
READ += ("docs/*.svg", "tools/results/*.json", "README.md")


def tool(*arguments):
    """Run the tool in this process, which has PyTorch already; return its exit status and what it said."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = imported("tables").main([*map(str, arguments)])
    return SimpleNamespace(returncode=status, stderr=errors.getvalue())


def test_the_pages_are_up_to_date():
    done = tool("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "count", "of_times"), [("README.md", 8, 7), ("docs/benchmarks/index.md", 20, 16)])
def test_the_front_pages_have_every_row_and_their_ratios_are_those_of_their_times(page, count, of_times):
    text = (ROOT / page).read_text().partition("<!-- summary -->")[2].partition("<!-- end")[0]
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")][2:]
    assert len(rows) == count
    timed = [row for row in rows if " ms" in row[1]]
    assert len(timed) == of_times
    for what, theirs, ours, ratio in timed:
        beside = [float(re.findall(r"([\d.]+) ms", cell)[0]) for cell in (theirs, ours)]
        assert beside[1] / beside[0] == pytest.approx(float(ratio), abs=0.01), what


def document():
    """Return results such as a GPU gives."""
    records = []
    for sizes in ((8192, 32768), (8192, 151936), (8, 151936)):
        shape, size = "x".join(map(str, sizes)), 2.0 * sizes[0] * sizes[1]
        for name, share in ((OURS, 0.95), ("eager", 0.1 if sizes[0] > 8 else 0.2), ("quack", 0.7), ("triton", 0.9)):
            ms = {"forward": size / 4.28e9 / share, "forward + backward": 3 * size / 4.28e9 / share}
            passes = {
                key: Measured.of(
                    Timing(value, GRAPH, 1e3 * value + 9, size / 2**20, 1),
                    Work(size if key == "forward" else 3 * size),
                    CEILINGS,
                    None if name == OURS else Timing(ms[key] * share / 0.95, GRAPH, 50.0, 0.0, 1),
                )
                for key, value in ms.items()
            }
            backend = "triton" if name == OURS else ""
            note = "rl-kernels, backend triton" if name == "triton" else ""
            records.append(Record("fused_logp", shape, sizes, "", "bf16", name, backend, note, passes=passes))
    absent = {"": "not installed: pip install liger-kernel"}
    records.append(Record("fused_logp", "8x151936", (8, 151936), "", "bf16", "liger", skipped=absent))
    where = {"device": "NVIDIA H200", "arch": "sm90", "torch": "2.11.0", "triton": "3.6.0"}
    return Document(where, {"bf16": CEILINGS}, records)


RECORD = {
    "environment": {"device": "NVIDIA H200"},
    "parts": {
        "check rms_norm/triton/bf16": dict(
            **dict(state="ran", seconds=9.0, checks=1200, failed=1, passed=False),
            **dict(failures=["case, output"], skipped={"no other backend": 3}, programs={"forward": 40}),
        ),
        "check rms_norm/triton/fp16": {"state": "stopped", "seconds": 60.2},
        "check rms_norm/cuda/bf16": {"state": "refused", "seconds": 1.0, "reason": "BF16 is not taken"},
        "tests norm/test_a": dict(state="ran", seconds=2.0, tests=7, failed=1, failures=["a::b"], skipped={"why": 2}),
        "tests norm/test_b": {"state": "not run"},
    },
}


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the pages and results, with other results of one operator, and of the checks."""
    for file in {file for pattern in READ for file in ROOT.glob(pattern)}:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    folder = tmp_path / "packages/fused-logp/benchmarks/results"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    document().write(folder / "h200-goals.json")
    elsewhere = document()
    elsewhere.environment = elsewhere.environment | {"device": "NVIDIA H100"}
    elsewhere.write(folder / "h100-goals.json")
    (tmp_path / "tools/results/h200-checks.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_results_are_written_into_the_pages(tree):
    stale = tool("--check", "--root", tree)
    assert stale.returncode == 1
    assert "packages/fused-logp/README.md is not up to date" in stale.stderr
    pictures = sorted((tree / "docs").glob("*.svg"))
    before = [(file.unlink(), file)[1] for file in pictures]
    assert tool("--root", tree).returncode == 0
    assert tool("--check", "--root", tree).returncode == 0
    drawn = [file.read_bytes() for file in before]
    assert len(drawn) >= 2
    brief = (tree / "packages/fused-logp/README.md").read_text()
    assert "Shapes `goals`, NVIDIA H200, timed one after the other:" in brief
    assert "| eager | 3 | 0.13 (0.11 to 0.21) | 0.13 (0.11 to 0.21) |" in brief
    assert "| triton |" not in brief
    assert "H100" not in brief.partition("<!-- bench summary -->")[2].partition("<!-- end")[0]
    page = (tree / "packages/fused-logp/benchmarks/README.md").read_text()
    assert "## Shapes `goals`, NVIDIA H200" in page
    assert "\n<!-- picture of packages/fused-logp/benchmarks/results/h200-goals.json: Share of the floor, " in page
    assert "| 8192x151936 | rl-kernels triton | 0.612 | 4.07 TB/s | 95 % |" in page
    assert "| 8192x151936 | eager | 5.82 | 0.428 TB/s | 10 % | 0.11 |" in page
    assert "- skipped: fused_logp: liger: not installed: pip install liger-kernel (8x151936)" in page
    assert "- ran on device NVIDIA H200, arch sm90" in page
    hardware = (tree / "docs/hardware.md").read_text()
    assert "| rms_norm, triton | 1,199 of 1,200 | stopped after 60 s | not run |" in hardware
    assert "| rms_norm, cuda | refused | not run | not run |" in hardware
    assert "| norm | 4 | 1 | 2 | 1 |" in hardware
    assert "- failed in norm/test_a: a::b\n" in hardware
    assert "- refused, rms_norm/cuda/bf16: BF16 is not taken\n" in hardware
    assert tool("--root", tree).returncode == 0
    assert [file.read_bytes() for file in before] == drawn


def test_what_was_not_measured_is_left_out(tree):
    results = tree / "tools/results"
    for name in ("trl-step", "trl-step-autocast"):
        file = results / f"h200-{name}.json"
        found = json.loads(file.read_text())
        found["ways"]["TRL"].update(largest=None)
        file.write_text(json.dumps(found))
    for file in results.glob("*client-calls.json"):
        file.unlink()
    for file in results.glob("*checks.json"):
        file.write_text(json.dumps(RECORD | {"parts": {}}))
    assert tool("--root", tree).returncode == 0
    assert "sequences that fit" not in (tree / "docs/recipes/trl.md").read_text()
    assert "No results are committed yet." in (tree / "packages/models/benchmarks/README.md").read_text()
    hardware = (tree / "docs/hardware.md").read_text()
    assert "The checker was not run." in hardware
    assert "The tests were not run." in hardware


def rows_of(page, section):
    """Return the cells of the tables of a section."""
    text = (ROOT / page).read_text().partition(f"<!-- {section} -->")[2].partition("<!-- end")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("| ")]


def result(name):
    return json.loads((ROOT / f"tools/results/{name}.json").read_text())


def test_numbers_of_the_tables_are_those_of_the_results():
    rows = rows_of("packages/models/benchmarks/README.md", "model step")
    step, ms = next(iter(result("h200-model-step")["ms"].items()))
    stock, ours = (float(ms[way]) for way in ("stock", "invariant"))
    (row,) = [row for row in rows if row[0] == step and float(row[1].split()[0]) == pytest.approx(stock, rel=0.01)][:1]
    assert float(row[-1].split()[0]) == pytest.approx(ours, rel=0.01)
    assert float(row[-1].split()[1].strip("()")) == pytest.approx(ours / stock, abs=0.006)

    ways = result("h200-trl-step")["ways"]
    # The last table is of this file, the one before of training under autocast.
    rows = {row[0]: row[1:] for row in rows_of("docs/recipes/trl.md", "trl step")}
    for label, key in (("rollout, ms", "rollout_ms"), ("update, ms", "update_ms")):
        assert [float(cell.replace(",", "")) for cell in rows[label]] == pytest.approx(
            [way[key] for way in ways.values()], rel=0.01
        )


def test_pictures_of_the_site_are_drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    page = (ROOT / "packages/linear-logp/GUIDE.md").read_text()
    (file,) = pictures.named(page)
    assert file.startswith("tools/results/")
    assert f"![Time over memory](../x/{file.replace('/', '-').replace('.json', '.svg')})\n" in pictures.shown(
        page, "../x"
    )
    shares = next(pictures.named((ROOT / "packages/norm/benchmarks/README.md").read_text()))
    for results in (file, shares):
        assert "<svg" in pictures.drawn(ROOT / results)


def test_a_page_without_markers_is_named(tree):
    (tree / "packages/det-gemm/README.md").write_text("# det_gemm\n")
    done = tool("--check", "--root", tree)
    assert done.returncode == 1
    assert done.stderr == "tables: packages/det-gemm/README.md: expected the markers of bench summary\n"
