"""Settings that schedulers of installed releases have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from policies.driving import Driven, DrivingError, Engine
from policies.installed.connection import Connection
from policies.view import Plan, ReplicaView

_GRAMMAR_STREAM = 0x6772616D
"""Names the random stream by which requests ask for structured output."""


@dataclass(frozen=True)
class Installed:
    """A scheduler that runs in an interpreter of its own.

    *python* is the interpreter: a path, or the name of a program on the PATH; without it the one that runs this. *options* are
    further settings of the release.
    """

    python: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    grammar_s: float = 0.0
    """Time that the grammar of a request with structured output is compiled, from when the engine has the request."""
    grammar_share: float = 1.0
    """Share of the requests with structured output, where `grammar_s` is given."""

    by_chunk: ClassVar[bool] = True
    evicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.grammar_s < float("inf") or not 0 <= self.grammar_share <= 1:
            raise ValueError(
                "grammar_s is a time of at least 0 and grammar_share a share from 0 to 1; got "
                f"{self.grammar_s} and {self.grammar_share}"
            )

    def plan(self, view: ReplicaView, /) -> Plan:
        raise DrivingError(
            "an installed scheduler keeps its own queue and its own memory, and answers to no other policy; leave out what wraps it"
        )

    def connected(self, worker: Path, engine: Engine, settings: Mapping[str, Any]) -> Driven:
        """The release that *worker* drives, started for *engine*; DrivingError where it cannot be driven."""
        return Connection(
            self.python or sys.executable, worker, {**engine._asdict(), "options": dict(self.options), **settings}
        )

    def grammar_ns(self, id_: int, seed: int) -> int:
        """Time for which the grammar of a request is compiled; 0: it has none."""
        compiles = (
            self.grammar_s > 0 and np.random.default_rng([seed, _GRAMMAR_STREAM, id_]).random() < self.grammar_share
        )
        return round(self.grammar_s * 1e9) if compiles else 0
