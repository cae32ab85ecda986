"""What the scheduler remembers from step to step, and what it knows of each sequence that runs."""

from __future__ import annotations

from typing import NamedTuple

from policies.view import RunningSeq


class Past(NamedTuple):
    """What the scheduler remembers from step to step: handed over as `Plan.memo`, and found again in `ReplicaView.memo`."""

    ratio: float
    """The new-token ratio, noted ..."""
    rounds: int = 0
    """... at this count of decode steps ..."""
    decays: bool = False
    """... and whether it falls with each step since."""
    full: bool = False
    """`batch_is_full`: nobody is let in until somebody leaves."""
    n_running: int = 0
    """Sequences in the decode batch unless somebody has ended since."""
    order: tuple[int, ...] | None = None
    """The decode batch as SGLang lists it, where that is not the order of admission; others follow, in that order."""
    late: bool | tuple[int, ...] = ()
    """Whose latest token the scheduler has not seen yet, where it plans ahead; True: that of all."""
    polled: int = 0
    """What the steps up to the latest one count since requests were last received ..."""
    weight: int = 0
    """... and what each one since does."""
    known: tuple[int, ...] | None = None
    """The queue as far as it was received, where that is not before every step."""
    queue: tuple[int, ...] | None = None
    """The queue as it was sorted last, where that depends on what the cache held."""


class Running(NamedTuple):
    """A sequence of the decode batch, by what the scheduler knows of it."""

    seq: RunningSeq
    prompt: int
    emitted: int
    max_new: int
    """Tokens that it may emit in all."""
