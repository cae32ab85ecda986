"""Machines that come, go and fail where prefill and decode are apart, to the nanosecond.

One millisecond an iteration, a prompt of 20 tokens of 1,000 bytes each over a link of 1 MB/s, 4 tokens to emit. Where nothing
happens: the prompt is computed by 1 ms, heard of 1 ns later, on the link 1 ns after that, there after 20 ms, and the rest is 3 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.control import PoolSeen, Seen
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import FINISHED, UNFINISHED, Experiment, ReplicaSpec, UnservedError, run
from sim.engine.disaggregation.handovers import Handovers
from sim.engine.record.columns import ABORTED, LOST, Columns
from sim.engine.spec.lifecycle import DRAINING, OFF, READY, STARTING, FleetSpec, Outage, Scaling
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.engine.random_runs import run_both_ways
from tests.engine.test_fleet import Says, changes
from workloads import Trace

MS = 1_000_000

PREFILL, DECODE = 0, 2
"""The first machines of the two pools, which get the only request of a run."""

ONE = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=EvictNewest(Sarathi()), kv_blocks=100)


def pools(
    *outages: Outage, rule: Any = "resume", trace: Trace | None = None, first_token: Any = "arrival", room: Any = "after_prefill",
    scaling: tuple[Scaling | None, Scaling | None] = (None, None), spec: ReplicaSpec = ONE, shared: Any = "sender",
    local_tokens: int = 0, layers: int = 1, **fleet: Any,
) -> Experiment:  # fmt: skip
    """Two machines that prefill and two that decode."""
    return Experiment(
        workload=trace or Trace(arrival_ns=[0], prompt_tokens=[20], output_tokens=[4]),
        replicas=(spec,) * 4,
        router=RoundRobin(),
        handover=HandoverSpec(
            roles=("prefill", "prefill", "decode", "decode"),
            pools=(0, 0, 1, 1),
            paths={(0, 1): KvPath(link=LinkSpec(1e6), bytes_per_token=1000.0, shared=shared, layers=layers)},
            router=RoundRobin(),
            first_token=first_token,
            room=room,
            local_tokens=local_tokens,
        ),
        fleet=FleetSpec(
            pools=(0, 0, 1, 1), names=("p", "d"), scaling=scaling, failing=(None, None), outages=outages, in_flight=rule, **fleet
        ),
    )  # fmt: skip


def said(columns: Columns) -> dict[str, int]:
    """The instants of a run of one request."""
    requests, facts = columns.requests, columns.meta["fleet"]
    return {
        "status": int(requests["status"][0]),
        "finish_ns": int(requests["finish_ns"][0]),
        "first_token_ns": int(requests["first_token_ns"][0]),
        "recomputed": int(requests["recomputed_tokens"][0]),
        "emitted": int(requests["emitted_tokens"][0]),
        "discarded": facts["discarded_tokens"],
        "prompts": int(requests["prompts_computed"][0]),
        "sent_bytes": int(requests["sent_bytes"][0]),
        "failures": int(requests["failures"][0]),
        "chosen_again": facts["chosen_again"],
    }


def expected(**what: int) -> dict[str, int]:
    """The same where nothing happens, but for *what*."""
    return {
        "status": FINISHED, "finish_ns": 24 * MS + 2, "first_token_ns": 21 * MS + 2, "recomputed": 0, "emitted": 4,
        "discarded": 0, "prompts": 1, "sent_bytes": 20_000, "failures": 0, "chosen_again": 0, **what,
    }  # fmt: skip


def fails(machine: int, at_ms: float) -> Outage:
    return Outage(machine=machine, at_s=at_ms / 1e3)


def test_where_nothing_happens_the_times_are_those_of_pools_without_a_fleet() -> None:
    found = run_both_ways(pools())
    assert said(found) == expected()
    plain = run(replace(pools(), fleet=None)).requests
    for name, column in plain.items():
        np.testing.assert_array_equal(found.requests[name], column, err_msg=name)


def test_what_goes_to_a_machine_that_was_chosen_late_is_sent_whole() -> None:
    """Its decode machine fails at 0.5 ms, while the prompt is computed: another is chosen when that is done, and knows of no layer
    before."""
    for machine, sent_ns, takes_ns in ((1, MS // 4 + 1, 20 * MS), (DECODE, MS + 3, 20 * MS)):
        found = run(pools(fails(machine, 0.5), room="before_prefill", layers=4), check_invariants=True).requests
        assert found["landed_ns"][0] == sent_ns + takes_ns


def test_a_prompt_of_just_so_many_tokens_needs_no_machine_that_prefills() -> None:
    for prompt, status in ((20, FINISHED), (21, UNFINISHED)):
        trace = Trace(arrival_ns=[MS], prompt_tokens=[prompt], output_tokens=[4])
        back = [Outage(machine=machine, at_s=1e-4, for_s=5e-3) for machine in (2, 3)]
        for decode in ([], back):
            found = run(pools(fails(0, 0.1), fails(1, 0.1), *decode, trace=trace, local_tokens=20))
            assert found.requests["status"].tolist() == [status]


@pytest.mark.parametrize("rule", ["resume", "retry", "lose"])
def test_a_prefill_machine_that_fails_before_the_prompt_is_computed(rule: Any) -> None:
    """At 0.5 ms: nothing has been computed, and all begins again 1 ns later."""
    found = said(run_both_ways(pools(fails(PREFILL, 0.5), rule=rule)))
    at = MS // 2 + 1
    if rule == "lose":
        assert found == expected(
            status=LOST, finish_ns=-1, first_token_ns=-1, emitted=0, prompts=0, sent_bytes=0, failures=1
        )
    else:
        assert found == expected(finish_ns=at + 24 * MS + 2, first_token_ns=at + 21 * MS + 2, failures=1)


@pytest.mark.parametrize("rule", ["resume", "retry", "lose"])
def test_a_prefill_machine_that_fails_during_the_transfer_takes_the_kv_with_it(rule: Any) -> None:
    """At 10 ms: 20 tokens of KV are lost, and a first token that nobody has got."""
    found = said(run_both_ways(pools(fails(PREFILL, 10), rule=rule)))
    at, lost = 10 * MS + 1, {"recomputed": 20, "discarded": 1, "failures": 1}
    if rule == "lose":
        assert found == expected(status=LOST, finish_ns=-1, first_token_ns=-1, emitted=0, **lost)
    else:
        again = {"finish_ns": at + 24 * MS + 2, "first_token_ns": at + 21 * MS + 2, "prompts": 2, "sent_bytes": 40_000}
        assert found == expected(**again, **lost)


@pytest.mark.parametrize(
    ("first_token", "rule", "what"),
    [
        # The client has a token at 1 ms: 21 tokens are computed and sent, the second comes from prefill, two more from decode.
        ("prefill", "resume", {"finish_ns": 10 * MS + 1 + 24 * MS + 2, "first_token_ns": MS, "sent_bytes": 41_000}),
        (
            "prefill",
            "retry",
            {"finish_ns": 34 * MS + 3, "first_token_ns": 11 * MS + 1, "discarded": 1, "sent_bytes": 40_000},
        ),
        # Nothing has been emitted; the last token is computed again where it is decoded, once.
        (
            "decode",
            "resume",
            {"finish_ns": 35 * MS + 3, "first_token_ns": 32 * MS + 3, "recomputed": 21, "sent_bytes": 40_000},
        ),
    ],
)
def test_what_the_client_has_got_when_the_kv_is_lost_is_not_emitted_again(
    first_token: Any, rule: Any, what: dict[str, int]
) -> None:
    found = said(run_both_ways(pools(fails(PREFILL, 10), rule=rule, first_token=first_token)))
    assert found == expected(**{"recomputed": 20, "failures": 1, "prompts": 2, **what})


def test_a_prefill_machine_that_fails_after_the_transfer_harms_nobody() -> None:
    assert said(run_both_ways(pools(fails(PREFILL, 22)))) == expected()


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        # The sender has the KV still: another machine takes room and gets all of it, from 10 ms + 2 ns on.
        (
            "resume",
            {"finish_ns": 10 * MS + 2 + 23 * MS, "first_token_ns": 10 * MS + 2 + 20 * MS, "sent_bytes": 40_000},
        ),
        (
            "retry",
            {
                "finish_ns": 34 * MS + 3, "first_token_ns": 31 * MS + 3, "recomputed": 20, "discarded": 1, "prompts": 2,
                "sent_bytes": 40_000,
            },
        ),
        (
            "lose",
            {"status": LOST, "finish_ns": -1, "first_token_ns": -1, "recomputed": 20, "discarded": 1, "emitted": 0},
        ),
    ],
)  # fmt: skip
def test_a_decode_machine_that_fails_during_the_transfer(rule: Any, what: dict[str, int]) -> None:
    assert said(run_both_ways(pools(fails(DECODE, 10), rule=rule))) == expected(**what, failures=1)


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        # 2 tokens emitted, 21 with KV: 22 are computed and sent, the third token comes with the KV, the fourth 1 ms later.
        ("resume", {"finish_ns": 22_500_001 + 24 * MS + 2, "sent_bytes": 42_000, "prompts": 2}),
        (
            "retry",
            {
                "finish_ns": 22_500_001 + 24 * MS + 2, "first_token_ns": 22_500_001 + 21 * MS + 2, "sent_bytes": 40_000,
                "prompts": 2, "discarded": 2,
            },
        ),
        ("lose", {"status": LOST, "finish_ns": -1, "emitted": 2}),
    ],
)  # fmt: skip
def test_a_decode_machine_that_fails_while_it_decodes(rule: Any, what: dict[str, int]) -> None:
    found = run_both_ways(pools(fails(DECODE, 22.5), rule=rule))
    assert said(found) == expected(**what, recomputed=21, failures=1)
    if rule == "resume":
        # From the last token before to the one that came with the KV, and the others.
        gaps, _ = found.itl()
        assert sorted(gaps.tolist()) == [MS, MS, 22_500_001 + 23 * MS + 2 - (22 * MS + 2)]


def test_a_decode_machine_that_fails_while_the_prompt_is_computed_is_replaced_whatever_the_rule() -> None:
    """Room was taken at 0, of which the sender hears; at 0.5 ms the receiver fails, and another is chosen at 1 ms."""
    found = said(run_both_ways(pools(fails(DECODE, 0.5), rule="lose", room="before_prefill")))
    # 1 ns until there is room, 1 until the prompt is heard of, 1 until there is room elsewhere.
    assert found == expected(finish_ns=24 * MS + 3, first_token_ns=21 * MS + 3, chosen_again=1)


def test_who_waits_for_room_at_a_decode_machine_that_fails_takes_room_at_another() -> None:
    """Two prompts, of which the first fills a decode machine; both are told to go there, the other being down until 5 ms."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[40, 40], output_tokens=[20, 20])
    small = replace(ONE, kv_blocks=5)
    experiment = pools(Outage(machine=3, at_s=0, for_s=0.005), fails(2, 50), trace=trace, spec=small, rule="lose")
    found = run_both_ways(experiment)
    assert found.requests["status"].tolist() == [LOST, FINISHED]
    assert found.requests["failures"].tolist() == [1, 0]
    assert found.meta["fleet"]["chosen_again"] == 1
    # Heard of at 50 ms + 1 ns, with room 1 ns later.
    assert found.requests["sent_ns"][1] == 50 * MS + 2
    assert found.requests["replica"].tolist() == [2, 3]


