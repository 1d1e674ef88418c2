"""The benchmark of det_attention on tiny shapes, with a stand-in of flash-attn's signature."""

import torch.nn.functional as F

from rl_kernels.attention.op import OPERATOR
from rl_kernels.attention.spec.bench import BENCH, NOT_CAUSAL
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


def test_decoding_reads_the_cache_once():
    (forward,) = BENCH.passes(Shape((64, 1, 2048, 32, 8, 128)), 2).values()
    assert forward.work.bytes == 2 * 64 * 128 * (2 * 32 + 2 * 2048 * 8)
