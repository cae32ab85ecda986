"""A stage before prefill: what comes with prompts is encoded on machines of their own, and crosses a link.

A batch takes 1 ms and each request as many ms as its size says; 1,000 bytes a unit of size cross a link of 1 MB/s. Then it is as
in `test_fleet_apart`: one millisecond an iteration, 20 tokens of 1,000 bytes over a link of 1 MB/s, 4 tokens to emit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.control import Seen
from policies.routers import LeastOutstanding, Prefix, ReplicaLoad, RoundRobin, RoutedRequest, Router
from sim.engine import FINISHED, UNFINISHED, Experiment, run
from sim.engine.machine.encoder import encoders_of
from sim.engine.record.columns import ABORTED, LOST, Columns
from sim.engine.simulation.online import LiveRun, live_trace
from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.spec.images import Image
from sim.engine.spec.lifecycle import DRAINING, OFF, READY, Failing, Life, Outage, Scaling
from sim.engine.tiers.links import LinkSpec
from sim.engine.time.events import Clock
from tests.engine.random_runs import an_experiment, apart, run_both_ways, with_fleet
from tests.engine.test_fleet import Says, changes
from tests.engine.test_fleet_apart import ONE, expected, pools, said
from tests.sample import few, some
from workloads import ClosedLoop, Trace

MS = 1_000_000


def encoders(n: int, sizes: list[int], *, router: Router | None = None, max_batch: int = 1) -> EncodeSpec:
    machine = EncoderSpec(request_s=lambda size: size / 1e3, batch_s=1e-3, max_batch=max_batch, link=LinkSpec(1e6))
    return EncodeSpec(machines=(machine,) * n, router=router or RoundRobin(), sizes=sizes, bytes_per_unit=1000.0)


def with_encoders(experiment: Experiment, encode: EncodeSpec, scaling: Scaling | None = None) -> Experiment:
    fleet = experiment.fleet
    if fleet is not None:
        n = len(fleet.names)
        fleet = replace(
            fleet,
            pools=(*fleet.pools, *[n] * len(encode.machines)),
            names=(*fleet.names, "e"),
            scaling=(*fleet.scaling, scaling),
            failing=(*fleet.failing, None),
        )
    return replace(experiment, encode=encode, fleet=fleet)


def serving(encode: EncodeSpec, arrival_ns: list[int], **more: Any) -> Experiment:
    """One machine that serves, and encoders before it, from machine 1 on."""
    n = len(arrival_ns)
    trace = Trace(arrival_ns=arrival_ns, prompt_tokens=[20] * n, output_tokens=[4] * n, **more)
    return Experiment(workload=trace, replicas=(ONE,), router=RoundRobin(), encode=encode)


def test_an_encoder_has_all_that_routers_see_of_a_machine() -> None:
    (encoder,) = encoders_of(encoders(1, [5]), 3, Clock())
    seen = {name for name, each in vars(ReplicaLoad).items() if isinstance(each, property)}
    assert {"waiting", "kv_use", "promised_ns", "no_hit_order"} <= seen
    for name in seen:
        getattr(encoder, name)
    encoder.deliver(0)
    assert (encoder.index, encoder.waiting, encoder.running, encoder.kv_use, encoder.cores) == (3, 1, 0, 0.0, [])
    assert (encoder.found_tokens(RoutedRequest(0, 20)), encoder.core_number(0)) == (0, -1)
    with pytest.raises(ValueError, match="machine 3 has no table of latencies"):
        encoder.done_ns(0, waiting=True)


def test_a_request_is_encoded_sent_and_then_served() -> None:
    found = run_both_ways(serving(encoders(1, [5]), [0])).requests
    assert found["encode_begin_ns"].tolist() == [0]
    assert found["encoded_ns"].tolist() == [6 * MS]
    assert found["encode_landed_ns"].tolist() == found["scheduled_ns"].tolist() == [11 * MS + 1]
    assert found["finish_ns"].tolist() == [15 * MS + 1]


def test_requests_are_encoded_in_order_and_in_batches_that_end_together() -> None:
    """Three at once, two in a batch: 1 + 2 + 3 ms, then 1 + 1 ms; the link sends one after the other."""
    found = run_both_ways(serving(encoders(1, [2, 3, 1], max_batch=2), [0, 0, 0])).requests
    assert found["encode_begin_ns"].tolist() == [0, 0, 6 * MS]
    assert found["encoded_ns"].tolist() == [6 * MS, 6 * MS, 8 * MS]
    assert found["encode_landed_ns"].tolist() == [8 * MS + 1, 11 * MS + 1, 12 * MS + 1]
    facts = run(serving(encoders(1, [2, 3, 1], max_batch=2), [0, 0, 0])).meta["encoders"]
    assert facts == [{"machine": 1, "batches": 2, "link_busy_ns": 6 * MS}]


def test_a_request_with_nothing_to_encode_is_served_at_once() -> None:
    experiment = serving(encoders(1, [0, 5]), [0, 0])
    found = run_both_ways(experiment).requests
    assert found["scheduled_ns"].tolist() == [0, 11 * MS + 1]
    assert found["encoder"].tolist() == [-1, 1]
    assert found["encoded_ns"].tolist() == [-1, 6 * MS]
    # Without sizes the run is that without encoders.
    plain = run(replace(experiment, encode=None)).requests
    nothing = run(replace(experiment, encode=encoders(1, [0, 0]))).requests
    for name, column in plain.items():
        np.testing.assert_array_equal(nothing[name], column, err_msg=name)


def test_the_router_of_the_stage_chooses_the_encoder() -> None:
    """A long one, then three short ones: in turn, or to the encoder with fewer requests."""
    for router, chosen in ((RoundRobin(), [1, 2, 1, 2]), (LeastOutstanding(), [1, 2, 2, 2])):
        encode = encoders(2, [50, 1, 1, 1], router=router)
        found = run(serving(encode, [0, MS, 10 * MS, 20 * MS]), check_invariants=True).requests
        assert found["encoder"].tolist() == chosen


def test_a_router_sees_that_encoders_have_no_kv() -> None:
    seen: list[tuple[int, float, int, int]] = []

    @dataclass(frozen=True)
    class Looks:
        def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
            seen.extend((r.kv_blocks_used, r.kv_use, r.prefill_tokens, r.found_tokens(request)) for r in replicas)
            return 0

    run(serving(encoders(2, [5, 5], router=Looks()), [0, MS]))
    assert seen == [(0, 0.0, 0, 0)] * 4


def test_a_batch_that_takes_no_time_ends_a_nanosecond_later() -> None:
    at_once = EncoderSpec(request_s=lambda size: 0.0, batch_s=0.0, max_batch=1, link=LinkSpec(1e6))
    encode = EncodeSpec(machines=(at_once,), router=RoundRobin(), sizes=[1, 1], bytes_per_unit=1000.0)
    assert run(serving(encode, [0, 0])).requests["encoded_ns"].tolist() == [1, 2]


def test_encode_prefill_and_decode_follow_each_other() -> None:
    found = run_both_ways(replace(pools(), encode=encoders(1, [5]), fleet=None)).requests
    plain = run(replace(pools(), fleet=None)).requests
    for name in ("scheduled_ns", "prefilled_ns", "sent_ns", "landed_ns", "joined_ns", "finish_ns"):
        assert found[name].tolist() == [plain[name][0] + 11 * MS + 1], name


def after(ns: int) -> dict[str, int]:
    """The facts that `expected` states of a request that has been encoded and has arrived by *ns*."""
    return {"finish_ns": ns + 24 * MS + 2, "first_token_ns": ns + 21 * MS + 2}


@pytest.mark.parametrize(
    ("fails_ms", "arrived_ns", "failures"),
    [(3, 14 * MS + 2, 1), (8, 19 * MS + 2, 1), (11.5, 11 * MS + 1, 0)],
    ids=["encoding", "on its link", "has sent"],
)
def test_what_a_failing_encoder_has_is_encoded_again_elsewhere(fails_ms: float, arrived_ns: int, failures: int) -> None:
    found = run_both_ways(_fails(fails_ms))
    assert said(found) == expected(failures=failures, **after(arrived_ns))
    assert found.requests["encoder"].tolist() == [5 if failures else 4]


def _fails(at_ms: float, n: int = 2, **outage: Any) -> Experiment:
    plain = with_encoders(pools(), encoders(n, [5]))
    assert plain.fleet is not None
    outages = (Outage(machine=4, at_s=at_ms / 1e3, **outage),)
    return replace(plain, fleet=replace(plain.fleet, outages=outages))


def test_a_request_waits_for_an_encoder_that_comes_back() -> None:
    """The only one fails at 3 ms for 10 ms."""
    found = run_both_ways(_fails(3, n=1, for_s=0.01))
    assert said(found) == expected(failures=1, **after(24 * MS + 1))
    assert found.requests["held_ns"].tolist() == [10 * MS - 1]
    # One that does not come back leaves it held to the end of the run.
    assert run(_fails(3, n=1), check_invariants=True).requests["status"].tolist() == [UNFINISHED]


def test_a_request_whose_prefill_machine_fails_is_encoded_again() -> None:
    """It is there at 11 ms + 1 ns, and its machine fails at 11.5 ms."""
    encode = encoders(1, [5])
    plain = with_encoders(pools(), encode)
    assert plain.fleet is not None
    found = run_both_ways(replace(plain, fleet=replace(plain.fleet, outages=(Outage(machine=0, at_s=0.0115),))))
    assert found.requests["encode_begin_ns"].tolist() == [11_500_001]
    assert said(found) == expected(failures=1, **after(22_500_002))


def test_a_request_that_has_been_encoded_and_waits_for_a_machine_is_not_encoded_again() -> None:
    """No machine that prefills is ready from 1 to 20 ms."""
    plain = with_encoders(pools(), encoders(1, [5]))
    assert plain.fleet is not None
    outages = tuple(Outage(machine=machine, at_s=1e-3, for_s=0.019) for machine in (0, 1))
    found = run_both_ways(replace(plain, fleet=replace(plain.fleet, outages=outages)))
    assert said(found) == expected(**after(20 * MS))
    assert found.requests["encode_begin_ns"].tolist() == [0]


def test_an_encoder_that_drains_goes_when_what_it_sent_has_arrived() -> None:
    """Told to be one at 5 ms: of two, the last has the second request until it has sent it, by 16 ms + 1 ns."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20] * 2, output_tokens=[4] * 2)
    to_one = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=0.005)
    found = run(with_encoders(pools(trace=trace), encoders(2, [5, 5]), to_one), check_invariants=True)
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(found)] == [
        (0.005, 5, DRAINING),
        (pytest.approx(0.011000002, abs=1e-12), 5, OFF),
    ]
    assert found.requests["status"].tolist() == [FINISHED] * 2


