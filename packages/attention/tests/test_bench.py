"""The benchmark of det_attention on tiny shapes, with a stand-in of flash-attn's signature."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.attention.op import OPERATOR
from rl_kernels.attention.reference import visible
from rl_kernels.attention.spec.bench import BENCH, NOT_CAUSAL, work_of
from rl_kernels.attention.spec.cases import inputs
from rl_kernels.attention.spec.places import pieces_of
from rl_kernels.core.testing import Draw
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape


def flash_attn_func(q, k, v, *, causal=False):
    operands = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=True).transpose(1, 2)


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((2, 17, 17, 4, 2, 16)), Shape((1, 9, 33, 2, 1, 16), NOT_CAUSAL, "not causal"))
    peers = ("eager", "sdpa", "flash-attn")
    modules = {"flash_attn": {"flash_attn_func": flash_attn_func}}


def test_the_work_is_two_products_then_five_more_of_the_keys_that_are_seen():
    forward, both = BENCH.passes(Shape((4, 2048, 2048, 32, 8, 128)), 2).values()
    seen = 2048 * 2049 / 2
    assert forward.work.flops == 4 * 4 * 32 * 128 * seen
    assert both.work.flops == 3.5 * forward.work.flops


@pytest.mark.parametrize("shape", [shape for shape in BENCH.sets["small"] if "layout" in shape.options])
def test_the_work_of_other_layouts_is_that_of_each_sequence(shape):
    case = BENCH.passes(shape, 2)["forward"].case
    pieces = pieces_of(inputs(case, Draw(torch.float32)))
    pairs = sum(int(visible(len(x.q), len(x.k), True, None, torch.device("cpu")).sum()) for x in pieces)
    assert work_of(case) == (sum(len(x.q) for x in pieces), sum(len(x.k) for x in pieces), pairs)


def test_a_window_takes_its_pairs_from_the_work():
    shape = Shape((2, 40, 90, 2, 1, 16), {"window": (7, 0)})
    seen = visible(40, 90, True, (7, 0), torch.device("cpu"))
    assert BENCH.passes(shape, 2)["forward"].work.flops == 2 * 4 * 2 * 16 * int(seen.sum())


def test_decoding_reads_the_cache_once():
    (forward,) = BENCH.passes(Shape((64, 1, 2048, 32, 8, 128)), 2).values()
    assert forward.work.bytes == 2 * 64 * 128 * (2 * 32 + 2 * 2048 * 8)
