"""Groups of prompts that begin alike, sent in stages: the shared-prefix load of inference-perf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.follows import Follows
from workloads.streams import Count, CountFromZero, FromZero, Positive, Stream, check_bounds, stream
from workloads.trace import Trace
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStage:
    """Part of a load: floor(rate x duration) requests."""

    rate_per_s: Positive
    duration_s: Positive

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.requests < 1:
            raise ValueError(f"a stage sends at least one request; got {self.rate_per_s:g}/s for {self.duration_s:g} s")

    @property
    def requests(self) -> int:
        # A product that is a hair below a whole number is that number: 0.1 x 30.
        return int(np.floor(self.rate_per_s * self.duration_s + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Groups of prompts that begin with the same system prompt, sent in stages as inference-perf does it: a later stage asks for
    the prompts of an earlier one again.

    The texts of all groups, a system prompt and a question of its own each, are shuffled once, if at all; request n of a stage is
    text n modulo their number. After kubernetes-sigs/inference-perf (shared_prefix_datagen.py, load_timer.py, load_generator.py).
    """

    groups: Count
    prompts_per_group: Count
    system_prompt_tokens: Count
    question_tokens: Count
    output_tokens: CountFromZero
    stages: Annotated[tuple[LoadStage, ...], MinLen(1)]
    pause_s: FromZero = 1.0
    """The time from the end of a stage's last request to the next stage."""
    arrival: Literal["poisson", "constant"] = "poisson"
    """`poisson`: a Poisson number each second, spread by exponential gaps; `constant`: exponential gaps scaled to the stage,
    despite its name in inference-perf."""
    block_tokens: Count = 16
    """Tokens that one id of the generated prompts stands for."""
    shuffle: bool = True
    """Prompts of all groups are mixed; otherwise group comes after group, which is the least that a cache has to hold at once."""
    in_flight: Count | None = None
    """Requests that the client has under way at most; the others wait in it, and no latency counts their wait. None: no limit."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.stages:
            raise ValueError("stages needs at least one, such as {rate_per_s: 5, duration_s: 60}")
        if self.arrival not in ("poisson", "constant"):
            raise ValueError(f"arrival is poisson or constant; got {self.arrival!r}")

    def trace(self, seed: int) -> Trace:
        """The requests, stage after stage; `stage_of` says which one a row belongs to."""
        texts = self.groups * self.prompts_per_group
        order = stream(seed, Stream.PROMPTS).permutation(texts) if self.shuffle else np.arange(texts)
        counts = [stage.requests for stage in self.stages]
        n = sum(counts)
        text = np.concatenate([order[np.arange(count) % texts] for count in counts])
        prompt = self.system_prompt_tokens + self.question_tokens
        per_text = -(-prompt // self.block_tokens)
        arrival_ns, follows = self._arrivals(seed, counts)
        return Trace(
            arrival_ns=arrival_ns,
            prompt_tokens=np.full(n, prompt, np.int64),
            output_tokens=np.full(n, self.output_tokens, np.int64),
            prefix_blocks=self._ids(texts, per_text)[text].reshape(-1),
            prefix_offsets=np.arange(n + 1, dtype=np.int64) * per_text,
            prefix_block_tokens=self.block_tokens,
            follows=follows,
            source=f"{self!r}, seed {seed}",
        )

    def requests(self, seed: int) -> Trace | StagedLoop:
        """The same as `trace`, behind the client's limit where there is one."""
        trace = self.trace(seed)
        if self.in_flight is None:
            return trace
        stage_of = self.stage_of()
        columns = {each.name: getattr(trace, each.name) for each in fields(Workload)}
        # A later stage's requests say how long after the one before they are due.
        due_ns = trace.arrival_ns
        if trace.follows is not None:
            due_ns = due_ns.copy()
            due_ns[stage_of > 0] = trace.follows.delay_ns[: np.count_nonzero(stage_of)]
        return StagedLoop(**columns, concurrency=self.in_flight, due_ns=due_ns, stage=stage_of)

    def stage_of(self) -> IntArray:
        """The stage of each request, from 0."""
        return np.repeat(np.arange(len(self.stages)), [stage.requests for stage in self.stages])

    def _ids(self, texts: int, per_text: int) -> IntArray:
        """The ids of the blocks of each text (rows): those of the system prompt are its group's, those after it its own."""
        shared = self.system_prompt_tokens // self.block_tokens
        groups = np.arange(texts, dtype=np.int64)[:, None] // self.prompts_per_group
        at = np.arange(per_text, dtype=np.int64)[None, :]
        own = self.groups * shared + np.arange(texts, dtype=np.int64)[:, None] * (per_text - shared) + at - shared
        return np.where(at < shared, groups * shared + at, own)

    def _arrivals(self, seed: int, counts: Sequence[int]) -> tuple[IntArray, Follows | None]:
        """Arrivals of the first stage, and of the others how long after the end of the one before; `arrival_ns` of these is a place
        in the order."""
        draw = _poisson if self.arrival == "poisson" else _constant
        rng = stream(seed, Stream.ARRIVALS)
        pause_ns = round(self.pause_s * NS_PER_S)
        offsets_ns: list[IntArray] = []
        arrival_ns: list[IntArray] = []
        begin_ns = 0
        for stage, count in zip(self.stages, counts, strict=True):
            ns = np.rint(draw(rng, stage, count) * NS_PER_S).astype(np.int64)
            offsets_ns.append(ns)
            arrival_ns.append(begin_ns + ns)
            begin_ns += max(int(ns[-1]), round(stage.duration_s * NS_PER_S)) + pause_ns
        if len(counts) == 1:
            return arrival_ns[0], None
        n, joins = sum(counts), len(counts) - 1
        # A request of stage s > 0 waits for join s - 1, which waits for all of stage s - 1.
        stage_of = np.repeat(np.arange(len(counts)), counts)
        waits = stage_of > 0
        edges = np.concatenate((waits.astype(np.int64), np.asarray(counts[:-1], np.int64)))
        rows = np.concatenate((n + stage_of[waits] - 1, np.arange(n - counts[-1])))
        delays = np.concatenate((np.concatenate(offsets_ns[1:]) + pause_ns, np.zeros(n - counts[-1], np.int64)))
        follows = Follows(
            offsets=np.concatenate(([0], np.cumsum(edges))), rows=rows.astype(np.int64), delay_ns=delays, joins=joins
        )
        return np.concatenate(arrival_ns), follows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StagedLoop(Workload):
    """Requests in stages, in order, from a client with so many under way at most: a stage begins when the one before has ended."""

    LEAST: ClassVar = {**Workload.LEAST, "due_ns": 0, "stage": 0}

    concurrency: int
    due_ns: IntArray
    """The instant before which each request is not sent, from the end of the stage before."""
    stage: IntArray

    def clients(self) -> _Stages:
        return _Stages(self)


