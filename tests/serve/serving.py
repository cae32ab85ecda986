"""An endpoint in a thread, for tests that are its clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim import Scenario
from sim.serve.app import Endpoint, Limits
from sim.serve.script import Script
from sim.serve.server import listen, serve
from sim.serve.session import Session
from sim.serve.setup import names_of, set_up
from workloads.texts import Approximate, Tokens


@dataclass
class Serving:
    """What clients and tests need of an endpoint."""

    url: str
    endpoint: Endpoint
    warnings: list[str] = field(default_factory=list)
    written_late_s: list[float] = field(default_factory=list)
    """Of every write of tokens, how late it was: what `pacer.handed` counts in buckets."""

    @property
    def session(self) -> Session:
        return self.endpoint.session

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

    def run() -> None:
        def started(stop: Callable[[], None]) -> None:
            stops.append(stop)
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
            yield Serving(url, endpoint, warnings, late_s)
    finally:
        for stop in stops:
            with contextlib.suppress(RuntimeError):
                stop()
        thread.join(60)
    if errors:
        raise errors[0]