@pytest.mark.parametrize(
    ("gone_ms", "off_s"), [(3, 0.006000001), (8, 0.008000001)], ids=["while it is encoded", "while it is sent"]
)
def test_an_encoder_that_drains_goes_when_nobody_wants_what_it_has_encoded(gone_ms: int, off_s: float) -> None:
    """The second request is encoded by 6 ms, and its tokens are on their link until 11 ms; its client goes before."""
    leaves_ns = np.array([-1, gone_ms * MS])
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20] * 2, output_tokens=[4] * 2, abort_ns=leaves_ns)
    to_one = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=0.005)
    found = run(with_encoders(pools(trace=trace), encoders(2, [5, 5]), to_one), check_invariants=True)
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(found)] == [
        (0.005, 5, DRAINING),
        (pytest.approx(off_s, abs=1e-12), 5, OFF),
    ]


def test_the_policy_of_the_stage_sees_what_came_what_waits_and_what_has_been_encoded() -> None:
    """One encoder, and two requests at 0: 6 ms each, looked at after 5, 10 and 15 ms."""
    seen: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class Looks:
        def wanted(self, now: Seen, /) -> int:
            mine = now.mine
            seen.append((mine.came, mine.waiting, mine.running, mine.finished, mine.finished_tokens))
            return 1

    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20] * 2, output_tokens=[4] * 2)
    stays = Scaling(policy=Looks(), min_machines=1, initial=1, interval_s=0.005)
    run(with_encoders(pools(trace=trace), encoders(1, [5, 5]), stays), check_invariants=True)
    assert seen[:3] == [(2, 1, 1, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 1, 0)]


