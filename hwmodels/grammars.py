"""The time that grammar libraries take on the host to constrain answers, as measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from hwmodels.tables import ROOM, read_toml


class GrammarTerms(NamedTuple):
    """The terms of a library."""

    release: str
    step_s: float
    """Each iteration in which some token is masked."""
    mask_s: float
    """Each mask of an iteration."""
    compile_s: float
    """A grammar of a usual size."""
    threads: int
    """Grammars compiled at once."""
    kept: int
    """Compiled grammars that are kept."""
    sources: Mapping[str, str]
    """The origin of each term."""


@functools.lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Mapping[str, Any]]:
    return read_toml(ROOM / "grammars.toml")


def grammar_libraries() -> tuple[str, ...]:
    """Their names."""
    return tuple(_catalogue())


def grammar_terms(library: str) -> GrammarTerms:
    """The terms of *library*; KeyError for one that was not measured."""
    entry = dict(_catalogue()[library])
    release = entry.pop("release")
    values = {name: value for name, (value, _) in entry.items()}
    return GrammarTerms(release=release, **values, sources={name: source for name, (_, source) in entry.items()})


def apply_s(vocabulary: int, *, host_bytes_per_s: float | None, hbm_bytes_per_s: float) -> float:
    """Device time of one mask: a bit for each token of the vocabulary crosses the host link, and logits of four bytes are read and
    written. Without a host link the copy is left out."""
    copied = 0.0 if host_bytes_per_s is None else vocabulary / 8 / host_bytes_per_s
    return copied + 2 * 4 * vocabulary / hbm_bytes_per_s
