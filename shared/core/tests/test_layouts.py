import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_kernels.core.testing import Draw, chunk, make_synthetic_rl_kernel_batch, pack, pad, permute

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


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 3), (1, 2)])
def test_pad_and_back(tensors, left, right):
    laid = pad(tensors, left=left, right=right)
    for name, value in laid.tensors.items():
        assert value.shape[:2] == (B, left + T + right)
        assert (value[:, :left] == 0).all()
        assert (value[:, left + T :] == 0).all()
        assert torch.equal(value[:, left : left + T], tensors[name])
    assert_same(laid.undo(laid.tensors), tensors)


def test_pad_with_what_it_is_told(tensors):
    laid = pad(tensors, left=1, right=1, fill={"ids": -100, "mask": True, "logps": float("nan")}).tensors
    assert (laid["ids"][:, [0, -1]] == -100).all()
    assert laid["mask"][:, [0, -1]].all()
    assert laid["logps"][:, [0, -1]].isnan().all()
    assert (laid["hidden"][:, [0, -1]] == 0).all()


def test_pad_refuses(tensors):
    with pytest.raises(ValueError, match="left: expected an integer >= 0, got -1"):
        pad(tensors, left=-1)
    with pytest.raises(ValueError, match="right: expected an integer >= 0, got -2"):
        pad(tensors, right=-2)
    with pytest.raises(ValueError, match="fill: expected names among ids, mask, logps, hidden, got 'no_such'"):
        pad(tensors, right=1, fill={"no_such": 1})
    for value in (float("nan"), 0.5):
        with pytest.raises(ValueError, match=f"fill: expected an integer for ids, got {value}"):
            pad(tensors, right=1, fill={"ids": value})


@pytest.mark.parametrize("order", [[3, 1, 0, 2], (0, 1, 2, 3), torch.tensor([1, 0, 3, 2])], ids=str)
def test_permute_and_back(tensors, order):
    laid = permute(tensors, order)
    for row, source in enumerate(order):
        assert torch.equal(laid.tensors["hidden"][row], tensors["hidden"][source])
    assert_same(laid.undo(laid.tensors), tensors)


def test_permute_brings_back_results_of_one_value_a_sequence(tensors):
    laid = permute(tensors, [3, 1, 0, 2])
    assert_same(laid.undo({"sums": laid.tensors["logps"].sum(1)}), {"sums": tensors["logps"].sum(1)})


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [[0, 1], [2, 3]], []], ids=str)
def test_permute_refuses_what_is_no_permutation(tensors, order):
    with pytest.raises(ValueError, match=r"order: expected a permutation of range\(4\)"):
        permute(tensors, order)


@pytest.mark.parametrize(("dim", "cuts"), [(0, []), (0, [1]), (0, [1, 2, 3]), (1, [4]), (1, [1, 3])], ids=str)
def test_chunk_and_back(tensors, dim, cuts):
    laid = chunk(tensors, cuts, dim=dim)
    bounds = [0, *cuts, (B, T)[dim]]
    assert len(laid.parts) == len(cuts) + 1
    for part, low, high in zip(laid.parts, bounds, bounds[1:], strict=False):
        assert torch.equal(part["hidden"], tensors["hidden"].narrow(dim, low, high - low))
    assert_same(laid.undo(laid.parts), tensors)


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [3, 1], [-1], [9]], ids=str)
def test_chunk_refuses_cuts_that_make_an_empty_part(tensors, cuts):
    with pytest.raises(ValueError, match=r"cuts: expected strictly increasing indices inside \(0, 4\)"):
        chunk(tensors, cuts)


def test_chunk_refuses_other_dims_and_lost_parts(tensors):
    with pytest.raises(ValueError, match="dim: expected 0 or 1, got 2"):
        chunk(tensors, [1], dim=2)
    laid = chunk(tensors, [1, 3])
    with pytest.raises(ValueError, match="results: expected 3 parts, got 2"):
        laid.undo(laid.parts[:2])
    with pytest.raises(ValueError, match=r"results: expected ids of leading shape \(1, 5\), got \(2, 5\)"):
        laid.undo([laid.parts[1], laid.parts[0], laid.parts[2]])


def test_pack_and_back(tensors):
    mask = tensors["mask"]
    laid = pack(tensors, mask)
    assert laid.cu_seqlens.dtype == torch.int32
    assert laid.cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    for row in range(B):
        start, end = laid.cu_seqlens[row : row + 2].tolist()
        assert torch.equal(laid.tensors["hidden"][start:end], tensors["hidden"][row, mask[row]])
    expected = {
        name: value.masked_fill(~mask[..., None] if value.ndim == 3 else ~mask, 0) for name, value in tensors.items()
    }
    assert_same(laid.undo(laid.tensors), expected)


@pytest.mark.parametrize("full", [False, True])
def test_pack_nothing_and_everything(tensors, full):
    laid = pack(tensors, torch.full((B, T), full))
    assert len(laid.tensors["logps"]) == (B * T if full else 0)
    expected = tensors if full else {name: torch.zeros_like(value) for name, value in tensors.items()}
    assert_same(laid.undo(laid.tensors), expected)


def test_pack_refuses(tensors):
    for bad in (tensors["mask"].float(), tensors["mask"][:, 1:], torch.ones(B, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask: expected bool \(4, 5\), got"):
            pack(tensors, bad)
    laid = pack(tensors, tensors["mask"])
    with pytest.raises(ValueError, match="results: expected x of leading shape"):
        laid.undo({"x": torch.zeros(B * T + 1)})


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


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), lambda tensors: chunk(tensors, [1])], ids=[*LAYOUTS, "chunk"])
def test_every_layout_refuses_tensors_that_do_not_belong_together(layout):
    with pytest.raises(ValueError, match="tensors: expected at least one, got none"):
        layout({})
    with pytest.raises(ValueError, match=r"tensors: expected y of shape \[B, T, ...\] like x, got \(4, 6\)"):
        layout({"x": torch.zeros(4, 5), "y": torch.zeros(4, 6)})
    with pytest.raises(ValueError, match=r"tensors: expected x of shape \[B, T, ...\] like x, got \(4,\)"):
        layout({"x": torch.zeros(4)})


@pytest.mark.parametrize("layout", [LAYOUTS["pad"], LAYOUTS["permute"]], ids=["pad", "permute"])
def test_undo_refuses_results_of_another_shape(tensors, layout):
    with pytest.raises(ValueError, match="results: expected x of leading shape"):
        layout(tensors).undo({"x": torch.zeros(B + 1, T)})


@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_layouts_of_a_batch_undo_each_other(data, seed):
    batch = make_synthetic_rl_kernel_batch(2, data.draw(st.integers(1, 3)), 2, data.draw(st.integers(1, 6)), seed=seed)
    tensors = batch.per_token()
    rows, length = batch.token_ids.shape
    widths = {"left": data.draw(st.integers(0, 3)), "right": data.draw(st.integers(0, 3))}
    padded = pad(tensors, **widths)
    permuted = permute(padded.tensors, data.draw(st.permutations(range(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=3)))
    chunks = chunk(permuted.tensors, cuts)
    packed = [pack(part, part["completion_mask"]) for part in chunks.parts]
    assert sum(len(part.tensors["token_ids"]) for part in packed) == len(batch.valid_indices)

    unpacked = chunks.undo([part.undo(part.tensors) for part in packed])
    found = padded.undo(permuted.undo(unpacked))
    # Masked positions of a batch hold 0, so that packing loses nothing.
    assert_same(found, tensors)
    assert found["token_ids"].shape == (rows, length)
