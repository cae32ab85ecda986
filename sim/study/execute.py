"""Runs scenarios batch by batch, and goes on when a process dies under one of them."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from sim.study.backends import Backend
from sim.study.points import Run
from sim.study.records import Outcome, failed
from sim.study.store import Store

BATCH_S = 0.4
"""Work handed to a process at once: long against the few ms of handing over, short against the end of a sweep."""
MAX_BATCH = 256
DIED = "the process that ran it died twice; it may have run out of memory"


def execute(runs: Iterator[Run], store: Store, backend: Backend, on_outcome: Callable[[Outcome], None]) -> None:
    """Run all of *runs* that have a scenario, storing each; *on_outcome* is called with each as it ends.

    At most two batches a process are under way, so that memory does not grow with the number of runs. When a process
    dies, the runs that it may have died of are tried once more, each alone; those that kill it again are failures.
    """
    work = _Work(runs, store, backend, on_outcome)
    try:
        while work.hand_over():
            work.take_back()
    except BaseException:
        work.cancel()
        backend.close(now=True)
        raise
    backend.close(now=False)


class _Work:
    """Runs that wait, that are suspected of killing a process, and batches under way."""

    def __init__(
        self, runs: Iterator[Run], store: Store, backend: Backend, on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._source, self._store, self._backend, self._on_outcome = iter(runs), store, backend, on_outcome
        self._waiting: collections.deque[Run] = collections.deque()
        self._suspects: collections.deque[Run] = collections.deque()
        self._under_way: dict[Future[list[Outcome]], list[Run]] = {}
        self._size = 1
        self._alone = False

    def hand_over(self) -> bool:
        """Keep the backend busy: with batches, or with one suspect alone. False where nothing is left to do."""
        while not self._suspects and len(self._under_way) < 2 * self._backend.width:
            batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            batch += itertools.islice(self._source, self._size - len(batch))
            if not batch:
                break
            self._submit(batch)
        self._alone = bool(self._suspects) and not self._under_way
        if self._alone:
            self._submit([self._suspects.popleft()])
        return bool(self._under_way)

    def take_back(self) -> None:
        """Wait for a batch to end, store its outcomes, and sort out what a process that died has left."""
        ended, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        lost: list[list[Run]] = []
        for future in ended:
            batch = self._under_way.pop(future)
            try:
                outcomes = future.result()
            except BaseException as error:
                if not self._backend.died(error):
                    raise
                lost.append(batch)
                continue
            for outcome in outcomes:
                self._finish(outcome)
            each = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
            self._size = max(1, min(MAX_BATCH, 2 * self._size, int(BATCH_S / max(each, 1e-4))))
        if lost:
            self._mourn(lost)
            self._backend.restart()

    def cancel(self) -> None:
        for future in self._under_way:
            future.cancel()

    def _submit(self, batch: list[Run]) -> None:
        pairs = [(run.key, run.scenario) for run in batch if run.scenario is not None]
        self._under_way[self._backend.submit(pairs)] = batch

    def _finish(self, outcome: Outcome) -> None:
        if outcome.record is not None:
            self._store.put(outcome.key, outcome.record)
        self._on_outcome(outcome)

    def _mourn(self, lost: list[list[Run]]) -> None:
        """Put back what a process that died had not finished; a run that was alone with it has killed it twice."""
        if self._alone:
            (run,) = lost[0]
            assert run.scenario is not None
            base = {"key": run.key, "seed": run.scenario.seed, "settings": run.scenario.settings()}
            self._finish(Outcome(run.key, DIED, 0.0, json.dumps(failed(base, DIED))))
            return
        local = self._backend.folder is not None
        if local:
            # A local pool ends as a whole, so what was under way elsewhere is lost with it.
            lost += self._under_way.values()
            self._under_way.clear()
        for batch in lost:
            left = [run for run in batch if run.key not in self._store]
            for run in batch:
                if run.key in self._store:
                    self._finish(Outcome(run.key, self._store.get(run.key).get("error", ""), 0.0))
            # Runs of a local batch are stored in order, so that the first without a record was being run.
            n_suspect = 1 if local else len(left)
            self._suspects.extend(left[:n_suspect])
            self._waiting.extend(left[n_suspect:])