# Both decode machines have room for one of two requests, and the prefill machine for one prompt. The first request's decode machine
# fails at 0.5 ms, while its prompt is computed; the second request has room at the other one.
def test_a_computed_prompt_whose_decode_machine_goes_does_not_wait_for_room_with_its_memory() -> None:
    """It is computed again behind the other, which waits for its memory and has the room that it asks for."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[40, 40], output_tokens=[4, 4])
    small = replace(ONE, kv_blocks=3)
    outages = (fails(1, 0), Outage(machine=2, at_s=0.0005))
    found = run_both_ways(pools(*outages, trace=trace, spec=small, room="before_prefill", rule="lose"))
    assert found.requests["status"].tolist() == [FINISHED, FINISHED]
    assert found.requests["prompts_computed"].tolist() == [2, 1]
    assert found.requests["recomputed_tokens"].tolist() == [40, 0]
    assert found.requests["failures"].tolist() == [0, 0]
    assert found.requests["finish_ns"][0] > found.requests["finish_ns"][1]
    assert found.meta["fleet"]["discarded_tokens"] == 1


def test_a_computed_prompt_whose_decode_machine_goes_takes_room_that_another_has() -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[40, 40], output_tokens=[4, 4])
    found = run_both_ways(
        pools(fails(1, 0), Outage(machine=2, at_s=0.0005), trace=trace, room="before_prefill", rule="lose")
    )
    assert found.requests["status"].tolist() == [FINISHED, FINISHED]
    assert found.requests["prompts_computed"].tolist() == [1, 1]
    assert found.meta["fleet"]["chosen_again"] == 1


def test_a_computed_prompt_that_nobody_can_decode_leaves_its_memory_to_one_that_has_room() -> None:
    """The only machine with memory for the first request fails for good; the second request has room at the other."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[40, 20], output_tokens=[4, 4])
    small = replace(ONE, kv_blocks=3)
    experiment = pools(fails(1, 0), fails(2, 0.5), trace=trace, room="before_prefill")
    machines = (small, small, small, replace(small, kv_blocks=2))
    found = run_both_ways(replace(experiment, replicas=machines))
    assert found.requests["status"].tolist() == [UNFINISHED, FINISHED]
    assert found.requests["replica"].tolist() == [-1, 3]
    assert found.meta["fleet"]["held_to_the_end"] == 1


