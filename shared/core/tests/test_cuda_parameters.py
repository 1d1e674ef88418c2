"""How parameters are packed, and descriptors of matrices, which are parameters too."""

import ctypes
import struct
from contextlib import contextmanager

import pytest
import torch

from rl_kernels.core.cuda import tensor_map as maps
from rl_kernels.core.cuda.signature import Buffer, Signature
from rl_kernels.core.cuda.tensor_map import tensor_map


@pytest.mark.parametrize(
    ("text", "places", "size"),
    [
        ("", (), 0),
        ("iPf", ((0, 4), (8, 8), (16, 4)), 20),
        ("bhid?", ((0, 1), (2, 2), (4, 4), (8, 8), (16, 1)), 17),
        ("PT", ((0, 8), (64, 128)), 192),
        ("TiT", ((0, 128), (128, 4), (192, 128)), 320),
        ("i(Pif)i(qb)", ((0, 4), (8, 16), (24, 4), (32, 16)), 48),
    ],
)
def test_parameters_lie_where_the_compiler_puts_them(text, places, size):
    signature = Signature(text)
    assert (signature.places, signature.size) == (places, size)


def test_a_signature_has_letters_of_parameters_and_pairs_of_parentheses():
    with pytest.raises(ValueError, match=r"signature: expected letters of .*, got '4s'"):
        Signature("P4s")
    for text in ("(P", "P)", "((P))", ")P("):
        with pytest.raises(ValueError, match="signature: a parenthesis"):
            Signature(text)


def test_a_map_is_packed_by_value_where_the_compiler_says():
    described = bytes(range(128))
    buffer = Buffer(Signature("iT"))
    buffer.fill((5, described))
    assert read_back(buffer, 192) == struct.pack("i", 5) + bytes(60) + described
    for wrong in (None, torch.zeros(1), 5):
        with pytest.raises(struct.error):
            buffer.fill((5, wrong))
    # Where a struct begins only the compiler knows.
    signature = Signature("iT(Pi)i", [0, 48, 176, 192])
    assert signature.places == ((0, 4), (48, 128), (176, 16), (192, 4))
    buffer = Buffer(signature)
    buffer.fill(signature.numbers((5, described, None, 6, 7)))
    assert read_back(buffer, 196) == struct.pack("i", 5) + bytes(44) + described + struct.pack("@PiiI", 0, 6, 0, 7)


def test_pointers_in_a_struct_are_addresses():
    signature, value = Signature("(iP)P"), torch.zeros(1)
    buffer = Buffer(signature)
    buffer.fill(signature.numbers((5, value, None)))
    assert read_back(buffer, 24) == struct.pack("@iPP", 5, value.data_ptr(), 0)


def read_back(buffer, size):
    """Read what a launch would read of a buffer."""
    words = (ctypes.c_void_p * 5).from_address(buffer.address)
    assert ctypes.c_size_t.from_address(words[3]).value == size
    return ctypes.string_at(words[1], size)


X = torch.zeros(5, 64, dtype=torch.bfloat16)
# Codes of 256 and 128 bytes in cuda.h: CUtensorMapL2promotion.
PROMOTED = [3, 2]


@pytest.mark.parametrize(
    ("tensor", "box", "swizzle", "words"),
    [
        (X.double(), (1, 64), 0, "tensor: expected bfloat16"),
        (X[0], (1, 64), 0, "tensor: expected 2 to 5 dims, the last contiguous"),
        (X.T, (1, 64), 0, "tensor: expected 2 to 5 dims, the last contiguous"),
        (X[:0], (1, 64), 0, "tensor: expected 2 to 5 dims, the last contiguous"),
        (X[:, 1:], (1, 64), 0, "tensor: expected rows that begin at multiples of 16"),
        (torch.zeros(3, 12, dtype=torch.bfloat16), (1, 8), 0, "tensor: expected rows that begin at multiples of 16"),
        (X, (1, 64), 48, "swizzle: expected one of"),
        (X, (1, 128), 128, "box: expected 2 sizes up to 256, the last up to 64 in multiples of 8"),
        (X, (257, 64), 0, "box: expected 2 sizes up to 256"),
        (X, (0, 64), 0, "box: expected 2 sizes up to 256"),
        (X, (1, 1, 8), 0, "box: expected 2 sizes up to 256"),
        (X[:1].expand(5, 64), (1, 8), 0, "tensor: expected rows that begin at multiples of 16"),
        (X, (1, 12), 0, "box: expected 2 sizes up to 256, the last up to 256 in multiples of 8"),
    ],
)
def test_matrices_that_the_accelerator_cannot_read(tensor, box, swizzle, words):
    with pytest.raises(ValueError, match=words):
        tensor_map(tensor, box, swizzle=swizzle)
    with pytest.raises(ValueError, match=r"promotion: expected one of \(64, 128, 256\), got 512"):
        tensor_map(X, (1, 64), promotion=512)


