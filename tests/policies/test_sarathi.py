"""SARATHI's batches, by literals; and that no prompt token is lost or computed twice, whatever the chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.published import FasterTransformer, OrcaPaged, Static
from policies.routers import RoundRobin
from policies.sarathi import ChunkedOnly, DecodeMaximal
from policies.schedulers import Sarathi
from policies.view import UNTIL_CHANGE, PartialSeq, Plan, ReplicaView, Scheduler, WaitingSeq, pads_to
from policies.wrappers import EvictNewest
from sim.engine import Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, with_scheduler
from tests.sample import few
from workloads import Trace

AMPLE = {"free_blocks": 10_000, "total_blocks": 10_000}


def test_a_hybrid_batch_fills_its_tile() -> None:
    view = ReplicaView(waiting=(WaitingSeq(9, 1000),), n_decoding=17, **AMPLE)
    assert DecodeMaximal(256, 18).plan(view) == Plan(True, ((9, 239),))
    assert DecodeMaximal(256, 18, align=False).plan(view) == Plan(True, ((9, 256),))


def test_there_is_one_chunk_however_many_prompts_wait() -> None:
    waiting = tuple(WaitingSeq(i, 20) for i in range(5))
    plan = DecodeMaximal(256, 18).plan(ReplicaView(waiting=waiting, n_decoding=3, **AMPLE))
    assert plan.run == ((0, 20),)


def test_a_prompt_begun_goes_on_before_another_begins() -> None:
    view = ReplicaView(
        waiting=(WaitingSeq(9, 1000),), prefilling=(PartialSeq(4, 239, 100),), n_decoding=2, **AMPLE
    )  # fmt: skip
    assert DecodeMaximal(256, 18).plan(view).run == ((4, 100),)
    longer = ReplicaView(prefilling=(PartialSeq(4, 239, 900),), n_decoding=2, **AMPLE)
    assert DecodeMaximal(256, 18).plan(longer).run == ((4, 239),)


def test_decodes_run_alone_while_every_slot_is_taken() -> None:
    view = ReplicaView(waiting=(WaitingSeq(9, 1000),), n_decoding=18, **AMPLE)
    assert DecodeMaximal(256, 18).plan(view) == Plan(True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_a_prompt_runs_whole_where_decodes_are_short_and_asked_so() -> None:
    scheduler = DecodeMaximal(256, 18, chunk_when_full=True)
    waiting = (WaitingSeq(9, 1000),)
    assert scheduler.plan(ReplicaView(waiting=waiting, n_decoding=16, **AMPLE)) == Plan(run=((9, 1000),))
    assert scheduler.plan(ReplicaView(waiting=waiting, n_decoding=17, **AMPLE)) == Plan(True, ((9, 239),))


def test_a_chunk_smaller_than_its_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no prompt tokens beside 19 decodes"):
        DecodeMaximal(16, 20)


def test_chunked_only_takes_turns() -> None:
    waiting = (WaitingSeq(9, 1000),)
    scheduler = ChunkedOnly(token_budget=256)
    assert scheduler.plan(ReplicaView(waiting=waiting, n_decoding=3, **AMPLE)) == Plan(run=((9, 256),))
    after = ReplicaView(prefilling=(PartialSeq(9, 256, 744),), n_decoding=3, after_prefill=True, **AMPLE)
    assert scheduler.plan(after) == Plan(decode=True)


def test_chunked_only_puts_several_prompts_into_a_budget() -> None:
    waiting = tuple(WaitingSeq(i, 100) for i in range(4))
    plan = ChunkedOnly(token_budget=256).plan(ReplicaView(waiting=waiting, **AMPLE))
    assert plan.run == ((0, 100), (1, 100), (2, 56))


def test_the_baseline_forms_its_batch_prompt_by_prompt_and_lets_nobody_in_later() -> None:
    scheduler = Static(3, max_prompts=1)
    waiting = (WaitingSeq(7, 50), WaitingSeq(8, 50))
    assert scheduler.plan(ReplicaView(waiting=waiting, n_decoding=1, after_prefill=True, **AMPLE)).run == ((7, 50),)
    assert scheduler.plan(ReplicaView(waiting=waiting, n_decoding=1, after_prefill=False, **AMPLE)).decode is True


def test_orcas_best_case_has_one_whole_prompt_an_iteration() -> None:
    waiting = (WaitingSeq(7, 500), WaitingSeq(8, 600))
    assert OrcaPaged(18, max_prompts=1).plan(ReplicaView(waiting=waiting, n_decoding=2, **AMPLE)) == Plan(
        True, ((7, 500),)
    )


def test_padding_is_said_once_by_the_scheduler_and_leaves_its_plans_alone() -> None:
    view = ReplicaView(
        waiting=(WaitingSeq(0, 10), WaitingSeq(1, 70)), prompt_tokens={0: 10, 1: 70}, max_tokens={0: 5, 1: 5}, **AMPLE
    )
    assert FasterTransformer(4).plan(view) == Plan(run=((0, 10), (1, 70)))
    assert FasterTransformer(4).plan(ReplicaView(n_decoding=2, **AMPLE)) == Plan(decode=True, through_arrivals=True)
    assert (pads_to(FasterTransformer(4)), pads_to(EvictNewest(FasterTransformer(4))), pads_to(OrcaPaged())) == (
        4,
        4,
        0,
    )


def finish_s(scheduler: Scheduler, prompts: list[int], outputs: list[int]) -> list[float]:
    trace = Trace(arrival_ns=[0] * len(prompts), prompt_tokens=prompts, output_tokens=outputs)
    spec = ReplicaSpec(cost=Linear(fixed_s=0.0, row_s=1e-3), scheduler=scheduler, kv_blocks=1000)
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    return (columns.requests["finish_ns"] / 1e9).tolist()


def test_padding_is_paid_for() -> None:
    # Rows at 1 ms. Without padding: 10 + 70 prompt rows, then steps of two rows, then of one.
    assert finish_s(Static(4), [10, 70], [3, 5]) == pytest.approx([0.084, 0.086])
    # With it: two prompts of 70 rows, and every step four rows.
    assert finish_s(FasterTransformer(4), [10, 70], [3, 5]) == pytest.approx([0.148, 0.156])


@dataclass(frozen=True)
class Counting:
    """Passes plans on and keeps the prompt tokens that each admission of a request computed."""

    inner: Scheduler
    log: list[tuple[str, int, int]]

    def plan(self, view: ReplicaView, /) -> Plan:
        plan = self.inner.plan(view)
        waiting = {seq.id: seq.tokens for seq in view.waiting}
        self.log.extend(("preempt", id_, 0) for id_ in plan.preempt)
        for id_, tokens in plan.run:
            if id_ in waiting:
                self.log.append(("admit", id_, waiting[id_]))
            self.log.append(("chunk", id_, tokens))
        return plan


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 30)), min_size=1, max_size=14),
    chunk=st.integers(8, 64),
    blocks=st.integers(31, 80),
    kind=st.sampled_from(["decode-maximal", "unaligned", "budget", "chunked-only"]),
)
def test_chunks_add_up_to_the_prompt_at_every_admission(
    requests: list[tuple[int, int]], chunk: int, blocks: int, kind: str
) -> None:
    inner = {
        "decode-maximal": DecodeMaximal(chunk, 8),
        "unaligned": DecodeMaximal(chunk, 8, align=False),
        "budget": Sarathi(chunk, 8),
        "chunked-only": ChunkedOnly(chunk, 8),
    }[kind]
    prompts, outputs = ([request[i] for request in requests] for i in (0, 1))
    log: list[tuple[str, int, int]] = []
    trace = Trace(
        arrival_ns=np.arange(len(prompts)) * 1_500_000,
        prompt_tokens=np.array(prompts),
        output_tokens=np.array(outputs),
    )
    spec = ReplicaSpec(
        cost=Linear(), scheduler=Counting(EvictNewest(inner), log), kv_blocks=blocks, block_tokens=4
    )  # fmt: skip
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    assert (columns.requests["status"] == 0).all()

    owed: dict[int, int] = {}
    admitted = dict.fromkeys(range(len(prompts)), 0)
    for what, id_, tokens in log:
        if what == "admit":
            assert owed.get(id_, 0) == 0, "admitted again before it was done or preempted"
            # The prompt, and after a preemption the tokens emitted so far besides.
            assert tokens == prompts[id_] if not admitted[id_] else tokens >= prompts[id_]
            owed[id_] = tokens
            admitted[id_] += 1
        elif what == "chunk":
            owed[id_] -= tokens
            assert owed[id_] >= 0, "more prompt tokens than there are"
        else:
            owed[id_] = 0
    assert all(left == 0 for left in owed.values())
    assert [admitted[i] - 1 for i in range(len(prompts))] == columns.requests["preemptions"].tolist()
    # What the engine counted is what was planned.
    assert columns.iterations()["prefill_tokens"].sum() == sum(tokens for what, _, tokens in log if what == "chunk")


def test_the_property_above_meets_preemptions() -> None:
    log: list[tuple[str, int, int]] = []
    trace = Trace(arrival_ns=[0] * 10, prompt_tokens=[40] * 10, output_tokens=[60] * 10)
    spec = ReplicaSpec(
        cost=Linear(), scheduler=Counting(EvictNewest(DecodeMaximal(32, 8)), log), kv_blocks=60, block_tokens=4
    )
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    assert columns.requests["preemptions"].sum() > 3


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    "scheduler",
    [
        DecodeMaximal(40, 6),
        DecodeMaximal(16, 4, align=False),
        DecodeMaximal(30, 5, chunk_when_full=True),
        ChunkedOnly(50, 7),
        FasterTransformer(4),
        Static(4, max_prompts=1),
        OrcaPaged(6, max_prompts=1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("seeds", few([range(2), range(2, 12)]))
def test_spans_equal_stepping(scheduler: Scheduler, speculative: bool, seeds: range) -> None:
    for seed in seeds:
        experiment = with_scheduler(an_experiment(seed, speculative=speculative), EvictNewest(scheduler))
        assert_same(run(experiment), run(experiment, fast_forward=False))
