"""Write keys and values of new tokens to the pages of a cache, in one launch."""

from __future__ import annotations

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import launch, next_power_of_2
from rl_kernels.models.fused.conditions import fits


def store(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write row i of ``key, value[T, Hkv, D]`` to place ``slots[i]`` of ``cache[pages, 2, page, Hkv, D]``.

    Args:
        key: new keys; may have padded rows. Rows after the last slot are skipped.
        value: new values, of the same shape.
        cache: contiguous; keys before values in each page.
        slots: ``[N]``, N <= T: number of the page times its size, plus the place in it; negative slots are skipped.
    """
    size = cache.shape[2]
    if fits(key, value, cache) and cache.is_contiguous() and key.stride(-1) == value.stride(-1) == 1:
        from rl_kernels.models.fused import kernels

        width = key.shape[1] * key.shape[2]
        with device_of(key):
            launch(
                kernels.store_rows,
                (slots.shape[0],),
                *(key, value, cache, slots.contiguous()),
                numbers=(
                    *(key.stride(0), key.stride(1), value.stride(0), value.stride(1), size, key.shape[2], width),
                    next_power_of_2(width),
                ),
                num_warps=4,
            )
        return
    # Skipping rows with negative slots would change shapes: they go to page 0, which vLLM assigns to no request.
    place = slots.clamp(min=0)
    for number, rows in enumerate((key, value)):
        cache[place // size, number, place % size] = rows[: slots.shape[0]]
