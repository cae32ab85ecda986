"""KV memory behind the device: host memory, disks, a store that machines share, and that of other machines.

A `Tiers` is one engine core's: the blocks of a prompt in each tier, the time of a load, and what is written when. A load
or a store takes its tier's link, first come first served and both directions together; iterations go on meanwhile. Sequences
that are queued for a load are in `sim.engine.serve.loading`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple

from policies.eviction import Eviction, RankFunction, asks_for_more, rank_of
from sim.engine.kv.content import Contents
from sim.engine.kv.content_store import LOADED, WRITTEN_AGAIN, Piece, Space
from sim.engine.record.columns import DEVICE, LOAD, MOVE_IN, PLACES, STORE, Recorder, TierKind
from sim.engine.tiers.links import Limit, Links, LinkSpec, Slowdown, Transfer, not_at_once
from sim.engine.tiers.stores import SharedStore, Store

WriteRule = Literal["through", "eviction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier of a model on a machine."""

    kind: TierKind
    """`host` and `disk` are the machine's own, a `remote` store is shared by all machines that name it, and `peer` is the host
    memory of the other machines, which is only read."""
    read_bytes_per_s: float
    """The rate of all the machine's devices."""
    write_bytes_per_s: float | None = None
    """None: as it reads."""
    latency_s: float = 0.0
    """Time of a load or store beside its bytes; it occupies no link."""
    capacity_bytes: int = 0
    """0 for a `peer`."""
    write: WriteRule = "through"
    """`through`: prompt blocks are written when they have been computed, and of a tree all that is put into it; `eviction`: those
    that the device, or the tier before this one, evicts."""
    eviction: Eviction | RankFunction | None = None
    """Which of its blocks go first; None: the least recently used, and of these the last of a prompt. A tier counts one use of what
    is written, and one of each load. A `peer` has none."""
    min_load_tokens: int = 0
    """A prompt that would gain fewer tokens is computed."""
    skip_when_slower: bool = False
    """Loads are left out that would take longer, queueing for the link included, than computing their tokens alone."""
    concurrent_transfers: int = 1
    staged: bool = False
    """Loads come to host memory first: the time of a copy over the link of the `host` tier is added, but no queueing for it."""
    store: str = ""
    """A `remote` tier's store."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Times at which its link is slower."""
    limits: tuple[Limit, ...] = ()
    """Limits that its link shares with others: of a store over all machines, or of a fabric."""
    link: str = ""
    """Models on a machine whose tiers name the same link share it."""

    def __post_init__(self) -> None:
        if self.kind not in PLACES[1:]:
            raise ValueError(f"kind is one of {', '.join(PLACES[1:])}; got {self.kind!r}")
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is the bandwidth of the tier's link and above 0; got {rate!r}")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is a finite time of at least 0; got {self.latency_s!r}")
        if self.write not in ("through", "eviction"):
            raise ValueError(f"write is through or eviction; got {self.write!r}")
        if self.kind != "peer" and self.capacity_bytes < 1:
            raise ValueError(f"a {self.kind} tier has capacity_bytes; got {self.capacity_bytes}")
        if self.kind == "peer" and self.eviction is not None:
            raise ValueError("a peer tier reads the host memory of other machines, which evicts by its own rule")
        if asks_for_more(self.eviction):
            raise ValueError(
                "a tier is not told which request looks for its blocks next, nor whose they are and for how long: part of them are "
                "used on the device; an eviction policy that asks for that is one of the device's cache alone"
            )
        if self.min_load_tokens < 0:
            raise ValueError(f"min_load_tokens is at least 0; got {self.min_load_tokens}")
        not_at_once(self.slowdowns)

    @property
    def link_spec(self) -> LinkSpec:
        return LinkSpec(
            bandwidth_bytes_per_s=self.read_bytes_per_s,
            latency_s=self.latency_s,
            concurrent_transfers=self.concurrent_transfers,
            write_bytes_per_s=self.write_bytes_per_s,
            slowdowns=self.slowdowns,
            limits=self.limits,
        )


