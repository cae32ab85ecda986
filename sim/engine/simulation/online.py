"""A run whose requests arrive while it proceeds: the same cluster, with growing columns and a clock that its caller moves.

Nothing here decides anything. A request that is sent at an instant is what a trace's is that arrives then, so that a trace of all
requests gives the same run. Iterations are events of their own: a listener hears of every token when it is there.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from policies.eviction import foresees
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.kv.content import Contents, GrowingContents
from sim.engine.record.columns import REJECTED, UNFINISHED, Columns
from sim.engine.simulation.cluster import Cluster
from sim.engine.spec.experiment import Experiment
from sim.engine.spec.lifecycle import DRAINING, READY
from sim.engine.time.events import ARRIVALS, Alarm
from workloads import Trace

AFTER_NS = 1
"""Requests are at least this far apart, so that their order is known."""


class Listener(Protocol):
    """A listener to events of requests; instants are those of the simulated clock, in order."""

    def emitted(self, id_: int, tokens: int, now_ns: int, /) -> None:
        """It has *tokens* more; those of the last step come with `ended`."""

    def ended(self, id_: int, now_ns: int, /) -> None:
        """All of its tokens are there."""

    def begins_anew(self, id_: int, now_ns: int, /) -> None:
        """Its machine has failed, and all of its tokens will be emitted again."""

    def refused(self, id_: int, reason: str, now_ns: int, /) -> None:
        """It is not served."""


class Load(NamedTuple):
    """A model on a machine, now."""

    model: int
    """Row of the run's models; -1: all."""
    running: int
    waiting: int
    kv_use: float
    up: bool
    """The machine has been started, and has not failed."""


def live_trace(models: tuple[str, ...], id_tokens: int, *, sessions: bool = True) -> Trace:
    """A trace with the columns of a live run, of one request that is never sent."""
    one = np.ones(1, np.int64)
    return Trace(
        arrival_ns=0 * one,
        prompt_tokens=one,
        output_tokens=one,
        max_tokens=one,
        priority=0 * one,
        session=-one if sessions else None,
        models=models,
        model_index=0 * one if len(models) > 1 else None,
        prefix_blocks=np.empty(0, np.int64),
        prefix_offsets=np.zeros(2, np.int64),
        prefix_block_tokens=id_tokens,
        source="requests that came while the run went on",
    )


