"""Segments of a sum: their bounds, their tree, and that the parts of ranks have the bits of one process."""

import pytest
import torch

from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.op import ops
from rl_kernels.det_gemm.segments import bounds, segment_length

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_bounds_of_segments():
    for segments in (1, 2, 4, 8):
        for size in (0, 1, 16, 17, 30, 128, 200, 1000):
            length = segment_length(size, segments)
            assert length % 16 == 0
            assert segments * length >= size > segments * (length - 16) or size == 0
            cuts = bounds(size, segments, length)
            assert [first for first, _ in cuts] == [min(i * length, size) for i in range(segments)]
            assert [end for _, end in cuts] == [*(first for first, _ in cuts[1:]), size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segments", [2, 4, 8])
def test_parts_of_ranks_match_one_process(segments, dtype):
    """With one segment on each rank, a part is a plain product."""
    for size in (30, 264, 1000):
        draw = Draw(dtype, seed=2)
        x, weight, bias = draw.normal(5, size), draw.normal(24, size), draw.normal(24)
        whole, length = (
            det_gemm(x, weight.t(), k_segments=segments, out_dtype=torch.float32),
            segment_length(size, segments),
        )
        assert torch.equal(det_linear(x, weight, bias, k_segments=segments), (whole + bias.float()).to(dtype))
        assert size == 30 or not torch.equal(det_gemm(x, weight.t(), out_dtype=torch.float32), whole)
        for ranks in (ranks for ranks in (2, 4, 8) if ranks <= segments):
            own, parts = segments // ranks, []
            for rank in range(ranks):
                part = slice(rank * own * length, (rank + 1) * own * length)
                a, b = x[:, part], weight[:, part].t()
                parts.append(ops["segmented"](a, weight[:, part], None, torch.float32, own, length, "native"))
                assert own > 1 or torch.equal(parts[-1], det_gemm(a, b, out_dtype=torch.float32))
            assert torch.equal(tree_sum(parts), whole), (size, ranks)


def test_dx_segments():
    draw = Draw(torch.bfloat16, seed=3)
    a, weight, upstream = draw.normal(18, 40).requires_grad_(), draw.normal(200, 40), draw.normal(18, 200)
    x, leaf = a.detach().view(2, 9, 40).requires_grad_(), weight.clone().requires_grad_()
    out = det_linear(x, leaf, k_segments=2, dx_segments=8)
    dx, dweight = torch.autograd.grad(out, (x, leaf), upstream.view(2, 9, 200))
    assert torch.equal(dx.flatten(0, 1), det_gemm(upstream, weight, k_segments=8))
    assert torch.equal(dweight, det_gemm_dw(upstream, a.detach()))
    (da,) = torch.autograd.grad(det_gemm(a, weight.t(), dx_segments=8), a, upstream)
    assert torch.equal(da, dx.flatten(0, 1))
    # In FP32, where segments give other bits.
    wide, weight, upstream = a.detach().float().requires_grad_(), weight.float(), upstream.float()
    (da,) = torch.autograd.grad(det_gemm(wide, weight.t(), k_segments=4), wide, upstream)
    assert torch.equal(da, det_gemm(upstream, weight))
    assert not torch.equal(da, det_gemm(upstream, weight, k_segments=4))


def test_segments_with_main_grad_and_autocast():
    draw = Draw(torch.float32, seed=5)
    x, weight, upstream = draw.normal(32, 40), draw.normal(24, 40).requires_grad_(), draw.normal(32, 24)
    weight.main_grad = torch.zeros(24, 40)
    det_linear(x, weight, k_segments=4, dx_segments=4).backward(upstream)
    assert weight.grad is None
    assert torch.equal(weight.main_grad, det_gemm_dw(upstream, x))
    with torch.autocast("cpu", torch.bfloat16):
        found = det_linear(x, weight, k_segments=4)
    assert torch.equal(found, det_linear(x.bfloat16(), weight.bfloat16(), k_segments=4))


def test_compiled_with_other_numbers_of_segments():
    torch.compiler.reset()
    draw = Draw(torch.bfloat16, seed=6)
    x, weight = draw.normal(5, 200).requires_grad_(), draw.normal(40, 200)

    def results(count, call=det_linear):
        out = call(x, weight, k_segments=count, dx_segments=count)
        return out, torch.autograd.grad(out, x, torch.ones_like(out))[0]

    run = torch.compile(det_linear, fullgraph=True, backend="aot_eager")
    for count in (1, 8, 2):
        assert all(torch.equal(*pair) for pair in zip(results(count, run), results(count), strict=True))