@patches_the_engine
def test_a_run_that_comes_to_rest_with_requests_that_nobody_can_serve_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(arrival_ns=[0, 0, 0], prompt_tokens=[40] * 3, output_tokens=[4] * 3)
    outages = (fails(1, 0), Outage(machine=2, at_s=0.0005))
    circle = pools(*outages, trace=trace, spec=replace(ONE, kv_blocks=3), room="before_prefill")
    # As if a computed prompt waited for room.
    monkeypatch.setattr(Handovers, "no_room", lambda *_: None)
    with pytest.raises(UnservedError, match=r"3 of 3 requests can never be served \(0, 1, 2\).*1 are at machine 0"):
        run(circle)
    with pytest.raises(UnservedError):
        run(replace(circle, horizon_ns=10 * 10**9))
    # While something is still to happen, a run may be cut short.
    assert run(replace(circle, horizon_ns=MS // 2)).requests["status"].tolist() == [UNFINISHED] * 3


def test_the_link_of_machines_that_fail_is_free_for_others() -> None:
    """One link for all, and a second request at 10 ms: whether its turn was promised before the first one's receiver failed."""
    trace = Trace(arrival_ns=[0, 10 * MS], prompt_tokens=[20, 20], output_tokens=[4, 4])
    found = run_both_ways(pools(fails(2, 12), trace=trace, shared="pools", rule="lose"))
    assert found.requests["status"].tolist() == [LOST, FINISHED]
    # Promised from 21 ms on; a promise does not change.
    assert found.requests["landed_ns"][1] == 41 * MS + 2
    found = run_both_ways(pools(fails(2, 9), trace=trace, shared="pools", rule="lose"))
    assert found.requests["landed_ns"][1] == 31 * MS + 2
    assert found.meta["links"][0]["busy_ns"] == 8 * MS - 2 + 20 * MS


def test_the_link_of_a_machine_that_is_back_is_free() -> None:
    """The first machine fails at 5 ms with KV on its link, and is back at 6; the third request is its own at 10 ms."""
    trace = Trace(arrival_ns=[0, 0, 10 * MS], prompt_tokens=[20] * 3, output_tokens=[4] * 3)
    found = run_both_ways(pools(Outage(machine=0, at_s=0.005, for_s=0.001), trace=trace))
    assert found.requests["prefill_replica"].tolist() == [1, 1, 0]
    assert found.requests["landed_ns"][2] == 31 * MS + 2
    # 4 ms - 2 ns of the transfer that was cut short, and a whole one.
    assert found.meta["links"][0]["busy_ns"] == 24 * MS - 2


def test_machines_of_both_pools_drain_when_they_have_sent_or_decoded_what_they_have() -> None:
    """Told at 5 ms to be one each, of machines that are as busy: the last of each ends what it has."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20, 20], output_tokens=[4, 4])
    to_one = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=0.005)
    found = run_both_ways(pools(trace=trace, scaling=(to_one, to_one)))
    assert found.requests["finish_ns"].tolist() == [24 * MS + 2] * 2
    by_state = [(at_s, machine, state) for at_s, machine, state, _ in changes(found)]
    # KV has arrived at 21 ms + 2 ns, the last token is there at 24 ms + 2 ns; each is seen 1 ns later.
    assert by_state == [
        (0.005, 1, DRAINING),
        (0.005, 3, DRAINING),
        (pytest.approx(0.021000003, abs=1e-12), 1, OFF),
        (pytest.approx(0.024000003, abs=1e-12), 3, OFF),
    ]


def test_a_prompt_waits_with_the_machine_that_computed_it_until_one_that_decodes_is_ready() -> None:
    """None at the beginning; one is asked for at 10 ms, and ready at 15."""
    grows = Scaling(policy=Says((1,)), min_machines=0, initial=0, interval_s=0.01, phases=(("load", 0.005),))
    found = run_both_ways(pools(scaling=(None, grows)))
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(found)] == [
        (0.01, 2, STARTING),
        (0.015, 2, READY),
    ]
    assert said(found) == expected(finish_ns=38 * MS + 1, first_token_ns=35 * MS + 1)
    assert found.requests["held_ns"].tolist() == [14 * MS - 1]
    lost = run_both_ways(pools(scaling=(None, grows), when_none="lose"))
    assert lost.reasons == ("no machine that decodes was ready",)
    assert said(lost)["recomputed"] == 20
    # Where room is taken first, nothing is computed before.
    first = run_both_ways(pools(scaling=(None, grows), room="before_prefill"))
    assert first.requests["held_ns"].tolist() == [15 * MS]
    assert first.requests["scheduled_ns"].tolist() == [15 * MS + 1]


def test_a_pool_whose_machines_could_not_hold_a_request_does_not_count_it_as_waiting() -> None:
    """Room is taken first, and no machine decodes: of two pools that could, one has memory for 16 tokens, and the prompt has 20."""
    seen: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class Looks:
        def wanted(self, seen_now: Seen, /) -> int:
            seen.append(tuple(seen_now.pools[name].waiting for name in ("p", "d", "small")))
            return int(seen_now.mine.waiting > 0)

    grows = Scaling(policy=Looks(), min_machines=0, initial=0, interval_s=0.01)
    plain = pools(room="before_prefill", scaling=(None, grows))
    assert plain.handover is not None
    assert plain.fleet is not None
    path = plain.handover.paths[0, 1]
    experiment = replace(
        plain,
        replicas=(ONE, ONE, ONE, replace(ONE, kv_blocks=1)),
        handover=replace(plain.handover, pools=(0, 0, 1, 2), paths={(0, 1): path, (0, 2): path}),
        fleet=replace(
            plain.fleet,
            pools=(0, 0, 1, 2),
            names=("p", "d", "small"),
            scaling=(None, grows, grows),
            failing=(None,) * 3,
        ),
    )
    found = run_both_ways(experiment)
    assert seen[0] == (0, 1, 0)
    assert [(machine, state) for _, machine, state, _ in changes(found)] == [(2, READY)]


def test_a_machine_whose_prompt_nobody_takes_yet_does_not_go() -> None:
    """Its pool is told to be one at 5 ms, and the machine that decodes is ready at 12 ms: KV crosses by 32 ms + 1 ns."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20, 20], output_tokens=[1, 4])
    to_one = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=0.005)
    grows = Scaling(policy=Says((1,)), min_machines=0, initial=0, interval_s=0.012)
    found = run_both_ways(pools(trace=trace, scaling=(to_one, grows)))
    # The first has nothing left, and of two as idle the last goes.
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(found) if machine < 2] == [
        (0.005, 1, DRAINING),
        (pytest.approx(0.032000002, abs=1e-12), 1, OFF),
    ]
    assert found.requests["landed_ns"][1] == 32 * MS + 1


