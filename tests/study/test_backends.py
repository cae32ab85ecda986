"""Where runs of a study are run, when a signal comes while work is handed over."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from sim.study.backends import Processes, signals_held


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

    def submit(self, *_work):
        os.kill(os.getpid(), signal.SIGTERM)
        self.has_started = True

    def shutdown(self, *, wait, kill_workers):
        assert self.has_started


def test_processes_can_be_ended_after_a_signal_that_came_while_they_were_started(monkeypatch, tmp_path, answered):
    monkeypatch.setattr("sim.study.backends.fresh_processes", lambda jobs: Interrupted())
    processes = Processes(2, tmp_path)
    with suppress(Ended):
        processes.submit(())
    assert answered == [signal.SIGTERM]
    processes.close(now=True)
