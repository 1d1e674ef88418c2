"""The picture and table of the README's first screen, and the table of the benchmarks' first page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sections.text import filled, of
from sections.training import WARMUP

from rl_kernels.lab.bench.record import OURS, Document
from rl_kernels.lab.bench.report import as_table, digits

STEP, CALLS, TRL = "h200-model-step.json", "h200-client-calls.json", "h200-trl-step.json"
MIXTURE, HYBRID = "h200-qwen3-30b-model-bits.json", "h200-qwen3.5-9b-model-step.json"
FLASH, ENGINE = "h200-attention-client-calls.json", "h200-trl-with-vllm.json"
ROLLOUT, REAL = "h200-rollout.json", {"smollm2": "SmolLM2-135M-Instruct"}
MODEL = {
    "forward + backward 4x2048": "forward and backward, 4x2048 tokens",
    "decode, 64 sequences, 2048 keys, CUDA graph": "decode a token for 64 sequences, 2048 keys, in a CUDA graph",
}
"""The rows of a whole model: label in the results, and text."""
STEPS = {
    ENGINE: "TRL with vLLM:\nrollout and update",
    TRL: "TRL: rollout\nand update",
    STEP: "Llama of 8B widths:\nforward and backward",
    MIXTURE: "mixture of 30B widths:\nforward and backward",
    HYBRID: "hybrid of 9B widths:\nforward and backward",
}
"""The bars of the picture: file of results, and text."""
COLORS = {"stock": "#c0392b", "invariant": "#1f618d"}
LOGP, SHAPE, BOTH = "linear-logp", "4096x4096x128256", "forward + backward"
PEERS = {"eager": "plain PyTorch", "compile": "torch.compile", "cce": "CCE", "liger": "Liger"}
PRODUCT, ATTENTION = "mm 2048x4096x4096, BF16", "varlen_attn 4x2048, 32 heads of 128, BF16, forward + backward"
Row = tuple[str, ...]


def first_table(results: Path, packages: Mapping[str, Mapping[str, Document]]) -> str:
    """Return the text between the markers of the README: a real model, whole steps, and two operators."""
    logps = (row for row in _logps(packages.get(LOGP, {})) if row[1].startswith(PEERS["compile"]))
    return _table([*_rollouts(results / ROLLOUT), *_steps(results).values(), *logps, *_products(results / CALLS)])


def front_table(results: Path, packages: Mapping[str, Mapping[str, Document]]) -> str:
    """Return the text between the markers of the benchmarks' first page."""
    rows = [
        *_rollouts(results / ROLLOUT),
        *_models(results / STEP, "Llama of 8B widths, 4 layers"),
        *_models(results / MIXTURE, "mixture of Qwen3-30B-A3B's widths, 4 layers"),
        *_choices(results / MIXTURE),
        *_models(results / HYBRID, "hybrid of Qwen3.5-9B's widths, 8 layers"),
        *_logps(packages.get(LOGP, {})),
        *_products(results / CALLS),
        *_attention(results / FLASH),
        *_trl(results / TRL),
        *_trl_with_vllm(results / ENGINE),
    ]
    return _table(rows)


