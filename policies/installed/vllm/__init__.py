"""The scheduler of an installed vLLM, which decides itself what each iteration runs: `worker` runs beside the release."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from policies.driving import Asked, Driven, DrivingError, Engine
from policies.installed.connection import Connection
from policies.schedulers import checked_as_given, setting_at_least
from policies.view import Plan, ReplicaView
from policies.vllm import Rules

_SCRIPT = Path(__file__).with_name("worker.py")
_GRAMMAR_STREAM = 0x6772616D
"""Names the random stream by which requests ask for structured output."""


@checked_as_given
@dataclass(frozen=True)
class VllmInstalled:
    """The scheduler class of the vLLM that an interpreter has, with its own KV blocks and its own prefix cache.

    *python* is the interpreter's path; without it the one that runs this. *options* are further settings of the release's
    `SchedulerConfig`.
    """

    python: str = ""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    async_scheduling: bool = True
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_loras: int = 0
    """Adapters that a step may have; 0: there are none."""
    adapters: int = 0
    """Adapters that requests ask for in turn."""
    grammar_s: float = 0.0
    """Time that the grammar of a request with structured output is compiled, from when the engine has the request."""
    grammar_share: float = 1.0
    """Share of the requests with structured output, where `grammar_s` is given."""

    by_chunk = True
    evicts = True
    rules = Rules()
    """Of the engine around the scheduler: what it drafts."""

    def __post_init__(self) -> None:
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_loras", 0), ("adapters", 0)):
            setting_at_least(self, name, least)
        if (self.max_loras > 0) != (self.adapters > 0):
            raise ValueError(f"max_loras and adapters go together; got {self.max_loras} and {self.adapters}")
        if not 0 <= self.grammar_s < float("inf") or not 0 <= self.grammar_share <= 1:
            raise ValueError(
                "grammar_s is a time of at least 0 and grammar_share a share from 0 to 1; got "
                f"{self.grammar_s} and {self.grammar_share}"
            )

    def plan(self, view: ReplicaView, /) -> Plan:
        raise DrivingError(
            "an installed scheduler keeps its own queue and its own memory, and answers to no other policy; leave out what wraps it"
        )

    def connect(self, engine: Engine, /) -> Driven:
        """The release, started for *engine*; DrivingError where it cannot be driven."""
        return Connection(
            self.python or sys.executable,
            _SCRIPT,
            {
                **engine._asdict(),
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "max_num_seqs": self.max_num_seqs,
                "async_scheduling": self.async_scheduling,
                "max_loras": self.max_loras,
                "options": dict(self.options),
            },
        )

    def asked(self, id_: int, seed: int, /) -> Asked:
        """Features that a request uses and workloads have no column for: its adapter, its grammar."""
        compiles = (
            self.grammar_s > 0 and np.random.default_rng([seed, _GRAMMAR_STREAM, id_]).random() < self.grammar_share
        )
        return Asked(
            adapter=id_ % self.adapters + 1 if self.adapters else 0,
            grammar_ns=round(self.grammar_s * 1e9) if compiles else 0,
        )
