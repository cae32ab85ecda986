"""The page's server as an ASGI application: answers as server-sent events, one stream a question and client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import mimetypes
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sim.errors import RooftraceError
from sim.explore.session import Session, Stream
from sim.explore.standalone import inlined
from sim.explore.state import Refused, refusal
from sim.explore.workers import Event

PAGE = Path(__file__).with_name("page")
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'"
)
"""The sources that the page may load from: nothing from elsewhere."""
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}
_SAFE_NAMES = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-."


class App:
    """The routes of one session."""

    def __init__(self, session: Session, *, hosts: frozenset[str], token: str | None) -> None:
        """*hosts*: names, with ports, that a browser may know this server by; *token*: what every request has to bring; None where
        only this machine can reach it."""
        self._session, self._hosts, self._token = session, hosts, token
        self._asked: dict[tuple[str, str], asyncio.Task[Any]] = {}
        streams = {
            "run": session.run,
            "curve": session.curve,
            "candidates": session.candidates,
            "compare": session.compare,
            "explain": session.explain,
            "theory": session.theory,
            "fit": session.fit,
            "watch": session.watch,
        }
        routes = [
            Route("/", self._page),
            Route("/page/{name:path}", self._asset),
            Route("/api/controls", self._controls, methods=["GET", "POST"]),
            *(
                Route(f"/api/{name}", functools.partial(self._stream, answers=answers), methods=["POST"])
                for name, answers in streams.items()
            ),
            Route("/api/bench", self._bench, methods=["POST"]),
            Route("/api/requests", self._requests),
            Route("/api/timeline", self._timeline),
            Route("/api/export", self._export, methods=["POST"]),
        ]
        handlers: Any = {
            RooftraceError: self._on_refused, HTTPException: self._on_http, ClientDisconnect: self._on_gone,
        }  # fmt: skip
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (why := self._stranger(Request(scope))) is not None:
            await JSONResponse({"sentence": why}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def stop(self) -> None:
        """End all answers that are under way."""
        for task in self._asked.values():
            task.cancel()

    def _stranger(self, request: Request) -> str | None:
        """Why *request* is refused: it is for another host, from a page of another, or without the token; None where it is ours."""
        host = request.headers.get("host", "")
        if host.lower() not in self._hosts:
            return f"this server is not {host or 'a host without a name'}; open the address that it printed"
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "a page of another host cannot use this server"
        if request.url.path != "/" and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "a page of another host cannot use this server"
        given = (
            request.query_params.get("token") or request.headers.get("x-token") or request.cookies.get("token") or ""
        )
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            return "the token is missing or wrong; open the address that the server printed, with ?token="
        return None

    # Answers that are no streams.

    async def _page(self, request: Request) -> Response:
        start = await self._session.started()
        response = HTMLResponse(page(start), headers={"content-security-policy": _POLICY, "cache-control": "no-store"})
        if self._token is not None:
            response.set_cookie("token", self._token, httponly=True, samesite="strict")
        return response

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = PAGE / name
        parts = name.split("/")
        if any(not part.strip(".") or set(part) - set(_SAFE_NAMES) for part in parts) or not path.is_file():
            raise HTTPException(404)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        kind = "text/javascript" if path.suffix == ".js" else kind
        return Response(path.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})

    async def _controls(self, request: Request) -> Response:
        state = await self._state(request) if request.method == "POST" else {}
        return JSONResponse(self._session.controls(state))

    async def _bench(self, request: Request) -> Response:
        body = await self._body(request)
        try:
            state = json.loads(unquote(request.headers.get("x-state", "{}")))
        except ValueError:
            raise Refused("X-State is a state as JSON, with characters beyond ASCII quoted as in an address") from None
        name = PurePath(unquote(request.headers.get("x-file", ""))).name
        return JSONResponse(await self._session.bench(self._client(request), _mapping(state), name, body))

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(await self._session.requests(request.query_params.get("key", "")))

    async def _timeline(self, request: Request) -> Response:
        content = await self._session.timeline(request.query_params.get("key", ""))
        disposition = {"content-disposition": 'attachment; filename="timeline.json.gz"'}
        return Response(content, media_type="application/gzip", headers=disposition)

    async def _export(self, request: Request) -> Response:
        frozen = await self._session.frozen(await self._state(request))
        disposition = {"content-disposition": 'attachment; filename="rooftrace.html"'}
        return HTMLResponse(standalone(frozen), headers=disposition)

    # Streams.

    async def _stream(self, request: Request, answers: Stream) -> Response:
        if len(self._asked) >= self._session.limits.streams:
            raise Refused("there are as many questions under way as this server takes; close other pages of it")
        state = await self._state(request)
        client = self._client(request)
        events = _refusals(answers(client, state), state)
        return StreamingResponse(
            self._one_at_a_time((client, request.url.path), events), media_type="text/event-stream", headers=_STREAM
        )

    async def _one_at_a_time(
        self, what: tuple[str, str], events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[bytes, None]:
        """*events* as they are sent; they end where the same client asks the same again."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()

        async def fill() -> None:
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        queue.put_nowait(event)
            finally:
                queue.put_nowait(None)

        if (before := self._asked.pop(what, None)) is not None:
            before.cancel()
        task = self._asked[what] = asyncio.create_task(fill())
        try:
            while (event := await queue.get()) is not None:
                yield encoded(event)
        finally:
            if self._asked.get(what) is task:
                del self._asked[what]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    # What clients send.

    async def _state(self, request: Request) -> Mapping[str, Any]:
        body = await self._body(request)
        try:
            found = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            raise Refused("the body of the request is not JSON") from None
        return _mapping(found)

    async def _body(self, request: Request) -> bytes:
        most = self._session.limits.body_bytes
        found = bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > most:
                raise HTTPException(413, f"a body is of at most {most:,} bytes")
        return bytes(found)

    @staticmethod
    def _client(request: Request) -> str:
        return request.headers.get("x-client", "")[:64]

    # Errors.

    async def _on_refused(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, RooftraceError)
        return JSONResponse(refusal(error, {}).facts, 400)

    async def _on_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {
            404: f"there is no {request.url.path} here",
            405: f"{request.method} is not what {request.url.path} takes",
        }
        return JSONResponse({"sentence": what.get(error.status_code, str(error.detail))}, error.status_code)

    async def _on_gone(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=400)


def _mapping(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise Refused('a state is a mapping such as {"set": {"replicas": 2}}')
    return found


async def _refusals(events: AsyncGenerator[Event, None], state: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
    """*events*, and where they end with an error its sentence as the last of them."""
    given = state.get("set")
    keys = given if isinstance(given, Mapping) else {}
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except RooftraceError as error:
        yield Event("refused", refusal(error, keys).facts)


def encoded(event: Event) -> bytes:
    """*event* as it is sent."""
    return f"event: {event.name}\ndata: {json.dumps(event.data, allow_nan=False, default=str)}\n\n".encode()


def page(start: Mapping[str, Any]) -> str:
    """The page, with what it begins with inside."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    head = f"<script>window.ROOFTRACE = {_inlined(start)};</script>"
    return text.replace("<head>", f"<head>\n{head}", 1)


def _inlined(value: Any) -> str:
    """JSON within a script: nothing in it ends the script."""
    return (
        json.dumps(value, allow_nan=False, default=str)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def standalone(frozen: Mapping[str, Any]) -> str:
    """The page as one file that needs no server: its style sheets and modules inside, and *frozen*, what it shows."""
    return inlined(page({**frozen, "frozen": True}), PAGE)
