"""What batch_invariant_ops cannot compute: an error that names the argument, and no other result."""

import pytest
import torch

import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops

F32, F64, HALF = torch.ones(3, 3), torch.ones(3, 3).double(), torch.ones(3, 3).half()
BAD = {
    "mat2: expected dtype": lambda: F32 @ F64,
    "mat2: expected 3 rows": lambda: F32 @ F32[:2],
    "input: expected dtype .* got torch.complex64": lambda: F32.cfloat() @ F32.cfloat(),
    "input: expected 2 dims": lambda: torch.mm(F32[0], F32),
    "mat2: expected 2 matrices": lambda: torch.bmm(F32.expand(2, 3, 3), F32.expand(1, 3, 3)),
    "mat2: expected 1 matrices": lambda: torch.bmm(F32[None], F32.expand(2, 3, 3)),
    "input: expected a shape that broadcasts": lambda: torch.addmm(F32[:2], F32, F32),
    r"input: expected a shape .* got \(1, 3, 3\)": lambda: torch.addmm(F32[None], F32, F32),
    "input: expected dtype torch.float32": lambda: torch.addmm(F64, F32, F32),
    "mat1: expected dtype": lambda: torch.addmm(F32, F32.long(), F32.long()),
    "input: expected shape": lambda: torch.ones(3).addmm_(F32, F32),
    "out: expected shape": lambda: torch.mm(F32, F32, out=torch.ones(2)),
    "out: expected dtype": lambda: torch.mm(F32, F32, out=torch.ones(3, 3).double()),
    "out_dtype: ": lambda: torch.mm(F64, F64, out_dtype=torch.float32),
    "alpha: expected a real number": lambda: torch.addmm(F32, F32, F32, alpha=1j),
    "b: expected a tensor": lambda: batch_invariant_ops.bmm_batch_invariant(HALF[None], None),
    "dtype: expected a torch.dtype": lambda: batch_invariant_ops.mean_dim(F32, 0, dtype="half"),
    "dim: expected a dim from -2 to 1": lambda: F32.mean(2),
    "dim: expected each dim once": lambda: F32.mean((0, -2)),
    "input: expected a floating dtype": lambda: torch.arange(3).mean(0),
    "dtype: expected a floating": lambda: F32.mean(0, dtype=torch.int64),
    "input: expected dtype .* got torch.int64": lambda: torch.arange(3).log_softmax(0),
    "input: .* with half_to_float": lambda: torch._log_softmax(F32, 0, True),
    "input: forward-mode AD": lambda: torch.func.jvp(lambda x: x @ x, (F32,), (F32,)),
    "input: forward-mode AD is not": lambda: torch.func.jvp(lambda x: torch.bmm(x, x), (F32[None],), (F32[None],)),
    "bias: expected 1 dims": lambda: batch_invariant_ops.matmul_persistent(F32, F32, F32),
    "a: expected dtype": lambda: batch_invariant_ops.matmul_persistent(F64, F64),
    "b: expected shape": lambda: batch_invariant_ops.matmul_persistent(F32, F32[:2]),
    "out: expected dtype float16": lambda: batch_invariant_ops.bmm_batch_invariant(HALF[None], HALF[None], out=F32),
    r"out: expected shape \(1, 3, 3\)": lambda: batch_invariant_ops.bmm_batch_invariant(
        F32[None], F32[None], out=torch.ones(2, 3, 3)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_computed_raises_and_names_the_argument(message):
    by_name = "batch_invariant_ops" in BAD[message].__code__.co_names
    # PyTorch's own ops raise what they raise without the mode.
    kinds = (TypeError, ValueError) if by_name else (RuntimeError, IndexError)
    with batch_invariant_ops.set_batch_invariant_mode(), pytest.raises(kinds, match=f"^{message}"):
        BAD[message]()
