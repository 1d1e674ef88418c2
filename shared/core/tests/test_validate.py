import math
import re

import numpy as np
import pytest
import torch

from rl_kernels.core import validate as check

X = torch.zeros(2, 3)
IDS = torch.tensor([[0, 6], [-100, 3]])


def refuses(error, message, function, *args, **kwargs):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(*args, **kwargs)


INSTEAD = {
    "weight": "pass its .weight",
    "bias": "pass its .bias",
    "hidden": "pass a tensor, such as its .weight or what it returns",
}
INSTEAD["lm_head_weight"] = f"{INSTEAD['weight']}, or the module to head_logp of rl_kernels.models, which knows "
INSTEAD["lm_head_weight"] += "biases and adapters"


def test_tensor_refuses_what_is_no_tensor_and_says_what_to_pass_instead_of_a_module():
    for value in ([1.0], None, np.zeros(3)):
        refuses(TypeError, f"x: expected a tensor, got {type(value).__name__}", check.tensor, "x", value, check.FLOATS)
    for name, instead in INSTEAD.items():
        message = f"{name}: expected a tensor, got Linear: {instead}"
        refuses(TypeError, message, check.tensor, name, torch.nn.Linear(2, 2), check.FLOATS)


@pytest.mark.smoke
def test_tensor_refuses_other_dtypes_layouts_and_dims():
    check.tensor("x", X, check.FLOATS)
    check.tensor("x", X, (torch.float64, torch.float32), ndim=2, least=2)
    check.tensor("x", X.t(), check.HALF_AND_FLOAT, least=1)
    check.tensor("x", torch.zeros(()), check.FLOATS, ndim=0)
    got = "got torch.int64"
    refuses(
        TypeError, f"x: expected dtype float32 or float16, {got}", check.tensor, "x", IDS, (torch.float32, torch.half)
    )
    refuses(
        TypeError,
        "x: expected a strided tensor, got layout torch.sparse_coo",
        *(check.tensor, "x", X.to_sparse(), check.FLOATS),
    )
    refuses(ValueError, "x: expected 1 dims, got shape (2, 3)", check.tensor, "x", X, check.FLOATS, ndim=1)
    refuses(ValueError, "x: expected at least 3 dims, got shape (2, 3)", check.tensor, "x", X, check.FLOATS, least=3)


def test_shape_device_and_dtype():
    check.shape("x", X, (2, 3), "why")
    check.shape("x", X, X.shape, "why")
    for expected in ((3, 2), (2,), (2, 3, 1), ()):
        message = f"x: expected shape {expected} (that of y), got (2, 3)"
        refuses(ValueError, message, check.shape, "x", X, expected, "that of y")
    check.same_device(x=X)
    check.same_device(x=X, y=None, z=X)
    message = "z: expected device cpu (that of x), got meta"
    refuses(ValueError, message, check.same_device, x=X, y=None, z=X.to("meta"))
    check.same_dtype(x=X, y=None, z=X)
    message = "z: expected dtype torch.float32 (that of x), got torch.bfloat16"
    refuses(TypeError, message, check.same_dtype, x=X, y=None, z=X.bfloat16())


@pytest.mark.smoke
def test_number_refuses_other_types_and_values():
    for value in (1, 0.5, np.float32(2), np.int64(3), 3.4e38, 2**70):
        check.number("x", value, above=0, least=0.5)
    for value in (True, "1", None, 1j, torch.tensor(1.0)):
        refuses(TypeError, f"x: expected a number, got {type(value).__name__}", check.number, "x", value)
    for value in (math.nan, math.inf, -math.inf):
        refuses(ValueError, f"x: expected a finite number, got {value}", check.number, "x", value, above=0)
    for value in (0, 0.0, -1):
        refuses(ValueError, f"x: expected a number > 0, got {value}", check.number, "x", value, above=0)
    refuses(ValueError, "x: expected a number >= 0.2, got 0.1", check.number, "x", 0.1, least=0.2)
    check.number("x", 0.2, least=0.2)
    check.number("x", -5)


def test_number_refuses_what_its_dtype_cannot_hold():
    wide = "x: expected a number within +-3.4e+38 (float32), got "
    shown = {1e39: "1e+39", -1e39: "-1e+39", 10**400: "2^1328 or more", -(10**5000): "-2^16609 or more"}
    for value, text in shown.items():
        refuses(ValueError, wide + text, check.number, "x", value)
    small = "x: expected a number > 0, at least 1.18e-38 (float32), got 1e-50"
    refuses(ValueError, small, check.number, "x", 1e-50, above=0)
    check.number("x", 1e-50, least=0)
    for value in (1e300, 1e-50):
        check.number("x", value, above=0, dtype=torch.float64)
    wide = "x: expected a number within +-1.8e+308 (float64), got 2^1328 or more"
    refuses(ValueError, wide, check.number, "x", 10**400, dtype=torch.float64)


