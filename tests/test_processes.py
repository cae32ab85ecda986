"""Processes of this machine, and signals that come while work is handed to them."""

import os
import signal
import threading
from contextlib import suppress
from typing import ClassVar

import pytest

from sim.processes import ProcessPool, signals_held


class Ended(Exception):
    """A signal was answered."""


@pytest.fixture
def answered():
    """Signals that were answered, each by an exception, as the command line answers them."""
    numbers = []

    def end(number, _frame):
        numbers.append(number)
        raise Ended

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_when_the_work_has_been_handed_over(answered, number):
    def hand_over():
        with signals_held():
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert not answered

    with pytest.raises(Ended):
        hand_over()
    assert answered == [number]
    with pytest.raises(Ended):  # and from then on at once
        signal.raise_signal(number)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_held():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_holds_nothing(answered):
    def hold():
        with signals_held():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


class Interrupted:
    """An executor to which a signal comes while it starts its processes."""

    made: ClassVar[list] = []

    def __init__(self, **settings):
        self.settings = settings
        self.has_started, self.killed = False, None
        self.made.append(self)

    def submit(self, *_work):
        os.kill(os.getpid(), signal.SIGTERM)
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.has_started = True

    def shutdown(self, *, wait, kill_workers):
        assert self.has_started
        self.killed = kill_workers


def test_processes_can_be_ended_after_a_signal_that_came_while_they_were_started(monkeypatch, answered):
    monkeypatch.setattr("joblib.externals.loky.ProcessPoolExecutor", Interrupted)
    with suppress(Ended), ProcessPool(2) as pool:
        pool.submit(len, ())
    (executor,) = Interrupted.made
    assert answered == [signal.SIGTERM]
    assert executor.killed
    # They are started with Ctrl-C blocked, and for the command it is no longer.
    assert executor.blocked - signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGINT}
    assert executor.settings["max_workers"] == 2
    assert {executor.settings["env"][name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}


@pytest.mark.slow(reason="a process is started")
def test_ctrl_c_is_for_the_command_and_not_for_its_processes():
    with ProcessPool(1) as pool:
        pool.submit(signal.raise_signal, signal.SIGINT).result()
        assert pool.submit(len, "ab").result() == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_there_is_at_least_one_process():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ProcessPool(0)
