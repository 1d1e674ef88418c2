"""The pages of the docs hold what the committed results say; tools/tables.py makes them so."""

import contextlib
import importlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_kernels.lab.bench.definition import Work
from rl_kernels.lab.bench.measure import GRAPH, Ceilings, Timing
from rl_kernels.lab.bench.record import OURS, Document, Measured, Record

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
CEILINGS = Ceilings(4.28e12, 750e12, "1024 MiB, read and written", "8192^3, bf16, torch.matmul")


BITS = {
    "settings": dict(layers=4, hidden=64, heads=8, kv_heads=2, dtype="bf16", prompts=3, longest=9),
    "bits": {
        way: {
            "prompts": {"packed": {"logits": 10 * some, "of_logits": 4000, "logps": some, "of_logps": 400}},
            "gradients": {"differ": 2 * some, "elements": 1600},
        }
        for way, some in (("stock", 300), ("invariant", 0))
    },
}


def twin(kl, rollout_ms):
    """Return what the demo records of one."""
    counts = dict(reward=0.5, solved=0.25, kl=kl, clip_fraction=0.125, tokens=10, mismatches=0, largest=0.0)
    seconds = dict(rollout_seconds=rollout_ms / 1000, update_seconds=1.0, seconds=4.0)
    return [counts | seconds | dict(step=step, ratios_off=0, watched={}) for step in (1, 2)]


CALLS = {
    "products": {
        "mm 2048x4096x4096, BF16": {
            "PyTorch": {"us": 20.0, "differing": [0, 9], "error": 3e-7},
            "batch_invariant_ops": {"us": 200.0, "differing": [0, 9], "error": 3e-7},
            "rl-kernels": {"us": 50.0, "differing": [0, 9], "error": 2e-7},
        },
        "mm 2x3x4, FP32": {
            "PyTorch": {"us": 20.0, "differing": [3, 4096], "error": 3e-7},
            "rl-kernels": {"us": 31.5, "differing": [0, 4096], "error": 2e-7},
        },
    },
    "attention": {
        "varlen_attn": {
            "PyTorch": {"us": 500.0, "differing": [30, 60], "error": None},
            "rl-kernels": {"us": 400.0, "differing": [0, 60], "error": None},
        }
    },
}
SIZES = dict(layers=4, hidden=64, vocab=99, dtype="bf16", groups=2, samples=8, prompt=9, tokens=20, limit_gib=40.0)
TRL = {
    name: dict(rollout_ms=rollout, update_ms=50.0, extra_mib=4000.0, largest=largest, differing=differing)
    for name, rollout, largest, differing in (
        ("TRL", 90.0, 248, {}),
        ("rl-kernels", 80.0, 240, {"TRL": [320, 320], "rl-kernels": [300, 320]}),
        ("rl-kernels, invariant", 70.0, 368, {"TRL": [310, 320], "rl-kernels": [0, 320]}),
    )
}
TWINS = {"model": {"parameters": 104_000_000}, "runs": {"ours": twin(0.0, 90.0), "stock": twin(2e-4, 120.0)}}


def tool(*arguments):
    """Run the tool in this process, which has PyTorch already; return its exit status and what it said."""
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.syspath_prepend(str(ROOT / "tools"))
        status = importlib.import_module("tables").main([*map(str, arguments)])
    return SimpleNamespace(returncode=status, stderr=errors.getvalue())


def test_the_pages_are_up_to_date():
    done = tool("--check")
    assert done.returncode == 0, done.stderr


def test_the_front_page_has_every_row_and_its_ratios_are_those_of_its_times():
    front = (ROOT / "README.md").read_text().partition("<!-- summary -->")[2].partition("<!-- end")[0]
    rows = [row.strip("| ").split(" | ") for row in front.splitlines() if row.startswith("| ")][2:]
    assert len(rows) == 11
    timed = [row for row in rows if " ms" in row[1]]
    assert len(timed) == 10
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


def scores():
    """Return results of linear_logp, of which a peer was not measured."""
    records, work, ours = [], Work(1e9, 3e12), Timing(20.0, GRAPH, 30.0, 1234.4, 1)
    for name, timing in (
        (OURS, ours),
        ("compile", Timing(10.0, GRAPH, 20.0, 3006.0, 1, beside_ms=19.0)),
        ("cce", None),
    ):
        measured = timing and {
            "forward + backward": Measured.of(timing, work, CEILINGS, None if name == OURS else ours)
        }
        records.append(
            Record("linear_logp", "4096x4096x128256", (4096, 4096, 128256), "", "bf16", name, passes=measured or {})
        )
    return Document(document().environment, {"bf16": CEILINGS}, records)


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

