"""The names under which servers and gateways count what they serve: the table `names.toml`, read once."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

COUNTERS = ("came", "finished", "prompt_tokens", "output_tokens", "prefix_hits", "prefix_queries", "preemptions")
GAUGES = ("running", "waiting", "in_flight", "kv_used", "prefix_hit")
LATENCIES = ("ttft", "itl", "tpot", "e2el", "queue")
LENGTHS = ("prompt_length", "output_length")
_SELECTOR = re.compile(r'^([^{]+)(?:\{(\w+)="([^"]*)"\})?$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """The name of a metric, and the label that its samples must have."""

    metric: str
    label: str | None = None
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The names of one maker, by kind and quantity."""

    key: str
    title: str
    role: str
    """engine, or gateway: it counts the requests of engines behind it once more."""
    source: str
    counter: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    gauge: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    histogram: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    pair: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    facts: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> frozenset[str]:
        """Every name that a sample of this maker may have."""
        plain = {
            each.metric for table in (self.counter, self.gauge, self.pair) for names in table.values() for each in names
        }
        plain |= {names[0].metric for names in self.facts.values()}
        suffixes = ("_bucket", "_sum", "_count")
        return frozenset(
            plain | {f"{each.metric}{end}" for names in self.histogram.values() for each in names for end in suffixes}
        )

    def names_of(self, quantity: str) -> tuple[str, ...]:
        """The names of one quantity, of whatever kind."""
        tables = (self.counter, self.gauge, self.histogram, self.pair, self.facts)
        return tuple(each.metric for table in tables for each in table.get(quantity, ()))


@functools.cache
def makers() -> Mapping[str, Maker]:
    """All makers by key: engines first, since of a quantity that two count the engine's own figure is taken."""
    text = files("sim.observe").joinpath("names.toml").read_text(encoding="utf-8")
    found = {
        key: Maker(
            key=key,
            title=each["title"],
            role=each["role"],
            source=each["source"],
            scale=each.get("scale", {}),
            **{
                kind: {quantity: tuple(map(_name, names)) for quantity, names in each.get(kind, {}).items()}
                for kind in ("counter", "gauge", "histogram", "pair", "facts")
            },
        )
        for key, each in tomllib.loads(text).items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1].role != "engine"))


def _name(text: str) -> Name:
    match = _SELECTOR.match(text)
    assert match is not None, text
    return Name(metric=match[1], label=match[2], value=match[3] or "")


def makers_of(names: Iterable[str]) -> tuple[Maker, ...]:
    """The makers whose metrics are among *names*."""
    there = set(names)
    return tuple(each for each in makers().values() if each.metrics & there)


def all_metrics() -> tuple[str, ...]:
    """Every name that is looked for in a Prometheus server."""
    return tuple(sorted({name for each in makers().values() if each.key != "table" for name in each.metrics}))
