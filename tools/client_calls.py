"""Compare PyTorch functions, plain and replaced by the operators: `python tools/client_calls.py` on a GPU.

`products` are the functions that batch_invariant_ops replaces in its mode, at the shape of its published test: in plain
PyTorch, in batch_invariant_ops if it is installed, and in ours. `attention` is `scaled_dot_product_attention` on its
flash backend, and `varlen_attn`, with and without `activate()`. Times are wall times, host included, taken in turn.

The first sequence or row of a call is also computed alone; the elements whose bits differ are counted.

Exit status: 1 if a bit of ours differs; 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import rl_kernels.models.clients.batch_invariant_ops as names
from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import Calls, Effort, call_seconds
from rl_kernels.lab.bench.report import digits
from rl_kernels.models.clients.torch import activate

STOCK, ORIGINAL, OURS = "PyTorch", "batch_invariant_ops", "rl-kernels"
PACKAGES = ("rl-kernels-models", "rl-kernels-det-gemm", "rl-kernels-fused-logp", "rl-kernels-attention")

Around = Callable[[], AbstractContextManager[object]]


class Call(NamedTuple):
    """A call on all rows or sequences, the call on the first one alone, and maybe the latter in FP64."""

    label: str
    whole: Callable[[], Sequence[torch.Tensor]]
    alone: Callable[[], Sequence[torch.Tensor]]
    exact: Callable[[], torch.Tensor] | None = None


def products(args: argparse.Namespace) -> Iterator[Call]:
    """Yield the calls that batch_invariant_ops replaces: products of rows with a matrix, and reductions of rows."""
    rows, inner, vocab = args.rows, args.inner, args.vocab
    for label, dtype in (("FP32", torch.float32), ("BF16", torch.bfloat16)):

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, device=args.device, dtype=dtype)

        a, b, bias, logits = drawn(rows, inner), drawn(inner, inner), drawn(inner), drawn(rows, vocab)
        for name, call, *operands in (
            (f"mm {rows}x{inner}x{inner}", torch.mm, a, b),
            (f"mm 1x{inner}x{inner}", torch.mm, a[:1], b),
            (f"addmm {rows}x{inner}x{inner}, transposed", lambda x, w, c: torch.addmm(c, x, w.t()), a, b, bias),
            (f"log_softmax {rows}x{vocab}", lambda x: torch.log_softmax(x, -1), logits),
            (f"mean {rows}x{inner}", lambda x: torch.mean(x, -1), a),
        ):
            yield Call(
                f"{name}, {label}",
                lambda call=call, inputs=operands: [call(*inputs)],
                lambda call=call, inputs=operands: [call(inputs[0][:1], *inputs[1:])],
                lambda call=call, inputs=operands: call(inputs[0][:1].double(), *(x.double() for x in inputs[1:])),
            )


def attention(args: argparse.Namespace) -> Iterator[Call]:
    """Yield calls of both attention functions, forward alone and with backward."""
    from torch.nn.attention.varlen import varlen_attn

    batch, tokens, heads, size = args.sequences, args.tokens, args.heads, args.head_size

    def leaves(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, device=args.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def sdpa(*operands: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True)

    def packed(*operands: torch.Tensor) -> torch.Tensor:
        bounds = torch.arange(len(operands[0]) // tokens + 1, dtype=torch.int32, device=args.device) * tokens
        out: torch.Tensor = varlen_attn(*operands, bounds, bounds, tokens, tokens, window_size=(-1, 0))
        return out

    def forward(call: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [call(*operands)]

    def through(
        call: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], upstream: torch.Tensor
    ) -> list[torch.Tensor]:
        out = call(*operands)
        return [out.detach(), *torch.autograd.grad(out, operands, upstream[: len(out)])]

    shape = f"{batch}x{tokens}, {heads} heads of {size}, BF16"
    for name, call, sizes, first_size in (
        (f"scaled_dot_product_attention {shape}", sdpa, (batch, heads, tokens, size), 1),
        (f"varlen_attn {shape}", packed, (batch * tokens, heads, size), tokens),
    ):
        whole = leaves(*sizes)
        first_alone = [x.detach()[:first_size].requires_grad_() for x in whole]
        upstream = torch.randn_like(whole[0])
        yield Call(name, lambda c=call, w=whole: forward(c, w), lambda c=call, o=first_alone: forward(c, o))
        yield Call(
            f"{name}, forward + backward",
            lambda c=call, w=whole, u=upstream: through(c, w, u),
            lambda c=call, o=first_alone, u=upstream: through(c, o, u),
        )


def ways(part: str) -> dict[str, Around]:
    """Return way -> the context manager that selects it."""
    if part == "attention":
        return {STOCK: nullcontext, OURS: activate}
    result: dict[str, Around] = {STOCK: nullcontext}
    if find_spec("batch_invariant_ops"):
        import batch_invariant_ops

        result[ORIGINAL] = batch_invariant_ops.set_batch_invariant_mode
    return result | {OURS: names.set_batch_invariant_mode}


def differing(call: Call) -> tuple[int, int]:
    """Return the number of elements of the first row or sequence whose bits differ when alone, and of all elements."""
    pairs = [(alone, whole[: len(alone)]) for alone, whole in zip(call.alone(), call.whole(), strict=True)]
    counts = [int((bits_of(alone) != bits_of(batched)).sum()) for alone, batched in pairs]
    return sum(counts), sum(alone.numel() for alone, _ in pairs)


def error(call: Call, exact: torch.Tensor | None) -> float | None:
    """Return the error of the first row, as a share of its norm."""
    return None if exact is None else float((call.alone()[0] - exact).norm() / exact.norm())


def measured(part: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label of each call, and the time, error and differing bits of each way."""
    device = torch.device(args.device)
    around = ways(part)
    for call in PARTS[part](args):
        exact = None if call.exact is None else call.exact()
        results: dict[str, dict[str, Any]] = {}
        for name, way in around.items():
            with way():
                results[name] = {"differing": differing(call), "error": error(call, exact)}
        sides = [Calls([call.whole], way) for way in around.values()]
        for name, seconds in zip(around, call_seconds(sides, device, Effort(iters=args.rounds)), strict=True):
            results[name]["us"] = 1e6 * seconds
        yield call.label, results


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Call]]] = {"products": products, "attention": attention}


