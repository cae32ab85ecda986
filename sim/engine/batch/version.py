"""The rule for asking a scheduler again: counts of events, and the events that a plan lets pass.

All that may change a plan counts in its `Version`. A plan that is held remembers the version that it was made for, and whether
it lets arrivals pass; a span of iterations is cut by the event itself.
"""

from __future__ import annotations


class Version:
    """Counts of events of a model on a machine, and the instants of the latest ones."""

    __slots__ = ("arrivals", "arrived_ns", "changes", "news_ns")

    def __init__(self) -> None:
        self.changes = 0
        """Everything that may change any plan: sequences that end, join or leave, KV blocks that come free, KV that lands, and
        news from clients and other machines."""
        self.arrivals = 0
        """Requests that have been queued, which some plans let pass."""
        self.arrived_ns = -1
        """The instant of the latest arrival."""
        self.news_ns = -1
        """The instant of the latest news: a plan made ahead does not know what came after the iteration before it started."""

    def hear(self, now_ns: int) -> None:
        """Counts news from a client, a tier or another machine."""
        self.changes += 1
        self.news_ns = now_ns

    def arrive(self, now_ns: int) -> None:
        """Counts a request that is queued."""
        self.arrivals += 1
        self.arrived_ns = now_ns


class HeldPlan:
    """A plan of decodes alone that is carried out again, one iteration after the other, for as long as it holds."""

    __slots__ = ("_arrivals", "_changes", "_until_ns", "left")

    def __init__(self, left: int, version: Version, *, through_arrivals: bool, until_ns: int) -> None:
        self.left = left
        """Iterations that it holds for, beyond the first."""
        self._changes = version.changes
        self._arrivals = -1 if through_arrivals else version.arrivals
        self._until_ns = until_ns

    @property
    def through_arrivals(self) -> bool:
        """Whether it lets arrivals pass."""
        return self._arrivals < 0

    @property
    def until_ns(self) -> int:
        """The instant before which an iteration has to start for the plan to hold."""
        return self._until_ns

    def holds(self, version: Version, now_ns: int) -> bool:
        """Whether the plan holds at *now_ns*: nothing has happened that it does not let pass."""
        return (
            self.left > 0
            and self._changes == version.changes
            and (self._arrivals < 0 or self._arrivals == version.arrivals)
            and now_ns < self._until_ns
        )
