"""Messages between the checker and a candidate's process: what arrives is what was sent, and nothing else is read."""

import io
import pickle
from fractions import Fraction

import pytest
import torch

from rl_kernels.lab.check.isolation import wire


def sent(message):
    """Return a message as the other end reads it."""
    stream = io.BytesIO()
    wire.write(stream, message)
    stream.seek(0)
    return wire.read(stream)


WHOLE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "whole": WHOLE,
    "a slice": WHOLE[1:3, 2:5],
    "every other element": WHOLE[:, ::2],
    "transposed": WHOLE.t(),
    "expanded": torch.tensor(3.0).expand(4, 5),
    "no dims": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bf16": torch.tensor([1.5, torch.nan, -torch.inf, -0.0]).bfloat16(),
    "fp16": torch.tensor([1.5, 65504.0]).half(),
    "fp64": torch.tensor([1e-300], dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([2**62, -1]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_layout_and_bits(name):
    value = TENSORS[name]
    found = sent(value)
    assert (found.dtype, found.shape, found.stride(), found.storage_offset()) == (
        value.dtype,
        value.shape,
        value.stride(),
        value.storage_offset(),
    )
    assert bytes_of(found) == bytes_of(value)


def bytes_of(value):
    return value.contiguous().view(-1).view(torch.uint8).tolist()


def test_gaps_between_elements_arrive_too():
    found = sent(WHOLE[:, ::2])
    assert torch.equal(found.as_strided((4, 6), (6, 1), 0), WHOLE)


def test_tensors_of_one_storage_share_it_again():
    found = sent({"x": WHOLE, "row": WHOLE[2]})
    found["x"][2] = -1
    assert (found["row"] == -1).all()


def test_what_is_sent_is_copied():
    value = torch.zeros(3)
    sent(value).fill_(1)
    assert (value == 0).all()


def test_a_buffer_that_a_parameter_carries_comes_along():
    weight = torch.ones(2, 3)
    weight.main_grad = torch.zeros(3, 2).t()
    found = sent(weight)
    assert torch.equal(found.main_grad, torch.zeros(2, 3))
    assert found.main_grad.stride() == (1, 2)


def test_plain_values_arrive():
    message = ("run", {"scale": 2.5, "none": None, "ids": [1, 2], "dtype": torch.bfloat16, "on": True}, [7])
    assert sent(message) == message


@pytest.mark.parametrize("value", [Fraction(1, 2), io.BytesIO, print, torch.Size([1])])
def test_nothing_else_is_read(value):
    with pytest.raises(pickle.UnpicklingError, match="plain values and tensors, not"):
        wire.parse(bytes(wire.packed(value))[wire.LENGTH.size :])


class Runs:
    def __reduce__(self):
        return pytest.fail, ("code of the other end ran",)


def test_no_code_of_the_other_end_runs():
    with pytest.raises(pickle.UnpicklingError):
        wire.parse(pickle.dumps(Runs()))


def test_a_closed_connection_is_the_end():
    with pytest.raises(EOFError):
        wire.read(io.BytesIO(b"\x01"))


@pytest.mark.parametrize("found", [None, "value", 3, {}, {"other": 1}])
def test_an_answer_says_what_became_of_a_request(found):
    with pytest.raises(ValueError, match="expected a value or an error"):
        wire.answer(found)
