"""A machine's two doors, used directly: deliveries that bring KV, and stopping in the middle of anything."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import Orca, OrcaPaged, Static
from policies.schedulers import Sarathi
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, Plan, ReplicaView
from policies.wrappers import EvictNewest
from sim.engine import Columns, MachineSpec, PolicyError, ReplicaSpec
from sim.engine.machine.machine import Machine
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import InCommon
from sim.engine.simulation.invariants import Watch
from sim.engine.tiers.tiers import SharedStores
from sim.engine.time.events import Clock
from tests.engine.costs import Linear

MS = 1_000_000
DRAFTS = Speculative(method="draft_model", num_speculative_tokens=3, acceptance=Iid(alpha=0.6))


class Ended:
    """Writes down what a machine tells."""

    def __init__(self) -> None:
        self.finished_ids: list[int] = []
        self.rejected_ids: list[int] = []

    def finished(self, id_: int, now_ns: int, /) -> None:
        self.finished_ids.append(id_)

    def rejected(self, id_: int, reason: str, /) -> None:
        self.rejected_ids.append(id_)


class Alone:
    """One machine without a cluster around it; everything has arrived at 0."""

    def __init__(
        self, prompt: list[int], output: list[int], scheduler: Any, *, kv_blocks: int = 100, fast_forward: bool = True, **spec: Any
    ) -> None:  # fmt: skip
        settings = {"cost": Linear(), **spec}
        pipelined = settings["cost"].n_stages > 1 or (settings.get("micro_batches") or 1) > 1
        self.state = RequestState(
            array("q", prompt), array("q", output), array("q", [0] * len(prompt)), pipelined=pipelined
        )
        self.clock = Clock()
        self.ended = Ended()
        replica = ReplicaSpec(scheduler=scheduler, kv_blocks=kv_blocks, **settings)
        common = InCommon(
            self.clock,
            self.state,
            self.ended,
            seed=1,
            fast_forward=fast_forward,
            prices={},
            stores=SharedStores(peers=False),
        )
        self.machine = Machine(common, 0, MachineSpec(hosted=(replica,)), 0)
        self.core = self.machine.cores[0]

    def has_emitted_one(self, id_: int) -> None:
        """The request comes from another machine, which emitted its first token at 0."""
        self.state.left[id_] -= 1
        self.state.first_token[id_] = self.state.token_ns[id_] = 0

    def run(self) -> None:
        Watch(self.state, [self.machine], self.clock).run(None)

    def iterations(self) -> Any:
        return Columns(requests={}, reasons=(), replicas=(self.core.columns(),)).iterations()


@dataclass(frozen=True)
class Everybody:
    """Admits all who wait; who has nothing to compute decodes at once."""

    def plan(self, view: ReplicaView, /) -> Plan:
        joins = any(not seq.tokens for seq in view.waiting)
        run = tuple((seq.id, seq.tokens) for seq in view.waiting)
        return Plan(decode=view.n_decoding > 0 or joins, run=run, hold=UNTIL_CHANGE)


@dataclass(frozen=True)
class Asks:
    """Plans *tokens* prompt tokens for whoever waits."""

    tokens: int

    def plan(self, view: ReplicaView, /) -> Plan:
        return Plan(decode=view.n_decoding > 0, run=tuple((seq.id, self.tokens) for seq in view.waiting))


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    "scheduler", [Everybody(), Sarathi(), Sarathi(token_budget=1), OrcaPaged(), Orca(), Static(4), TrtLlm()]
)
def test_a_sequence_whose_kv_exists_joins_the_decodes_and_takes_its_blocks(scheduler: Any, fast_forward: bool) -> None:
    alone = Alone([30], [5], scheduler, fast_forward=fast_forward)
    alone.has_emitted_one(0)
    alone.machine.deliver(0, kv_tokens=30)
    alone.run()
    found = alone.iterations()
    assert found["prefill_tokens"].tolist() == [0] * 4
    assert found["decode_tokens"].tolist() == found["emitted_tokens"].tolist() == [1] * 4
    # 30 tokens are two blocks, of which two places are left; the 33rd needs a third.
    assert found["kv_blocks_used"].tolist() == [2, 2, 3, 3]
    assert (alone.state.first_token[0], alone.state.finish[0], alone.state.left[0]) == (0, 4 * MS, 0)
    assert alone.core.sequences.kv.free == 100
    gaps, weights = Columns(requests={}, reasons=(), replicas=(alone.core.columns(),)).itl()
    assert (gaps == MS).all()
    assert weights.sum() == 4


@pytest.mark.parametrize(("emitted", "kv_tokens"), [(False, -4), (False, 16), (False, 20), (True, 17)])
def test_kv_that_cannot_be_is_refused_at_the_door(emitted: bool, kv_tokens: int) -> None:
    alone = Alone([16], [2], Sarathi())
    if emitted:
        alone.has_emitted_one(0)
    with pytest.raises(ValueError, match="the latest never has"):
        alone.machine.deliver(0, kv_tokens=kv_tokens)


def test_evict_newest_makes_room_for_the_first_step_of_who_joins() -> None:
    alone = Alone([16, 16], [9, 9], EvictNewest(Sarathi()), kv_blocks=3)
    alone.machine.deliver(0)
    alone.clock.run(until=2 * MS + 5)
    alone.has_emitted_one(1)
    alone.machine.deliver(1, kv_tokens=16)
    alone.run()
    assert sorted(alone.ended.finished_ids) == [0, 1]


def test_a_prompt_whose_beginning_exists_is_computed_from_there() -> None:
    alone = Alone([20], [3], Sarathi(token_budget=3))
    alone.machine.deliver(0, kv_tokens=13)
    alone.run()
    found = alone.iterations()
    assert found["prefill_tokens"].tolist() == [3, 3, 1, 0, 0]
    assert found["kv_blocks_used"].tolist() == [2] * 5
    assert (alone.state.first_token[0], alone.state.finish[0]) == (3 * MS, 5 * MS)


def test_one_joins_while_another_is_computed() -> None:
    alone = Alone([20, 33], [5, 3], Everybody(), cost=Linear(n_stages=2), micro_batches=1)
    alone.has_emitted_one(0)
    alone.machine.deliver(0, kv_tokens=20)
    alone.machine.deliver(1)
    alone.run()
    assert list(alone.state.finish) == [8 * MS, 6 * MS]
    assert alone.iterations()["emitted_tokens"].tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("kv_tokens", "planned", "message"),
    [
        (0, 0, "planned 0 prompt tokens for request 0, of which 21 are left to compute"),
        (19, 0, "planned 0 prompt tokens for request 0, of which 2 are left to compute"),
        (20, 1, "planned 1 prompt tokens for request 0, of which 0 are left to compute"),
        (15, 7, "planned 7 prompt tokens for request 0, of which 6 are left to compute"),
        (15, -1, "planned -1 prompt tokens for request 0, of which 6 are left to compute"),
    ],
)
def test_a_wrong_plan_for_kv_that_exists_is_refused_with_a_sentence(kv_tokens: int, planned: int, message: str) -> None:
    alone = Alone([20], [5], Asks(planned))
    alone.has_emitted_one(0)
    alone.machine.deliver(0, kv_tokens=kv_tokens)
    with pytest.raises(PolicyError, match=message):
        alone.run()


def test_kv_that_has_no_room_is_refused_with_a_sentence() -> None:
    alone = Alone([20, 90], [5, 5], Everybody(), kv_blocks=7)
    for id_ in (0, 1):
        alone.has_emitted_one(id_)
    alone.machine.deliver(0, kv_tokens=20)
    alone.machine.deliver(1, kv_tokens=90)
    with pytest.raises(PolicyError, match=r"planned 6 new KV blocks at t=0\.000000 s but only 5 are free"):
        alone.run()


def stopped(seed: int, *, fast_forward: bool) -> tuple[Alone, list[int]]:
    """A random machine, stopped at a random instant, often that of an iteration's end; and what it hands back."""
    rng = random.Random(seed)
    n, n_stages, block_tokens = rng.randrange(1, 12), rng.choice([1, 1, 2, 3]), rng.choice([1, 4, 16])
    prompt, output = ([rng.randrange(1, 60) for _ in range(n)] for _ in range(2))
    scheduler = rng.choice(
        [Sarathi(rng.randrange(4, 80), rng.randrange(1, 6)), OrcaPaged(rng.randrange(1, 6)), Static(3)]
    )
    alone = Alone(
        prompt, output, EvictNewest(scheduler), kv_blocks=200 // block_tokens + 4, fast_forward=fast_forward,
        cost=Linear(kv_s=rng.choice([0, 1e-6]), n_stages=n_stages, window_tokens=rng.choice([None, 40])),
        block_tokens=block_tokens, micro_batches=rng.choice([None, None, 1, 3]), decoding=rng.choice([None, None, DRAFTS]),
    )  # fmt: skip
    for id_ in range(n):
        alone.machine.deliver(id_)
    at_ns = rng.randrange(MS, 60 * MS)
    alone.clock.run(until=at_ns if rng.random() < 0.7 else at_ns // MS * MS)
    return alone, alone.machine.abort(alone.clock.now_ns)


def test_stopping_hands_back_every_request_once_and_frees_all_memory() -> None:
    seen = 0
    for seed in range(60):
        alone, back = stopped(seed, fast_forward=True)
        ended = alone.ended.finished_ids + alone.ended.rejected_ids
        assert sorted([*back, *ended]) == list(range(len(alone.state.prompt))), f"seed {seed}"
        assert alone.core.sequences.kv.used == 0
        assert (alone.machine.waiting, alone.machine.running, alone.machine.kv_blocks_used) == (0, 0, 0)
        assert alone.machine.abort(alone.clock.now_ns) == []
        emitted = sum(alone.state.output) - sum(alone.state.left)
        records = alone.core.columns()
        if alone.state.bubbles:
            # Of micro-batches that were in flight nothing is left in the record, in any stage.
            assert len(records.stages) == len(records.spans) * len(alone.machine.stages)
        if len(alone.core.recorder.spans.array()):
            assert alone.iterations()["emitted_tokens"].sum() == emitted, f"seed {seed}"
        seen += bool(back) and emitted > 0
        stepped, back_stepped = stopped(seed, fast_forward=False)
        assert back_stepped == back
        for name in ("left", "finish", "token_ns", "rounds", "recomputed", "preemptions"):
            assert getattr(stepped.state, name) == getattr(alone.state, name), f"seed {seed}: {name}"
    assert seen > 30


def test_one_micro_batch_hands_back_who_runs_before_who_waits() -> None:
    alone = Alone([10, 10, 10, 10], [50] * 4, OrcaPaged(2))
    for id_ in (2, 0, 3, 1):
        alone.machine.deliver(id_)
    alone.clock.run(until=10 * MS + 7)
    assert alone.machine.abort(alone.clock.now_ns) == [2, 0, 3, 1]
    # Nine decodes had ended, after the prompts.
    assert list(alone.state.left) == [40, 50, 40, 50]


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_machine_that_was_stopped_serves_what_comes_next(n_stages: int, fast_forward: bool) -> None:
    alone = Alone([10, 10], [50, 5], Sarathi(), fast_forward=fast_forward, cost=Linear(n_stages=n_stages))
    alone.machine.deliver(0)
    stop_ns = 20 * MS + 500_000
    alone.clock.run(until=stop_ns)
    assert alone.machine.abort(alone.clock.now_ns) == [0]
    alone.machine.deliver(1)
    alone.clock.run(until=1000 * MS)
    assert (alone.state.scheduled[1], alone.state.finish[1]) == (stop_ns, stop_ns + 5 * n_stages * MS)
