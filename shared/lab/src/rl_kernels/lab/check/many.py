"""Call one function thousands of times, and from two threads at once."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_kernels.core.testing.spec import Inputs
from rl_kernels.lab.check.guard import Misbehaved, Results, check_global_state, equal, guarded, misbehaved, named
from rl_kernels.lab.check.surroundings import global_state

CALLS_ON_OTHERS = 5000
"""Calls on each of the other inputs at the end, as time allows; they must not change the first result."""


def call_often(
    call: Callable[[Inputs], Any], output: str, inputs: Sequence[Inputs], calls: int, seconds: float
) -> dict[str, Any]:
    """Call up to ``calls`` times on copies of the inputs in turn, for at most ``seconds``.

    Returns:
        ``first``, the first result of an input; ``other``, a later result of this input with other bits, or, if there
        was none, the first result as it is at the end; and ``number``, the number of calls.
    """
    copies = [copy.deepcopy(arguments) for arguments in inputs]

    def bits(place: int) -> tuple[Results, list[bytes]]:
        outputs = guarded("forward", lambda: named(call(dict(copies[place])), output))
        results = {name: value.detach().cpu().contiguous() for name, value in outputs.items()}
        return results, [value.view(-1).view(torch.uint8).numpy().tobytes() for value in results.values()]

    with torch.no_grad():
        before = global_state()
        expected = [bits(place) for place in range(len(copies))]
        # Clones, because a later call may overwrite what an earlier one returned.
        first = [{name: value.clone() for name, value in results.items()} for results, _ in expected]
        number, end = len(copies), time.monotonic() + seconds
        while number < calls and time.monotonic() < end:
            place = number % len(copies)
            other, other_bytes = bits(place)
            number += 1
            if other_bytes != expected[place][1]:
                return {"first": first[place], "other": other, "number": number}
        # When inputs alternate, a buffer that is reused after an even number of calls always holds the same result.
        for place in range(len(copies) - 1, 0, -1):
            end = time.monotonic() + seconds
            for _ in range(CALLS_ON_OTHERS):
                if time.monotonic() < end:
                    bits(place)
        check_global_state("forward", before)
    return {"first": first[0], "other": expected[0][0], "number": number}


def call_in_threads(call: Callable[[Inputs], Any], output: str, inputs: Sequence[Inputs], calls: int) -> list[Results]:
    """Call on each of the inputs in its own thread, all at once.

    Returns:
        for each input the expected result, then the first one with other numbers, or the expected one again.
    """
    copies = [copy.deepcopy(arguments) for arguments in inputs]

    def once(place: int) -> Results:
        outputs = guarded("forward", lambda: named(call(dict(copies[place])), output))
        return {name: value.detach().clone() for name, value in outputs.items()}

    expected = [once(place) for place in range(len(copies))]
    results: list[Results | Misbehaved] = list(expected)

    def repeat(place: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(calls):
                    outputs = once(place)
                    if any(not equal(outputs.get(name), value) for name, value in expected[place].items()):
                        results[place] = outputs
                        return
        except BaseException as error:  # KeyboardInterrupt too: it would end only the thread.
            results[place] = error if isinstance(error, Misbehaved) else misbehaved("forward", error)

    threads = [threading.Thread(target=repeat, args=(place,), daemon=True) for place in range(len(copies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Misbehaved):
            raise result
    return [result for pair in zip(expected, results, strict=True) for result in pair]  # type: ignore[misc]