def check_tiers(specs: Sequence[TierSpec]) -> None:
    """ValueError for tiers of one machine that do not go together."""
    kinds = [spec.kind for spec in specs]
    for kind in ("host", "peer"):
        if kinds.count(kind) > 1:
            raise ValueError(f"a machine has one tier of kind {kind} at most; got {kinds.count(kind)}")
    if "peer" in kinds and "host" not in kinds:
        raise ValueError("a peer tier reads the host memory of other machines, and there is no tier of kind host")
    if "host" not in kinds and any(spec.staged for spec in specs):
        raise ValueError("staged loads come over the link of the host tier, and there is no tier of kind host")
    for above, spec in zip((None, *specs), specs, strict=False):
        if spec.write != "eviction" or spec.kind == "peer" or above is None:
            continue
        if above.kind == "host" and "peer" in kinds and spec.limits:
            raise ValueError(
                f"write: eviction: the {spec.kind} tier would take what host memory gives up that others read, at a moment that no "
                "order of machines says, over a limit that they share; write it through, or leave the limit out"
            )
        if above.kind in ("remote", "peer"):
            raise ValueError(
                f"write: eviction: the {spec.kind} tier would take what a {above.kind} tier gives up, which is no machine's own; "
                "write it through"
            )


class SharedStores:
    """Stores and links that machines of a run share."""

    def __init__(self, *, peers: bool) -> None:
        self.links = Links()
        self.peers = peers
        """Whether machines read each other's host memory."""
        self.hosts: dict[int, SharedStore] = {}
        """Host memory by engine core number, in order of machines."""
        self._named: dict[str, tuple[TierSpec, SharedStore]] = {}

    def host(self, number: int, spec: TierSpec) -> Store:
        if not self.peers:
            return Store(spec.capacity_bytes, _rank(spec))
        self.hosts[number] = SharedStore(spec.capacity_bytes, _rank(spec))
        return self.hosts[number]

    def named(self, spec: TierSpec) -> Store:
        first, found = self._named.setdefault(spec.store, (spec, SharedStore(spec.capacity_bytes, _rank(spec))))
        for name in ("capacity_bytes", "eviction"):
            if getattr(first, name) != getattr(spec, name):
                raise ValueError(
                    f"machines share the store {spec.store!r} and give it {name} {getattr(first, name)} and {getattr(spec, name)}"
                )
        return found


class Segment(NamedTuple):
    """Blocks that one tier has."""

    tier: int
    lo: int
    hi: int
    source: Store
    owner: int
    """The engine core whose host memory or disk it is; -1: of none."""


