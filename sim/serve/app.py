"""OpenAI's interface over a session, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sim.errors import RooftraceError
from sim.serve.bodies import Asked, Refusal, asked_of, read
from sim.serve.exchange import Exchange
from sim.serve.filler import filler
from sim.serve.prometheus import head, sample
from sim.serve.script import Script
from sim.serve.session import Session
from workloads.texts import Tokens, digests

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

RECEIVED_NS = "rooftrace.received_ns"
"""In the scope of a request: when its latest bytes came (`time.perf_counter_ns`)."""
_SLICE = 1 << 16
"""Characters of a prompt that are counted before others have a turn."""
_DRAINED = 8
"""Times the largest body that is read, and dropped, of one that is too large."""
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a session accepts from its clients."""

    body_bytes: int = 8 << 20
    bodies_bytes: int = 256 << 20
    """All bodies that are being read or counted, together."""
    streams: int = 2048
    """Requests under way, streams and others."""
    connections: int = 4096
    """Connections at a time, those that ask for nothing included; fewer where the process may not have so many files open."""
    head_s: float = 10.0
    """A connection's first request comes as far as its body within this time, and any later one from its first byte."""
    body_s: float = 60.0
    """A body comes within this time."""
    head_bytes: int = 64 << 10
    """The size of a request before its body."""
    stall_s: float = 300.0
    """A client that reads nothing for so long is taken for gone."""