def test_integer():
    check.integer("x", -3)
    check.integer("x", 2, least=2)
    check.integer("x", np.int64(2), least=2)
    refuses(ValueError, "x: expected an integer >= 2, got 1", check.integer, "x", 1, least=2)
    check.integer("x", 2**63 - 1)
    message = f"x: expected an integer <= {2**63 - 1}, got "
    refuses(ValueError, message + str(2**63), check.integer, "x", 2**63)
    refuses(ValueError, message + "2^16609 or more", check.integer, "x", 10**5000)
    refuses(ValueError, f"x: expected an integer >= {1 - 2**63}, got {-(2**70)}", check.integer, "x", -(2**70))
    refuses(ValueError, "x: expected an integer <= 9, got 10", check.integer, "x", 10, most=9)
    for value in (1.0, True, "1", None, torch.tensor(1)):
        refuses(TypeError, f"x: expected an integer, got {type(value).__name__}", check.integer, "x", value)


def test_choice_and_backend_name():
    check.choice("x", "a", ("a", None))
    check.choice("x", None, ("a", None))
    refuses(ValueError, "x: expected one of 'a', None, got 'b'", check.choice, "x", "b", ("a", None))
    check.backend_name(None)
    check.backend_name("triton")
    refuses(TypeError, "backend: expected a name or None, got int", check.backend_name, 3)


def temperature(value, *, leading=(2, 3), dtype=torch.float32, values=True):
    check.temperature(value, leading, torch.device("cpu"), dtype, values=values)


def test_temperature_refuses():
    for value in (0.7, 2, torch.ones(2, 3), torch.tensor(0.5), torch.ones(2, 3).double()):
        temperature(value)
    temperature(torch.ones(0), leading=(0,))
    refuses(ValueError, "temperature: expected a number > 0, got 0", temperature, 0)
    small = "temperature: expected a number > 0, at least 1.18e-38 (float32), got 1e-50"
    refuses(ValueError, small, temperature, 1e-50)
    refuses(TypeError, "temperature: expected a number, got str", temperature, "1")
    refuses(
        TypeError,
        "temperature: expected dtype float32 or bfloat16 or float16 or float64, got torch.int64",
        *(temperature, torch.ones(2, 3).long()),
    )
    message = "temperature: expected shape (2, 3) (one value per token), got (3,)"
    refuses(ValueError, message, temperature, torch.ones(3))
    refuses(ValueError, "temperature: expected device cpu, got meta", temperature, torch.ones(2, 3, device="meta"))
    message = "temperature: expected a tensor that does not require grad: it gets no gradient"
    refuses(ValueError, message, temperature, torch.ones(2, 3, requires_grad=True))


def test_temperature_reads_the_values_of_a_tensor_in_the_dtype_of_the_computation_unless_told_not_to():
    for smallest in (0.0, -1.5, math.nan):
        value = torch.ones(2, 3).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(smallest))
        message = f"temperature: expected values > 0, the smallest is {smallest}"
        refuses(ValueError, message, temperature, value)
        temperature(value, values=False)
    value = torch.full((2, 3), 1e-50, dtype=torch.float64)
    refuses(ValueError, "temperature: expected values > 0, the smallest is 0.0", temperature, value)
    temperature(value, dtype=torch.float64)
    for infinite in (torch.full((2, 3), torch.inf), torch.full((2, 3), 1e39, dtype=torch.float64)):
        refuses(ValueError, "temperature: expected finite values, the largest is inf", temperature, infinite)


def test_ids_in_range():
    check.ids_in_range("ids", torch.tensor([0, 6]), 7)
    check.ids_in_range("ids", torch.tensor([0, 6], dtype=torch.int32), 7)
    check.ids_in_range("ids", IDS, 7, ignore_index=-100)
    check.ids_in_range("ids", torch.full((3,), -100), 7, ignore_index=-100)
    check.ids_in_range("ids", torch.zeros(0, dtype=torch.long), 7)
    check.ids_in_range("ids", torch.zeros(0, dtype=torch.long), 0)
    # Values of tensors without storage are not looked at.
    check.ids_in_range("ids", IDS.to("meta"), 1)
    check.temperature(torch.zeros(2, 3, device="meta"), (2, 3), torch.device("meta"), torch.float32, values=True)


