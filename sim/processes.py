"""Work in processes of this machine, which end with the command that started them when a signal ends it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_S = 20
"""A process that had nothing to do for so long ends; work that comes later starts another."""


class ProcessPool:
    """*jobs* processes of this machine (joblib's loky), each with one thread for numerics, started with the first work.

    They are no forked copies, which may hang where there are threads, and can be ended in the middle of their work. A pool is made
    anew for each study: a process that is kept has an older version of a policy that was edited since.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is at least 1; got {jobs!r}")
        self.jobs = jobs
        self._executor: Any = None

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have *work* done with *arguments* by one of the processes."""
        from joblib.externals.loky import ProcessPoolExecutor

        with signals_held():
            if self._executor is None:
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                self._executor = ProcessPoolExecutor(max_workers=self.jobs, timeout=_IDLE_S, env=threads)
            with _interrupts_blocked():
                return self._executor.submit(work, *arguments)

    def close(self, *, now: bool) -> None:
        """End the processes, *now* or when they have done what was submitted."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=now)
            self._executor = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(now=True)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end a command are answered when the block is done, which holds what hands work to an executor of processes: one
    that was interrupted while it started them cannot be shut down.

    Python answers signals in its main thread alone; in any other nothing has to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    ends = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not None]
    before = {each: signal.signal(each, lambda number, _frame: came.append(number)) for each in ends}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """SIGINT is blocked, and so it is in processes that are started in the block: a terminal sends Ctrl-C to all processes of a
    command, which ends its own by itself, and each of them would print a traceback."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # started on the way it would unblock what is blocked here (CPython 3.11 to 3.13)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