def show(document: Mapping[str, Any]) -> None:
    """Print the results and the environment."""
    print("ran on " + ", ".join(f"{name} {value}" for name, value in document["environment"].items()))
    for part, calls in document["calls"].items():
        table = Table(box=None, padding=(0, 2, 0, 0))
        way_names = list(next(iter(calls.values())))
        heads = [part, *(f"{name}, {column}" for name in way_names for column in ("us", "bits that differ", "error"))]
        for i, head in enumerate(heads):
            table.add_column(head, justify="right" if i else "left")
        for label, results in calls.items():
            table.add_row(label, *(cell for way in results.values() for cell in cells(way)))
        Console(width=200).print(table)


def cells(way: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return time, differing bits and error as text."""
    some, every = way["differing"]
    return digits(way["us"]), f"{some:,} of {every:,}", "" if way["error"] is None else f"{way['error']:.1e}"


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("client_calls.py", "Time PyTorch functions, plain and replaced by the operators, and compare bits.")
    sizes = {"rows": 2048, "inner": 4096, "vocab": 128256, "sequences": 4, "tokens": 2048, "heads": 32}
    sizes |= {"head_size": 128, "rounds": 15}
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        cli.add_argument(option, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if a bit of ours differs."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        cli.error("--device: this PyTorch sees no GPU")
    if args.device == "cpu" and "attention" in args.parts:
        cli.error("--parts: attention needs a GPU")
    torch.manual_seed(args.seed)
    calls = {part: dict(measured(part, args)) for part in args.parts}
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    packages = [*PACKAGES, *(["batch_invariant_ops"] if find_spec("batch_invariant_ops") else [])]
    machine = environment(torch.device(args.device), packages)
    document = {"version": 1, "environment": machine, "settings": settings, "calls": calls}
    if args.json is not None:
        write_json(args.json, document)
    show(document)
    results = [ways_of_call[OURS] for calls_of_part in calls.values() for ways_of_call in calls_of_part.values()]
    return int(any(result["differing"][0] for result in results))


if __name__ == "__main__":
    sys.exit(main())