ROLLOUTS = {
    "settings": {"model": "llama", "layers": 8, "runner": 1, "rounds": 3, "ways": ["rl-kernels", "stock"]},
    "bits": [
        {
            "way": way,
            "training": training,
            "tokens": 40,
            "differ": 40 * ((way, training) != ("rl-kernels", "invariant")),
        }
        for way in ("rl-kernels", "stock")
        for training in ("stock", "invariant")
    ],
    "speed": {"16": {"rl-kernels": [50.0, 1.0, 500.0], "stock": [100.0, 100.0, 7.0]}},
}


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the pages, with results of one operator."""
    names = [
        *ROOT.glob("packages/*/src/rl_kernels/*/spec/bench.py"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("packages/*/benchmarks/README.md"),
        *ROOT.glob("docs/benchmarks/*.md"),
        *(
            ROOT / f"{name}.md"
            for name in (
                *("README", "docs/demo", "docs/hardware", "docs/many-gpus", "docs/objectives", "docs/recipes/trl"),
                "docs/recipes/vllm-sglang",
            )
        ),
        *(ROOT / f"packages/{name}/GUIDE.md" for name in ("det-gemm", "linear-logp")),
    ]
    for file in names:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    folder = tmp_path / "packages/fused-logp/benchmarks/results"
    folder.mkdir()
    document().write(folder / "h200-goals.json")
    elsewhere = document()
    elsewhere.environment = elsewhere.environment | {"device": "NVIDIA H100"}
    elsewhere.write(folder / "h100-goals.json")
    folder = tmp_path / "packages/linear-logp/benchmarks/results"
    folder.mkdir()
    scores().write(folder / "h200-goals.json")
    (tmp_path / "tools/results").mkdir(parents=True)
    step = {
        "settings": dict(layers=4, hidden=64, vocab=99, dtype="bf16", prompts=2, samples=8, tokens=32, limit_gib=40.0),
        "environment": dict(device="NVIDIA H200", date="today", torch="2.11.0", transformers="5", triton="3.6.0"),
        "steps": {
            "eager": {"ms": 64.0, "extra_mib": 15548.4, "largest": 32},
            "rl-kernels": {"ms": 56.0, "extra_mib": 4277.5, "largest": 152},
        },
    }
    (tmp_path / "tools/results/h200-grpo-step.json").write_text(json.dumps(step))
    whole = {
        "settings": dict(layers=4, hidden=64, heads=8, kv_heads=2, dtype="bf16"),
        "environment": step["environment"],
        "ms": {
            "forward 2x16": {"stock": 8.0, "compiled": 6.0, "invariant": 7.0},
            "decode": {"stock": 4.0, "invariant": 1.0},
            "forward + backward 4x2048": {"stock": 4.0, "invariant": 3.0},
        },
    }
    (tmp_path / "tools/results/h200-model-step.json").write_text(json.dumps(whole))
    (tmp_path / "tools/results/h200-checks.json").write_text(json.dumps(RECORD))
    (tmp_path / "tools/results/h200-model-bits.json").write_text(json.dumps(whole | BITS))
    where = {"environment": step["environment"]}
    (tmp_path / "tools/results/h200-client-calls.json").write_text(json.dumps(where | {"calls": CALLS}))
    (tmp_path / "tools/results/h200-trl-step.json").write_text(json.dumps(where | {"settings": SIZES, "ways": TRL}))
    mixed = where | {"settings": SIZES | {"dtype": "autocast"}, "ways": TRL}
    (tmp_path / "tools/results/h200-trl-step-autocast.json").write_text(json.dumps(mixed))
    (tmp_path / "tools/results/h200-vllm-llama.json").write_text(json.dumps(where | ROLLOUTS))
    (tmp_path / "tools/results/h200-demo.json").write_text(json.dumps(TWINS | {"environment": step["environment"]}))
    return tmp_path


def test_results_are_written_into_the_pages(tree):
    stale = tool("--check", "--root", tree)
    assert stale.returncode == 1
    assert "packages/fused-logp/README.md is not up to date" in stale.stderr
    assert tool("--root", tree).returncode == 0
    assert tool("--check", "--root", tree).returncode == 0
    brief = (tree / "packages/fused-logp/README.md").read_text()
    assert "Shapes `goals`, NVIDIA H200, timed one after the other:" in brief
    assert "| eager | 3 | 0.13 (0.11 to 0.21) | 0.13 (0.11 to 0.21) |" in brief
    assert "| triton |" not in brief
    assert "H100" not in brief
    page = (tree / "packages/fused-logp/benchmarks/README.md").read_text()
    assert "## Shapes `goals`, NVIDIA H200" in page
    assert "\n<!-- picture of packages/fused-logp/benchmarks/results/h200-goals.json: Share of the floor, " in page
    assert "fused_logp, bf16, forward:" in page
    assert "| 8192x151936 | rl-kernels triton | 0.612 | 4.07 TB/s | 95 % |" in page
    assert "| 8192x151936 | eager | 5.82 | 0.428 TB/s | 10 % | 0.11 |" in page
    assert "- skipped: fused_logp: liger: not installed: pip install liger-kernel (8x151936)" in page
    assert "- ran on device NVIDIA H200, arch sm90" in page
    hardware = (tree / "docs/hardware.md").read_text()
    assert "| rms_norm, triton | 1,199 of 1,200 | stopped after 60 s | not run |" in hardware
    assert "| rms_norm, cuda | refused | not run | not run |" in hardware
    assert "| norm | 4 | 1 | 2 | 1 |" in hardware
    assert "| rms_norm, triton | `forward` 40 |" in hardware
    assert "- failed in norm/test_a: a::b\n" in hardware
    assert "- refused, rms_norm/cuda/bf16: BF16 is not taken\n" in hardware
    assert "| rl-kernels | 56.0 | 0.88 |" in (tree / "docs/benchmarks/grpo-step.md").read_text()
    models = (tree / "packages/models/benchmarks/README.md").read_text()
    assert "| forward 2x16 | 8.00 (1.00) | 6.00 (0.75) | 7.00 (0.88) |" in models
    assert "| decode | 4.00 (1.00) |  | 1.00 (0.25) |" in models
    assert "| packed | 3,000 of 4,000 (75%) | 300 of 400 (75%) | 0 of 4,000 | 0 of 400 |" in models
    assert "those padded: stock 600 of 1,600 (38%), invariant 0 of 1,600\n" in models
    assert "| mm 2x3x4, FP32 | 20.0 | 31.5 | 3 of 4,096 (under 1%) | 0 of 4,096 | 3.0e-07 | 2.0e-07 |" in models
    assert "| varlen_attn | 500 | 400 | 30 of 60 (50%) | 0 of 60 |" in models
    trl = (tree / "docs/recipes/trl.md").read_text()
    assert trl.count("| rollout, ms | 90.0 | 80.0 | 70.0 |") == 2
    assert "vocabulary 99, weights in FP32 under BF16 autocast; " in trl
    assert "| sequences that fit in 40 GiB | 248 | 240 | 368 |" in trl
    assert "| tokens that differ from the rollout | 320 of 320 (100%) | 300 of 320 (94%) | 0 of 320 |" in trl
    vllm = (tree / "docs/recipes/vllm-sglang.md").read_text()
    assert "llama, 8 layers, vLLM's model runner 1:" in vllm
    assert "| rl-kernels | 40 of 40 (100%) | 0 of 40 |" in vllm
    assert "| 16 | 50 (0.50); 500 (5.00) | 100 (1.00); 100 (1.00) |" in vllm
    front = (tree / "README.md").read_text()
    assert "4096x4096x128256 | torch.compile: 10.0 ms, 3,006 MiB | 19.0 ms, 1,234 MiB | 1.90 |" in front
    assert "CCE" not in front
    assert "| TRL's GRPOTrainer: rollout | TRL: 90.0 ms | 70.0 ms | 0.78 |" in front
    assert "| TRL's GRPOTrainer: update | TRL: 50.0 ms | 50.0 ms | 1.00 |" in front
    assert "| stock model, scored by linear_logp: 300 of 320 (94%) | 0 of 320 |  |" in front
    assert "4x2048 tokens | stock: 4.00 ms | 3.00 ms | 0.75 |" in front
    assert "decode a token" not in front
    assert (
        front.partition("<!-- summary -->")[2].partition("<!-- end")[0]
        in (tree / "docs/benchmarks/index.md").read_text()
    )
    demo = (tree / "docs/demo.md").read_text()
    assert "| KL, nats a token | 0 | 2.0e-04 |  |" in demo
    assert "| rollout, ms a step | 90 | 120 | 0.75 |" in demo
    assert "(h200-demo.svg)" in demo
    picture = tree / "docs/h200-demo.svg"
    before = picture.read_bytes()
    assert tool("--root", tree).returncode == 0
    assert picture.read_bytes() == before


def test_what_was_not_measured_is_left_out(tree):
    results = tree / "tools/results"
    for name, change in (
        ("trl-step", lambda found: found["ways"]["TRL"].update(largest=None)),
        ("trl-step-autocast", lambda found: found["ways"]["TRL"].update(largest=None)),
        ("client-calls", lambda found: found["calls"].pop("attention")),
    ):
        file = results / f"h200-{name}.json"
        found = json.loads(file.read_text())
        change(found)
        file.write_text(json.dumps(found))
    assert tool("--root", tree).returncode == 0
    assert "sequences that fit" not in (tree / "docs/recipes/trl.md").read_text()
    assert "No results are committed yet." in (tree / "packages/models/benchmarks/README.md").read_text()


def test_a_page_without_markers_is_named(tree):
    (tree / "packages/det-gemm/README.md").write_text("# det_gemm\n")
    done = tool("--check", "--root", tree)
    assert done.returncode == 1
    assert done.stderr == "tables: packages/det-gemm/README.md: expected the markers of bench summary\n"


def test_results_of_ranks_are_tables_and_give_estimates(tree):
    times = {"ours": 600.0, "NCCL, BF16": 400.0}
    reduced = {"eager": {**times, "ours": 800.0}, "graph": times, "differing": None, "bytes": 1 << 28}
    layer = {way: {"ours": 30.0, "cuBLAS + NCCL": 40.0} for way in ("eager", "graph")}
    found = {
        "version": 1,
        "environment": {"device": "NVIDIA H200", "ranks": "2", "nccl": "2.28.9"},
        "parts": {
            "exchanges": {f"{name}, 262144 KiB": reduced for name in ("all-reduce", "reduce-scatter")},
            "layers": {"8B o_proj, 1 rows": {**layer, "differing": 0, "bytes": 0}},
            "heads": {"linear_logp 1x2x3, forward": {**layer, "differing": 0, "bytes": 0}},
            "training": {"ours, TP": {"ms": 44.3, "peak_gib": 4.76, "differing": 0}},
            "loop": {f"round {number}": {"tokens": 1536, "differing": number} for number in range(2)},
        },
    }
    (tree / "tools/results/h200-ranks.json").write_text(json.dumps(found))
    assert tool("--root", tree).returncode == 0
    page = (tree / "docs/many-gpus.md").read_text()
    assert "| all-reduce, 262144 KiB | 447 | 600 | 1.50 | 800 | 2.00 |" in page
    assert "| 8B o_proj, 1 rows | 0 | 30.0 | 0.75 | 30.0 | 0.75 |" in page
    assert "FSDP2: 0 of 1,536, 1 of 1,536." in page
    assert "| ours, TP | 0 | 44.3 | 4.76 |" in page
    assert "- ran on device NVIDIA H200, ranks 2, NCCL 2.28.9" in page
    assert "### 2 GPUs" in page
    # Half of 2^26 numbers come in as FP32, and half go back as BF16: 201 MB in 600 us.
    assert "| one row-parallel layer, TP 8, all-reduce | 352 MB | 336 GB/s | 1.05 | 235 MB | 0.700 |" in page


def test_results_of_shards_and_segments_are_tables(tree):
    layer, head = {"one GPU, plain": 52.0, "one GPU": 50.0}, {"one GPU, forward": 60.0, "one GPU, backward": 200.0}
    for size in (2, 4, 8):
        layer |= {f"{size} ranks, product": 40.0 / size, f"{size} ranks, sum": 5.0}
        head |= {f"{size} ranks, {part}": 30.0 / size for part in ("states", "merge", "backward")}
    device = {"device": "NVIDIA H200"}
    shards = {"environment": device, "us": {"8B o_proj, 32 rows": layer, "linear_logp 1x2x3": head}, "differing": 0}
    times = {m: {"cuBLAS": 10.0, "plain": 20.0, "2 segments": 21.0, "8 segments": 25.0} for m in ("1", "32")}
    segments = {"environment": device, "us": {"1280x8192": times}}
    for name, found in {"shards": shards, "segments": segments}.items():
        (tree / f"tools/results/h200-{name}.json").write_text(json.dumps(found))
    assert tool("--root", tree).returncode == 0
    page = (tree / "docs/many-gpus.md").read_text()
    of_layer = "20.0 + 5.00 | 0.50 | 10.0 + 5.00 | 0.30 | 5.00 + 5.00 | 0.20 |"
    assert f"| 8B o_proj, 32 rows | 52.0 | 50.0 | {of_layer}" in page
    assert "| linear_logp 1x2x3, forward | 60.0 | 15.0 + 15.0 | 0.50 |" in page
    assert "| linear_logp 1x2x3, backward | 200 | 15.0 | 0.07 |" in page
    page = (tree / "packages/det-gemm/GUIDE.md").read_text()
    assert "| 1280 x 8192 | plain / cuBLAS | 2.00 | 2.00 |" in page
    assert "|  | 8 segments / plain | 1.25 | 1.25 |" in page
    assert "|  | 8 segments / cuBLAS | 2.50 | 2.50 |" in page


def test_errors_of_long_sums_and_shares_of_schedules_are_tables(tree):
    where = {"environment": {"device": "NVIDIA H100"}}
    ways = {"one chain": {"error": 2e-4, "shrink": 1e-4}, "cuBLAS": {"error": 5e-6, "shrink": 0.0}}
    sums = [{"sum": "4096 tokens", "signs": "one sign", "ways": ways}]
    times = [
        {"what": what, "ms": {"one chain": ms, "cuBLAS": 2.0}} for what, ms in (("a layer", 1.5), ("a head", 50.0))
    ]
    shares = {"8 x 8": 0.8, "chosen": 0.88, "16 x 8": 1.2}
    products = [
        {"pass": name, "sizes": [rows, 4, 4], "cuBLAS, us": 9.0, "shares": shares | {"chosen": chosen}}
        for rows, name, chosen in ((64, "forward", 1.0), (1, "forward", 0.8), (1, "dA", 0.84), (1, "dA", 1.2))
    ]
    for name, found in (("chain-error", {"sums": sums, "times": times}), ("schedules", {"products": products})):
        (tree / f"tools/results/h100-{name}.json").write_text(json.dumps(where | found))
    assert tool("--root", tree).returncode == 0
    page = (tree / "packages/det-gemm/GUIDE.md").read_text()
    assert "| 4096 tokens | one sign | 2.0e-04 (1.0e-04) | 5.0e-06 (0.0e+00) |" in page
    assert "- a layer: one chain 1.50 ms, cuBLAS 2.00 ms\n- a head: one chain 50.0 ms, cuBLAS 2.00 ms\n- ran on" in page
    page = (tree / "docs/hardware.md").read_text()
    assert "| 1 | 3 | 0.840, 1.200 | 1.050, 1.500 |\n| 64 | 1 | 1.000, 1.000 | 1.250, 1.250 |" in page


def test_results_of_heads_are_tables_and_a_picture_on_the_site(tree, monkeypatch):
    ways = {"gemm": [3.0, 4.0, 1024.0], "compile": [12.0, 12.0, 3072.0], "cce": [24.0, 24.0, 512.0]}
    ours = {
        "linear_logp": [12.6, 12.4, 750.0],
        "linear_logp, saved_mib=all": [9.0, 10.0, 2800.0],
        "linear_logp, known": [9.3, 9.2, 750.0],
        "linear_logp, known, main_grad": [9.6, 9.6, 250.0],
    }
    found = {
        "environment": {"device": "NVIDIA H200"},
        "shapes": {
            "4096x2048x131072": {"ways": {**ways, **ours}, "differing": 0},
            "1x2x3": {"ways": {name: ways[name] for name in ("gemm", "compile")} | ours, "differing": 2},
        },
    }
    (tree / "tools/results/h200-head.json").write_text(json.dumps(found))
    assert tool("--root", tree).returncode == 0
    page = (tree / "packages/linear-logp/GUIDE.md").read_text()
    assert "| `linear_logp, saved_mib=all` | 9.00 (3.00) | 10.0 (2.50) | 2,800 |" in page
    assert "| cce | 24.0 (8.00) | 24.0 (6.00) | 512 |" in page
    assert page.count("| compile |") == 2
    assert "- numbers of the gradients that differ between the forms: 2" in page
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    (file,) = pictures.named(page)
    assert file == "tools/results/h200-head.json"
    assert "![Time over memory](../x/tools-results-h200-head.svg)\n" in pictures.shown(page, "../x")
    for drawn in (file, "packages/fused-logp/benchmarks/results/h200-goals.json"):
        assert "<svg" in pictures.drawn(tree / drawn)