def test_where_no_machine_that_decodes_comes_back_requests_are_held_to_the_end_and_the_run_ends() -> None:
    trace = Trace(arrival_ns=[0, 30 * MS], prompt_tokens=[20] * 2, output_tokens=[4] * 2)
    # A policy that is asked every 5 ms is asked no more when nothing can come of it.
    stays = Scaling(policy=Says((2,)), min_machines=2, initial=2, interval_s=0.005)
    found = run_both_ways(pools(fails(2, 2), fails(3, 3), trace=trace, scaling=(stays, None)))
    assert found.requests["status"].tolist() == [UNFINISHED] * 2
    assert found.meta["fleet"]["held_to_the_end"] == 2
    # The second still had its prompt computed, and waits with it.
    assert found.requests["prompts_computed"].tolist() == [1, 1]


def test_who_is_held_waits_for_a_machine_that_does_both_where_no_other_comes_back() -> None:
    trace = Trace(arrival_ns=[10 * MS], prompt_tokens=[20], output_tokens=[4])
    # A policy that is asked every 5 ms is asked until the machine starts that does both.
    starts = Scaling(policy=Says((0, 0, 0, 1)), min_machines=0, initial=1, interval_s=0.005)
    experiment = pools(fails(0, 1), fails(2, 2), fails(3, 3), trace=trace, scaling=(starts, None))
    assert experiment.handover is not None
    roles = replace(experiment.handover, roles=("prefill", "both", "decode", "decode"))
    found = run_both_ways(replace(experiment, handover=roles))
    assert found.requests["status"].tolist() == [FINISHED]
    assert found.requests["replica"].tolist() == [1]