def test_encoders_start_for_requests_that_wait_for_them() -> None:
    grows = Scaling(policy=Says((1,)), min_machines=0, initial=0, interval_s=0.01)
    found = run_both_ways(with_encoders(pools(), encoders(2, [5]), grows))
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(found)] == [(0.01, 4, READY)]
    assert said(found) == expected(**after(21 * MS + 1))


@pytest.mark.parametrize("at_ms", [1, 4, 8], ids=["encoding", "queued", "on the link"])
def test_a_client_who_goes_before_the_prompt_is_computed_takes_nothing_further(at_ms: int) -> None:
    """The second request is encoded from 0, 6 or 0 ms on: one encoder, or two."""
    n = 1 if at_ms == 4 else 2
    trace: dict[str, Any] = {"abort_ns": np.array([-1, at_ms * MS])}
    found = run_both_ways(serving(encoders(n, [5, 5]), [0, 0], **trace)).requests
    assert found["status"].tolist() == [FINISHED, ABORTED]
    assert found["scheduled_ns"].tolist() == [11 * MS + 1, -1]
    assert found["encode_landed_ns"][1] == -1


def test_a_client_may_go_while_no_encoder_is_ready() -> None:
    """The only one fails at 3 ms for 10 ms, and the client goes at 8 ms."""
    trace = Trace(arrival_ns=[0], prompt_tokens=[20], output_tokens=[4], abort_ns=np.array([8 * MS]))
    waits = _fails(3, n=1, for_s=0.01)
    found = run_both_ways(replace(waits, workload=trace)).requests
    assert [found[name].tolist() for name in ("status", "failures", "encoder", "encode_begin_ns")] == [
        [ABORTED],
        [1],
        [-1],
        [-1],
    ]


