"""The host side of the CUDA C++ backend, with kernels that a few lines of PyTorch stand for."""

import pytest
import torch

from rl_kernels.core.rowwise import LogpUpstream
from rl_kernels.linear_logp import cuda_sm90_backend as backend
from rl_kernels.linear_logp import cuda_tiles as tiles
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.reference import linear_logp as reference

IGNORED = -100
SHARED = 227 << 10


def norm_of(raw, z):
    """Return the largest raw logit of each row, and what its logsumexp is more than that."""
    return torch.stack((raw.amax(-1), z.logsumexp(-1) - z.amax(-1)), 1)


class Launched:
    """Stands for a kernel on a CPU: computes what the arguments say, and checks them against its constants."""

    logits = None

    def __init__(self, program, entry):
        self.constants, self.entry = dict(program.defines), entry

    def launch(self, grid, block, *args, shared=0):
        assert 0 < grid < 1 << 31
        assert shared <= SHARED
        if shared:
            assert grid <= 132
            assert block == 128 * (self.constants["GROUPS"] + 1)
        getattr(self, self.entry)(*args)

    def of_tiles(self, order, rows):
        """Return which rows are in tiles that are computed."""
        height, computed = 64 * self.constants["GROUPS"], torch.zeros(rows, dtype=torch.bool)
        tiles = range(-(-rows // height)) if order is None else order[1 : 1 + order[0]].tolist()
        for tile in tiles:
            computed[tile * height : (tile + 1) * height] = True
        return computed

    def sort_tiles(self, *args):
        (_, _, ids, _, ignored, rows, *_), order = args[:-1], args[-1]
        tiles = ids.split(64 * self.constants["GROUPS"])
        assert len(order) == 1 + len(tiles)
        assert rows == len(ids)
        wanted = torch.tensor([bool((tile != ignored).any()) for tile in tiles])
        order.copy_(torch.cat((wanted.sum()[None], wanted.logical_not().sort(stable=True).indices)))

    def tiles_of_logits(self, hidden, weight, bias, order, rows, columns, inner):
        (hidden, box), (weight, weight_box) = hidden, weight
        assert box == (64, 64)
        assert weight_box == (256, 64)
        assert hidden.shape == (rows, inner)
        assert weight.shape == (columns, inner)
        z = hidden.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        return torch.where(self.of_tiles(order, rows)[:, None], z, torch.nan)

    def states(self, hidden, weight, *args):
        bias, _, _, order, _, rows, columns, inner, *_ = args
        states, blocks = args[12], args[-1]
        assert states.shape == (-(-columns // (256 * blocks)), 3, rows)
        Launched.logits = self.tiles_of_logits(hidden, weight, bias, order, rows, columns, inner)

    def finish(self, *args):
        _, temperatures, ids, _, ignored, _, _, _, _, temperature, ignores, _, _, logp, norm, lse, entropy, _ = args
        z = Launched.logits / (temperature if temperatures is None else temperatures.double()[:, None])
        logs, keep = z.log_softmax(-1), (ids != ignored) if ignores else torch.ones_like(ids, dtype=torch.bool)
        norm.copy_(torch.where(keep[:, None], norm_of(Launched.logits, z), 0.0))
        if self.constants["ENTROPY"]:
            entropy.copy_(torch.where(keep, -(logs.exp() * logs).sum(-1), 0.0))
            lse.copy_(torch.where(keep, z.logsumexp(-1), 0.0))
        logp.copy_(torch.where(keep, logs.gather(1, ids.clamp(0)[:, None])[:, 0], 0.0))

    def gradient(self, hidden, weight, dz, *args):
        bias, temperatures, ids, order, ignored, rows, columns, inner, _, temperature, ignores, *others = args
        norm, entropy, g_logp, g_lse, g_entropy, sums, begin, width = others
        assert (g_entropy is not None) == self.constants["ENTROPY"]
        raw = self.tiles_of_logits(hidden, weight, bias, order, rows, columns, inner)[:, begin : begin + width]
        inverse = 1 / torch.tensor(temperature) if temperatures is None else 1 / temperatures.double()[:, None]
        assert norm.shape == (rows, 2)
        d = (raw - norm[:, :1]) * inverse - norm[:, 1:]
        p = d.exp()
        chosen = (ids[:, None] == torch.arange(begin, begin + width)).double()
        found = torch.zeros_like(raw)
        if g_logp is not None:
            found += g_logp[:, None] * (chosen - p)
        if g_lse is not None:
            found += g_lse[:, None] * p
        if g_entropy is not None:
            found -= g_entropy[:, None] * p * (d + entropy[:, None])
        found = found * inverse
        if ignores:
            found = torch.where((ids != ignored)[:, None], found, 0.0)
        (out, box), _ = dz, None
        assert out.shape == (rows, width)
        assert box == (64, 64)
        out.copy_(found)
        if sums is not None:
            padded = torch.nn.functional.pad(found, (0, 0, 0, -rows % 16))
            sums.copy_(padded.unflatten(0, (-1, 16)).sum(1))

    def add_rows(self, sums, out, rows, width):
        assert sums.shape == (-(-rows // 16), width)
        out += sums.sum(0)


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(tiles, "processors", lambda _: 132)
    monkeypatch.setattr(tiles, "tensor_map", lambda x, box, swizzle: (x, box))
    for module in (tiles, backend):
        monkeypatch.setattr(module, "kernel", lambda program, entry, *_: Launched(program, entry))


def drawn(rows, size=24, vocab=600, ignored=0):
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, size).half(), torch.randn(vocab, size).half()
    ids = torch.randint(vocab, (rows,))
    ids[rows // 3 : rows // 3 + ignored] = IGNORED
    return hidden, weight, ids, torch.randn(vocab).half()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "ignored"), [(1, 0), (64, 0), (129, 0), (700, 300), (700, 0), (260, 260)])
def test_the_forward_pass_is_launched_with_what_it_needs(pretended, monkeypatch, rows, ignored, per_row):
    hidden, weight, ids, bias = drawn(rows)
    ids[rows // 3 : rows // 3 + ignored] = IGNORED
    temperature = torch.rand(rows) + 0.5 if per_row else torch.tensor(0.7)
    monkeypatch.setattr(backend, "MOST_ROWS", 384)
    *found, norm = backend.forward_stats(hidden, weight, ids, bias, temperature, IGNORED)
    alone, same = backend.forward(hidden, weight, ids, bias, temperature, IGNORED)
    assert torch.equal(alone, found[0])
    assert torch.equal(same, norm)
    scale = temperature if per_row else 0.7
    expected = reference(
        hidden.double(), weight.double(), ids, bias.double(), temperature=scale, ignore_index=IGNORED, return_stats=True
    )
    for value, gold in zip(found, expected, strict=True):
        assert torch.allclose(value.double(), gold.double(), atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_copy_begins_its_rows_where_the_copy_engine_can(rows, offset):
    x = torch.randn(5, 300).half()[:rows, offset : offset + 136]
    for value in (x, x.t().contiguous().t(), x[:1].expand(rows, 136)):
        found = tiles.copyable(value)
        assert torch.equal(found, value)
        assert found.stride(1) == 1
        assert found.stride(0) % 8 == 0
        assert found.stride(0) >= 136
        assert found.data_ptr() % 16 == 0


@pytest.mark.parametrize("file", [tiles.FORWARD, tiles.BACKWARD])
def test_tiles_and_stages(file):
    for count, groups in ((1, 1), (64, 1), (65, 2), (128, 2), (129, 2)):
        cut = tiles.Cut.of(count)
        assert cut.groups == groups
        assert cut.stages(file) >= 4
        assert cut.shared(file) <= SHARED


@pytest.mark.parametrize("others", [(None, None), ("lse", None), (None, "entropy"), ("lse", "entropy")])
def test_the_gradient_beside_triton_products(pretended, monkeypatch, others):
    pytest.importorskip("triton")
    from rl_kernels.linear_logp import cuda_backward

    for name in ("kernel", "tensor_map"):
        monkeypatch.setattr(cuda_backward, name, getattr(tiles, name))
    hidden, weight, ids, bias = drawn(300, ignored=200)
    z = (hidden.double() @ weight.double().t() + bias.double()) / 0.7
    z.requires_grad_()
    logs, keep = z.log_softmax(-1), ids != IGNORED
    lse, entropy = z.logsumexp(-1), -(logs.exp() * logs).sum(-1)
    grads = [torch.randn(300), *(torch.randn(300) if name else None for name in others)]
    values = (logs.gather(1, ids.clamp(0)[:, None])[:, 0], lse, entropy)
    sum(((g * v)[keep].sum() for g, v in zip(grads, values, strict=True) if g is not None), 0.0).backward()
    inputs = Inputs(hidden, weight, ids, bias, torch.tensor(0.7), IGNORED)
    norm = norm_of(z * 0.7, z).detach().float()
    upstream = LogpUpstream(ids, norm, entropy.detach().float(), *grads)
    dbias = torch.zeros(600)
    for columns in (slice(0, 256), slice(256, 600)):
        dz = cuda_backward.Steps().dlogits(inputs, upstream, columns, dbias[columns])
        assert torch.allclose(dz.double(), z.grad[:, columns] / 0.7, rtol=1e-3, atol=1e-4)
        assert dz.stride(0) % 256 == 0
    assert torch.allclose(dbias.double(), z.grad.sum(0) / 0.7, atol=1e-3)