@pytest.fixture
def encoded(monkeypatch):
    """Stand in for the driver's encoder; the list of what it was asked for."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    asked = []
    numbers = (ctypes.c_int, ctypes.c_uint32, *(ctypes.c_void_p,) * 5, *(ctypes.c_int,) * 4)

    def encode(place, dtype, rank, address, sizes, strides, box, steps, *rest):
        words = [
            (ctypes.c_uint64 * count).from_address(array)[:] for count, array in ((rank, sizes), (rank - 1, strides))
        ]
        words += [(ctypes.c_uint32 * rank).from_address(array)[:] for array in (box, steps)]
        asked.append((place % 128, rank, address, *words, rest[2]))
        ctypes.memset(place, len(asked), 128)
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *numbers)(encode)
    monkeypatch.setattr(maps, "_encode", lambda: function)
    monkeypatch.setattr(maps, "_maps", {})
    monkeypatch.setattr(maps, "_layouts", {})
    return asked


def test_a_descriptor_is_written_at_an_aligned_place_and_kept(encoded):
    first = tensor_map(X, (4, 64), swizzle=128)
    assert first == tensor_map(X, (4, 64), swizzle=128) == bytes([1]) * 128
    assert encoded == [(0, 2, X.data_ptr(), [64, 5], [128], [64, 4], [1, 1], PROMOTED[0])]


def test_a_descriptor_of_four_dims_begins_with_the_last(encoded):
    cache = torch.zeros(3, 7, 2, 64, dtype=torch.bfloat16)
    tensor_map(cache[:, 1:], (1, 4, 1, 32), swizzle=64)
    assert encoded == [
        (0, 4, cache[0, 1].data_ptr(), [64, 2, 6, 3], [128, 256, 1792], [32, 1, 4, 1], [1, 1, 1, 1], PROMOTED[0])
    ]


def test_a_descriptor_is_written_on_the_gpu_of_its_matrix(encoded, monkeypatch):
    entered = []

    @contextmanager
    def device_of(tensor):
        entered.append(tensor is X and not encoded)
        yield

    monkeypatch.setattr(maps, "device_of", device_of)
    tensor_map(X, (4, 64))
    assert entered == [True]
    assert len(encoded) == 1


def test_another_matrix_box_or_promotion_is_another_descriptor(encoded):
    known = [tensor_map(X, (4, 64)), tensor_map(X, (4, 64), promotion=128)]
    assert [asked[-1] for asked in encoded] == PROMOTED
    for tensor, box, swizzle in ((X[1:], (4, 64), 0), (X, (2, 64), 0), (X, (4, 64), 128), (X.half(), (4, 64), 0)):
        known.append(tensor_map(tensor, box, swizzle=swizzle))
        assert len({*known}) == len(known) == len(encoded)


def test_a_transpose_and_other_strides_are_described_where_the_matrix_begins(encoded):
    row = X[2:3].t()
    maps = [tensor_map(row, (4, 64), transposed=True, strides=strides) for strides in (None, (72, 1))]
    assert maps[0] != maps[1]
    assert [asked[2:5] for asked in encoded] == [(X[2].data_ptr(), [64, 1], [size]) for size in (128, 144)]


def test_descriptors_that_are_kept_are_bounded(encoded, monkeypatch):
    monkeypatch.setattr(maps, "CACHE_SIZE", 3)
    for rows in range(1, 10):
        tensor_map(X, (rows, 64))
        assert max(len(maps._maps), len(maps._layouts)) <= 3


def test_a_matrix_of_a_known_layout_is_checked_and_described_where_it_begins(encoded):
    rows = torch.zeros(9, 64, dtype=torch.bfloat16)
    for row in (0, 3, 5):
        tensor_map(rows[row : row + 4], (4, 64))
    assert [asked[2] for asked in encoded] == [rows[row].data_ptr() for row in (0, 3, 5)]
    assert len({str(asked[3:]) for asked in encoded}) == len(maps._layouts) == 1
    flat = rows.flatten()
    with pytest.raises(ValueError, match="tensor: expected rows that begin at multiples of 16"):
        tensor_map(flat[1 : 1 + 4 * 64].view(4, 64), (4, 64))


def test_a_descriptor_that_the_driver_refuses_is_an_error(encoded, monkeypatch):
    monkeypatch.setattr(maps, "_encode", lambda: lambda *_: 1)
    monkeypatch.setattr(maps, "error_of", lambda status, what: RuntimeError(f"{what}: {int(status)}"))
    with pytest.raises(RuntimeError, match=r"tensor map of \(5, 64\) in boxes of \(4, 64\): 1"):
        tensor_map(X, (4, 64))
    assert not maps._maps
