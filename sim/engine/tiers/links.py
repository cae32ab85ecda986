"""Links that KV crosses: first come, first served, a stated number of transfers at once, slower at stated times.

Links may have limits in common: the switches of a fabric, or a store that many machines read. A transfer takes of each the earliest
capacity that those before it have left, and holds its place on its own link until its last byte is through all of them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

_UNHARMED: Final = (1.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A time for which a link is not what it was."""

    at_s: Annotated[float, Ge(0)]
    for_s: Annotated[float, Ge(0)] | None = None
    """Where it is left out, to the end."""
    factor: Annotated[float, Ge(0), Le(1)] = 1.0
    """A factor on the bandwidth: 0.1 leaves a tenth, 0 stops the link and needs for_s. A transfer goes on at whatever there is."""
    added_latency_s: Annotated[float, Ge(0)] = 0.0
    """The time that each transfer takes beside its bytes and latency whose last byte is sent in this time."""

    def __post_init__(self) -> None:
        for name in ("at_s", "for_s", "added_latency_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is a finite time of at least 0; got {value!r}")
        if not 0 <= self.factor <= 1:
            raise ValueError(f"factor is a share of the bandwidth, from 0 to 1; got {self.factor!r}")
        if self.factor == 0 and self.for_s is None:
            raise ValueError(
                "factor 0 stops the link, and without for_s it never goes on; give for_s, or a factor above 0"
            )
        if self.factor == 1 and not self.added_latency_s:
            raise ValueError("nothing is degraded: give factor below 1, or added_latency_s")

    @property
    def begin_ns(self) -> int:
        return round(self.at_s * 1e9)

    @property
    def end_ns(self) -> float:
        return inf if self.for_s is None else round(self.at_s * 1e9) + round(self.for_s * 1e9)


def not_at_once(slowdowns: tuple[Slowdown, ...]) -> tuple[Slowdown, ...]:
    """*slowdowns* of one link; ValueError where two hold at once."""
    for one, two in pairwise(sorted(slowdowns, key=lambda each: each.begin_ns)):
        if two.begin_ns < one.end_ns:
            until = "to the end" if one.for_s is None else f"to {one.at_s + one.for_s:g} s"
            raise ValueError(
                f"from {two.at_s:g} s on the link is slowed down twice: the one of {one.at_s:g} s holds {until}; have it end before"
            )
    return slowdowns


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that all links with a limit of this name carry together."""

    name: str
    bytes_per_s: float
    way: Literal["both", "read", "write"] = "both"
    """The direction that counts; `both`: the two together."""

    def __post_init__(self) -> None:
        if not (isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(f"bytes_per_s of the limit {self.name!r} is finite and above 0; got {self.bytes_per_s!r}")


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The configuration of a link."""

    bandwidth_bytes_per_s: float
    """Rate of a transfer; infinite if the link only delays."""
    latency_s: float = 0.0
    """Time from last byte sent to last byte received; it occupies nothing."""
    concurrent_transfers: int = 1
    """Transfers at once, each with the whole `bandwidth_bytes_per_s`: rails, or copy engines."""
    write_bytes_per_s: float | None = None
    """The rate in the other direction; None: the same."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Times at which the link is slower."""
    limits: tuple[Limit, ...] = ()
    """Limits that it shares with other links."""

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be positive, not {self.bandwidth_bytes_per_s!r}")
        if self.write_bytes_per_s is not None and not self.write_bytes_per_s > 0:
            raise ValueError(f"write_bytes_per_s must be positive, not {self.write_bytes_per_s!r}")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s must be finite and not negative, not {self.latency_s!r}")
        if self.concurrent_transfers < 1:
            raise ValueError(f"concurrent_transfers must be at least 1, not {self.concurrent_transfers}")
        not_at_once(self.slowdowns)

    def occupied_ns(self, n_bytes: int, *, writes: bool = False) -> int:
        """Nanoseconds for which a transfer holds its place, at full bandwidth."""
        rate = self.bandwidth_bytes_per_s
        if writes and self.write_bytes_per_s is not None:
            rate = self.write_bytes_per_s
        return 0 if rate == inf else round(n_bytes / rate * 1e9)


Stretches = tuple[tuple[int, int], ...]
"""Times from one instant to another, in order."""


