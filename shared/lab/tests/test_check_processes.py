"""The process of a candidate: how it ends, and what it may answer."""

import time

import pytest
import torch

from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.isolation import remote
from rl_kernels.lab.check.isolation.remote import Worker


@pytest.fixture
def worker(candidate):
    """Return ``worker(body, first, timeout)``: a started process, which is ended after the test."""
    made = []

    def start(body="return 2 * x", first="", timeout=30.0):
        made.append(Worker(candidate(body, first), timeout))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.stop()


def run_of(worker, x=None):
    return remote.RemoteRun(worker, "output", {"x": torch.ones(3) if x is None else x}, [])


def test_a_process_that_reads_no_more_is_no_hang(worker):
    stops = "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()\n    return 2 * x"
    made = worker(stops)
    made._timeout = 2.0
    run_of(made)
    time.sleep(1.0)
    with pytest.raises(Misbehaved, match="no answer within 2 s"):
        run_of(made, torch.ones(1 << 20))


@pytest.mark.usefixtures("real_processes")
def test_a_process_ends_with_whoever_started_it(worker):
    made = worker()
    process = made._process
    made.stop()
    assert process.poll() is not None
    again = Worker(made._target)
    again.start()
    process = again._process
    del again
    assert process.poll() is not None


def test_an_error_in_one_thread_alone_is_seen(worker):
    made = worker("if threading.current_thread() is not threading.main_thread(): raise KeyboardInterrupt\n    return x")
    inputs = [{"x": torch.ones(3)}, {"x": torch.zeros(3)}]
    with pytest.raises(Misbehaved, match="forward raised KeyboardInterrupt"):
        made.ask("threads", inputs=inputs, output="output", calls=2)


def test_messages_that_a_candidate_forges_are_no_answers(worker):
    made = worker("[_forge(fd) for fd in range(3, 12)]\n    return 2 * x", first=FORGE)
    with pytest.raises(Misbehaved, match="unreadable answer"):
        run_of(made)


FORGE = """
import fcntl

def _forge(fd):
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_WRONLY:
            os.write(fd, (4).to_bytes(8, "little") + b"junk")
    except OSError:
        pass
"""
