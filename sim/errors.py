"""The errors that the command line turns into one sentence and exit code 2; every other of `sim` is a RooftraceError too.

The rooms below (`hwmodels`, `policies`, `workloads`) raise ValueError; whoever calls them says which setting it came from.
"""

from __future__ import annotations


class RooftraceError(Exception):
    """Something the user gave cannot be used; the message says what, why and the way out."""


class ScenarioError(RooftraceError, ValueError):
    """A scenario, or a file that it names, cannot be used."""


class OutputError(RooftraceError, OSError):
    """A results folder cannot be written or read."""