class Capacity:
    """A limit that links share, and when it is taken."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._begins: list[int] = []
        self._ends: list[int] = []

    def next_free(self, begin_ns: int, n_bytes: int) -> Stretches:
        """The earliest times from *begin_ns* on at which *n_bytes* can pass."""
        left, at, found = round(n_bytes / self.limit.bytes_per_s * 1e9), begin_ns, list[tuple[int, int]]()
        if not left:
            return ((at, at),)
        for i in range(max(bisect_right(self._begins, at) - 1, 0), len(self._begins)):
            free_ns = min(self._begins[i] - at, left)
            if free_ns > 0:
                found.append((at, at + free_ns))
                left -= free_ns
            if not left:
                return tuple(found)
            at = max(at, self._ends[i])
        return (*found, (at, at + left))

    def take(self, stretches: Stretches) -> None:
        """Take times that are free."""
        begins, ends = self._begins, self._ends
        for begin, end in stretches:
            i = bisect_left(begins, begin)
            follows, leads = i > 0 and ends[i - 1] == begin, i < len(begins) and begins[i] == end
            if follows and leads:
                del begins[i], ends[i - 1]
            elif follows:
                ends[i - 1] = end
            elif leads:
                begins[i] = begin
            elif end > begin:
                begins.insert(i, begin)
                ends.insert(i, end)

    def give_back(self, stretches: Stretches, from_ns: int) -> None:
        """Give back what is taken after *from_ns*."""
        begins, ends = self._begins, self._ends
        for begin, end in ((max(begin, from_ns), end) for begin, end in stretches if end > max(begin, from_ns)):
            i = bisect_right(begins, begin) - 1
            rest = [(low, high) for low, high in ((begins[i], begin), (end, ends[i])) if high > low]
            begins[i : i + 1] = [low for low, _ in rest]
            ends[i : i + 1] = [high for _, high in rest]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The instants and bytes of one transfer."""

    asked_ns: int
    begin_ns: int
    sent_ns: int
    arrived_ns: int
    n_bytes: int
    through_ns: int
    """The end of its bytes; its place is held until `sent_ns`."""
    taken: tuple[tuple[Capacity, Stretches], ...] = ()
    """The stretches that it has of each shared limit."""

    @property
    def times(self) -> tuple[int, int, int, int]:
        """Asked for, begun, sent, arrived (ns)."""
        return self.asked_ns, self.begin_ns, self.sent_ns, self.arrived_ns


