"""The scheduler's state from step to step, and its knowledge of each running sequence."""

from __future__ import annotations

from typing import NamedTuple

from policies.view import ALWAYS_NS, RunningSeq


class Past(NamedTuple):
    """The scheduler's state from step to step: returned as `Plan.memo`, and found again in `ReplicaView.memo`."""

    ratio: float
    """The new-token ratio."""
    rounds: int = 0
    """Count of decode steps when it was noted."""
    decays: bool = False
    """Whether it falls with each step since."""
    full: bool = False
    """`batch_is_full`: no request is admitted until a sequence leaves."""
    n_running: int = 0
    """Sequences in the decode batch unless some have ended since."""
    order: tuple[int, ...] | None = None
    """The decode batch as SGLang lists it, where that is not the order of admission; others follow, in that order."""
    late: bool | tuple[int, ...] = ()
    """Sequences whose latest token the scheduler has not seen yet, where it plans ahead; True: all."""
    polled: int = 0
    """Weight of the steps up to the latest one since the last poll."""
    weight: int = 0
    """Weight of each step since."""
    known: tuple[int, ...] | None = None
    """The queue as far as it was received, where that is not before every step."""
    queue: tuple[int, ...] | None = None
    """The queue as it was sorted last, where that depends on what the cache held."""
    since_prompts: int = ALWAYS_NS
    """Rounds without prompts since the latest step that computed some; ALWAYS_NS: it delays none."""
    let_in: int = -1
    """With ranks: the number of the step in which a small batch last let prompts in."""


class Running(NamedTuple):
    """A sequence of the decode batch, as the scheduler knows it."""

    seq: RunningSeq
    prompt: int
    emitted: int
    max_new: int
    """Tokens that it may emit in all."""
