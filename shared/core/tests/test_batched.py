"""Batched products: a number's bits depend on its row and column alone, whatever the library does."""

import pytest
import torch

from rl_kernels.core import batched
from rl_kernels.core.testing import Draw
from rl_kernels.core.verified import Way

TRUE_LIBRARY = batched.library


def by_size(a, b, out):
    """Add in another order if there are more than 8 rows."""
    if a.shape[1] <= 8:
        return TRUE_LIBRARY(a, b, out)
    half = a.shape[2] // 2
    return TRUE_LIBRARY(a[..., half:], b[:, half:], TRUE_LIBRARY(a[..., :half], b[:, :half], out))


@pytest.fixture(params=[None, by_size], ids=["this library", "one that looks at the size"])
def library(request, monkeypatch):
    batched.way_of.cache_clear()
    if request.param:
        monkeypatch.setattr(batched, "library", request.param)
    yield request.param
    batched.way_of.cache_clear()


@pytest.mark.parametrize("by_columns", [False, True])
def test_bits_of_a_number_in_any_batch(library, by_columns):
    draw = Draw(torch.float32)
    a, b, out = draw.normal(3, 96, 64), draw.normal(3, 64, 192), draw.normal(3, 96, 192)
    if by_columns:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    found, added = batched.multiply(a, b), batched.multiply(a, b, out.clone())
    assert torch.equal(added, out + found)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=0, atol=1e-4)
    for item, rows, columns in ((0, slice(0, 8), slice(0, 64)), (2, slice(88, 96), slice(112, 192))):
        part = batched.multiply(a[item : item + 1, rows], b[item : item + 1, :, columns])
        assert torch.equal(part[0], found[item, rows, columns])


def test_explain_says_that_a_library_looks_at_the_size(library):
    assert batched.note(16, 64, 64) == (f"products {Way.TILES.value}" if library else None)
