"""PyTorch in place of the Triton kernels of experts, calls to compare, and their comparison with ``native``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial

import torch

from rl_kernels.core.testing.triton_launches import Descriptor, TritonLaunch
from rl_kernels.core.testing.triton_matmul import SHARED
from rl_kernels.moe.activations import NAMES, activate, activate_backward
from rl_kernels.moe.backends import native
from rl_kernels.moe.reference import split
from rl_kernels.moe.routes import sort_routes


def dense(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """A pointer without strides of its own."""
    assert x.shape == shape
    assert x.is_contiguous()
    return x


def count(launch: TritonLaunch) -> None:
    ids, experts, width = launch["IDS"].flatten(), launch["E"], launch["WIDTH"]
    assert len(ids) == launch["routes"]
    known = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    counts = [torch.bincount(block, minlength=width) for block in known.split(128)]
    dense(launch["COUNTS"], launch.grid[0] + 1, width)[:-1] = torch.stack(counts)


def add_up(launch: TritonLaunch) -> None:
    counts = dense(launch["COUNTS"], launch["blocks"] + 1, launch["WIDTH"])
    assert launch.grid[0] * 4 == launch["WIDTH"]
    counts[-1] = 0
    counts.copy_(counts.cumsum(0) - counts)


def place(launch: TritonLaunch) -> None:
    ids, experts = launch["IDS"], launch["E"]
    assert ids.is_contiguous()
    assert launch["WIDTH"] >= experts + 2
    assert launch.grid[0] == max(1, -(-ids.numel() // 128))
    assert launch["routes"] == ids.numel()
    if launch["COUNTS"] is not None:
        assert dense(launch["COUNTS"], launch.grid[0] + 1, launch["WIDTH"])[-1].sum() == ids.numel()
    dense(launch["ORDER"], ids.numel() + experts + 1).copy_(sort_routes(ids, experts))
    write_tiles(launch, launch["ORDER"][ids.numel() :])


def list_tiles(launch: TritonLaunch) -> None:
    write_tiles(launch, launch["BOUNDS"])


def write_tiles(launch: TritonLaunch, bounds: torch.Tensor) -> None:
    tiles, experts, ends = dense(launch["TILES"], 3, launch["size"]), launch["E"], bounds.tolist()
    rows = [(e, at, ends[e + 1]) for e in range(experts) for at in range(ends[e], ends[e + 1], launch["BLOCK"])]
    tiles[0, len(rows) :] = experts
    tiles[:, : len(rows)] = torch.tensor(rows, dtype=torch.int32).view(-1, 3).t()


def product(launch: TritonLaunch) -> None:
    outputs, columns = launch["N"], launch["BLOCK_N"]
    assert launch.grid[0] == launch["size"] * -(-outputs // columns)
    out = dense(launch["OUT"], len(launch["OUT"]), outputs)
    weight = weight_of(launch, outputs, columns)
    for expert, positions in tiles_of(launch):
        rows = routes_at(launch, positions) if launch["SCATTERED"] else positions
        out[rows.long()] = sums(launch, weight, expert, positions, launch["GATHERED"]).to(out.dtype)


def gate_up(launch: TritonLaunch) -> None:
    inner, columns, z, h = launch["F"], launch["BLOCK_N"], launch["Z"], launch["H"]
    assert launch.grid[0] == launch["size"] * -(-inner // columns)
    weight = weight_of(launch, 2 * inner, 2 * columns if launch["INTERLEAVED"] else columns)
    for expert, positions in tiles_of(launch):
        value = sums(launch, weight, expert, positions, gathered=True).to(h.dtype)
        if z is not None:
            dense(z, len(h), 2 * inner)[positions] = value
        dense(h, len(h), inner)[positions] = activate(*split(value, launch["INTERLEAVED"]), NAMES[launch["ACTIVATION"]])


def tiles_of(launch: TritonLaunch) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield expert and positions of each tile."""
    if launch["TILES"] is None:
        assert launch["ROUTES"].shape == (1, launch["SLOTS"])
        assert launch.grid[0] >= launch["SLOTS"]
        found = enumerate(launch["ROUTES"][0].tolist())
        yield from ((expert, torch.tensor([slot])) for slot, expert in found if 0 <= expert < launch["E"])
        return
    for expert, first, end in dense(launch["TILES"], 3, launch["size"]).t().tolist():
        if expert < launch["E"]:
            yield expert, torch.arange(first, min(first + launch["BLOCK_M"], end))


def routes_at(launch: TritonLaunch, positions: torch.Tensor) -> torch.Tensor:
    """Return the routes at positions."""
    return positions if launch["TILES"] is None else launch["ROUTES"][positions]


