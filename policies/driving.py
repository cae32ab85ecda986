"""A scheduler that drives itself: it keeps its own queue, memory and cache, and is told what has run and what has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class DrivingError(ValueError):
    """An installed release that cannot be driven, or has failed; the message names it."""


class Engine(NamedTuple):
    """The engine that such a scheduler is started for."""

    kv_blocks: int
    block_tokens: int
    max_model_len: int
    prefix_cache: bool
    k: int
    """Tokens that are drafted for each sequence; 0: none."""
    lookahead_tokens: int
    draft_slots: int
    reads_target: bool = False
    """Whether the drafter reads the target's states (EAGLE, MTP)."""


class Asked(NamedTuple):
    """Features that a request uses and workloads have no column for, such as a grammar."""

    grammar_ns: int = 0
    """Time (ns) until its grammar is compiled; 0: it has none."""


class Driven(Protocol):
    """One that has been started."""

    @property
    def release(self) -> str: ...

    def anew(self) -> None:
        """Begin with no request and an empty cache."""
        ...

    def step(self, told: Mapping[str, Any], /) -> dict[str, Any]:
        """Tell it what has happened: `done` (pairs of a request and its tokens, of the oldest plan in flight; None: nothing has
        run), `add`, `abort` and `ready`. It answers with `emitted`, `ended`, `has_requests` and the next `plan`, if any."""
        ...


class Driving(Protocol):
    """A scheduler that drives itself."""

    async_scheduling: bool

    def connect(self, engine: Engine, /) -> Driven: ...

    def asked(self, id_: int, seed: int, /) -> Asked: ...


def driving(scheduler: object) -> bool:
    """Whether *scheduler* drives itself: by a method `connect`."""
    return callable(getattr(scheduler, "connect", None))
