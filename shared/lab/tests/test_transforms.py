"""The standard transforms on toy functions: they hold where rows are independent, and catch where they are not."""

import pytest
import torch

from rl_kernels.core.testing import IGNORED, Case, Draw, bits_of
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.lab.check.transforms import STORAGE, options

CASE = Case("plain", {"rows": 6, "size": 5})
LAYOUT = RowLayout(
    arguments={"x": 1, "ids": 0, "temperature": 0}, results=frozenset({"output", "gradient:x"}), ids="ids"
)
TRANSFORMS = {**LAYOUT.transforms(), **LAYOUT.hygiene()}
NAMES = ("alone", "batch", "position", "neighbors", "leading", "chunks", "padding", "masked")


def rowwise_toy(x, ids, temperature=1.0, ignore_index=None, square=False):
    """Return x[id] / temperature in each row, 0 where the row is ignored."""
    active = torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
    z = torch.where(active[..., None], x, 0.0)
    chosen = z.gather(-1, torch.where(active, ids, 0)[..., None])[..., 0] / temperature
    return chosen.square() if square else chosen


def batch_dependent(x, **rest):
    return rowwise_toy(x - x.reshape(-1, x.shape[-1]).mean(0), **rest)


def follows_row_number(x, ids, **rest):
    return rowwise_toy(x, ids, **rest) + torch.arange(ids.numel(), dtype=x.dtype).view(ids.shape)


def follows_row_count(x, ids, **rest):
    return rowwise_toy(x, ids, **rest) + ids.numel()


def follows_neighbor(x, ids, **rest):
    return rowwise_toy(x, ids, **rest) + x[..., 0].flatten().roll(1).view(ids.shape).nan_to_num(7.0)


def reads_masked_rows(x, ids, **rest):
    return rowwise_toy(x, ids, **rest) + 0 * x.sum()


def gradient_is_scaled_by_the_batch(x, ids, **rest):
    scaled = x / ids.numel() + (x - x / ids.numel()).detach()
    return rowwise_toy(scaled, ids, **rest)


def draw_inputs(leading=(2, 3), temperature="tensor"):
    draw = Draw(torch.float32, seed=3)
    inputs = {"x": draw.normal(*leading, 5), "ids": draw.ids(5, *leading)}
    return inputs | ({"temperature": draw.uniform(0.5, 2.0, *leading)} if temperature == "tensor" else {})


def results(function, inputs, lift=None):
    """Return output and gradient of one call, under a random upstream gradient that ``lift`` may carry over."""
    x = inputs["x"].detach().requires_grad_()
    output = function(**{**inputs, "x": x})
    upstream = lift("output", UPSTREAM) if lift else UPSTREAM
    output.backward(upstream.view(output.shape))
    return {"output": output.detach(), "gradient:x": x.grad}


UPSTREAM = Draw(torch.float32, seed=9).normal(6)


