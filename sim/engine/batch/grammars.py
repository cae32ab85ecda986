"""Grammars that constrain answers: what compiling them and masking tokens by them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True, eq=False)
class GrammarSpec:
    """The grammars of requests, and their costs on a machine.

    A request whose grammar is not compiled there waits until it is, and others pass it. In each iteration the host fills a mask for
    each token that a request with a grammar samples, while the forward pass runs where *overlapped*; the device then applies
    the masks.
    """

    grammar: Sequence[int]
    """The grammar of each request of the workload; -1: none."""
    compile_s: Sequence[float]
    """The time to compile each grammar."""
    threads: int = 8
    """Grammars that are compiled at once; others wait for a thread, first come, first served."""
    kept: int = 1024
    """Compiled grammars that a machine keeps, those used last; the others are compiled again when they are asked for."""
    step_s: float = 0.0
    """Host time of the masks of an iteration, however many they are."""
    mask_s: float = 0.0
    """Host time of each mask: the last token is taken in, the mask is filled and put in its row."""
    apply_s: float = 0.0
    """Device time of each mask: it is copied there, and the logits that it forbids are overwritten."""
    overlapped: bool = True
    """The host fills masks while the forward pass runs, so that an iteration takes as long as the longer of the two."""
    goes_first: bool = True
    """A request whose grammar has been compiled stands ahead of those that wait for nothing else, as in vLLM; otherwise at the
    end of the queue."""

    def __post_init__(self) -> None:
        for name in ("step_s", "mask_s", "apply_s"):
            _check_time(name, getattr(self, name))
        for each in self.compile_s:
            _check_time("compile_s", each)
        for name in ("threads", "kept"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; got {getattr(self, name)}")
        most = max(self.grammar, default=-1)
        if most >= len(self.compile_s):
            raise ValueError(f"compile_s has {len(self.compile_s)} grammars, and a request has number {most}")


def _check_time(name: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{name} is a finite time of at least 0; got {value!r}")