class Endpoint:
    """The routes and what they share."""

    def __init__(
        self, session: Session, tokens: Tokens, *, names: Sequence[Sequence[str]], limits: Limits,
        outputs: Literal["asked", "workload"], script: Script | None = None,
    ) -> None:  # fmt: skip
        """*names*: of each model all that it may be asked for by, the first of which is its own; *script*: faults."""
        self.session = session
        self.tokens = tokens
        self.limits = limits
        self._outputs = outputs
        self._script = script or Script()
        self._names = [tuple(each) for each in names]
        self._row = {name: row for row, each in enumerate(self._names) for name in each}
        self.busy = 0
        self.bytes_of_bodies = 0
        self.refused: dict[int, int] = {}
        self.gone = 0
        """Clients that went before their answer was over."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/rooftrace/requests/{number:int}", self._times),
        ]
        handlers: Any = {
            Refusal: self._on_refusal,
            HTTPException: self._on_http,
            ClientDisconnect: self._on_gone,
            Exception: self._on_bug,
        }
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    # Errors.

    def error(self, refusal: Refusal) -> Response:
        self.refused[refusal.status] = self.refused.get(refusal.status, 0) + 1
        headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
        return JSONResponse(refusal.body, refusal.status, headers)

    async def _on_refusal(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return self.error(error)

    async def _on_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {
            404: f"there is no {request.url.path} here",
            405: f"{request.method} is not what {request.url.path} takes",
        }
        return self.error(Refusal(error.status_code, what.get(error.status_code, str(error.detail))))

    async def _on_gone(self, _request: Request, _error: Exception) -> Response:
        """A client that went while it sent its request."""
        self.gone += 1
        return Response(status_code=400)

    async def _on_bug(self, _request: Request, error: Exception) -> Response:
        return self.error(Refusal(500, f"{type(error).__name__} in the endpoint; its log says where"))

    def full(self) -> bytes:
        """The answer to a connection above the limit, which is closed after it."""
        answer = self.error(Refusal(503, "there are as many connections as the endpoint takes; try again"))
        heads = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
        return b"HTTP/1.1 503 Service Unavailable\r\n" + heads + b"connection: close\r\n\r\n" + bytes(answer.body)

    # Small answers.

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=200)

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": version("rooftrace")})

    def _card(self, name: str, row: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self.session.began_s),
            "owned_by": "rooftrace",
            "root": self._names[row][0],
            "parent": None,
            "max_model_len": self.session.setup.limits[row],
        }

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name, row) for name, row in self._row.items()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._card(name, self._row_of(name)))

    async def _times(self, request: Request) -> Response:
        number, run = request.path_params["number"], self.session.run
        if not 0 <= number < len(run):
            raise Refusal(404, f"request {number} has not come; there are {len(run)}")
        facts = {"arrival_ns": run.arrival_ns(number), "scheduled_ns": run.scheduled_ns(number)}
        facts |= {"first_token_ns": run.first_token_ns(number), "finish_ns": run.finish_ns(number)}
        facts = {name: None if ns < 0 else ns for name, ns in facts.items()}
        return JSONResponse({"request": number, **facts, "cached_tokens": run.cached_tokens(number)})

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse("\n".join(self._samples()) + "\n", media_type="text/plain; version=0.0.4")

    def _samples(self) -> Iterable[str]:
        session, pacer = self.session, self.session.pacer
        yield from session.counted.lines(session.run)
        lags = {
            "pacer_lag_seconds": (pacer.lag, "Wall time from when simulated events were due until they had happened."),
            "handed_over_lag_seconds": (pacer.handed, "Wall time from when tokens were due until they were written."),
        }
        for name, (lag, text) in lags.items():
            yield from head(f"rooftrace:{name}", "histogram", text)
            yield from lag.histogram.lines(f"rooftrace:{name}", {})
            yield from head(f"rooftrace:{name}_max", "gauge", f"{text} The worst.")
            yield sample(f"rooftrace:{name}_max", {}, lag.worst_s)
            yield from head(f"rooftrace:{name}_beyond_bound_total", "counter", f"{text} Beyond the bound.")
            yield sample(f"rooftrace:{name}_beyond_bound_total", {}, lag.late)
        plain = {
            "lag_bound_seconds": ("gauge", "Lag beyond which the endpoint warns.", pacer.bound_s),
            "speed": ("gauge", "Simulated seconds in a second of the wall clock.", pacer.speed),
            "simulated_seconds": ("gauge", "The simulated clock.", session.run.now_ns * 1e-9),
            "requests_in_flight": ("gauge", "Requests under way.", self.busy),
            "clients_gone_total": ("counter", "Clients that went before their answer was over.", self.gone),
        }
        for name, (kind, text, value) in plain.items():
            yield from head(f"rooftrace:{name}", kind, text)
            yield sample(f"rooftrace:{name}", {}, value)
        yield from head("rooftrace:refused_total", "counter", "Requests answered by an error, by its status.")
        for status, count in sorted(self.refused.items()):
            yield sample("rooftrace:refused_total", {"status": str(status)}, count)

    # Bodies.

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[Any]:
        """The JSON object that a client sends, its bytes counted for as long as the block runs."""
        limits, taken = self.limits, 0
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_s):
                dropped = 0
                async for part in request.stream():
                    if dropped or taken + len(part) > limits.body_bytes:
                        # A client that is still sending would not read the answer.
                        dropped += len(part)
                        parts.clear()
                        if dropped > _DRAINED * limits.body_bytes:
                            break
                        continue
                    if self.bytes_of_bodies + len(part) > limits.bodies_bytes:
                        raise Refusal(503, "the endpoint is reading as many bodies as it may; try again")
                    taken += len(part)
                    self.bytes_of_bodies += len(part)
                    parts.append(part)
            if dropped:
                raise Refusal(413, f"the body is larger than {limits.body_bytes} bytes, the most that is taken")
            yield read(b"".join(parts))
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {limits.body_s:g} s") from None
        finally:
            self.bytes_of_bodies -= taken

    def _row_of(self, name: str | None) -> int:
        if name is None:
            return 0
        row = self._row.get(name)
        if row is None:
            known = ", ".join(self._row)
            raise Refusal(404, f"the model `{name[:200]}` does not exist; there is {known}", param="model")
        return row

    async def _counted(self, text: str, limit: int | None) -> list[int]:
        """Numbers of the tokens of *text*; Refusal where there are more than *limit*."""
        most = limit if limit is not None else 1 << 24
        if (least := self.tokens.least(len(text))) > most:
            raise Refusal(400, f"the prompt has at least {least} tokens, and the model takes {most}", param="prompt")
        found: list[int] = []
        at = 0
        while at < len(text):
            end = at + _SLICE
            if end < len(text):
                # Cut where a word ends, so that few tokens are counted twice.
                space = text.rfind(" ", at + _SLICE // 2, end)
                end = end if space < 0 else space
                await asyncio.sleep(0)
            found.extend(self.tokens.of(text[at:end]))
            if len(found) > most:
                raise Refusal(400, f"the prompt has more than the {most} tokens that the model takes", param="prompt")
            at = end
        return found

    async def _tokenize(self, request: Request) -> Response:
        async with self._body(request) as body:
            row = self._row_of(body.get("model") if isinstance(body.get("model"), str) else None)
            asked = asked_of({**body, "stream": False}, chat="messages" in body)
            limit = self.session.setup.limits[row]
            tokens = list(asked.tokens or ()) if asked.text is None else await self._counted(asked.text, None)
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    # Completions.

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        if self.busy >= self.limits.streams:
            raise Refusal(503, f"{self.limits.streams} requests are under way, and more are not taken; try again")
        self.busy += 1
        try:
            answer = await self._asked(request, chat=chat)
        except BaseException:
            self.busy -= 1
            raise
        return answer

    def exchange_over(self) -> None:
        self.busy -= 1

    async def _asked(self, request: Request, *, chat: bool) -> Response:
        session = self.session
        async with self._body(request) as body:
            received_ns = request.scope.get(RECEIVED_NS)
            asked = asked_of(body, chat=chat)
            row = self._row_of(asked.model)
            fault = self._script.fault_of(session.pacer.present_ns() * 1e-9, self._names[row][0])
            if fault is not None and fault.status is not None:
                raise Refusal(fault.status, "the script of this endpoint answers so now")
            limit = session.setup.limits[row]
            tokens = asked.tokens if asked.text is None else await self._counted(asked.text, limit)
            assert tokens is not None
            prompt_tokens = len(tokens)
            named = digests(tokens, session.run.id_tokens)
        output, most = self._lengths(asked, prompt_tokens, limit)
        reason = session.run.refusal(prompt_tokens, output, row)
        if reason is not None:
            raise Refusal(400, f"this request can never be served: {reason}", param="prompt")
        exchange = session.ask(
            prompt_tokens=prompt_tokens, output_tokens=output, max_tokens=most, digests=named, model=row,
            priority=asked.priority, session=request.headers.get("x-session-id") or asked.session,
            received_ns=received_ns,
        )  # fmt: skip
        name = asked.model if asked.model is not None else self._names[row][0]
        return _Answer(self, exchange, asked, name, chat=chat, cut_after=None if fault is None else fault.cut_after)

    def _lengths(self, asked: Asked, prompt_tokens: int, limit: int | None) -> tuple[int, int]:
        """Tokens that come out, and how many the client allows; Refusal where the model has no room for them."""
        room = (1 << 30) if limit is None else limit - prompt_tokens
        wanted = asked.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            raise Refusal(
                400,
                f"this model's maximum context length is {limit} tokens; {prompt_tokens} are in the prompt"
                + ("" if wanted is None else f" and {wanted} are asked for")
                + ": shorten the prompt or ask for fewer",
                param="prompt" if wanted is None else "max_tokens",
            )
        most = room if wanted is None else wanted
        if wanted is not None and (asked.ignore_eos or self._outputs == "asked"):
            return most, most
        return min(max(self.session.drawn(), asked.min_tokens, 1), most), most


class _Cut(RooftraceError):
    """The script cuts this connection now."""


class _Answer(Response):
    """An answer as it is written, in pieces or at once."""

    def __init__(
        self, endpoint: Endpoint, exchange: Exchange, asked: Asked, model: str, *, chat: bool, cut_after: int | None = None,
    ) -> None:  # fmt: skip
        """*cut_after*: tokens after which the connection is cut; None: it is not."""
        self._cut_after = cut_after
        self._endpoint = endpoint
        self._exchange = exchange
        self._asked = asked
        self._model = model
        self._is_chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{exchange.id}"
        self._created = int(time.time())
        self.background = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        endpoint, exchange = self._endpoint, self._exchange
        gone = asyncio.ensure_future(self._until_gone(receive))
        try:
            await (self._stream(send) if self._asked.stream else self._whole(send))
        except _Cut:
            # An answer that is left unfinished has its connection closed.
            endpoint.session.give_up(exchange)
        except OSError:
            # It reads nothing any more, or has gone.
            endpoint.gone += 1
            endpoint.session.give_up(exchange)
        except asyncio.CancelledError:
            endpoint.session.give_up(exchange)
            raise
        finally:
            gone.cancel()
            endpoint.exchange_over()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive()).get("type") != "http.disconnect":
            pass
        exchange, endpoint = self._exchange, self._endpoint
        if not exchange.over:
            endpoint.gone += 1
            endpoint.session.give_up(exchange)
            exchange.reason = "the client has gone"
            exchange.wake()

    @property
    def _usage(self) -> dict[str, Any]:
        exchange = self._exchange
        prompt, got = exchange.prompt_tokens, exchange.got
        found = self._endpoint.session.run.cached_tokens(exchange.id)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": got,
            "total_tokens": prompt + got,
            "prompt_tokens_details": {"cached_tokens": found},
        }

    def _headers(self) -> list[tuple[bytes, bytes]]:
        found = self._endpoint.session.times(self._exchange)
        if self._asked.without_effect:
            found["X-Rooftrace-Without-Effect"] = ", ".join(self._asked.without_effect)
        found["X-Rooftrace-Prompt-Tokens"] = str(self._exchange.prompt_tokens)
        return [(name.lower().encode(), value.encode()) for name, value in found.items()]

    def _event(self, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        event = {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        return event if usage is None else {**event, "usage": usage}

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        said: Any = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    async def _stream(self, send: Send) -> None:
        exchange, asked, pacer = self._exchange, self._asked, self._endpoint.session.pacer
        stall_s = self._endpoint.limits.stall_s
        await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *self._headers()]})
        before, after = self._around()
        told = 0
        if self._is_chat:
            opening = self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        else:
            opening = None
        while True:
            await exchange.more()
            pieces, exchange.pending = exchange.pending, []
            parts: list[bytes] = [] if opening is None or not pieces else [_line(opening)]
            opening = None if pieces else opening
            if self._cut_after is not None and told + sum(tokens for tokens, _ in pieces) >= self._cut_after:
                raise _Cut
            for tokens, _ in pieces:
                told += tokens
                if asked.continuous_usage or told == exchange.output_tokens:
                    finish = exchange.finish if told == exchange.output_tokens else None
                    so_far = {"completion_tokens": told, "total_tokens": exchange.prompt_tokens + told}
                    usage = self._usage | so_far if asked.continuous_usage else None
                    parts.append(_line(self._event([self._choice(filler(told - tokens, tokens), finish)], usage)))
                else:
                    parts += (before, filler(told - tokens, tokens).encode(), after)
            if exchange.over:
                if exchange.reason is not None:
                    parts.append(_line(Refusal(503, exchange.reason).body))
                elif asked.include_usage:
                    parts.append(_line(self._event([], self._usage)))
                parts.append(b"data: [DONE]\n\n")
            over = exchange.over
            async with asyncio.timeout(stall_s):
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not over})
            for _, due_ns in pieces:
                pacer.handed_over(due_ns)
            if over:
                return

    def _around(self) -> tuple[bytes, bytes]:
        """The bytes before and after the text of a piece that is neither first nor last."""
        mark = "\x00"
        before, after = _line(self._event([self._choice(mark, None)])).split(json.dumps(mark)[1:-1].encode())
        return before, after

    async def _whole(self, send: Send) -> None:
        exchange = self._exchange
        while not exchange.over:
            await exchange.more()
            exchange.pending.clear()
            if self._cut_after is not None and exchange.got >= self._cut_after:
                raise _Cut
        if exchange.reason is not None:
            response = self._endpoint.error(Refusal(503, exchange.reason))
            await send({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": bytes(response.body)})
            return
        text = filler(0, exchange.got)
        said: Any = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": exchange.finish}
        answer = {
            **self._event([choice], self._usage),
            "object": "chat.completion" if self._is_chat else "text_completion",
        }
        body = json.dumps(answer).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._endpoint.session.pacer.handed_over(exchange.ended_ns)


def _line(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
