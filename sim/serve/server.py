"""A session behind a socket, until somebody stops it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sim.engine import PolicyError
from sim.errors import RooftraceError, ScenarioError
from sim.serve.app import RECEIVED_NS, Endpoint, Limits
from sim.serve.pacer import loop_factory
from sim.serve.stopping import StoppingServer

_BACKLOG = 2048
_GRACE_S = 5
_OWN_FILES = 64
"""Files that the process may have open beside its connections: what it listens at, and results when it ends."""
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARN_EVERY_S = 60.0


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections at *host* and *port*; RooftraceError where that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is said for asyncio, which sends small pieces at once (TCP_NODELAY) where it reads it here: without, a first
    # token waits up to 40 ms for the client to acknowledge the headers.
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise RooftraceError(f"cannot listen at {host}:{port}: {reason}; give another --port or --host") from None
    taken.listen(_BACKLOG)
    return taken


try:
    import resource
except ImportError:  # Windows has none.
    resource = None

_HttpTools: Any = HttpToolsProtocol


class _Bounded(_HttpTools):
    """HTTP with its connections and the heads of its requests bounded; each connection says when its latest bytes came.

    What the endpoint does with bytes once they are there is none of the client's time.
    """

    endpoint: Endpoint
    most_connections: int
    head_bytes = 0
    """Bytes that came since the latest request began to be answered, or since the connection was made."""
    late: asyncio.TimerHandle | None = None
    """Ends the connection, unless the head that has begun is whole by then."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.write(self.endpoint.full())
            transport.close()
        else:
            self._begun()

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        cycle: Any = self.cycle
        super().data_received(data)
        scope: Any = self.scope
        if scope is not None:
            scope[RECEIVED_NS] = now_ns
        if self.cycle is not cycle:
            self.head_bytes = 0
        elif cycle is None or cycle.response_complete:
            self.head_bytes += len(data)
            if self.head_bytes > self.endpoint.limits.head_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun()

    def on_headers_complete(self) -> None:
        self._in_time()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _begun(self) -> None:
        if self.late is None and not self.transport.is_closing():
            self.late = asyncio.get_running_loop().call_later(self.endpoint.limits.head_s, self.transport.abort)

    def _in_time(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


def _protocol(of: Endpoint) -> type[asyncio.Protocol]:
    """The connections of one endpoint."""

    class Bounded(_Bounded):
        endpoint = of
        most_connections = _most_connections(of.limits)

    return Bounded


def _most_connections(limits: Limits) -> int:
    """As many as are asked for, or as the process may have files open beside those that it needs itself."""
    if resource is None:
        return limits.connections
    may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits.connections if may == resource.RLIM_INFINITY else max(1, min(limits.connections, may - _OWN_FILES))


def _short_of_files(
    listening: socket.socket, warn: Callable[[str], None]
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Says once in a while that connections wait because the process or the machine can open no more files; asyncio takes them
    a second later. Where the endpoint has stopped by then, *listening* is closed, which asyncio does not look for."""
    warned_s = -_WARN_EVERY_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal warned_s
        error = context.get("exception")
        if isinstance(error, ValueError) and listening.fileno() < 0:
            return
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() - warned_s >= _WARN_EVERY_S:
            warned_s = time.monotonic()
            warn(
                f"no connection is taken for now ({error.strerror}); they are taken again when others have been closed"
            )

    return handle


def serve(endpoint: Endpoint, listening: socket.socket, *, started: Callable[[Callable[[], None]], None]) -> None:
    """Serve until SIGINT or SIGTERM, or until what *started* is told when clients may come is called, from any thread.

    ScenarioError where a policy breaks its rules.
    """
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(endpoint, listening, started))


async def _serve(endpoint: Endpoint, listening: socket.socket, started: Callable[[Callable[[], None]], None]) -> None:
    session = endpoint.session
    config = uvicorn.Config(
        endpoint.app, http=_protocol(endpoint), log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=75,
    )  # fmt: skip
    server = StoppingServer(config, lambda: session.close("the endpoint was stopped"))
    session.warm_up()
    # What is there by now stays: it need not be looked through again and again while tokens are due.
    gc.collect()
    gc.freeze()
    session.pacer.start()
    pacing = asyncio.create_task(session.pacer.go())
    broken: list[BaseException] = []

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            broken.append(error)
            for exchange in list(session.open.values()):
                exchange.reason = "the simulation stopped"
                exchange.wake()
            session.open.clear()
            server.should_exit = True

    pacing.add_done_callback(ended)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_short_of_files(listening, session.pacer.warn))
    started(lambda: loop.call_soon_threadsafe(server.stop) and None)
    try:
        await server.serve(sockets=[listening])
    finally:
        pacing.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await pacing
    if broken:
        if isinstance(broken[0], PolicyError):
            raise ScenarioError(str(broken[0])) from broken[0]
        raise broken[0]