class _Stages:
    """The client of one run."""

    starts_ns: Sequence[int] = (0,)

    def __init__(self, loop: StagedLoop) -> None:
        self._due_ns, self._concurrency = loop.due_ns.tolist(), loop.concurrency
        self._ends = [*(np.flatnonzero(np.diff(loop.stage)) + 1).tolist(), len(loop)]
        """The row behind each stage, of those that have not ended."""
        self._next = self._left = 0
        self._begin_ns = 0

    def start(self, now_ns: int, /) -> Iterator[tuple[int, int]]:
        """The stage begins: as many requests as may be under way."""
        self._begin_ns, self._left = now_ns, self._ends[0] - self._next
        for _ in range(min(self._concurrency, self._left)):
            yield self._sent(now_ns)

    def ended(self, _row: int, now_ns: int, /) -> Iterator[tuple[int, int]]:
        self._left -= 1
        if self._next < self._ends[0]:
            yield self._sent(now_ns)
        elif not self._left and len(self._ends) > 1:
            del self._ends[0]
            yield from self.start(now_ns)

    def _sent(self, now_ns: int) -> tuple[int, int]:
        row = self._next
        self._next = row + 1
        return row, max(now_ns, self._begin_ns + self._due_ns[row])


def _poisson(rng: np.random.Generator, stage: LoadStage, count: int) -> NDArray[np.float64]:
    """Seconds from the start of the stage, in order."""
    times: list[NDArray[np.float64]] = []
    found, second = 0, 0
    while found < count:
        in_second = int(rng.poisson(stage.rate_per_s))
        gaps = rng.standard_exponential(in_second + 1)
        times.append(second + np.cumsum(gaps)[:in_second] / gaps.sum())
        found += in_second
        second += 1
    return np.concatenate(times)[:count]


def _constant(rng: np.random.Generator, stage: LoadStage, count: int) -> NDArray[np.float64]:
    """Seconds from the start of the stage, in order."""
    gaps = rng.standard_exponential(count)
    return np.cumsum(gaps) / gaps.sum() * stage.duration_s
