"""Errors of a run."""

from __future__ import annotations

from sim.errors import RooftraceError
from sim.text import without_addresses


class PolicyError(RooftraceError, ValueError):
    """A plan that cannot be carried out; the message says which policy, what it asked and the way out."""

    def __init__(self, message: str, *, short_of_memory: bool = False) -> None:
        super().__init__(without_addresses(message))
        self.short_of_memory = short_of_memory
        """Whether the plan needed more KV blocks than were free."""


class UnservedError(RooftraceError):
    """A run has come to rest, or would go on for ever, with requests that can never be served: the message says which and why."""


class InvariantError(AssertionError):
    """The engine has broken one of its own invariants; the message names which, where and when."""