def weight_of(launch: TritonLaunch, outputs: int, columns: int) -> torch.Tensor:
    """Return the weights ``[E, N, K]`` as a kernel reads them."""
    source, kind, inner, block = launch["B"], launch["KIND"], launch["K"], launch["BLOCK_K"]
    shape = launch["E"], outputs, inner
    assert launch["WHOLE"] == (inner % block == 0)
    if kind == 2:
        return source.as_strided(shape, (launch["b_expert"], launch["b_row"], launch["b_k"]), source.storage_offset())
    room = (launch["BLOCK_M"] + columns) * block * source.base.itemsize * launch.options["num_stages"]
    assert isinstance(source, Descriptor)
    assert room <= SHARED
    assert source.block_shape == ([columns, block] if kind == 0 else [block, columns])
    assert kind == 0 or inner % block == 0
    return source.value.view(shape) if kind == 0 else source.value.view(shape[0], inner, outputs).mT


def sums(
    launch: TritonLaunch, weight: torch.Tensor, expert: int, positions: torch.Tensor, gathered: bool
) -> torch.Tensor:
    """Return the FP64 sums of a tile of routes, with the bias."""
    left, inner = launch["A"], launch["K"]
    if launch["LEFT"] == 0:
        assert not gathered
        assert left.block_shape == [launch["BLOCK_M"], launch["BLOCK_K"]]
        left = left.value
    rows = routes_at(launch, positions) // launch["SLOTS"] if gathered else positions
    total = dense(left, len(left), inner)[rows].double() @ weight[expert].double().t()
    return total if launch["BIAS"] is None else total + launch["BIAS"][expert].double()


