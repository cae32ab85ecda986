"""An endpoint in a thread, for tests that are its clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from sim import Scenario
from sim.serve.app import Endpoint, Limits
from sim.serve.script import Script
from sim.serve.server import listen, serve
from sim.serve.session import Session
from sim.serve.setup import names_of, set_up
from workloads.texts import Approximate, Tokens

Answer = TypeVar("Answer")
HELD = 1e-7
"""A speed at which nothing happens while requests come."""


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Returns when *what* is so; for one that never is, the test fails."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def patiently(ask: Callable[[], Answer]) -> Answer:
    """The answer to *ask*, again where the endpoint closed the connection because the request, from a busy machine, came late."""
    for _ in range(50):
        with contextlib.suppress(httpx.TransportError, ConnectionError):
            return ask()
    return ask()


@dataclass
class Serving:
    """The parts of an endpoint that clients and tests need."""

    url: str
    endpoint: Endpoint
    loop: asyncio.AbstractEventLoop
    warnings: list[str] = field(default_factory=list)
    written_late_s: list[float] = field(default_factory=list)
    """The lateness of every write of tokens: what `pacer.handed` counts in buckets."""

    @property
    def session(self) -> Session:
        return self.endpoint.session

    def run_on(self, speed: float) -> None:
        """Simulated time, which hardly passes at `HELD` so that everybody comes at its beginning whatever the machine, begins
        anew at *speed*."""

        def change() -> None:
            self.session.pacer.speed = speed
            self.session.pacer.start()
            self.session.pacer.ring()

        self.loop.call_soon_threadsafe(change)

    def results(self, folder: Path) -> Any:
        """The results of all that came, written into *folder*; once it is stopped."""
        folder.mkdir(parents=True, exist_ok=True)
        return self.session.write(folder, facts={})


@contextlib.contextmanager
def serving(
    *settings: str, speed: float = 1.0, bound_s: float = 0.02, limits: Limits | None = None, outputs: Any = "asked",
    names: tuple[str, ...] = (), script: Script | None = None, scenario: Scenario | None = None,
    tokens: Tokens | None = None,
) -> Iterator[Serving]:  # fmt: skip
    """The built-in scenario with *settings* at a port of its own, until the block ends."""
    warnings: list[str] = []
    setup = set_up((scenario or Scenario.default()).with_set(*settings))
    session = Session(setup, speed=speed, bound_s=bound_s, warn=warnings.append)
    endpoint = Endpoint(
        session,
        tokens or Approximate(),
        names=names_of(setup, names),
        limits=limits or Limits(),
        outputs=outputs,
        script=script,
    )
    late_s: list[float] = []
    add = session.pacer.handed.add

    def added(lag_s: float, bound_s: float) -> None:
        late_s.append(lag_s)
        add(lag_s, bound_s)

    session.pacer.handed.add = added  # type: ignore[method-assign]
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    up, stops, errors = threading.Event(), list[Callable[[], None]](), list[BaseException]()
    loops: list[asyncio.AbstractEventLoop] = []

    def run() -> None:
        def started(stop: Callable[[], None]) -> None:
            stops.append(stop)
            loops.append(asyncio.get_running_loop())
            up.set()

        try:
            serve(endpoint, listening, started=started)
        except BaseException as error:
            errors.append(error)
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert up.wait(60)
        if not errors:
            yield Serving(url, endpoint, loops[0], warnings, late_s)
    finally:
        for stop in stops:
            with contextlib.suppress(RuntimeError):
                stop()
        thread.join(60)
    if errors:
        raise errors[0]
