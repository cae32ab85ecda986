"""A request of a client, and its answer as far as it is there."""

from __future__ import annotations

import asyncio


class Exchange:
    """A request and whoever waits for its answer."""

    __slots__ = (
        "_waiting",
        "ended_ns",
        "finish",
        "first_ns",
        "got",
        "grouped",
        "id",
        "latest_ns",
        "model",
        "output_tokens",
        "pending",
        "prompt_tokens",
        "reason",
        "shown",
        "turn",
    )  # fmt: skip

    def __init__(self, model: int, prompt_tokens: int, output_tokens: int, finish: str) -> None:
        """*finish*: why it will end, in OpenAI's words, `length` or `stop`."""
        self.id = -1
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.finish = finish
        self.pending: list[tuple[int, int]] = []
        """Tokens that may be written, and when they were there, one entry for each piece of the stream."""
        self.grouped = 0
        """Tokens that are there and not sent yet, where the server sends them in groups."""
        self.turn = 0
        """Steps that emitted for it."""
        self.got = 0
        self.shown = 0
        """Tokens that its client has or may have by now: as many as it got, or more where it begins anew."""
        self.first_ns = self.latest_ns = self.ended_ns = -1
        self.reason: str | None = None
        """Why it is not served."""
        self._waiting: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self.ended_ns >= 0 or self.reason is not None

    def begin_anew(self) -> None:
        """The machine that served it has failed, and another emits all of its tokens."""
        self.got = 0
        self.first_ns = self.latest_ns = -1

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def more(self) -> None:
        """Wait until something is pending, or it is over."""
        while not self.pending and not self.over:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