def test_ids_out_of_range_are_told_with_their_range():
    message = "ids: expected values in [0, 7), got values in [-100, 6]"
    advice = "; ignore_index=-100 ignores the positions with that id"
    refuses(ValueError, message + advice, check.ids_in_range, "ids", IDS, 7)
    refuses(ValueError, message, check.ids_in_range, "ids", IDS, 7, ignorable=False)
    message = "ids: expected values in [0, 6) or -100 (ignored), got values in [0, 6]"
    refuses(ValueError, message, check.ids_in_range, "ids", IDS, 6, ignore_index=-100)
    message = "ids: expected values in [0, 7) or 5 (ignored), got values in [-100, 6]"
    refuses(ValueError, message, check.ids_in_range, "ids", IDS, 7, ignore_index=5)


def test_token_ids():
    check.target_ids("ids", IDS, (2, 2), "that of x")
    check.target_ids("ids", IDS.int(), (2, 2), "that of x")
    refuses(
        TypeError,
        "ids: expected dtype int64 or int32, got torch.float32",
        *(check.target_ids, "ids", IDS.float(), (2, 2), "that of x"),
    )
    message = "ids: expected shape (2,) (that of x), got (2, 2)"
    refuses(ValueError, message, check.target_ids, "ids", IDS, (2,), "that of x")


def test_ignore_index_is_held_by_the_dtype_of_the_ids():
    for value in (None, -100, 2**31 - 1, -(2**31)):
        check.ignore_index(value, IDS.int())
    check.ignore_index(2**40, IDS)
    message = f"ignore_index: expected an integer <= {2**31 - 1}, got {2**40}"
    refuses(ValueError, message, check.ignore_index, 2**40, IDS.int())
    message = f"ignore_index: expected an integer >= {-(2**63)}, got {-(2**70)}"
    refuses(ValueError, message, check.ignore_index, -(2**70), IDS)
    refuses(TypeError, "ignore_index: expected an integer, got float", check.ignore_index, 1.5, IDS)


def test_main_grad():
    weight = X.bfloat16()
    check.main_grad("buffer", X, weight)
    check.main_grad("buffer", torch.zeros(3, 2).t(), weight)
    message = "buffer: expected dtype float32, got torch.bfloat16"
    refuses(TypeError, message, check.main_grad, "buffer", weight, weight)
    message = "buffer: expected shape (2, 3) (that of its weight), got (3, 2)"
    refuses(ValueError, message, check.main_grad, "buffer", X.t(), weight)
    message = "buffer: expected device cpu (that of its weight), got meta"
    refuses(ValueError, message, check.main_grad, "buffer", X.to("meta"), weight)
    message = "buffer: expected elements with storage of their own, got strides (0, 1) for shape (2, 3)"
    refuses(ValueError, message, check.main_grad, "buffer", torch.zeros(3).expand(2, 3), weight)


def test_own_storage_refuses_dims_that_overlap():
    for fine in (torch.as_strided(torch.zeros(1), (1, 1), (0, 0)), X[:, ::2], torch.zeros(3, 4, 5).permute(2, 0, 1)):
        check.own_storage("x", fine)
    for shape, strides in (((8, 8), (1, 1)), ((4, 4), (3, 1)), ((2, 3, 4), (1, 4, 1))):
        with pytest.raises(ValueError, match="x: expected elements with storage of their own"):
            check.own_storage("x", torch.zeros(64).as_strided(shape, strides))


def test_writable_refuses_a_tensor_of_inference_mode_outside_of_it():
    with torch.inference_mode():
        made = torch.zeros(3)
        check.writable("x", made)
    message = "x: expected a tensor made outside of torch.inference_mode(), such as its clone()"
    refuses(ValueError, message, check.writable, "x", made)
    check.writable("x", made.clone())


class DTensor(torch.Tensor):
    pass


DTensor.__module__ = "torch.distributed.tensor"
PASS = "pass its full_tensor(), which gathers it from all ranks, or its to_local() if you mean only this rank's part"


def test_a_dtensor_is_refused_with_the_function_that_checks_and_what_to_pass_instead():
    message = f"x: expected a local tensor, got a DTensor: {PASS}"
    refuses(TypeError, message, check.tensor, "x", X.as_subclass(DTensor), check.FLOATS)
    space = {"__name__": "rl_kernels.some_op.api", "check": check, "FLOATS": check.FLOATS}
    exec("def some_op(x): _kinds(x)\ndef _kinds(x): check.tensor('x', x, FLOATS)", space)
    message = f"x: expected a local tensor for some_op, got a DTensor: {PASS}"
    refuses(TypeError, message, space["some_op"], X.as_subclass(DTensor))
