"""A session with real workers, on an event loop of its own, for tests that ask it questions one after another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sim.explore.session import Session
from sim.explore.workers import Workers, prepare
from sim.scenario import Scenario

SMALL = Scenario.default().with_set("workload.limit=120")


class Loop:
    """An event loop in a thread, with two workers and one for quick answers."""

    def __init__(self) -> None:
        prepare()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.workers: Workers = self.run(self._start())

    async def _start(self) -> Workers:
        workers = Workers(2)
        await workers.start()
        return workers

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def close(self) -> None:
        self.run(self.workers.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def session(self, folder: Path, base: Scenario = SMALL, **how: Any) -> Session:
        return Session(base, folder / "points", self.workers, **how)

    def ask(self, events: Any) -> list[tuple[str, Any]]:
        """All that a stream of a session says."""

        async def gather() -> list[tuple[str, Any]]:
            return [(event.name, event.data) async for event in events]

        return self.run(gather())
