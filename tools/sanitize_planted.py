"""Kernels with a fault each, which the sanitizer must report: a test of `tools/sanitize.py` itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Each thread writes its own word of shared memory, and reads the word of a thread in the next warp without a barrier.
RACE = """
{
    .shared .align 4 .b32 words[128];
    .reg .b32 base, here, there;
    mov.u32 base, words;
    mad.lo.u32 here, $1, 4, base;
    st.shared.b32 [here], $1;
    add.u32 there, $1, 32;
    and.b32 there, there, 127;
    mad.lo.u32 there, there, 4, base;
    ld.shared.b32 $0, [there];
}
"""


@triton.jit
def beyond_the_end(out):
    """Write 128 elements, even if the tensor is shorter."""
    places = tl.arange(0, 128)
    tl.store(out + places, places)


@triton.jit
def race(out, CODE: tl.constexpr):
    """Read what the threads of another warp may not have written yet."""
    places = tl.arange(0, 128)
    words = tl.inline_asm_elementwise(CODE, "=r,r", [places], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + places, words)


@triton.jit
def copy(source, out):
    """Copy 128 elements, even if they were never written."""
    places = tl.arange(0, 128)
    tl.store(out + places, tl.load(source + places))


def run(tool: str) -> None:
    """Run the kernel that a tool must catch."""
    out = torch.zeros(100 if tool == "memcheck" else 128, dtype=torch.int32, device="cuda")
    if tool == "memcheck":
        beyond_the_end[(1,)](out, num_warps=4)
    elif tool == "initcheck":
        copy[(1,)](torch.empty_like(out), out, num_warps=4)
    else:
        race[(1,)](out, RACE, num_warps=4)
    torch.cuda.synchronize()
