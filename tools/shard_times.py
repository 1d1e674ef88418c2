"""Times of what each rank of a group computes, on one GPU: shards in turn, as `python tools/shard_times.py`.

For groups of 2, 4 and 8: a row-parallel layer's product of the first rank, an FP32 partial, and the sum of all partials
in tree order; linear_logp's states of the largest shard, the merge of all states, and the backward pass of the shard.
The exchanges between are left out. Beside them stands one GPU, and for layers also the plain product. Times are medians
of CUDA graphs in turn, in microseconds; the parts are checked against one GPU bit for bit.

Exit status: 1 if a bit differs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rank_calls import LAYERS, VOCABULARIES, different, drawn

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.dispatch import choose
from rl_kernels.core.distributed.sums import total
from rl_kernels.det_gemm import det_linear
from rl_kernels.det_gemm import op as products
from rl_kernels.det_gemm.segments import segment_length
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.report import digits
from rl_kernels.linear_logp import op as heads
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.linear_logp.vocabulary import SEGMENTS, slots

SIZES = (2, 4, 8)
ROWS = (32, 1024, 8192)
PACKAGES = ("rl-kernels-core", "rl-kernels-det-gemm", "rl-kernels-linear-logp")
NEEDED = [True, True, False]
Times = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times; return 1 if a bit differs."""
    parser = Parser("shard_times.py", __doc__)
    parser.add_argument("--rounds", type=count(1), default=5, help="turns of each call (%(default)s)")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES), "us": {}}
    wrong = 0
    for name, (outputs, inputs) in LAYERS.items():
        for rows in ROWS:
            calls, differing = layer(rows, outputs, inputs)
            wrong += differing
            record["us"][f"{name}, {rows} rows"] = _timed(f"{name}, {rows} rows", calls, args.rounds)
    for tokens, hidden, vocab in VOCABULARIES:
        calls, differing = head(tokens, hidden, vocab)
        wrong += differing
        label = f"linear_logp {tokens}x{hidden}x{vocab}"
        record["us"][label] = _timed(label, calls, args.rounds)
    print(f"{wrong} numbers differ from one GPU")
    if args.json:
        write_json(args.json, {**record, "differing": wrong})
    return 1 if wrong else 0


def layer(rows: int, outputs: int, inputs: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return the calls of a row-parallel layer, and how many numbers of the ranks' sum differ from one GPU."""
    x, weight = drawn(rows, inputs, seed=1), drawn(outputs, inputs, seed=2, scale=inputs**-0.5)
    backend = choose(products.OPERATOR, products.describe(x, weight.t())).name
    length, differing = segment_length(inputs, SEGMENTS), 0
    expected = det_linear(x, weight, k_segments=SEGMENTS)
    calls: dict[str, Callable[[], Any]] = {
        "one GPU, plain": lambda: det_linear(x, weight),
        "one GPU": lambda: det_linear(x, weight, k_segments=SEGMENTS),
    }
    for size in SIZES:
        own = SEGMENTS // size

        def part(rank: int, own: int = own, size: int = size) -> torch.Tensor:
            mine = slice(rank * inputs // size, (rank + 1) * inputs // size)
            a, b = x[:, mine].contiguous(), weight[:, mine].contiguous()
            partial: torch.Tensor = products.ops["segmented"](a, b, None, torch.float32, own, length, backend)
            return partial

        parts = torch.stack([part(rank) for rank in range(size)])
        differing += different(total(parts, "tree", dtype=x.dtype), expected)
        a, b = (value[:, : inputs // size].contiguous() for value in (x, weight))
        calls[f"{size} ranks, product"] = lambda a=a, b=b, own=own: products.ops["segmented"](
            a, b, None, torch.float32, own, length, backend
        )
        # A rank adds its slice of the rows.
        piece = parts[:, : max(rows // size, 1)].contiguous()
        calls[f"{size} ranks, sum"] = lambda piece=piece: total(piece, "tree", dtype=torch.bfloat16)
    return calls, differing


def head(tokens: int, size: int, vocab: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return the calls of linear_logp, and how many log-probs of the ranks differ from one GPU."""
    hidden, weight = drawn(tokens, size, seed=3), drawn(vocab, size, seed=4, scale=size**-0.5)
    ids = torch.randint(vocab, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    upstream, temperature = torch.randn(tokens, device="cuda"), torch.ones(())
    backend = choose(heads.OPERATOR, heads.describe(hidden, weight, ids, vocab_size=vocab)).name
    inputs = (hidden, weight, ids, None, temperature, None, None, None)
    logp, norm, _ = heads.ops["forward"](*inputs, 0, backend)
    saved = (norm, None, None, upstream, None, None)

    def backward(shard: torch.Tensor, partial: bool) -> Callable[[], Any]:
        inputs = (hidden, shard, ids, None, temperature, None, None, None)
        return lambda: heads.ops["backward"](
            *inputs, *saved, 0, vocab, SEGMENTS, partial, None, 256, NEEDED, None, False, backend
        )

    calls: dict[str, Callable[[], Any]] = {
        "one GPU, forward": lambda: heads.ops["forward"](*inputs, 0, backend),
        "one GPU, backward": backward(weight, False),
    }
    differing = 0
    for ranks in SIZES:
        spans, units = vocab_shards(vocab, ranks), slots(vocab, ranks)

        def states(rank: int, spans: Any = spans, units: int = units) -> torch.Tensor:
            start, stop = spans[rank]
            inputs = (hidden, weight[start:stop], ids, None, temperature, None, None, None)
            shard_states: torch.Tensor = heads.ops["states"](*inputs, start, units, False, 0, backend)[0]
            return shard_states

        gathered = torch.stack([states(rank) for rank in range(ranks)])
        merge = lambda g=gathered: heads.ops["finish"](g, ids, temperature, None, vocab, False, backend)  # noqa: E731
        differing += different(merge()[0], logp)
        calls[f"{ranks} ranks, states"] = lambda states=states: states(0)
        calls[f"{ranks} ranks, merge"] = merge
        calls[f"{ranks} ranks, backward"] = backward(weight[: spans[0][1]], True)
    return calls, differing


def _timed(name: str, calls: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    microseconds = _in_turn(calls, rounds)
    print(f"{name}: " + ", ".join(f"{label} {digits(us)}" for label, us in microseconds.items()), flush=True)
    torch.cuda.empty_cache()
    return microseconds


def _in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    graphs, spent = {}, {name: [] for name in calls}  # type: ignore[var-annotated]
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                spent[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


if __name__ == "__main__":
    sys.exit(main())