def test_the_place_in_the_queue_of_a_client_who_has_gone_is_the_next_one_s() -> None:
    found = run_both_ways(serving(encoders(1, [5, 5, 5]), [0, 0, 0], abort_ns=np.array([-1, 4 * MS, -1]))).requests
    assert found["encode_begin_ns"].tolist() == [0, -1, 6 * MS]


def test_what_cannot_be_is_refused() -> None:
    one = serving(encoders(1, [5]), [0])
    with pytest.raises(ValueError, match="2 sizes for 1 requests"):
        replace(one, encode=encoders(1, [5, 5]))
    with pytest.raises(ValueError, match="at least 0; got -1"):
        encoders(1, [-1])
    with pytest.raises(ValueError, match="ask which images requests have; give images"):
        replace(keeping(10, [image(1)]), images=None)
    with pytest.raises(ValueError, match="cache is at least 0; got -1"):
        keeping(-1, [image(1)])
    with pytest.raises(ValueError, match="has machines; got none"):
        encoders(0, [5])
    with pytest.raises(ValueError, match="asks for more than loads"):
        encoders(1, [5], router=Prefix(event_delay_s=1e-3))
    with pytest.raises(ValueError, match="learns late of machines"):
        replace(one, router=Prefix(event_delay_s=1e-3))
    with pytest.raises(ValueError, match="pools for 4 machines and there are 5"):
        replace(pools(), encode=encoders(1, [5]))
    with pytest.raises(ValueError, match="no size to encode"):
        LiveRun(replace(one, workload=live_trace((), 16)), listener=None)  # pyright: ignore[reportArgumentType]


# Images that encoders keep.


def image(content: int, size: int = 5) -> Image:
    return Image(content=content, first=0, tokens=size, embeddings=size, size=size)


def keeping(cache: int, *of: Sequence[Image], n: int = 1, max_batch: int = 1) -> EncodeSpec:
    """An image of n embeddings is encoded in n ms, several one after the other; a batch takes 1 ms beside."""
    machine = EncoderSpec(
        together_s=lambda sizes: sum(sizes) / 1e3, batch_s=1e-3, max_batch=max_batch, cache=cache, link=LinkSpec(1e9)
    )
    sizes = [sum(each.embeddings for each in images) for images in of]
    return EncodeSpec(machines=(machine,) * n, router=RoundRobin(), sizes=sizes, images=tuple(map(tuple, of)))