def test_a_client_who_goes_while_no_machine_decodes_is_gone_and_its_blocks_are_free() -> None:
    trace = Trace(
        arrival_ns=[0, 30 * MS], prompt_tokens=[20, 20], output_tokens=[4, 4], abort_ns=np.array([5 * MS, -1])
    )
    grows = Scaling(policy=Says((0, 0, 0, 1)), min_machines=0, initial=0, interval_s=0.01)
    found = run_both_ways(pools(trace=trace, scaling=(None, grows)))
    assert found.requests["status"].tolist() == [ABORTED, FINISHED]


def test_a_request_that_goes_on_finds_what_the_prefill_machine_has_cached() -> None:
    """It had emitted 2 tokens of 36 when its decode machine failed: of 34 tokens two blocks are found, and 2 are computed."""
    ids = np.arange(1, 3)
    trace = Trace(
        arrival_ns=[0],
        prompt_tokens=[32],
        output_tokens=[4],
        prefix_blocks=ids,
        prefix_offsets=[0, 2],
        prefix_block_tokens=16,
    )
    caching = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=Vllm(), kv_blocks=100, prefix_cache="blocks")
    found = run_both_ways(pools(fails(DECODE, 34.5), trace=trace, spec=caching))
    assert found.requests["status"].tolist() == [FINISHED]
    assert found.requests["prefix_hit_again_tokens"].tolist() == [32]
    assert found.iterations()["prefill_tokens"].sum() == 32 + 2
    assert found.requests["recomputed_tokens"].tolist() == [33]