class Tiers:
    """The tiers of an engine core, nearest first."""

    def __init__(
        self, specs: Sequence[TierSpec], space: Space, contents: Contents | None, recorder: Recorder, shared: SharedStores, *,
        machine: int, number: int,
    ) -> None:  # fmt: skip
        """*contents*: what the workload names; None: nothing is found again, and sequences alone are moved. *machine*: its number;
        *number*: the engine core's among all of the run."""
        check_tiers(specs)
        self.specs = tuple(specs)
        self.block_tokens, self.block_bytes = space[1], space[2]
        self._space = space
        self._contents = contents
        self._recorder = recorder
        self._shared = shared
        self._machine = machine
        self._number = number
        self.links = [
            shared.links.of(("machine", machine, spec.link) if spec.link else ("tier", number, place), spec.link_spec)
            for place, spec in enumerate(specs)
        ]
        self.stores = [self._store_of(spec) for spec in specs]
        if number in shared.hosts:
            shared.hosts[number].passes_on = self._pass_on_at
        self.skipped: Counter[tuple[int, str]] = Counter()
        """Loads that were left out, by tier and reason."""
        self.now_ns = 0
        """The present instant, set by the engine core when it acts."""
        self.price_ns: Callable[[int, int], int] = _free
        """(tokens, cached tokens) -> ns for computing the tokens."""
        self._home = next((i for i, spec in enumerate(specs) if spec.kind == "host"), -1)
        """The tier that preempted sequences are moved to, or -1."""
        self._writes_through = [i for i, spec in enumerate(specs) if spec.kind != "peer" and spec.write == "through"]
        self.takes_evicted = contents is not None and any(
            spec.kind != "peer" and spec.write == "eviction" for spec in specs
        )
        """Whether a tier takes evicted blocks, so that the time of eviction matters."""

    def _store_of(self, spec: TierSpec) -> Store | None:
        if spec.kind == "peer":
            return None
        if spec.kind == "host":
            return self._shared.host(self._number, spec)
        if spec.kind == "remote":
            return self._shared.named(spec)
        return Store(spec.capacity_bytes, _rank(spec))

    # Contents.

    def _pieces(self, id_: int, lo: int, hi: int) -> list[Piece]:
        """Blocks *lo* to *hi* of a request, in order."""
        assert self._contents is not None
        space = self._space
        return [((space, chain), first, end) for chain, first, end in self._contents.path(id_, hi, lo)]

    def _bring_up_to_now(self) -> None:
        # Blocks that a machine's memory evicts may go to a store among those that follow.
        for store in (*self._shared.hosts.values(), *self.stores):
            if isinstance(store, SharedStore):
                store.bring_up_to(self.now_ns)

    def segments(self, id_: int, at: int, upto: int) -> list[Segment]:
        """Blocks of a request from *at* on, below *upto*, by the tiers that have them, as far as a load is worth it."""
        if self._contents is None or at >= upto:
            return []
        self._bring_up_to_now()
        pieces, found = self._pieces(id_, at, upto), list[Segment]()
        for tier, spec in enumerate(self.specs):
            source, to, owner = self._longest(tier, pieces, at)
            if source is None or to <= at:
                continue
            tokens = (to - at) * self.block_tokens
            if tokens < spec.min_load_tokens:
                self.skipped[tier, "short"] += 1
                continue
            if spec.skip_when_slower and self._load_ns(tier, to - at) > self.price_ns(tokens, at * self.block_tokens):
                self.skipped[tier, "slower"] += 1
                continue
            found.append(Segment(tier, at, to, source, owner))
            at = to
        return found

    def _longest(self, tier: int, pieces: list[Piece], at: int) -> tuple[Store | None, int, int]:
        store = self.stores[tier]
        if store is not None:
            return store, store.covered(pieces, at, self.now_ns), self._owner(tier)
        best, to, owner = None, at, -1
        for number, other in self._shared.hosts.items():
            if number != self._number:
                reach = other.covered(pieces, at, self.now_ns)
                if reach > to:
                    best, to, owner = other, reach, number
        return best, to, owner

    def _owner(self, tier: int) -> int:
        return -1 if self.specs[tier].kind == "remote" else self._number

    def _load_ns(self, tier: int, blocks: int) -> int:
        link = self.links[tier]
        return (
            link.wait_ns(self.now_ns)
            + link.takes_ns(self.now_ns, blocks * self.block_bytes)
            + self._staging_ns(tier, blocks * self.block_bytes)
        )

    def load(self, id_: int, segments: Sequence[Segment]) -> int:
        """Starts a load; returns its last byte's instant, after now at the earliest."""
        ends_ns = self.now_ns + 1
        for tier, lo, hi, source, owner in segments:
            self._use(source, self._pieces(id_, lo, hi), LOADED)
            sent = self._send(LOAD, tier, id_, hi - lo, owner)
            ends_ns = max(ends_ns, sent.arrived_ns + self._staging_ns(tier, sent.n_bytes))
        return ends_ns

    def _staging_ns(self, tier: int, n_bytes: int) -> int:
        """Nanoseconds of a load's second leg, from host memory to the device."""
        if not self.specs[tier].staged or self._home < 0:
            return 0
        return self.links[self._home].takes_ns(self.now_ns, n_bytes)

    def _use(self, store: Store, pieces: list[Piece], how: int) -> None:
        if isinstance(store, SharedStore):
            store.later(self._machine, self.now_ns, pieces, how)
        else:
            store.use(pieces, how)

    def _send(self, what: int, tier: int, id_: int, blocks: int, owner: int, near: int = DEVICE) -> Transfer:
        """Reads from a tier, or writes to it: memory of engine core *owner*, or of none. *near*: the other end, a place."""
        n_bytes = blocks * self.block_bytes
        sent = self.links[tier].send(self.now_ns, n_bytes, writes=what != LOAD)
        here, there = (near, self._number), (PLACES.index(self.specs[tier].kind), owner)
        source, destination = (there, here) if what == LOAD else (here, there)
        self._recorder.add_transfer(what, id_, n_bytes, sent.times, source, destination, tier)
        return sent

    # Writing.

    def computed(self, id_: int, blocks: int) -> None:
        """Writes the first *blocks* blocks of a request, which are computed, to the tiers with the rule `through`."""
        if self._contents is None or not blocks:
            return
        self._bring_up_to_now()
        for tier in self._writes_through:
            self._write(tier, id_, self._pieces(id_, 0, blocks))

    def evicted(self, chain: int, lo: int, hi: int) -> None:
        """The device has evicted blocks *lo* to *hi* of a chain (-1 - id: a request's own)."""
        if self.takes_evicted and self.specs[0].write == "eviction":
            self._write(0, -1, [((self._space, chain), lo, hi)])

    def _write(self, tier: int, id_: int, pieces: list[Piece], near: int = DEVICE) -> None:
        store = self.stores[tier]
        assert store is not None
        if isinstance(store, SharedStore):
            store.bring_up_to(self.now_ns)
        blocks = store.missing(pieces)
        if not blocks:
            self._use(store, pieces, WRITTEN_AGAIN)
            return
        sent = self._send(STORE, tier, id_, blocks, self._owner(tier), near)
        if isinstance(store, SharedStore):
            store.later(self._machine, self.now_ns, pieces, sent.arrived_ns)
        else:
            self._pass_on(tier, store.put(pieces, self.now_ns, sent.arrived_ns))

    def _pass_on(self, tier: int, gone: list[Piece]) -> None:
        """Writes what a tier evicts to the next, where that takes it."""
        below = tier + 1
        if (
            gone
            and below < len(self.specs)
            and self.specs[below].kind != "peer"
            and self.specs[below].write == "eviction"
        ):
            for piece in gone:
                self._write(below, -1, [piece], PLACES.index(self.specs[tier].kind))

    def _pass_on_at(self, gone: list[Piece], at_ns: int) -> None:
        """`_pass_on` for host memory that others read, which evicted it at *at_ns*."""
        now_ns, self.now_ns = self.now_ns, at_ns
        self._pass_on(self._home, gone)
        self.now_ns = now_ns

    # Moving sequences.

    def move_out_of_the_device(self, id_: int, blocks: int) -> int:
        """Moves a preempted sequence of *blocks* blocks to host memory; returns its end in ns, -1 without room."""
        store = self.stores[self._home]
        assert store is not None
        if isinstance(store, SharedStore):
            if not store.move_in_later(self._machine, self.now_ns, id_, blocks * self.block_bytes):
                return -1
        else:
            gone = store.move_in(id_, blocks * self.block_bytes)
            if gone is None:
                return -1
            self._pass_on(self._home, gone)
        return self._send(MOVE_IN, self._home, id_, blocks, self._number).arrived_ns

    def move_back(self, id_: int, blocks: int) -> int:
        """Copies back *blocks* blocks that the device lacks of a sequence; returns the last byte's instant."""
        sent = self._send(LOAD, self._home, id_, blocks, self._number)
        return max(sent.arrived_ns, self.now_ns + 1)

    def forget(self, id_: int) -> None:
        """Drops a sequence that was moved to host memory."""
        store = self.stores[self._home]
        assert store is not None
        store.move_out(id_)

    def lost(self, now_ns: int) -> list[Store]:
        """Drops host memory and disks of a machine that has stopped, and its writes to others; returns stores that others may
        have been reading."""
        self.now_ns = now_ns
        gone: list[Store] = []
        for spec, store, link in zip(self.specs, self.stores, self.links, strict=True):
            link.stop(now_ns)
            if spec.kind == "remote":
                assert isinstance(store, SharedStore)
                store.writer_gone(self._machine, now_ns)
            elif store is not None:
                store.clear()
                gone.append(store)
        return gone

    @property
    def home(self) -> int:
        return self._home

    def fault(self) -> str | None:
        """The first invariant of a tier that does not hold, or None."""
        for spec, store in zip(self.specs, self.stores, strict=True):
            fault = None if store is None else store.fault()
            if fault is not None:
                return f"{spec.kind} tier: {fault}"
        return None


def _rank(spec: TierSpec) -> RankFunction | None:
    return None if spec.eviction is None else rank_of(spec.eviction)


def _free(tokens: int, cached: int) -> int:
    return 0