def one_by_one(encode: EncodeSpec) -> Any:
    return run_both_ways(serving(encode, [100 * MS * i for i in range(len(encode.sizes))])).requests


def test_an_image_that_an_encoder_keeps_is_not_encoded_again() -> None:
    found = one_by_one(keeping(10, [image(1)], [image(1), image(2)], [image(2)]))
    assert (found["encoded_ns"] - found["encode_begin_ns"]).tolist() == [6 * MS, 6 * MS, 1 * MS]
    assert found["encoded_images"].tolist() == [1, 1, 0]
    assert found["image_hits"].tolist() == [0, 1, 1]


def test_what_was_used_longest_ago_goes_first() -> None:
    found = one_by_one(keeping(10, *([image(content)] for content in (1, 2, 1, 3, 1, 2))))
    # 3 takes the room of 2, since 1 was used behind it; then 2 takes that of 3.
    assert found["encoded_images"].tolist() == [1, 1, 0, 1, 0, 1]


def test_an_image_larger_than_the_cache_is_encoded_each_time_and_drives_nothing_out() -> None:
    found = one_by_one(keeping(10, [image(1)], [image(2, 11)], [image(2, 11)], [image(1)]))
    assert found["encoded_images"].tolist() == [1, 1, 1, 0]


def test_equal_images_of_a_batch_are_encoded_once_and_each_encoder_keeps_its_own() -> None:
    together = run_both_ways(serving(keeping(10, *[[image(1)]] * 3, max_batch=3), [0, MS, MS])).requests
    # The first alone; the two that came meanwhile find its image.
    assert together["encoded_images"].tolist() == [1, 0, 0]
    assert together["encoded_ns"].tolist() == [6 * MS, 7 * MS, 7 * MS]
    apart = one_by_one(keeping(10, *[[image(1)]] * 4, n=2))
    assert apart["encoded_images"].tolist() == [1, 1, 0, 0]


def test_an_encoder_that_comes_back_has_kept_nothing() -> None:
    plain = with_encoders(pools(trace=_at(0, 60 * MS)), keeping(10, [image(1)], [image(1)]))
    assert plain.fleet is not None
    stopped = replace(plain, fleet=replace(plain.fleet, outages=(Outage(machine=4, at_s=0.03, for_s=0.01),)))
    assert run_both_ways(plain).requests["encoded_images"].tolist() == [1, 0]
    assert run_both_ways(stopped).requests["encoded_images"].tolist() == [1, 1]


def _at(*arrival_ns: int) -> Trace:
    n = len(arrival_ns)
    return Trace(arrival_ns=list(arrival_ns), prompt_tokens=[20] * n, output_tokens=[4] * n)


def test_without_equal_images_a_cache_changes_nothing() -> None:
    images = [[image(row)] for row in range(6)]
    without, kept = (run(serving(keeping(cache, *images), [MS * i for i in range(6)])).requests for cache in (0, 12))
    assert {"encoded_images", "image_hits"} == kept.keys() - without.keys()
    assert all((kept[name] == values).all() for name, values in without.items())


@pytest.mark.parametrize("seed", some(range(60)))
def test_what_encoders_keep_is_what_a_count_by_hand_keeps(seed: int) -> None:
    """One at a time, so that the order is that of arrival; the latest uses are at the end of a list."""
    rng = random.Random(f"kept {seed}")
    sizes, room = [rng.randrange(1, 9) for _ in range(8)], rng.randrange(0, 30)
    of = [
        [image(content, sizes[content]) for content in rng.choices(range(8), k=rng.randrange(1, 4))] for _ in range(30)
    ]
    kept: list[int] = []
    encoded = []
    for images in of:
        encoded.append(0)
        for content in (each.content for each in images):
            encoded[-1] += content not in kept
            if sizes[content] <= room:
                kept = [*(each for each in kept if each != content), content]
            while sum(sizes[each] for each in kept) > room:
                del kept[0]
    experiment = serving(keeping(room, *of), [100 * MS * i for i in range(30)])
    requests = run(experiment, check_invariants=True).requests
    if room:
        assert requests["encoded_images"].tolist() == encoded
        assert requests["image_hits"].tolist() == [len(images) - n for images, n in zip(of, encoded, strict=True)]