def test_a_prompt_that_stays_needs_no_machine_that_prefills() -> None:
    trace = Trace(arrival_ns=[MS], prompt_tokens=[20], output_tokens=[4])
    found = run_both_ways(pools(fails(0, 0), fails(1, 0), trace=trace, local_tokens=20))
    assert found.requests["finish_ns"].tolist() == [5 * MS]


@dataclass(frozen=True)
class Notes:
    """Asks for what there is, and notes what it saw."""

    seen: list[dict[str, PoolSeen]]

    def wanted(self, seen: Seen, /) -> int:
        self.seen.append(dict(seen.pools))
        return seen.mine.machines


def test_a_policy_sees_of_each_pool_what_came_what_ended_and_the_time_to_the_first_token() -> None:
    notes: list[dict[str, PoolSeen]] = []
    stays = Scaling(policy=Notes(notes), min_machines=0, initial=2, interval_s=0.022)
    run(pools(scaling=(stays, None)))
    first, second = notes[0]["p"], notes[0]["d"]
    assert (first.came, first.came_tokens, first.finished, first.finished_tokens) == (1, 20, 1, 1)
    assert (second.came, second.came_tokens, second.finished, second.running) == (1, 20, 0, 1)
    assert first.ttft_mean_s == second.ttft_mean_s == pytest.approx(0.021000002)


def test_a_request_that_comes_again_has_come_once_for_each_pool() -> None:
    notes: list[dict[str, PoolSeen]] = []
    stays = Scaling(policy=Notes(notes), min_machines=0, initial=2, interval_s=0.035)
    trace = Trace(arrival_ns=[0, 60 * MS], prompt_tokens=[20, 20], output_tokens=[4, 4])
    found = run(pools(fails(PREFILL, 10), scaling=(stays, None), trace=trace))
    assert found.requests["prompts_computed"].tolist() == [2, 1]
    assert [(notes[0][name].came, notes[0][name].finished) for name in "pd"] == [(1, 2), (1, 1)]


@pytest.mark.parametrize(("prompt_tokens", "waits_for_decode"), [(20, 1), (21, 0)])
def test_a_held_request_waits_for_a_machine_that_decodes_only_where_its_prompt_stays_there(
    prompt_tokens: int, waits_for_decode: int
) -> None:
    notes: list[dict[str, PoolSeen]] = []
    all_off = (Outage(machine=machine, at_s=0.0, for_s=0.01) for machine in range(4))
    trace = Trace(arrival_ns=[MS], prompt_tokens=[prompt_tokens], output_tokens=[4])
    scaling = (None, Scaling(policy=Notes(notes), min_machines=0, initial=2, interval_s=0.002))
    run(pools(*all_off, trace=trace, local_tokens=20, scaling=scaling))
    assert (notes[0]["p"].waiting, notes[0]["d"].waiting) == (1, waits_for_decode)
