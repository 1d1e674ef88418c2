"""The benchmark of grpo_loss on tiny shapes."""

from rl_kernels.core.bench.conformance import BenchConformance
from rl_kernels.core.bench.definition import Shape
from rl_kernels.grpo_loss.bench import BENCH, TYPES
from rl_kernels.grpo_loss.op import OPERATOR


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (
        Shape((2, 4, 16)),
        Shape((3, 2, 7), {"density": 0.5}, "half masked"),
        Shape((2, 3, 5), {"beta": 0.0, "ref": None}, "no KL"),
        *(
            Shape(
                (2, 3, 5), {"loss_type": name, "kl_correction": True, **options}, name, without=frozenset({"compile"})
            )
            for name, options in TYPES.items()
        ),
    )
    # Plain PyTorch takes even its sums in BF16 there, and is off by a tenth.
    dtypes = ("fp32",)


def test_the_floor_is_13_bytes_a_token_and_25_with_the_gradient():
    forward, both = BENCH.passes(Shape((512, 16, 4096)), 4).values()
    tokens = 512 * 16 * 4096
    assert (forward.work.bytes, both.work.bytes) == (13 * tokens, 25 * tokens)