def draw(results: Path, path: Path) -> None:
    """Write the picture: tokens of a real model that differ, and the times of steps over those of stock."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from rl_kernels.lab.bench.plot import save

    document = _read(results / ROLLOUT)
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        shares, times = figure.subplots(1, 2)
        for place, (way, color) in enumerate(COLORS.items()):
            counts = document["counts"][way]
            heights = [100 * each["differ"] / each["tokens"] for each in counts.values()]
            label = "rl-kernels" if way == "invariant" else "what people use"
            bars = shares.bar([i + 0.4 * place for i in range(len(counts))], heights, 0.38, color=color, label=label)
            shares.bar_label(bars, [f"{height:.0f} %" for height in heights], padding=2)
        shares.set_xticks([i + 0.2 for i in range(len(counts))], list(counts))
        name = REAL[document["settings"]["model"]]
        shares.set(title=f"{name}: sampled tokens\nwhose log-prob differs in training, %", ylim=(0, 118))
        rows = _steps(results)
        ratios = [float(row[-1]) for row in rows.values()]
        bars = times.barh([STEPS[file] for file in rows], ratios, color=COLORS["invariant"])
        times.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2)
        times.axvline(1, color=COLORS["stock"])
        times.invert_yaxis()
        times.set(title="Time of a step, over that of what people use", xlim=(0, 1.1))
        figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        save(figure, path)


def _table(rows: Sequence[Row]) -> str:
    head = ("BF16, one H200", "what people use", "rl-kernels", "ratio")
    return filled([as_table([head, *rows])] if rows else [])


def _steps(results: Path) -> dict[str, Row]:
    """Return a row for each whole step, by the file of its results; measurements that are missing have no row."""
    rows = {
        ENGINE: (row for row in _trl_with_vllm(results / ENGINE) if row[0].endswith("whole step")),
        TRL: _trl_step(results / TRL),
        STEP: _models(results / STEP, "Llama of 8B widths, 4 layers"),
        MIXTURE: _models(results / MIXTURE, "mixture of Qwen3-30B-A3B's widths, 4 layers"),
        HYBRID: _models(results / HYBRID, "hybrid of Qwen3.5-9B's widths, 8 layers"),
    }
    # A model's first row is forward and backward.
    return {file: row for file, each in rows.items() if (row := next(each, None)) is not None}


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return document


def _rollouts(file: Path) -> Iterator[Row]:
    document = _read(file)
    if document:
        stock, ours = (document["counts"][way]["padded"] for way in ("stock", "invariant"))
        theirs, differing = (of(counts["differ"], counts["tokens"]) for counts in (stock, ours))
        model = REAL.get(document["settings"]["model"], document["settings"]["model"])
        label = f"{model}: sampled tokens whose log-prob in training differs from the rollout's"
        yield (label, f"stock transformers: {theirs}", differing, "")


def _models(file: Path, model: str) -> Iterator[Row]:
    timed = _read(file).get("ms", {})
    for label, text in MODEL.items():
        if label in timed:
            yield _beside(f"{model}: {text}", "stock", timed[label]["stock"], timed[label]["invariant"])


def _choices(file: Path) -> Iterator[Row]:
    bits = _read(file).get("bits")
    if bits:
        packed = [bits[way]["prompts"]["packed"] for way in ("stock", "invariant")]
        theirs, ours = (of(entry["experts"], entry["of_tokens"]) for entry in packed)
        yield ("its tokens that choose other experts packed than alone", f"stock: {theirs}", ours, "")


def _logps(documents: Mapping[str, Document]) -> Iterator[Row]:
    records = {
        record.implementation: record.passes[BOTH]
        for document in documents.values()
        for record in document.records
        if record.shape == SHAPE and record.dtype == "bf16" and BOTH in record.passes
    }
    for name, text in PEERS.items():
        if name in records and OURS in records:
            theirs, ours = records[name].timing, records[OURS].timing
            # Our time beside this peer: clocks follow what else runs, so each peer has its own.
            beside = ours.ms if theirs.beside_ms is None else theirs.beside_ms
            yield (
                f"linear_logp, {BOTH}, {SHAPE}",
                f"{text}: {digits(theirs.ms)} ms, {theirs.extra_mib:,.0f} MiB",
                f"{digits(beside)} ms, {ours.extra_mib:,.0f} MiB",
                f"{beside / theirs.ms:.2f}",
            )


def _products(file: Path) -> Iterator[Row]:
    product = _read(file).get("calls", {}).get("products", {}).get(PRODUCT, {})
    if "batch_invariant_ops" in product:
        theirs, ours = (product[name]["us"] / 1e3 for name in ("batch_invariant_ops", OURS))
        yield _beside("batch-invariant matrix product, 2048x4096x4096", "batch_invariant_ops", theirs, ours)


def _attention(file: Path) -> Iterator[Row]:
    attention = _read(file).get("calls", {}).get("attention", {}).get(ATTENTION)
    if attention:
        theirs, ours = (attention[name]["us"] / 1e3 for name in ("PyTorch", OURS))
        label = "packed attention, 4x2048 tokens, forward and backward"
        yield _beside(label, "PyTorch's flash attention", theirs, ours)


def _trl(file: Path) -> Iterator[Row]:
    ways = _read(file).get("ways")
    if not ways:
        return
    stock, scored, aligned = (ways[name] for name in ("TRL", OURS, f"{OURS}, invariant"))
    differing = [of(*way["differing"][OURS]) for way in (scored, aligned)]
    for part in ("rollout", "update"):
        yield _beside(f"TRL's GRPOTrainer: {part}", "TRL", stock[f"{part}_ms"], aligned[f"{part}_ms"])
    yield (
        "its tokens whose log-prob in training differs from the rollout's",
        f"stock model, scored by linear_logp: {differing[0]}",
        differing[1],
        "",
    )


def _trl_step(file: Path) -> Iterator[Row]:
    ways = _read(file).get("ways")
    if ways:
        steps = [ways[name]["rollout_ms"] + ways[name]["update_ms"] for name in ("TRL", f"{OURS}, invariant")]
        yield _beside("TRL's GRPOTrainer: rollout and update", "TRL", *steps)


def _trl_with_vllm(file: Path) -> Iterator[Row]:
    document = _read(file)
    if not document:
        return
    stock, ours = (document["ways"][name] for name in ("stock", OURS))
    label = f"TRL with vLLM in its process, {document['settings']['layers']} layers"
    for part, text in {"rollout": "sampling", "step": "whole step"}.items():
        times = [1e3 * statistics.median(way["seconds"][part][WARMUP:]) for way in (stock, ours)]
        yield _beside(f"{label}: {text}", "TRL", *times)
    theirs, differing = (of(way["differ"], way["tokens"]) for way in (stock, ours))
    yield ("its tokens whose log-prob in training differs from vLLM's", f"TRL: {theirs}", differing, "")


def _beside(label: str, name: str, theirs: float, ours: float) -> Row:
    return (label, f"{name}: {digits(theirs)} ms", f"{digits(ours)} ms", f"{ours / theirs:.2f}")