def combine(launch: TritonLaunch) -> None:
    (tokens, slots), out = launch["IDS"].shape, launch["OUT"]
    assert launch.grid[:2] == (tokens, -(-launch["D"] // launch["WIDTH"]))
    assert slots == launch["SLOTS"]
    places = launch["PLACES"]
    if places is None:
        dense(launch["Y"], tokens * slots, launch["D"])
        places = torch.arange(tokens * slots).view(tokens, slots)
    y = dense(launch["Y"], len(launch["Y"]), launch["D"])
    total = native.combine(y, launch["IDS"], places, launch["WEIGHTS"], launch["SHARED"], launch["E"])
    dense(out, tokens, launch["D"]).copy_(total)


def activate_backward_rows(launch: TritonLaunch) -> None:
    inner, experts, name = launch["F"], launch["E"], NAMES[launch["KIND"]]
    order, bounds = launch["ROUTES"], launch["BOUNDS"]
    routes = launch.grid[0]
    dh, z = dense(launch["DH"], routes, inner), dense(launch["Z"], routes, 2 * inner)
    dz, scaled, dots = dense(launch["DZ"], *z.shape), dense(launch["SCALED"], *dh.shape), launch["DOTS"].view(-1)
    dots.zero_()
    for expert in range(experts):
        here = slice(int(bounds[expert]), int(bounds[expert + 1]))
        at = order[here].long()
        weight = launch["WEIGHTS"].flatten()[at][:, None].float()
        gate, up = split(z[here], launch["INTERLEAVED"])
        h = activate(gate, up, name).float()
        dots[at] = (dh[here] * h).sum(1)
        if launch["BIAS"] is not None:
            dots[at] += (launch["GRAD"][at // launch["slots"]].float() * launch["BIAS"][expert].float()).sum(1)
        scaled[here] = (weight * h).to(scaled.dtype)
        parts = split(dz[here], launch["INTERLEAVED"])
        for part, value in zip(parts, activate_backward(weight * dh[here], gate, up, name), strict=True):
            part.copy_(value)


def weight_gradient(launch: TritonLaunch) -> None:
    n, k, bounds, out = launch["N"], launch["K"], launch["BOUNDS"].tolist(), launch["OUT"]
    experts = len(bounds) - 1
    tiles = -(-n // launch["BLOCK_M"]) * -(-k // launch["BLOCK_N"])
    assert launch.grid[0] == experts * tiles
    strides = launch["out_expert"], launch["out_row"], launch["out_column"]
    out = out.as_strided((experts, n, k), strides, out.storage_offset())
    for expert in range(experts):
        positions = torch.arange(bounds[expert], bounds[expert + 1])
        tokens = launch["ROUTES"][positions] // launch["SLOTS"]
        left = launch["LEFT"][tokens if launch["LEFT_GATHERED"] else positions].double()
        right = launch["RIGHT"][tokens if launch["RIGHT_GATHERED"] else positions].double()
        out[expert] = (left.t() @ right + (out[expert] if launch["CONTINUES"] else 0)).to(out.dtype)


def bias_gradient(launch: TritonLaunch) -> None:
    bounds, out = launch["BOUNDS"].tolist(), launch["OUT"]
    assert launch.grid[:2] == (len(out), -(-launch["N"] // launch["WIDTH"]))
    for expert in range(len(out)):
        at = torch.arange(bounds[expert], bounds[expert + 1])
        if launch["WEIGHTS"] is None:
            rows = launch["X"][at].float()
        else:
            at = launch["ROUTES"][at].long()
            rows = launch["X"][at // launch["slots"]].float() * launch["WEIGHTS"].flatten()[at][:, None].float()
        out[expert] = rows.sum(0).to(out.dtype)


STAND_INS = {one.__name__: one for one in (count, add_up, place, list_tiles, product, gate_up, combine)}
STAND_INS |= {"activate_backward": activate_backward_rows, "weight_gradient": weight_gradient}
STAND_INS |= {"bias_gradient": bias_gradient}


def operands(tokens, width, inner, experts, slots, *, layout="row", biases=False, dtype=torch.bfloat16, **_):
    """Return grad and the tensors of a call; some ids are absent."""
    gate_up, down = torch.randn(experts, 2 * inner, width) / 4, torch.randn(experts, width, inner) / 4
    if layout == "transposed":
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    gate_up, down = (x.to(dtype) for x in (gate_up, down))
    hidden, grad, shared = torch.randn(3, tokens, width).to(dtype).unbind()
    if layout == "odd":
        # Rows that are no multiple of 16 bytes apart, and a first one at no multiple of 16 bytes.
        gate_up, down = (torch.cat((x, x[..., :1]), -1)[..., :-1] for x in (gate_up, down))
        hidden = torch.cat((hidden.flatten()[:1], hidden.flatten()))[1:].view(hidden.shape)
    ids, weights = torch.randint(experts + 1, (tokens, slots)), torch.rand(tokens, slots)
    bias = [torch.randn(experts, n).to(dtype) if biases else None for n in (2 * inner, width)]
    return grad, (hidden, gate_up, down, ids, weights), bias, shared


def _check_routes(backend, inputs: tuple) -> None:
    """Compare the outputs of single routes, and their sum from places in another order."""
    hidden, gate_up, down, ids, weights, *biases, shared, activation, interleaved = inputs
    slots, count = ids.shape[1], len(gate_up)
    places, each = torch.randperm(ids.numel()), ids.reshape(-1, 1)
    turned = places.argsort()
    single = (hidden.repeat_interleave(slots, 0)[turned], gate_up, down, each[turned], None, *biases, None)
    y = backend.forward(*single, activation, interleaved)
    is_here = (each[turned] < count)[:, 0]
    torch.testing.assert_close(
        y[is_here], native.forward(*single, activation, interleaved)[is_here], rtol=2e-2, atol=4e-2
    )
    total = backend.combine(y, ids, places.view(ids.shape), weights, shared, count)
    assert torch.equal(total, backend.forward(*inputs))


def check(module: str, call: dict) -> None:
    """Compare the results of a backend's launches with those of ``native``."""
    torch.manual_seed(0)
    backend = importlib.import_module(module)
    grad, tensors, biases, shared = operands(**call)
    form = call.get("activation", "silu"), call.get("interleaved", False)
    near = partial(torch.testing.assert_close, rtol=2e-2, atol=4e-2)
    inputs = (*tensors, *biases, shared, *form)
    out, z, order = backend.forward_kept(*inputs)
    expected = native.forward_kept(*inputs)
    assert torch.equal(order, expected[2])
    end = order[-1]
    near(out, expected[0])
    near(z[:end], expected[1][:end])
    assert torch.equal(backend.forward(*inputs), out)
    _check_routes(backend, inputs)
    needs = [True, True, True, True, *(bias is not None for bias in biases)]
    expected = native.backward(*inputs, grad, z.nan_to_num(), order, needs)
    for kept in ((z, order), (None, None)):
        for value, other in zip(backend.backward(*inputs, grad, *kept, needs), expected, strict=True):
            near(value, other)
    buffers = [torch.ones(*x.shape[:2], 2 * x.shape[2])[..., ::2] for x in tensors[1:3]]
    needs[2:4] = False, False
    backend.backward_into(*inputs, grad, z, order, *buffers, needs)
    for buffer, other in zip(buffers, expected[2:4], strict=True):
        near(buffer, 1 + other.float())
