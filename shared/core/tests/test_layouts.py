import pytest
import torch

from rl_kernels.core.testing import Draw, chunk, pack, pad, permute

B, T = 4, 5


@pytest.fixture
def tensors():
    draw = Draw(torch.float32)
    return {
        "ids": draw.ids(9, B, T),
        "mask": draw.mask(0.6, B, T),
        "logps": draw.normal(B, T),
        "hidden": draw.normal(B, T, 3),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_pad_and_back(tensors):
    for left, right in ((0, 0), (2, 0), (0, 3), (1, 2)):
        laid = pad(tensors, left=left, right=right)
        for name, value in laid.tensors.items():
            assert value.shape[:2] == (B, left + T + right)
            assert (value[:, :left] == 0).all()
            assert (value[:, left + T :] == 0).all()
            assert torch.equal(value[:, left : left + T], tensors[name])
        assert_same(laid.undo(laid.tensors), tensors)
    laid = pad(tensors, left=1, right=1, fill={"ids": -100, "mask": True, "logps": float("nan")}).tensors
    assert (laid["ids"][:, [0, -1]] == -100).all()
    assert laid["mask"][:, [0, -1]].all()
    assert laid["logps"][:, [0, -1]].isnan().all()
    assert (laid["hidden"][:, [0, -1]] == 0).all()


def test_permute_and_back(tensors):
    for order in ([3, 1, 0, 2], (0, 1, 2, 3), torch.tensor([1, 0, 3, 2])):
        laid = permute(tensors, order)
        for row, source in enumerate(order):
            assert torch.equal(laid.tensors["hidden"][row], tensors["hidden"][source])
        assert_same(laid.undo(laid.tensors), tensors)
        # Results may have one value a sequence.
        assert_same(laid.undo({"sums": laid.tensors["logps"].sum(1)}), {"sums": tensors["logps"].sum(1)})


def test_chunk_and_back(tensors):
    for dim, cuts in ((0, []), (0, [1]), (0, [1, 2, 3]), (1, [4]), (1, [1, 3])):
        laid = chunk(tensors, cuts, dim=dim)
        bounds = [0, *cuts, (B, T)[dim]]
        assert len(laid.parts) == len(cuts) + 1
        for part, low, high in zip(laid.parts, bounds, bounds[1:], strict=False):
            assert torch.equal(part["hidden"], tensors["hidden"].narrow(dim, low, high - low))
        assert_same(laid.undo(laid.parts), tensors)


def test_pack_and_back(tensors):
    for mask in (tensors["mask"], torch.full((B, T), False), torch.full((B, T), True)):
        laid = pack(tensors, mask)
        assert laid.cu_seqlens.dtype == torch.int32
        assert laid.cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
        assert len(laid.tensors["logps"]) == mask.sum()
        for row in range(B):
            start, end = laid.cu_seqlens[row : row + 2].tolist()
            assert torch.equal(laid.tensors["hidden"][start:end], tensors["hidden"][row, mask[row]])
        masked = {name: ~mask[..., None] if value.ndim == 3 else ~mask for name, value in tensors.items()}
        expected = {name: value.masked_fill(masked[name], 0) for name, value in tensors.items()}
        assert_same(laid.undo(laid.tensors), expected)


LAYOUTS = {
    "pad": lambda tensors: pad(tensors, left=2, right=1),
    "permute": lambda tensors: permute(tensors, [2, 0, 3, 1]),
    "pack": lambda tensors: pack(tensors, torch.ones(B, T, dtype=torch.bool)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_gradients_flow_there_and_back(tensors, layout):
    leaf = tensors["hidden"].clone().requires_grad_()
    laid = layout({"hidden": leaf})
    back = laid.undo({"squares": laid.tensors["hidden"].square()})
    assert_same(back, {"squares": leaf.square()})
    (back["squares"] * torch.arange(B * T * 3.0).view(B, T, 3)).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach() * torch.arange(B * T * 3.0).view(B, T, 3))


ORDER, CUTS, MASK = r"order: .* permutation of range\(4\)", r"cuts: .* inside \(0, 4\)", r"mask: expected bool \(4, 5\)"
REFUSED = [
    ("left: expected an integer >= 0, got -1", lambda x: pad(x, left=-1)),
    ("fill: .* names among ids, mask, logps, hidden, got 'no_such'", lambda x: pad(x, right=1, fill={"no_such": 1})),
    ("fill: expected an integer for ids, got nan", lambda x: pad(x, right=1, fill={"ids": float("nan")})),
    ("fill: expected an integer for ids, got 0.5", lambda x: pad(x, right=1, fill={"ids": 0.5})),
    ("results: expected x of leading shape", lambda x: pad(x).undo({"x": torch.zeros(B + 1, T)})),
    *((ORDER, lambda x, o=o: permute(x, o)) for o in ([0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [[0, 1], [2, 3]], [])),
    ("results: expected x of leading shape", lambda x: permute(x, [1, 0, 2, 3]).undo({"x": torch.zeros(B + 1, T)})),
    *((CUTS, lambda x, cuts=cuts: chunk(x, cuts)) for cuts in ([0], [4], [2, 2], [3, 1], [-1], [9])),
    ("dim: expected 0 or 1, got 2", lambda x: chunk(x, [1], dim=2)),
    ("results: expected 3 parts, got 2", lambda x: (laid := chunk(x, [1, 3])).undo(laid.parts[:2])),
    (
        r"results: expected ids of leading shape \(1, 5\), got \(2, 5\)",
        lambda x: (laid := chunk(x, [1, 3])).undo([laid.parts[place] for place in (1, 0, 2)]),
    ),
    (MASK, lambda x: pack(x, x["mask"].float())),
    (MASK, lambda x: pack(x, x["mask"][:, 1:])),
    (MASK, lambda x: pack(x, torch.ones(B, dtype=torch.bool))),
    ("results: expected x of leading shape", lambda x: pack(x, x["mask"]).undo({"x": torch.zeros(B * T + 1)})),
]


def test_bad_arguments_are_refused(tensors):
    for message, attempt in REFUSED:
        with pytest.raises(ValueError, match=message):
            attempt(tensors)
    for layout in (*LAYOUTS.values(), lambda x: chunk(x, [1])):
        with pytest.raises(ValueError, match="tensors: expected at least one, got none"):
            layout({})
        with pytest.raises(ValueError, match=r"tensors: expected y of shape \[B, T, ...\] like x, got \(4, 6\)"):
            layout({"x": torch.zeros(4, 5), "y": torch.zeros(4, 6)})
        with pytest.raises(ValueError, match=r"tensors: expected x of shape \[B, T, ...\] like x, got \(4,\)"):
            layout({"x": torch.zeros(4)})