class LiveRun(Cluster):
    """A cluster that is sent requests while it runs. `experiment.workload` is a `live_trace`."""

    def __init__(self, experiment: Experiment, listener: Listener) -> None:
        workload = experiment.workload
        if not isinstance(workload, Trace) or workload.prefix_block_tokens is None or len(workload) != 1:
            raise ValueError("a live run takes a live_trace for its workload")
        if any(core.adapters is not None for core in experiment.hosted):
            raise ValueError("requests that arrive while a run proceeds ask for no adapter; leave adapters out")
        if experiment.encode is not None:
            raise ValueError("requests that arrive while a run proceeds have no size to encode; leave encode out")
        if any(hosted.grammars is not None for hosted in experiment.hosted):
            raise ValueError("requests that arrive while a run proceeds have no grammar; leave structured_output out")
        if any(foresees(hosted.eviction) for hosted in experiment.hosted):
            raise ValueError(
                "an eviction policy that knows the next use of blocks needs a trace, and requests come one by one here"
            )
        self._tree = GrowingContents(workload.prefix_block_tokens)
        self._listener = listener
        super().__init__(experiment, False, False)
        self._state.clear()
        self._n = 0
        self._state.told = self._tell
        if self._routing is not None:
            self._routing.begin_live()
        if self._fleet is not None:
            self._fleet.more_come = True
            self._fleet.begin()
        self._sessions = array("q")
        self._of_model = Counter[int]()
        self._given_up_ns = array("q")
        self._asked_ns = -1

    def _contents_in(self, block_tokens: int, next_tokens: int = 0, /) -> Contents:
        return self._tree.contents_in(block_tokens, next_tokens)

    # Time.

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns

    def next_ns(self) -> int | None:
        """The instant of the next event; None where nothing happens before another request."""
        due = self._clock.next_due()
        return None if due is None else due[0]

    def advance(self, to_ns: int) -> None:
        """Let everything happen that is due before *to_ns*, which is the present afterwards."""
        self._clock.run(until=to_ns)

    # Requests.

    @property
    def id_tokens(self) -> int:
        """Tokens that a digest stands for."""
        return self._tree.id_tokens

    def send(
        self, *, prompt_tokens: int, output_tokens: int, max_tokens: int, digests: Sequence[int], model: int = 0,
        priority: int = 0, session: int = -1, came_ns: int | None = None,
    ) -> int:  # fmt: skip
        """Send a request now; return its number. Each has an instant of its own: the present moves on by a nanosecond for it.

        *came_ns*: it arrived earlier, and is taken to have been sent as soon after that as makes no difference to what has happened
        since: after the request before it, and not seen by the router before now.
        """
        if self._asked_ns >= self.now_ns:
            self.advance(self._asked_ns + AFTER_NS)
        now_ns = self.now_ns
        if came_ns is not None and came_ns < now_ns:
            now_ns = self._front_end.sent_ns(max(came_ns, self._asked_ns + AFTER_NS), now_ns, prompt_tokens)
        self._asked_ns = now_ns
        id_ = self._n
        self._n += 1
        self._state.add(prompt_tokens, output_tokens, max_tokens, now_ns, model, priority, session)
        if self._state.turn is not None:
            self._state.turn[-1] = self._of_model[model]
            self._of_model[model] += 1
        self._given_up_ns.append(-1)
        self._tree.add(digests, prompt_tokens, output_tokens)
        self._sessions.append(session)
        self._send(id_, now_ns, None)
        return id_

    def give_up(self, id_: int) -> None:
        """The client of a request has gone; nothing happens where it has ended."""
        if self._state.status[id_] != UNFINISHED or self._given_up_ns[id_] >= 0:
            return
        self._given_up_ns[id_] = self.now_ns
        Alarm(self._clock, ARRIVALS, lambda _event: self._give_up(id_)).set(self.now_ns)

    def stop(self) -> Columns:
        """Abort all requests that are left; return the columns when everything has come to rest."""
        if self._asked_ns >= self.now_ns:
            self.advance(self._asked_ns + AFTER_NS)
        for id_ in range(self._n):
            self.give_up(id_)
        if self._routing is not None:
            self._routing.end_live()
        if self._fleet is not None:
            self._fleet.more_come = False
        self._clock.run()
        if self._fleet is not None:
            self._fleet.close(None)
        for machine in self._machines:
            machine.abort(self._clock.now_ns)
        return self.columns()

    # Known facts of requests.

    def __len__(self) -> int:
        return self._n

    def arrival_ns(self, id_: int) -> int:
        return self._state.arrival[id_]

    def scheduled_ns(self, id_: int) -> int:
        """The start of the first iteration that worked on it; -1: none has."""
        return self._state.scheduled[id_]

    def first_token_ns(self, id_: int) -> int:
        return self._state.first_token[id_]

    def finish_ns(self, id_: int) -> int:
        return self._state.finish[id_]

    def output_tokens(self, id_: int) -> int:
        """Tokens of its answer; fewer than requested where a scheduler has shortened it."""
        return self._state.output[id_]

    def preemptions(self, id_: int) -> int:
        return self._state.preemptions[id_]

    def cached_tokens(self, id_: int) -> int:
        """Tokens of its prompt that were found or loaded when it was first admitted."""
        state = self._state
        loaded = sum(column[id_] for kind, column in state.tier_hits.items() if kind not in ("again", "swap"))
        return state.prefix_hits[id_] + loaded

    def replica(self, id_: int) -> int:
        return self._state.replica[id_]

    def loads(self) -> list[Load]:
        """One for each model on a machine, in the order of the results' replicas."""
        states = None if self._fleet is None else self._fleet.states
        return [
            Load(
                -1 if core.spec.model is None else core.spec.model,
                core.sequences.n_admitted,
                len(core.sequences.queue),
                core.sequences.kv.used / core.sequences.kv.total,
                states is None or states[machine.index] in (READY, DRAINING),
            )
            for machine in self._machines
            for core in machine.cores
        ]

    def refusal(self, prompt_tokens: int, output_tokens: int, model: int = 0) -> str | None:
        """The reason that no machine could ever serve such a request; None where one can."""
        hosting = [machine for machine in self._serving if machine.hosts(model)]
        spec = self._experiment.handover
        if spec is None:
            stages = [hosting]
        else:
            stages = [
                [machine for machine in hosting if spec.stage_of(machine.index) == stage] for stage in spec.stages
            ]
            if any(spec.roles[machine.index] == "both" for machine in hosting):
                # The router says whether another machine has a part in it.
                del stages[1]
        for machines in stages:
            if not machines:
                return "no machine hosts the model"
            reasons = [each.core_of(model).sequences.never_fits(prompt_tokens, output_tokens) for each in machines]
            if None not in reasons:
                return reasons[0]
        return None

    def trace(self) -> Trace:
        """All requests so far, as a trace that gives the same run."""
        state, n, workload = self._state, self._n, self._experiment.workload
        assert isinstance(workload, Trace)
        column: dict[str, Any] = {name: np.array(values, np.int64) for name, values in self._told_columns()}
        rows = [self._tree.digests_of(row) for row in range(n)]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        # Small numbers in place of digests, which are long to write.
        ids = np.unique(np.array([digest for row in rows for digest in row], np.int64), return_inverse=True)[1]
        gone = np.array(self._given_up_ns, np.int64)
        return replace(
            workload,
            **column,
            model_index=None if state.model is None else np.array(state.model, np.int64),
            priority=None if state.priority is None or not any(state.priority) else np.array(state.priority, np.int64),
            session=np.array(self._sessions, np.int64) if max(self._sessions, default=-1) >= 0 else None,
            abort_ns=np.where(gone < 0, -1, gone - column["arrival_ns"]) if (gone >= 0).any() else None,
            prefix_blocks=ids.astype(np.int64),
            prefix_offsets=offsets,
        )

    def _told_columns(self) -> list[tuple[str, array[int]]]:
        state = self._state
        return [
            ("arrival_ns", state.arrival),
            ("prompt_tokens", state.prompt),
            ("output_tokens", state.output),
            ("max_tokens", state.max_tokens),
        ]

    # Calls from machines.

    def _tell(self, batch: MicroBatch, now_ns: int) -> None:
        """A step of *batch* has ended."""
        listener, decoding = self._listener, batch.decoding
        for id_ in batch.completing:
            # A sequence that ended with its prompt has been reported already.
            if id_ in decoding:
                listener.emitted(id_, 1, now_ns)
        if batch.decodes:
            for id_ in decoding:
                tokens = decoding.last_emitted(id_)
                if tokens:
                    listener.emitted(id_, tokens, now_ns)

    def first_token_elsewhere(self, id_: int, at_ns: int) -> None:
        self._listener.emitted(id_, 1, at_ns)

    def begins_anew(self, id_: int) -> None:
        self._listener.begins_anew(id_, self._clock.now_ns)

    def finished(self, id_: int, now_ns: int) -> None:
        super().finished(id_, now_ns)
        if self._state.finish[id_] >= 0:
            self._listener.ended(id_, now_ns)

    def rejected(self, id_: int, reason: str, status: int = REJECTED) -> None:
        super().rejected(id_, reason, status)
        self._listener.refused(id_, reason, self._clock.now_ns)
