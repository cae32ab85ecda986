"""A machine: stages, and the engine cores that share them, in groups: those of a model, one for each of its ranks.

Four methods are called from outside: `deliver`, when a request arrives; `post`, when another machine has a message; `give_up`, when
a client has gone; and `abort`, which stops everything and hands the requests back. All else happens in the machine's own turns
(`sim.engine.machine.turns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from policies.driving import Driving, driving
from policies.routers import RoutedRequest
from policies.view import drafts_prompts
from sim.engine.batch.prices import StageTable
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.rank_prices import CommonPrices
from sim.engine.batch.stages import Stages
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.driven import DrivenTurns
from sim.engine.machine.groups import Group
from sim.engine.machine.loads import CoreLoad
from sim.engine.machine.together import Together
from sim.engine.machine.turns import Alone, InTurn, Turns
from sim.engine.serve.engine_core import EngineCore, InCommon
from sim.engine.spec.experiment import MachineSpec
from sim.engine.spec.roles import Part
from sim.engine.time.clock import TICK_BITS


class Machine(AnyMachine):
    """Serves the requests that are delivered to it on the models that it hosts."""

    def __init__(
        self, common: InCommon, index: int, spec: MachineSpec, first_number: int, part: Part | None = None
    ) -> None:
        """*first_number*: the number of its first engine core in the run; *part*: its part in hand-over."""
        stages = Stages(spec.hosted[0].cost.n_stages)
        n_models = len(spec.hosted)
        super().__init__(index, [_group(common, spec, i, first_number, stages, part, index) for i in range(n_models)])
        self.stages = stages
        self._clock = common.clock
        self._agenda = common.clock.agenda
        self._state = common.state
        self._outside = common.outside
        self._loads = [CoreLoad(core, common.clock) for core in self.cores]
        self._load = self._loads[0]
        for core in self.cores:
            core.ring_when_loaded(common.clock, self._on_loaded)
            core.ring_when_compiled(common.clock, self._on_compiled)
        self._hosting = {group.cores[0].spec.model: group for group in self.groups}
        self._only = self.cores[0] if len(self.cores) == 1 else None
        self._promised = [0] * len(self.stages) if isinstance(spec.hosted[0].cost, StageTable) else []
        self.turns = self._turns_of(common, spec)

    def _turns_of(self, common: InCommon, spec: MachineSpec) -> Turns:
        """The way in which its micro-batches share the stages."""
        first, fast_forward = self.groups[0], common.fast_forward
        if not _is_alone(spec):
            oldest_first = spec.turn == "oldest"
            return InTurn(self.groups, self.stages, common.clock, fast_forward=fast_forward, oldest_first=oldest_first)
        scheduler = spec.hosted[0].scheduler
        if driving(scheduler):
            return DrivenTurns(first, common.clock, cast(Driving, scheduler), common.seed, fast_forward=fast_forward)
        if first.prices is None:
            return Alone(first, common.clock, fast_forward=fast_forward)
        return Together(first, first.prices, common.clock, fast_forward=fast_forward)

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
        return self.kv_blocks_used / self.kv_blocks

    @property
    def kv_blocks(self) -> int:
        return sum(core.sequences.kv.total for core in self.cores)

    @property
    def block_tokens(self) -> int:
        return self._load.block_tokens

    @property
    def prefill_tokens(self) -> int:
        return sum(load.prefill_tokens for load in self._loads) + self.awaited_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(load.prompt_tokens for load in self._loads) + self.awaited_prompts

    @property
    def n_stages(self) -> int:
        """Stages of all ranks: one that has no work idles while others step, as a machine would."""
        return len(self.stages) * len(self.groups[0].cores)

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt, in full blocks, that are cached here, on the rank that has most of it; the router inside may choose
        another."""
        return max([load.found_tokens(request) for load in self._loads_of(request.model)])

    def _loads_of(self, model: int) -> Sequence[CoreLoad]:
        """The loads of the engine cores that serve a model."""
        group = self._group_of(model)
        first = group.cores[0].number - self.cores[0].number
        return self._loads[first : first + len(group.cores)]

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
            raise ValueError(f"machine {self.index} has no table of latencies to predict ends from")
        return [ns << TICK_BITS for ns in table.of(1)]

    def hosts(self, model: int) -> bool:
        return model in self._hosting or None in self._hosting

    def core_number(self, model: int) -> int:
        return self.core_of(model).number

    def core_of(self, model: int) -> EngineCore:
        """The engine core of a model; with ranks the first of them."""
        return self._group_of(model).cores[0]

    def _group_of(self, model: int) -> Group:
        return self._hosting.get(model) or self._hosting[None]

    # Called from outside.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request with the KV of its first *kv_tokens* tokens; one that can never fit is rejected with its reason."""
        core = self._only or self.core_of(self._model(id_))
        if self._accept(core, id_, kv_tokens):
            self.turns.arrive(core, self._agenda.now_ns)

    def _accept(self, core: EngineCore, id_: int, kv_tokens: int) -> bool:
        """Put a request into the queue of *core*; False where it waits for its grammar, or can never be served and is rejected."""
        self._state.replica[id_] = core.number
        reason = core.sequences.refusal(id_)
        if reason is not None:
            self._outside.rejected(id_, reason)
            return False
        if self._promised:
            now = self._clock.now_ns << TICK_BITS
            self._promised = self.stages.through(now, self._one(self._model(id_)), self._promised)
        return core.sequences.come(id_, kv_tokens, self._agenda.now_ns)

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def _on_loaded(self, core: EngineCore) -> None:
        """A load from a tier has ended: the sequence that waits for it may continue."""
        core.sequences.version.hear(self._clock.now_ns)
        self.turns.heed(self._clock.now_ns)

    def _on_compiled(self, core: EngineCore, id_: int, kv_tokens: int) -> None:
        """The grammar of a request is compiled: it may be scheduled."""
        now_ns, sequences = self._clock.now_ns, core.sequences
        if sequences.grammars is None or not sequences.grammars.goes_first:
            sequences.enqueue(id_, kv_tokens, now_ns)
            self.turns.arrive(core, now_ns)
            return
        sequences.grammars.compiled.append((now_ns, id_, kv_tokens))
        sequences.version.hear(now_ns)
        self.turns.heed(now_ns)

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

    def pause(self, until_ns: int) -> None:
        """Begin no iteration from now on until then."""
        now_ns = self._clock.now_ns
        for core in self.cores:
            core.pause(now_ns, until_ns)
        self.turns.heed(now_ns)

    def abort(self, now_ns: int) -> list[int]:
        """Stop at *now_ns*: iterations that have ended by then count, others are dropped. All memory is free afterwards; the
        requests are returned, running ones before waiting ones."""
        self.turns.stop(now_ns)
        for group in self.groups:
            group.stop()
        ticks = now_ns << TICK_BITS
        self._promised = [ticks] * len(self._promised)
        self.stages.stop(ticks)
        return [id_ for core in self.cores for id_ in core.hand_back()]


def _group(
    common: InCommon, spec: MachineSpec, i: int, first_number: int, stages: Stages, part: Part | None, index: int
) -> Group:
    """The engine cores of model *i* of machine *index*, the first of which is number *first_number* of the run."""
    hosted, prices = spec.hosted[i], None
    if spec.ranks > 1:
        assert not isinstance(hosted.cost, StageTable)
        pricing = Pricing(
            hosted.cost,
            hosted.draft_cost,
            hosted.speculation_overhead_s,
            drafts_prompts=drafts_prompts(hosted.scheduler),
        )
        prices = CommonPrices(pricing, spec.ranks)
    first = first_number + i * spec.ranks
    alone = _is_alone(spec)
    cores = [
        EngineCore(common, first + rank, hosted, stages, alone=alone, machine=index, prices=prices, part=part)
        for rank in range(spec.ranks)
    ]
    return Group(cores, stages, prices, spec.prompt_balance or hosted.prompt_balance)


def _is_alone(spec: MachineSpec) -> bool:
    """Whether a machine has one micro-batch of each rank, and one stage."""
    first = spec.hosted[0]
    return len(spec.hosted) == 1 and first.cost.n_stages == 1 and (first.micro_batches or 1) == 1
