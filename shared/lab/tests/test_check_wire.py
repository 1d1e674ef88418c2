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
    assert described(sent(TENSORS[name])) == described(TENSORS[name])


def described(value):
    data = value.contiguous().view(-1).view(torch.uint8).tolist()
    return value.dtype, value.shape, value.stride(), value.storage_offset(), data


def test_gaps_shared_storage_and_buffers_arrive_as_copies():
    found = sent(WHOLE[:, ::2])
    assert torch.equal(found.as_strided((4, 6), (6, 1), 0), WHOLE)
    found = sent({"x": WHOLE, "row": WHOLE[2]})
    found["x"][2] = -1
    assert (found["row"] == -1).all()
    assert (WHOLE >= 0).all()
    weight = torch.ones(2, 3)
    weight.main_grad = torch.zeros(3, 2).t()
    found = sent(weight)
    assert torch.equal(found.main_grad, torch.zeros(2, 3))
    assert found.main_grad.stride() == (1, 2)


def test_plain_values_arrive():
    message = ("run", {"scale": 2.5, "none": None, "ids": [1, 2], "dtype": torch.bfloat16, "on": True}, [7])
    assert sent(message) == message


class Runs:
    def __reduce__(self):
        return pytest.fail, ("code of the other end ran",)


def test_nothing_else_is_read_and_no_code_of_the_other_end_runs():
    for value in (Fraction(1, 2), io.BytesIO, print, torch.Size([1])):
        with pytest.raises(pickle.UnpicklingError, match="plain values and tensors, not"):
            wire.parse(bytes(wire.packed(value))[wire.LENGTH.size :])
    with pytest.raises(pickle.UnpicklingError):
        wire.parse(pickle.dumps(Runs()))


def test_a_closed_connection_is_the_end_and_an_answer_says_what_became_of_a_request():
    with pytest.raises(EOFError):
        wire.read(io.BytesIO(b"\x01"))
    for found in (None, "value", 3, {}, {"other": 1}):
        with pytest.raises(ValueError, match="expected a value or an error"):
            wire.answer(found)
