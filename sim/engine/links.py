"""A link that KV crosses: first come, first served, a stated number of transfers at once."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf, isfinite


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What is known of a link beforehand."""

    bandwidth_bytes_per_s: float
    """Of one transfer; infinite for a link that only delays."""
    latency_s: float = 0.0
    """From the last byte sent to the last byte received; it occupies nothing."""
    concurrent_transfers: int = 1
    """So many go on at once, each with the whole `bandwidth_bytes_per_s`: rails, or copy engines."""
    write_bytes_per_s: float | None = None
    """Of a transfer in the other direction; None: the same."""

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be positive, not {self.bandwidth_bytes_per_s!r}")
        if self.write_bytes_per_s is not None and not self.write_bytes_per_s > 0:
            raise ValueError(f"write_bytes_per_s must be positive, not {self.write_bytes_per_s!r}")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s must be finite and not negative, not {self.latency_s!r}")
        if self.concurrent_transfers < 1:
            raise ValueError(f"concurrent_transfers must be at least 1, not {self.concurrent_transfers}")

    def occupied_ns(self, n_bytes: int, *, writes: bool = False) -> int:
        """How long a transfer holds its place on the link."""
        rate = self.bandwidth_bytes_per_s
        if writes and self.write_bytes_per_s is not None:
            rate = self.write_bytes_per_s
        return 0 if rate == inf else round(n_bytes / rate * 1e9)


@dataclass(frozen=True, slots=True)
class Transfer:
    """When one transfer waited, went and arrived."""

    asked_ns: int
    begin_ns: int
    sent_ns: int
    arrived_ns: int
    n_bytes: int

    @property
    def waited_ns(self) -> int:
        """For its turn; 0 for one that began before all of it was at hand."""
        return max(self.begin_ns - self.asked_ns, 0)


class Link:
    """Transfers are asked for in order of time; what has been promised is not changed by what is asked later."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._latency_ns = round(spec.latency_s * 1e9)
        self._free_ns = [0] * spec.concurrent_transfers
        """A heap: when each place is free again."""
        self.busy_ns = 0
        """Summed over places."""

    def wait_ns(self, now_ns: int) -> int:
        """How long a transfer that is asked for now would wait for its turn."""
        return max(0, self._free_ns[0] - now_ns)

    def send(
        self, now_ns: int, n_bytes: int, *, writes: bool = False, since_ns: int | None = None, last_bytes: int = 0
    ) -> Transfer:
        """Takes the first place that is free.

        *since_ns*: the bytes came to be at hand evenly from then on, the last *last_bytes* now, and were sent behind that in what
        time the place had been free: what nobody had asked for is given away afterwards, so that no promise changes.
        """
        begin = max(now_ns if since_ns is None else since_ns, self._free_ns[0])
        occupied = self.spec.occupied_ns(n_bytes, writes=writes)
        sent = begin + occupied
        if since_ns is not None:
            sent = max(sent, now_ns + self.spec.occupied_ns(last_bytes))
        heapq.heapreplace(self._free_ns, sent)
        self.busy_ns += occupied
        return Transfer(now_ns, begin, sent, sent + self._latency_ns, n_bytes)
