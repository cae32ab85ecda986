"""The page behind a socket of this machine, until somebody stops it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from sim.explore.app import App, standalone
from sim.explore.session import Limits, Session
from sim.explore.watching import Watched
from sim.explore.workers import Workers
from sim.scenario import Scenario
from sim.serve.stopping import StoppingServer

_GRACE_S = 1
_MOST_CONNECTIONS = 256
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_local(host: str) -> bool:
    """Whether nothing but this machine reaches *host*."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def token_for(host: str) -> str | None:
    """A token for a server at *host*; None where only this machine reaches it."""
    return None if is_local(host) else secrets.token_urlsafe(24)


def address(host: str, port: int, token: str | None) -> str:
    """The address to open."""
    where = f"[{host}]" if ":" in host else host
    return f"http://{where}:{port}/" + (f"?token={token}" if token else "")


def hosts_of(host: str, port: int) -> frozenset[str]:
    """The names, with ports, by which a browser may ask for a server at *host*."""
    names = {f"[{host}]" if ":" in host else host, *(_LOCAL_NAMES if is_local(host) else ())}
    if host in ("0.0.0.0", "::"):
        names = {*_LOCAL_NAMES, *_own_addresses()}
    return frozenset(f"{name.lower()}:{port}" for name in names) | frozenset(
        name.lower() for name in names if port == 80
    )


def _own_addresses() -> set[str]:
    name = socket.gethostname()
    found = {name, socket.getfqdn()}
    with contextlib.suppress(OSError):
        found |= {
            f"[{entry[4][0]}]" if entry[0] == socket.AF_INET6 else str(entry[4][0])
            for entry in socket.getaddrinfo(name, None)
        }
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; says which address would be used
        found.add(str(probe.getsockname()[0]))
    return found


def processes() -> int:
    """Processes for runs, beside that for quick answers."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, available)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The settings that a page is opened with."""

    base: Scenario
    store: Path
    """The folder of finished runs."""
    file: str | None = None
    """Where the scenario is from; None for the default."""
    settings: tuple[str, ...] = ()
    """Those that were changed over the file, as `--set` takes them."""
    measured: Sequence[tuple[str, bytes]] = ()
    """Names and contents of files of measured runs."""
    limits: Limits = field(default_factory=Limits)
    watched: Watched | None = None
    """A fleet that runs, which the page shows too."""

    def session(self, workers: Workers) -> Session:
        return Session(
            self.base, self.store, workers, file=self.file, settings=self.settings, given=self.measured, limits=self.limits,
            watched=self.watched,
        )  # fmt: skip


def frozen_page(opened: Opened) -> str:
    """The page over what is *opened* as one file, with all that it would answer at its beginning."""

    async def run() -> str:
        workers = Workers(processes())
        try:
            await workers.start()
            return standalone(await opened.session(workers).frozen({}))
        finally:
            await workers.close()

    return asyncio.run(run())


def serve(
    opened: Opened,
    listening: socket.socket,
    *,
    host: str,
    token: str | None,
    started: Callable[[Callable[[], None]], None],
) -> None:
    """Serve the page over what is *opened* until SIGINT, SIGTERM, or what *started* is told when clients may come is called,
    from any thread."""
    port = listening.getsockname()[1]
    hosts = hosts_of(host, port)

    async def run() -> None:
        workers = Workers(processes())
        session = opened.session(workers)
        app = App(session, hosts=hosts, token=token)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=_GRACE_S, limit_concurrency=_MOST_CONNECTIONS,
        )  # fmt: skip
        server = StoppingServer(config, app.stop)
        loop = asyncio.get_running_loop()
        starting = asyncio.create_task(workers.start())
        session.begin()
        try:
            started(lambda: loop.call_soon_threadsafe(server.stop) and None)
            await server.serve(sockets=[listening])
        finally:
            await asyncio.gather(starting, return_exceptions=True)
            await workers.close()

    asyncio.run(run())
