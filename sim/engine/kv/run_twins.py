"""Copies of chains and runs of cached blocks that refer to each other as the ones they are of do."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.kv.block_runs import Chain, HeldRuns, Run


class Twins:
    """A twin of each chain and of each run."""

    __slots__ = ("chains", "queue", "runs")

    def __init__(self, chains: Iterable[Chain], unfound: Chain, queue: Iterable[Run], *, ranked: bool) -> None:
        """*unfound*: the chain that no look-up finds; *queue*: unheld runs; *ranked*: an eviction policy ranks them."""
        self.chains: dict[Chain, Chain] = {}
        self.runs: dict[Run, Run] = {}
        self.queue: list[Run] = []
        """Twins of the unheld runs, in the same order."""
        for chain in (*chains, unfound):
            twin = self.chains[chain] = Chain(chain.start, None, chain.owner, chain.number)
            twin.end, twin.overlaps, twin.writers = chain.end, chain.overlaps, dict(chain.writers)
            for run in chain.runs:
                twin.runs.append(self._twin(run, twin, ranked))
        for chain, twin in self.chains.items():
            twin.parent = None if chain.parent is None else self.chains[chain.parent]
        for run in queue:
            self.queue.append(self.runs.get(run) or self._twin(run, self.chains[unfound], ranked))
        for run, part in self.runs.items():
            # A part that has been evicted since is held by nobody.
            part.rest = None if run.rest is None else self.runs.get(run.rest)

    def _twin(self, run: Run, chain: Chain, ranked: bool) -> Run:
        twin = self.runs[run] = Run(chain, run.lo, run.hi, run.entered, run.again)
        twin.refs = run.refs
        if ranked:
            twin.place, twin.uses, twin.idle_s = run.place, run.uses, run.idle_s
            twin.used, twin.used_ns, twin.user = run.used, run.used_ns, run.user
        return twin

    def held(self, held: HeldRuns) -> HeldRuns:
        twin = HeldRuns(held.order, held.found)
        twin.full, twin.computed = held.full, held.computed
        twin.entries = [(self.runs[run], hi) for run, hi in held.entries]
        return twin