def broken(function, transform, inputs, case=CASE):
    """Return the labels of the variants whose bits differ from the base call's, and the number of comparisons."""
    shape = inputs["ids"].shape
    base = results(function, inputs)
    labels, compared = [], 0
    for variant in transform(case, inputs, Draw(torch.float32, seed=4)):

        def lift(name, upstream, variant=variant):
            return variant.lift(name, upstream.view(shape))

        found = results(function, variant.inputs, lift)
        for name, result in base.items():
            expected = variant.pick(name, result)
            if expected is None:
                continue
            compared += 1
            if not torch.equal(bits_of(variant.find(name, found[name])), bits_of(expected)):
                labels.append(f"{variant.label}: {name}")
    return labels, compared


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_holds_where_rows_are_independent(name):
    for leading in ((2, 3), (6,), (1, 6), (3, 1, 2)):
        for temperature in ("tensor", "none"):
            labels, compared = broken(rowwise_toy, TRANSFORMS[name], draw_inputs(leading, temperature))
            assert labels == []
            assert compared >= 4
    assert list(TRANSFORMS[name](CASE, draw_inputs((0,)), Draw(torch.float32))) == []
    single = {key: value[:1, :1] for key, value in draw_inputs().items()}
    variants = list(TRANSFORMS[name](CASE, single, Draw(torch.float32)))
    for variant in variants:
        expected = variant.pick("output", rowwise_toy(**single))
        assert torch.equal(variant.find("output", rowwise_toy(**variant.inputs)), expected)
    assert variants or name == "chunks"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("function", "caught_by"),
    [
        (batch_dependent, {*NAMES}),
        (follows_row_number, {"alone", "batch", "position", "chunks", "padding", "masked"}),
        (follows_row_count, {"alone", "batch", "neighbors", "leading", "chunks", "padding", "masked"}),
        (follows_neighbor, set(NAMES)),
        # A neighbor may hold NaN whether it is masked or not.
        (reads_masked_rows, {"neighbors", "masked"}),
        (gradient_is_scaled_by_the_batch, {"alone", "batch", "neighbors", "leading", "chunks", "padding", "masked"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_way_of_looking_beyond_a_row_is_caught(function, caught_by):
    assert set(TRANSFORMS) == set(NAMES)
    caught = {name for name in NAMES if broken(function, TRANSFORMS[name], draw_inputs())[0]}
    assert caught == caught_by


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_neighbors_may_hold_what_is_no_number(number):
    def spreads(x, ids, **rest):
        found = x.isnan() if number == "nan" else x == float(number)
        return rowwise_toy(x, ids, **rest) + found.any()

    labels, _ = broken(spreads, TRANSFORMS["neighbors"], draw_inputs())
    assert {label for label in labels if "output" in label} == {
        f"row {row} among rows of {number}: output" for row in (0, 3, 5)
    }


def test_leading_dims_may_be_no_one_stride_apart():
    def rows_one_stride_apart(x, ids, **rest):
        """Read rows as far apart as the innermost two leading dims say."""
        if x.ndim < 4:
            return rowwise_toy(x, ids, **rest)
        flat = x.as_strided((ids.numel(), x.shape[-1]), (x.stride(-2), x.stride(-1)), x.storage_offset())
        return rowwise_toy(flat.reshape(x.shape), ids, **rest)

    labels, _ = broken(rows_one_stride_apart, TRANSFORMS["leading"], draw_inputs())
    assert {label.partition(":")[0] for label in labels} == {"leading dims cut from larger ones"}


def test_rows_have_any_leading_dims_and_batches_any_size():
    def needs_two_dims(x, ids, **rest):
        return rowwise_toy(x, ids, **rest) + (ids.ndim != 2)

    labels, _ = broken(needs_two_dims, TRANSFORMS["leading"], draw_inputs())
    assert {label.partition(":")[0] for label in labels} == {
        *("no leading dims", "leading dims cut from larger ones"),
        *("leading dims (6,)", "leading dims (6, 1, 1)", "leading dims (1, 6, 1, 1)"),
    }
    layout = RowLayout({"x": 1}, frozenset({"output"}), any_leading=False)
    assert list(layout.transforms()["leading"](CASE, draw_inputs(), Draw(torch.float32))) == []
    sizes = [len(variant.inputs["ids"]) for variant in TRANSFORMS["batch"](CASE, draw_inputs(), Draw(torch.float32))]
    assert {1, 2, 4, 9} <= set(sizes)
    assert max(sizes) > 128


def test_calls_to_which_a_transform_does_not_apply_are_left_out():
    draw, other = Draw(torch.float32), Case("other", {}, function="toy_other")
    assert list(TRANSFORMS["masked"](CASE, draw_inputs() | {"ignore_index": 3}, draw)) == []
    assert not RowLayout({"x": 1}, frozenset({"output"})).hygiene()
    assert list(TRANSFORMS["alone"](other, draw_inputs(), draw)) == []
    assert list(TRANSFORMS["alone"](CASE, draw_inputs() | {"row_indices": torch.tensor([0])}, draw)) == []


def test_strides_of_matrices_and_of_tensors_without_one():
    draw = Draw(torch.float32)
    labels = [variant.label for variant in STORAGE["strided"](CASE, draw_inputs(), draw)]
    assert labels == ["every other element", "in the middle", "stored column by column"]
    inputs = {"rewards": draw.normal(5), "eps": 1e-6, "scale": torch.tensor(2.0)}
    variants = list(STORAGE["strided"](CASE, inputs, draw))
    assert [variant.label for variant in variants] == ["every other element", "in the middle"]
    assert variants[0].inputs["rewards"].stride() == (2,)


@pytest.mark.parametrize("name", STORAGE)
def test_gaps_hold_garbage_and_places_the_values(name):
    garbage = {torch.float32: torch.nan, torch.bool: True, torch.int32: torch.iinfo(torch.int32).max}
    for dtype, filler in garbage.items():
        value = torch.tensor([[1, 0], [0, 1]]).to(dtype)
        (moved, *_) = (variant.inputs["x"] for variant in STORAGE[name](CASE, {"x": value}, Draw(torch.float32)))
        assert torch.equal(moved, value)
        everything = torch.empty(0, dtype=dtype).set_(moved.untyped_storage())
        gaps = everything.numel() - value.numel()
        assert gaps >= 2
        assert (everything != everything).sum() + (everything == filler).sum() >= gaps


def test_options_hold_and_catch_what_follows_them():
    transform = options(ignoring={"ignore_index": IGNORED}, number={"temperature": 1})
    assert broken(rowwise_toy, transform, draw_inputs(temperature="none")) == ([], 4)
    labels, _ = broken(rowwise_toy, options(squared={"square": True}), draw_inputs())
    assert labels == ["squared: output", "squared: gradient:x"]
    # An option that the base call gives is left out.
    transform = options(number_as_tensor={"temperature": 2}, without_it={"square": False})
    variants = list(transform(CASE, draw_inputs(), Draw(torch.float32)))
    assert [variant.label for variant in variants] == ["without it"]
