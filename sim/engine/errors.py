"""Errors of a run."""

from __future__ import annotations


class PolicyError(ValueError):
    """A plan that cannot be carried out; the message says which policy, what it asked and the way out."""


class InvariantError(AssertionError):
    """The engine has broken one of its own invariants; the message names which, where and when."""
