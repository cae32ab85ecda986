"""A server of uvicorn that stops at the first signal and tells those who serve behind it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import uvicorn


class StoppingServer(uvicorn.Server):
    """Stops at the first signal, and tells *stopping*; what comes after the end is the caller's."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    def stop(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._stopping()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        in_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        for each in signals:
            loop.add_signal_handler(each, self.stop)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)
