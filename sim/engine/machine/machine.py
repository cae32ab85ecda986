"""A machine: stages, and the engine cores that share them.

Four methods are called from outside: `deliver`, when a request arrives; `post`, when another machine has a message; `give_up`, when
a client has gone; and `abort`, which stops everything and hands the requests back. All else happens in the machine's own turns
(`sim.engine.machine.turns`).
"""

from __future__ import annotations

from policies.routers import RoutedRequest
from sim.engine.batch.prices import StageTable
from sim.engine.batch.stages import Stages
from sim.engine.machine.loads import CoreLoad
from sim.engine.machine.turns import Alone, InTurn, Turns
from sim.engine.serve.engine_core import EngineCore, InCommon
from sim.engine.spec.experiment import MachineSpec
from sim.engine.spec.roles import Part
from sim.engine.time.clock import TICK_BITS


class Machine:
    """Serves the requests that are delivered to it; routers see it as a `policies.routers.ReplicaLoad`."""

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        """*first_number*: the number of its first engine core in the run; *part*: its part in hand-over."""
        self.index = index
        self.no_hit_order = -1
        """Only `gateway.routing.Seen` keeps it."""
        self.awaited = self.awaited_tokens = 0
        """Requests sent here that wait elsewhere, for blocks or for their prompt to be computed; and tokens of those whose prompt
        is to be computed here."""
        self._clock = common.clock
        self._state = common.state
        self._outside = common.outside
        self.stages = Stages(spec.hosted[0].cost.n_stages)
        self.cores = self._made(common, spec, first_number, part)
        self._loads = [CoreLoad(core, common.clock) for core in self.cores]
        self._load = self._loads[0]
        for core in self.cores:
            core.ring_when_loaded(common.clock, self._on_loaded)
        self._hosting = {core.spec.model: core for core in self.cores}
        self._only = self.cores[0] if len(self.cores) == 1 else None
        self._promised = [0] * len(self.stages) if isinstance(spec.hosted[0].cost, StageTable) else []
        self.turns = self._turns_of(common, spec)

    def _made(self, common: InCommon, spec: MachineSpec, first_number: int, part: Part | None) -> list[EngineCore]:
        """The engine cores, in order."""
        alone = _is_alone(spec)
        return [
            EngineCore(common, first_number + i, each, self.stages, alone=alone, machine=self.index, part=part)
            for i, each in enumerate(spec.hosted)
        ]

    def _turns_of(self, common: InCommon, spec: MachineSpec) -> Turns:
        """The way in which its micro-batches share the stages."""
        if _is_alone(spec):
            return Alone(self.cores[0], common.clock, fast_forward=common.fast_forward)
        return InTurn(
            self.cores,
            self.stages,
            common.clock,
            fast_forward=common.fast_forward,
            oldest_first=spec.turn == "oldest",
        )

    @property
    def events(self) -> int:
        """Turns in which iterations ended."""
        return self.turns.events

    # Loads for routers: iterations that have ended.

    @property
    def waiting(self) -> int:
        if self._only is not None:
            return self._load.waiting + self.awaited
        return sum(load.waiting for load in self._loads) + self.awaited

    @property
    def running(self) -> int:
        if self._only is not None:
            return self._only.sequences.n_admitted
        return sum(load.running for load in self._loads)

    @property
    def kv_blocks_used(self) -> int:
        return sum(load.kv_blocks_used for load in self._loads)

    @property
    def kv_use(self) -> float:
        return self.kv_blocks_used / sum(core.sequences.kv.total for core in self.cores)

    @property
    def block_tokens(self) -> int:
        return self._load.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return sum(load.prefill_tokens for load in self._loads) + self.awaited_tokens

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt, in full blocks, that are cached here."""
        return self._loads[self.cores.index(self.core_of(request.model))].found_tokens(request)

    @property
    def promised_ns(self) -> int:
        """The end of all accepted work at its last stage (ns), for models on tables of latencies."""
        return self._promised[-1] >> TICK_BITS

    def done_ns(self, model: int, *, waiting: bool) -> int:
        """The end (ns) of a request that arrives now, alone in its batch: after all accepted work or, not *waiting*, after all that
        has been started. For models on tables of latencies."""
        clocks = self._promised if waiting else self.stages.free
        return self.stages.through(self._clock.now_ns << TICK_BITS, self._one(model), clocks)[-1] >> TICK_BITS

    def _one(self, model: int) -> list[int]:
        table = self.core_of(model).spec.cost
        if not isinstance(table, StageTable):
            raise ValueError(f"machine {self.index} has no table of latencies to promise an end by")
        return [ns << TICK_BITS for ns in table.of(1)]

    def hosts(self, model: int) -> bool:
        return model in self._hosting or None in self._hosting

    def core_of(self, model: int) -> EngineCore:
        return self._hosting.get(model) or self._hosting[None]

    # Called from outside.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        core = self._only or self.core_of(self._model(id_))
        if self._accept(core, id_, kv_tokens):
            self.turns.arrive(core, self._clock.now_ns)

    def _accept(self, core: EngineCore, id_: int, kv_tokens: int) -> bool:
        """Put a request into the queue of *core*; False where it can never be served there, and is rejected."""
        self._state.replica[id_] = core.number
        reason = core.sequences.refusal(id_)
        if reason is not None:
            self._outside.rejected(id_, reason)
            return False
        if self._promised:
            now = self._clock.now_ns << TICK_BITS
            self._promised = self.stages.through(now, self._one(self._model(id_)), self._promised)
        core.sequences.enqueue(id_, kv_tokens, self._clock.now_ns)
        return True

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def _on_loaded(self, core: EngineCore) -> None:
        """A load from a tier has ended: the sequence that waits for it may continue."""
        core.sequences.version.hear(self._clock.now_ns)
        self.turns.heed(self._clock.now_ns)

    def give_up(self, id_: int) -> None:
        """The client of a request that is here has gone: it takes no further iteration, and its KV is free when the present one
        ends (where plans are made ahead, when the next one does)."""
        core = self._serving(id_)
        core.give_up(id_, self._clock.now_ns)
        self.turns.heed(self._clock.now_ns)

    def _serving(self, id_: int) -> EngineCore:
        """The engine core that a request is with."""
        return self._only or self.core_of(self._model(id_))

    def core_for(self, id_: int) -> EngineCore:
        """The engine core that decodes a request whose prompt is computed elsewhere."""
        return self._only or self.core_of(self._model(id_))

    def post(self, core: EngineCore, id_: int, what: int, tokens: int = 0) -> None:
        """Post a message about a request from another machine; it is read when the next iteration is planned."""
        now_ns = self._clock.now_ns
        core.sequences.connector.tell(now_ns, what, id_, tokens)
        self.turns.heed(now_ns)

    def abort(self, now_ns: int) -> list[int]:
        """Stop at *now_ns*: iterations that have ended by then count, others are dropped. All memory is free afterwards; the
        requests are returned, running ones before waiting ones."""
        self.turns.stop(now_ns)
        for core in self.cores:
            core.drop_in_flight()
        ticks = now_ns << TICK_BITS
        self._promised = [ticks] * len(self._promised)
        self.stages.stop(ticks)
        return [id_ for core in self.cores for id_ in core.hand_back()]


def _is_alone(spec: MachineSpec) -> bool:
    """Whether a machine has one micro-batch and one stage."""
    first = spec.hosted[0]
    return len(spec.hosted) == 1 and first.cost.n_stages == 1 and (first.micro_batches or 1) == 1