class Link:
    """A link. Transfers are asked for in order of time, and a later one never changes the others' times."""

    def __init__(self, spec: LinkSpec, shared: Sequence[Capacity] = ()) -> None:
        """*shared*: the capacities of the limits of *spec*."""
        self.spec = spec
        self._shared = {
            writes: [each for each in shared if each.limit.way != ("read" if writes else "write")]
            for writes in (False, True)
        }
        self._limited: list[Transfer] = []
        """Transfers that have taken of a limit and may be on the link."""
        self._latency_ns = round(spec.latency_s * 1e9)
        self._changes = _changes(spec.slowdowns)
        self._free_ns = [0] * spec.concurrent_transfers
        """A heap: the end of each place's use."""
        self.busy_ns = 0
        """Summed over places."""
        self._stretched: list[tuple[int, int]] = []
        """(end of the bytes, end of the place's use) of transfers that held a place for longer than their bytes took, and may do
        so still."""

    def wait_ns(self, now_ns: int) -> int:
        """Nanoseconds for which a transfer asked for now is queued."""
        return max(0, self._free_ns[0] - now_ns)

    def takes_ns(self, now_ns: int, n_bytes: int) -> int:
        """Nanoseconds until a transfer that begins now arrives, if the link stays as it is; where it stands still, its later
        changes count."""
        factor, more_ns = self._state_at(now_ns)
        occupied = self.spec.occupied_ns(n_bytes)
        begin_ns = now_ns + self.wait_ns(now_ns) if self._shared[False] else now_ns
        limited = max((each.next_free(begin_ns, n_bytes)[-1][1] - begin_ns for each in self._shared[False]), default=0)
        if factor:
            return max(round(occupied / factor), limited) + self._latency_ns + more_ns
        sent = max(self._sent_ns(now_ns, occupied), now_ns + limited)
        return sent - now_ns + self._latency_ns + self._state_at(sent)[1]

    def send(
        self, now_ns: int, n_bytes: int, *, writes: bool = False, since_ns: int | None = None, last_bytes: int = 0
    ) -> Transfer:
        """Sends on the first free place.

        *since_ns*: the bytes were produced evenly from then on, the last *last_bytes* now, and were sent in the time that the
        place had been free since: that was in no other transfer's use, so that no other one changes.
        """
        begin = max(now_ns if since_ns is None else since_ns, self._free_ns[0])
        through = self._sent_ns(begin, self.spec.occupied_ns(n_bytes, writes=writes))
        taken = tuple((each, each.next_free(begin, n_bytes)) for each in self._shared[writes])
        for capacity, stretches in taken:
            capacity.take(stretches)
            through = max(through, stretches[-1][1])
        self.busy_ns += through - begin
        sent = through
        if since_ns is not None:
            sent = max(sent, self._sent_ns(now_ns, self.spec.occupied_ns(last_bytes)))
            self._stretched = [each for each in self._stretched if each[1] > now_ns]
            if sent > through:
                self._stretched.append((through, sent))
        heapq.heapreplace(self._free_ns, sent)
        arrived = sent + self._latency_ns + self._state_at(sent)[1]
        transfer = Transfer(now_ns, begin, sent, arrived, n_bytes, through, taken)
        if taken:
            self._limited = [*(each for each in self._limited if each.sent_ns > now_ns), transfer]
        return transfer

    def stop(self, now_ns: int) -> None:
        """Drops the transfers that are on the link or queued for it."""
        self.busy_ns -= sum(max(free_ns - now_ns, 0) for free_ns in self._free_ns)
        self.busy_ns += sum(max(sent_ns - max(gone_ns, now_ns), 0) for gone_ns, sent_ns in self._stretched)
        self._stretched.clear()
        for transfer in self._limited:
            self._give_back(transfer, now_ns)
        self._limited.clear()
        self._free_ns = [min(free_ns, now_ns) for free_ns in self._free_ns]
        heapq.heapify(self._free_ns)

    def cancel(self, transfer: Transfer, now_ns: int) -> None:
        """Cancels a transfer: its place is free from *now_ns* on, unless later ones have been given it since."""
        end_ns = max(transfer.begin_ns, now_ns)
        if transfer in self._limited:
            self._limited.remove(transfer)
            self._give_back(transfer, now_ns)
        if end_ns >= transfer.sent_ns or transfer.sent_ns not in self._free_ns:
            return
        self._free_ns[self._free_ns.index(transfer.sent_ns)] = end_ns
        heapq.heapify(self._free_ns)
        self.busy_ns -= max(transfer.through_ns - end_ns, 0)
        if (transfer.through_ns, transfer.sent_ns) in self._stretched:
            self._stretched.remove((transfer.through_ns, transfer.sent_ns))

    def _give_back(self, transfer: Transfer, now_ns: int) -> None:
        for capacity, stretches in transfer.taken:
            capacity.give_back(stretches, now_ns)

    def _state_at(self, at_ns: int) -> tuple[float, int]:
        """(share of the bandwidth, ns beside the latency) at an instant."""
        changes = self._changes
        if not changes:
            return _UNHARMED
        at = bisect_right(changes, at_ns, key=lambda change: change[0]) - 1
        return _UNHARMED if at < 0 else changes[at][1:]

    def _sent_ns(self, begin_ns: int, occupied_ns: int) -> int:
        """The end of sending that begins at *begin_ns* and takes *occupied_ns* at full bandwidth."""
        changes = self._changes
        if not changes:
            return begin_ns + occupied_ns
        at = bisect_right(changes, begin_ns, key=lambda change: change[0])
        now_ns, left = begin_ns, float(occupied_ns)
        factor = changes[at - 1][1] if at else 1.0
        for until_ns, after, _ in changes[at:]:
            if factor and left <= (until_ns - now_ns) * factor:
                break
            left -= (until_ns - now_ns) * factor
            now_ns, factor = until_ns, after
        return now_ns + round(left / factor)


def _changes(slowdowns: Sequence[Slowdown]) -> list[tuple[int, float, int]]:
    """(instant, factor, added latency in ns) of each change, in order of time."""
    found: list[tuple[int, float, int]] = []
    for each in sorted(slowdowns, key=lambda each: each.begin_ns):
        if found and found[-1][0] == each.begin_ns:
            found.pop()
        found.append((each.begin_ns, each.factor, round(each.added_latency_s * 1e9)))
        if each.end_ns < inf:
            found.append((round(each.end_ns), *_UNHARMED))
    return found


class Links:
    """The links of a run, each made when it is first asked for, and the limits that they share."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Link] = {}
        self._capacities: dict[str, Capacity] = {}

    def of(self, key: Hashable, spec: LinkSpec) -> Link:
        """The link called *key*; all that name the same one share it."""
        if key not in self._made:
            self._made[key] = Link(spec, [self._capacity(limit) for limit in spec.limits])
        link = self._made[key]
        if link.spec is not spec and link.spec != spec:
            raise ValueError(f"the link {key!r} is shared, and is said to be {link.spec!r} and {spec!r}")
        return link

    def _capacity(self, limit: Limit) -> Capacity:
        found = self._capacities.setdefault(limit.name, Capacity(limit))
        if found.limit != limit:
            raise ValueError(
                f"links share the limit {limit.name!r}, and it is said to be {found.limit!r} and {limit!r}"
            )
        return found
