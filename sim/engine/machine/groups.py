"""The engine cores of one model on a machine, whose micro-batches run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from hwmodels.totals import Totals
from policies.ranks import Balance, Moment, RankWork
from policies.view import ALWAYS_NS, counts_steps
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.rank_prices import IDLE, CommonPrices
from sim.engine.batch.stages import Stages
from sim.engine.machine.one_queue import OneQueue
from sim.engine.serve.engine_core import NOTHING, EngineCore
from sim.engine.time.clock import TICK_BITS


class Group:
    """One engine core, or those of the ranks of one model: their i-th micro-batches begin and end together.

    A rank whose scheduler plans nothing for its micro-batch is idle in it.
    """

    def __init__(
        self, cores: Sequence[EngineCore], stages: Stages, prices: CommonPrices | None, balance: Balance | None
    ) -> None:
        """*prices*: of the micro-batches of ranks; None for one engine core."""
        self.cores = cores
        self._stages = stages
        self.prices = prices
        self._balance = balance
        self.one_queue: OneQueue | None = None
        """The queue of ranks whose requests wait together while all seats are taken."""
        self._waited = None if balance is None else balance.begin()
        self._started = [0] * len(cores)
        """Prompts that each rank computed in the latest step."""
        self._step = 0 if prices is not None and counts_steps(cores[0].spec.scheduler) else -1
        """The number of the coming step since all ranks were idle; -1: it is not counted."""
        self._since_prompts = ALWAYS_NS
        """Steps since the last one in which a rank computed prompt tokens."""
        self._ready = deque(zip(*(core.batches for core in cores), strict=True))
        """Micro-batches that are not in flight, one of each engine core; the longest idle first."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence is there, or on its way from a tier."""
        first = self.cores[0]
        if first.sequences.busy or first.n_loading:
            return True
        if any([core.sequences.busy or core.n_loading for core in self.cores[1:]]):
            return True
        return self.queues

    @property
    def queues(self) -> bool:
        """Whether any request waits in the queue of all ranks."""
        return self.one_queue is not None and bool(self.one_queue.waiting)

    @property
    def balances(self) -> bool:
        """Whether prompts may have to wait for those of other ranks."""
        return self._balance is not None

    @property
    def oldest(self) -> int:
        """The waiting request that came first, ALWAYS_NS where none waits. Requests are numbered in order of arrival."""
        return min([core.sequences.queue[0].id if core.sequences.queue else ALWAYS_NS for core in self.cores])

    # Micro-batches that take turns on the stages.

    def send_next(self, ticks: int) -> tuple[int, tuple[MicroBatch, ...]] | None:
        """Send those micro-batches off that have been idle longest and have work; return the tick at which they leave the last
        stage, and themselves."""
        ready = self._ready
        refused: set[int] = set()
        for _ in range(max(len(ready), 1)):
            batches = ready.popleft() if ready else self._more_batches()
            if batches is None:
                return None
            # As they are before they are asked: one that is emptied by that, as clients have gone, was not empty when asked.
            end = self._begin(batches, ticks, [rank for rank in refused if not batches[rank].admitted])
            if end != NOTHING:
                return end, batches
            ready.append(batches)
            # A policy plans the same for an empty micro-batch as for the one before.
            refused = {rank for rank, batch in enumerate(batches) if not batch.admitted}
        return None

    def _more_batches(self) -> tuple[MicroBatch, ...] | None:
        """One more micro-batch of each engine core; None where no more may be in flight."""
        return tuple([core.add_batch() for core in self.cores]) if self.cores[0].may_add_batch else None

    def _begin(self, batches: Sequence[MicroBatch], ticks: int, refused: Collection[int]) -> int:
        """Send what is planned at *ticks* through the stages; return the tick at which it leaves the last, or NOTHING. *refused*:
        ranks that are known to plan nothing, and are not asked."""
        if self.prices is None:
            # One engine core sends its micro-batch itself.
            batch = batches[0]
            batch.wake_ns = ALWAYS_NS
            return NOTHING if refused else self.cores[0].begin(batch, ticks)
        taking, totals, draft_steps = self.prepare(batches, ticks, refused)
        if not taking:
            return NOTHING
        iterations = [self.cores[rank].iterations for rank in taking]

        def record(_: int, stage: int, begin_ns: int, duration_ns: int, bubble_ns: int, kind: int) -> None:
            for each in iterations:
                each.add_stage(stage, begin_ns, duration_ns, bubble_ns, kind)

        durations, handover = self.prices.common_stages(totals, draft_steps)
        prefills = any([batches[rank].run for rank in taking])
        end, bubbles = self._stages.send(ticks, durations, handover, prefills, 0, record)
        for rank in taking:
            self.cores[rank].iterations.launch(batches[rank], ticks, end, bubbles)
        self.count_steps(1, prompts=prefills)
        return end

    def prepare(
        self, batches: Sequence[MicroBatch], ticks: int, refused: Collection[int] = ()
    ) -> tuple[list[int], list[Totals], list[int]]:
        """Have the scheduler of each rank plan at *ticks*; return the numbers of those that take part, and rank by rank the totals
        and the draft steps. *refused*: ranks that plan nothing for an empty micro-batch."""
        if self.one_queue is not None:
            self.one_queue.give_out()
        found = self._prepared(batches, ticks, refused)
        if found[0] or self._step < 0 or self._since_prompts == ALWAYS_NS or not self.has_work:
            return found
        # Rounds in which nothing runs take no time.
        self._since_prompts = ALWAYS_NS
        return self._prepared(batches, ticks, refused)

    def _prepared(
        self, batches: Sequence[MicroBatch], ticks: int, refused: Collection[int]
    ) -> tuple[list[int], list[Totals], list[int]]:
        """As `prepare`, where prompts are due."""
        if self._step >= 0:
            for batch in batches:
                batch.view.step, batch.view.since_prompts = self._step, self._since_prompts
        balance = self._balance
        if balance is None:
            return self._plan(batches, ticks, refused)
        while True:
            waited = self._waited
            self._let_prompts_start(balance, batches, ticks)
            found = self._plan(batches, ticks, refused)
            self._started = [len(batch.run) if rank in found[0] else 0 for rank, batch in enumerate(batches)]
            if found[0] or not self.cores[0].planner.prompts_wait or all(self.decodes(batches)):
                return found
            # Nothing runs: the decodes that prompts were to wait for have left as the ranks planned, such as those of aborted
            # requests, or other ranks have no work. This pass counts as a waited step only where the balance counts idle passes.
            if not balance.counts_idle:
                self._waited = waited

    def _plan(
        self, batches: Sequence[MicroBatch], ticks: int, refused: Collection[int]
    ) -> tuple[list[int], list[Totals], list[int]]:
        """Plan as `prepare` does, with prompts shown or not."""
        taking: list[int] = []
        totals, draft_steps = [IDLE] * len(batches), [0] * len(batches)
        for rank, core in enumerate(self.cores):
            batch = batches[rank]
            batch.wake_ns = ALWAYS_NS
            if rank in refused:
                continue
            if core.begin(batch, ticks) != NOTHING:
                taking.append(rank)
                prepared = batch.prepared
                assert prepared is not None
                totals[rank], draft_steps[rank] = prepared.priced, prepared.draft_steps
        return taking, totals, draft_steps

    def end(self, batches: tuple[MicroBatch, ...]) -> None:
        """They have left the last stage."""
        for rank, core in enumerate(self.cores):
            span = batches[rank].span
            if span is not None:
                core.commit(batches[rank], 1, span.end(1))
        self._ready.append(batches)

    def stop(self) -> None:
        """Forget what has not left the last stage, and what prompts have waited for."""
        for core in self.cores:
            core.drop_in_flight()
        self._waited = None if self._balance is None else self._balance.begin()
        self.count_steps(0)
        self._ready = deque(zip(*(core.batches for core in self.cores), strict=True))

    # Prompts that wait for each other.

    def _let_prompts_start(self, balance: Balance, batches: Sequence[MicroBatch], ticks: int) -> None:
        """Let prompts start in the coming micro-batches, or have them wait."""
        prompts = [core.schedules_prompts(batch, ticks) for core, batch in zip(self.cores, batches, strict=True)]
        works = [
            RankWork(each, decodes, *core.planner.seen(batch), started)
            for each, decodes, core, batch, started in zip(
                prompts, self.decodes(batches), self.cores, batches, self._started, strict=True
            )
        ]
        starts, self._waited = balance.start(works, self._waited, Moment(ticks >> TICK_BITS, self._since_prompts))
        for core in self.cores:
            core.planner.let_prompts_start(starts, chunks=balance.chunks_go_on)

    def count_steps(self, n: int, *, prompts: bool = False) -> None:
        """Count *n* steps, the last of which computed *prompts* or not; 0: all ranks are idle, and the next step is the first."""
        if self._step >= 0:
            self._step = self._step + n if n else 0
            self._since_prompts = 0 if prompts else self._since_prompts + n if n else ALWAYS_NS

    def pass_steps(self, decodes: Sequence[bool], n: int) -> None:
        """Count *n* steps in which the ranks had no prompt that could run; *decodes*: whether each had decodes."""
        if self._balance is not None:
            works = [RankWork(False, each) for each in decodes]
            for _ in range(n):
                _, self._waited = self._balance.start(works, self._waited, Moment(0, self._since_prompts))

    def decodes(self, batches: Sequence[MicroBatch]) -> list[bool]:
        """Whether each rank has decodes for its micro-batch now."""
        return [bool(batch.decoding.n or batch.paused) for batch in batches]

    def prompts_wait(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether prompts are there, and none may start."""
        return self.cores[0].planner.prompts_wait and any(
            [bool(core.sequences.queue or batch.partial) for core, batch in zip(self.cores, batches, strict=True)]
        )
