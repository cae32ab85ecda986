"""Errors of a run."""

from __future__ import annotations

from sim.engine.kv import OutOfBlocks
from sim.errors import RooftraceError


class PolicyError(RooftraceError, ValueError):
    """A plan that cannot be carried out; the message says which policy, what it asked and the way out."""

    @property
    def short_of_memory(self) -> bool:
        """Whether the plan asked for more KV blocks than were free."""
        return isinstance(self.__context__, OutOfBlocks)


class InvariantError(AssertionError):
    """The engine has broken one of its own invariants; the message names which, where and when."""