# Random runs.


def encoded_first(seed: int) -> Experiment:
    """A random experiment with encoders before it, which fail and scale like its other machines."""
    rng = random.Random(f"encoders of {seed}")
    experiment = (apart if seed % 2 else an_experiment)(seed, speculative=seed % 5 == 0)
    if seed % 3 and isinstance(experiment.workload, Trace):
        experiment = with_fleet(experiment, seed)
    n = len(experiment.workload)
    machines = tuple(
        EncoderSpec(
            request_s=lambda size: size * 1e-4,
            batch_s=rng.choice([0.0, 1e-3]),
            max_batch=rng.choice([1, 2, 8]),
            link=LinkSpec(rng.choice([1e6, 1e9]), latency_s=rng.choice([0.0, 1e-3])),
        )
        for _ in range(rng.randrange(1, 4))
    )
    encode = EncodeSpec(
        machines=machines,
        router=rng.choice([RoundRobin(), LeastOutstanding()]),
        sizes=[rng.choice([0, 1, 10, 40]) for _ in range(n)],
        bytes_per_unit=100.0,
    )
    experiment = with_encoders(replace(experiment, encode=None), encode)
    if experiment.fleet is None:
        return experiment
    failing = Failing(up=Life(mean_s=0.05), down=Life(mean_s=0.01))
    return replace(experiment, fleet=replace(experiment.fleet, failing=(*experiment.fleet.failing[:-1], failing)))


def check_encoding(experiment: Experiment, found: Columns) -> None:
    requests, encode = found.requests, experiment.encode
    assert encode is not None
    sizes = np.array(encode.sizes)
    begun, encoded, landed = (requests[name] for name in ("encode_begin_ns", "encoded_ns", "encode_landed_ns"))
    finished = requests["status"] == FINISHED
    # Whoever is served has been encoded before, and is encoded for nothing else.
    assert ((landed >= 0) == (sizes > 0))[finished].all()
    assert (begun[sizes == 0] == -1).all()
    failed = requests.get("failures", np.zeros(len(sizes))) > 0
    assert ((landed <= requests["scheduled_ns"]) | failed | (requests["scheduled_ns"] < 0)).all()
    through = landed >= 0
    assert (requests["arrival_ns"] <= begun)[through].all()
    first = len(experiment.replicas)
    for id_ in np.flatnonzero(through).tolist():
        machine = encode.machines[requests["encoder"][id_] - first]
        own_ns = round(machine.request_s(encode.sizes[id_]) * 1e9)
        assert encoded[id_] - begun[id_] >= own_ns
        assert landed[id_] - encoded[id_] >= machine.link.occupied_ns(round(sizes[id_] * 100.0))
    batches = Counter(zip(requests["encoder"][through].tolist(), begun[through].tolist(), strict=True))
    assert all(n <= encode.machines[encoder - first].max_batch for (encoder, _), n in batches.items())
    ends = set(
        zip(requests["encoder"][through].tolist(), begun[through].tolist(), encoded[through].tolist(), strict=True)
    )
    assert len(ends) == len(batches)
    if experiment.fleet is None and experiment.horizon_ns is None:
        assert not np.isin(requests["status"], (UNFINISHED, LOST)).any()


@pytest.mark.parametrize("seed", few(some(range(200)), 4))
def test_random_runs_with_encoders_keep_every_request_and_step_as_they_run(seed: int) -> None:
    experiment = encoded_first(seed)
    found = run_both_ways(experiment)
    check_encoding(experiment, found)


def test_random_runs_meet_failures_of_encoders_and_closed_loops() -> None:
    experiments = [encoded_first(seed) for seed in range(20)]
    assert any(isinstance(experiment.workload, ClosedLoop) for experiment in experiments)
    assert sum(experiment.fleet is not None and experiment.handover is not None for experiment in experiments) > 3
