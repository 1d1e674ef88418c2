"""The table on the README's first screen: what people use and rl-kernels beside it, from the committed results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sections.text import filled, of
from sections.training import WARMUP

from rl_kernels.lab.bench.record import OURS, Document
from rl_kernels.lab.bench.report import as_table, digits

STEP, CALLS, TRL = "h200-model-step.json", "h200-client-calls.json", "h200-trl-step.json"
MIXTURE = "h200-qwen3-30b-model-bits.json"
FLASH, ENGINE = "h200-attention-client-calls.json", "h200-trl-with-vllm.json"
ROLLOUT, REAL = "h200-rollout.json", {"smollm2": "SmolLM2-135M-Instruct"}
MODEL = {
    "forward + backward 4x2048": "forward and backward, 4x2048 tokens",
    "decode, 64 sequences, 2048 keys, CUDA graph": "decode a token for 64 sequences, 2048 keys, in a CUDA graph",
}
"""The rows of a whole model: label in the results, and text."""
LOGP, SHAPE, BOTH = "linear-logp", "4096x4096x128256", "forward + backward"
PEERS = {"eager": "plain PyTorch", "compile": "torch.compile", "cce": "CCE", "liger": "Liger"}
PRODUCT, ATTENTION = "mm 2048x4096x4096, BF16", "varlen_attn 4x2048, 32 heads of 128, BF16, forward + backward"
Row = tuple[str, ...]


def front_table(results: Path, packages: Mapping[str, Mapping[str, Document]]) -> str:
    """Return the text between the markers of the README; measurements that are missing have no row."""
    rows = [
        *_rollouts(results / ROLLOUT),
        *_models(results / STEP, "Llama of 8B widths, 4 layers"),
        *_models(results / MIXTURE, "mixture of Qwen3-30B-A3B's widths, 4 layers"),
        *_choices(results / MIXTURE),
        *_logps(packages.get(LOGP, {})),
        *_products(results / CALLS),
        *_attention(results / FLASH),
        *_trl(results / TRL),
        *_trl_with_vllm(results / ENGINE),
    ]
    head = ("BF16, one H200", "what people use", "rl-kernels", "ratio")
    return filled([as_table([head, *rows])] if rows else [])


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
