"""The facts that routers are told: by machines, a while later, by what was sent where, by sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.routers import (
    Booked,
    Dynamo,
    Knowledge,
    LeastOutstanding,
    LeastQueue,
    LlmD,
    Prefix,
    RoundRobin,
    RoutedRequest,
    Router,
    SentBlocks,
    SessionAffinity,
)
from policies.vllm import Vllm
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.gateway.routing import SentTo
from sim.engine.time.errors import PolicyError
from tests.engine.contents import trace_of_ids
from tests.engine.costs import Linear, Ranked
from tests.engine.random_runs import an_experiment, assert_same
from tests.sample import few
from workloads import ClosedLoop, Conversations, Deterministic, Fixed, LoadStage, Poisson, SharedPrefix, Trace, Uniform

S = 10**9
SPACE = (0, 4, 1)
THREE_A_ROUND = Speculative(method="draft_model", num_speculative_tokens=2, acceptance=Iid(alpha=1.0))


def a_trace(*requests: tuple[float, list[int]], output: int = 1) -> Trace:
    """(arrival in seconds, ids of blocks of four tokens)."""
    return trace_of_ids(*((at, 4 * len(ids), output, ids) for at, ids in requests), tokens=4)


def served(
    trace: Trace, router: Router, *, n: int = 2, blocks: int = 100, fixed_s: float = 1.0, **how: bool
) -> Columns:
    replica = ReplicaSpec(
        cost=Linear(fixed_s=fixed_s, kv_s=1e-6),
        scheduler=Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False),
        kv_blocks=blocks,
        block_tokens=4,
        prefix_cache="blocks",
    )
    return run(Experiment(workload=trace, replicas=(replica,) * n, router=router), **how)


@dataclass(frozen=True)
class Asked:
    """Writes down what it is told, and sends requests in turn."""

    knows: Knowledge
    told: list[list[int]]

    def route(self, request, replicas, /) -> int:
        self.told.append([load.found_tokens(request) for load in replicas])
        return request.id % len(replicas)


@dataclass(frozen=True)
class Sees:
    """Writes down how many wait on the first machine, and sends all there."""

    knows: Knowledge
    told: list[int]

    def route(self, request, replicas, /) -> int:
        self.told.append(replicas[0].waiting)
        return 0


def told(trace: Trace, **knows) -> list[list[int]]:
    router = Asked(Knowledge(prefixes=True, **knows), [])
    served(trace, router)
    return router.told


def test_an_exact_index_knows_what_each_machine_has() -> None:
    same = [1, 2, 3]
    trace = a_trace((0, same), (10, [1, 2, 4]), (20, same), (30, [1, 2, 4]), (40, [9, 2, 3]))
    assert told(trace) == [[0, 0], [8, 0], [12, 8], [8, 12], [0, 0]]


def test_events_are_late_by_the_delay() -> None:
    # Blocks are cached when they are scheduled, at 0 s: heard of 15 s later.
    trace = a_trace((0, [1]), (10, [1]), (14.9, [1]), (15.1, [1]))
    assert told(trace) == [[0, 0], [4, 0], [4, 4], [4, 4]]
    assert told(trace, event_delay_s=15.0) == [[0, 0], [0, 0], [0, 0], [4, 0]]


def test_late_events_are_those_of_machines_that_host_the_model() -> None:
    # Two models in turn, each on two machines of four.
    trace = a_trace(*((10.0 * i, [1]) for i in range(6)))
    trace = replace(trace, models=("a", "b"), model_index=np.array([0, 1] * 3))
    router = Asked(Knowledge(prefixes=True, event_delay_s=5.0), [])
    of = {
        model: ReplicaSpec(
            cost=Linear(fixed_s=1.0), scheduler=Vllm(), kv_blocks=9, block_tokens=4, prefix_cache="blocks", model=model
        )
        for model in (0, 1)
    }
    run(Experiment(workload=trace, replicas=(of[0], of[1], of[1], of[0]), router=router))
    assert router.told == [[0, 0], [0, 0], [4, 0], [0, 4], [4, 0], [0, 4]]


def test_an_approximate_index_knows_what_was_sent_where_and_forgets() -> None:
    trace = a_trace((0, [1, 2]), (10, [3, 4]), (20, [5]), (30, [1, 2]), (40, [1, 2]))
    sent = SentBlocks(block_tokens=4, capacity_blocks=2)
    # The third takes the place of the first's first block on machine 0, without which the second is not found.
    assert told(trace, sent=sent) == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 8]]
    assert told(trace, sent=replace(sent, capacity_blocks=3))[3:] == [[8, 0], [8, 8]]
    assert told(trace, sent=replace(sent, capacity_blocks=9, max_age_s=29.0))[3:] == [[0, 0], [0, 8]]
    assert told(trace, sent=replace(sent, capacity_blocks=9, max_blocks=1))[3:] == [[4, 0], [4, 4]]


def test_blocks_that_nobody_else_can_ask_for_take_their_place_in_the_index() -> None:
    # The third says nothing of its four blocks; machine 0 is thought to keep three.
    named = a_trace((0, [1, 2]), (10, [3]), (20, [4, 5, 6, 7]), (30, [3]), (40, [1, 2]))
    assert named.prefix_blocks is not None
    trace = replace(named, prefix_blocks=np.array([1, 2, 3, 3, 1, 2]), prefix_offsets=np.array([0, 2, 3, 3, 4, 6]))
    sent = SentBlocks(block_tokens=4, capacity_blocks=3)
    assert told(trace, sent=sent)[4] == [0, 0]
    assert told(trace, sent=replace(sent, capacity_blocks=6))[4] == [8, 0]


@dataclass(frozen=True)
class Books:
    """Writes down the account of every machine at each request, and draws where it goes."""

    told: list[list[Booked]]
    found: list[int]
    """The tokens of it that the machine has which gets it."""
    knows: Knowledge

    def route(self, request, replicas, /) -> int:
        at = int(request.draws[0] * len(replicas))
        self.told.append([load.booked(request) for load in replicas])
        self.found.append(replicas[at].found_tokens(request))
        return at


@pytest.mark.parametrize("seed", range(6))
def test_a_router_s_own_account_is_that_of_sets_of_blocks(seed: int) -> None:
    """Beside a count of what every unfinished request has, block by block, from the columns of the run."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 3, 6).tolist() for _ in range(3)]
    ids = [stems[rng.integers(3)][: rng.integers(0, 7)] for _ in range(60)]
    prompts = [4 * len(each) + int(rng.integers(1, 9)) for each in ids]
    arrivals = np.sort(rng.integers(0, 40 * S, 60))
    trace = Trace(
        arrival_ns=arrivals,
        prompt_tokens=prompts,
        output_tokens=rng.integers(1, 6, 60),
        prefix_blocks=np.array([id_ for each in ids for id_ in each], np.int64),
        prefix_offsets=np.cumsum([0, *(len(each) for each in ids)]),
        prefix_block_tokens=4,
    )
    router = Books([], [], Knowledge(prefixes=True, booked=True))
    columns = served(trace, router, n=2).requests
    for at, told in enumerate(router.told):
        now_ns = arrivals[at]
        for machine, account in enumerate(told):
            here = [i for i in range(at) if columns["replica"][i] == machine and columns["finish_ns"][i] > now_ns]
            named = {tuple(ids[i][: end + 1]) for i in here for end in range(len(ids[i]))}
            own = sum(-(-prompts[i] // 4) - len(ids[i]) for i in here)
            shared = sum(tuple(ids[at][: end + 1]) in named for end in range(len(ids[at])))
            computing = sum(prompts[i] - router.found[i] for i in here if columns["first_token_ns"][i] > now_ns)
            assert account == Booked(len(named) + own, shared, computing), (at, machine)


def test_who_got_what_nobody_had_last_is_told_of_such_requests_alone() -> None:
    seen: list[list[int]] = []

    @dataclass(frozen=True)
    class Notes:
        knows: Knowledge

        def route(self, request, replicas, /) -> int:
            for load in replicas:
                load.found_tokens(request)
            seen.append([load.no_hit_order for load in replicas])
            return (0, 0, 1, 0)[request.id]

    # The second finds what the first left, and is not counted.
    served(
        a_trace((0, [1, 2]), (10, [1, 2]), (20, [3, 4]), (30, [5, 6])), Notes(Knowledge(prefixes=True, no_hits=True))
    )
    assert seen == [[-1, -1], [0, -1], [0, -1], [0, 1]]


def test_the_approximate_index_is_a_plain_lru_of_blocks() -> None:
    rng = np.random.default_rng(5)
    for capacity in (1, 3, 8, 20):
        index, plain = SentTo(capacity, None), OrderedDict[tuple[int, int], None]()
        for step in range(300):
            chain, length, others = (int(x) for x in rng.integers((0, 0, 0), (4, 9, 3)))
            named, own = (SPACE, chain), (SPACE, -1 - step)
            prompt = [(named, 0, length)] * (length > 0) + [(own, length, length + others)] * (others > 0)
            expected = 0
            while expected < length and (chain, expected) in plain:
                expected += 1
            assert index.found(prompt, step) == expected
            index.add(prompt, step)
            assert index.fault() is None
            for key, lo, hi in prompt:
                for block in range(lo, hi):
                    plain.pop((key[1], block), None)
                    plain[key[1], block] = None
            while len(plain) > capacity:
                plain.popitem(last=False)
            assert index.used_bytes == len(plain)


def test_what_was_sent_is_forgotten_when_it_is_older_than_the_limit_and_not_before() -> None:
    index, prompt = SentTo(10, 100), [((SPACE, 0), 0, 3)]
    index.add(prompt, 50)
    assert [index.found(prompt, now_ns) for now_ns in (150, 151)] == [3, 0]


def test_a_prompt_that_is_sent_again_is_remembered_from_then_on() -> None:
    index, prompt, other = SentTo(10, 100), [((SPACE, 0), 0, 3)], [((SPACE, 1), 0, 3)]
    index.add(prompt, 50)
    index.add(other, 60)
    index.add(prompt[:1], 90)
    assert [index.found(each, 161) for each in (prompt, other)] == [3, 0]
    assert index.found(prompt, 191) == 0


def test_a_machine_with_ranks_is_thought_to_have_what_any_of_its_ranks_has() -> None:
    # In turn: to rank 0 of the first machine, of the second, rank 1 of the first, of the second.
    trace = a_trace((0, [1, 2, 3]), (10, [9]), (20, [4, 5]), (30, [9]), (40, [1, 2, 3]), (50, [4, 5]))
    replica = ReplicaSpec(
        cost=Ranked(fixed_s=1.0), scheduler=Vllm(), kv_blocks=99, block_tokens=4, prefix_cache="blocks"
    )
    machine = MachineSpec(hosted=(replica,), ranks=2, rank_router=RoundRobin())
    router = Asked(Knowledge(prefixes=True), [])
    run(Experiment(workload=trace, replicas=(machine,) * 2, router=router))
    assert router.told[4:] == [[12, 0], [8, 0]]


@pytest.mark.parametrize(("ahead", "waiting"), [(False, [0, 0, 0, 2, 3]), (True, [0, 0, 0, 0, 2])])
def test_a_machine_with_one_seat_publishes_those_whom_its_plan_left_waiting(ahead: bool, waiting: list[int]) -> None:
    """A second an iteration; planned when it begins, or ahead, when the one before it begins."""
    router = Sees(Knowledge(poll_s=0.5), [])
    trace = a_trace((1, [1]), (1.2, [2]), (1.6, [3]), (2.6, [4]), (3.6, [5]), output=9)
    replica = ReplicaSpec(cost=Linear(), scheduler=Vllm(max_num_seqs=1, async_scheduling=ahead), kv_blocks=100)
    for fast_forward in (True, False):
        router.told.clear()
        experiment = Experiment(
            workload=trace, replicas=(replace(replica, cost=Linear(fixed_s=1.0)),) * 2, router=router
        )
        run(experiment, fast_forward=fast_forward)
        assert router.told == waiting


def test_polled_loads_are_those_of_the_last_poll() -> None:
    seen: list[list[int]] = []

    @dataclass(frozen=True)
    class Looks:
        knows: Knowledge

        def route(self, request, replicas, /) -> int:
            seen.append([load.waiting + load.running for load in replicas])
            return 0

    trace = a_trace((1, [1]), (1.2, [2]), (1.4, [3]), (1.6, [4]), output=9)
    served(trace, Looks(Knowledge(poll_s=0.5)))
    # Looked at at 1.0 (before the first is there), and at 1.5: the iteration in flight was planned when the second had not come.
    assert seen == [[0, 0], [0, 0], [0, 0], [1, 0]]


def test_clients_who_answer_meet_the_loads_that_requests_known_from_the_start_would_meet() -> None:
    """Each thinks for longer than the time between two polls, so that the poll ahead of its next request is still to come."""
    alike = {"prompt_tokens": [8] * 12, "output_tokens": [5] * 12}
    think_ns = np.arange(12) * 300_000_000 + 700_000_000
    loop = ClosedLoop(**alike, concurrency=4, think_ns=think_ns, start_ns=np.arange(4) * 1_300_000_000)
    replica = ReplicaSpec(cost=Linear(fixed_s=1.0), scheduler=Vllm(max_num_seqs=1), kv_blocks=100)
    of_loop, of_trace = Sees(Knowledge(poll_s=0.5), []), Sees(Knowledge(poll_s=0.5), [])
    columns = run(Experiment(workload=loop, replicas=(replica,) * 2, router=of_loop))
    trace = Trace(arrival_ns=columns.requests["arrival_ns"], **alike)
    run(Experiment(workload=trace, replicas=(replica,) * 2, router=of_trace))
    assert of_loop.told == of_trace.told
    assert max(of_loop.told) > 0


def test_a_session_stays_on_its_machine() -> None:
    talk = Conversations(sessions=6, turns=Uniform(min_tokens=2, max_tokens=5), user_tokens=Fixed(tokens=8),
                         answer_tokens=Fixed(tokens=4), mean_think_s=2.0, block_tokens=4)  # fmt: skip
    trace = talk.trace(Poisson(rate_per_s=1.0), seed=1)
    columns = served(trace, SessionAffinity(inner=LeastOutstanding()), n=3, blocks=400)
    assert trace.session is not None
    machines = [set(columns.requests["replica"][trace.session == session].tolist()) for session in range(6)]
    assert {len(each) for each in machines} == {1}
    assert len(set.union(*machines)) > 1
    # All but the last block of what was said before is found.
    later = np.flatnonzero(trace.follows.counts > 0)  # type: ignore[union-attr]
    found = columns.requests["prefix_hit_tokens"][later]
    assert (found == (trace.prompt_tokens[later] - 8 - 1) // 4 * 4).all()


@pytest.mark.parametrize(
    "router", [Prefix(), LlmD(), LlmD(event_delay_s=0.4, poll_s=0.1), LlmD(index="approximate", block_tokens=4)]
)
@pytest.mark.parametrize("seed", few(range(4)))
def test_spans_are_equal_to_stepping_whatever_a_router_asks(router: Router, seed: int) -> None:
    load = SharedPrefix(groups=4, prompts_per_group=3, system_prompt_tokens=40, question_tokens=20, output_tokens=30,
                        block_tokens=4, pause_s=0.1,
                        stages=(LoadStage(rate_per_s=9, duration_s=2), LoadStage(rate_per_s=20, duration_s=1)))  # fmt: skip
    trace = load.trace(seed)
    fast, slow = (
        served(trace, router, n=3, blocks=60, fixed_s=0.01, fast_forward=how, check_invariants=how)
        for how in (True, False)
    )
    assert_same(fast, slow)
    assert fast.requests["prefix_hit_tokens"].sum() > 0
    assert fast.meta["prefix_evictions"] > 0


@pytest.mark.parametrize("router", [Prefix(), Dynamo(temperature=0.5)])
@pytest.mark.parametrize("seed", few(range(4)))
def test_spans_are_equal_to_stepping_where_answers_are_found_too(router: Router, seed: int) -> None:
    talk = Conversations(
        sessions=12,
        turns=Uniform(min_tokens=2, max_tokens=5),
        user_tokens=Uniform(min_tokens=1, max_tokens=20),
        answer_tokens=Uniform(min_tokens=1, max_tokens=40),
        system_prompt_tokens=21,
        mean_think_s=0.3,
        block_tokens=4,
    )
    trace = talk.trace(Poisson(rate_per_s=5.0), seed)
    fast, slow = (
        served(trace, router, n=2, blocks=90, fixed_s=0.01, fast_forward=how, check_invariants=True)
        for how in (True, False)
    )
    assert_same(fast, slow)
    assert fast.meta["prefix_evictions"] > 0


@pytest.mark.parametrize(
    ("vllm", "ranks", "decoding", "at_s", "tokens"),
    [
        (Vllm(async_scheduling=False), 1, None, 12.5, 16),
        (Vllm(), 1, None, 12.5, 12),
        (Vllm(), 2, None, 12.5, 12),
        (Vllm(), 1, THREE_A_ROUND, 6.5, 16),
    ],
    ids=["alone", "ahead", "ranks", "speculative"],
)
def test_routers_find_what_was_emitted_in_the_span_in_flight(
    vllm: Vllm, ranks: int, decoding: Speculative | None, at_s: float, tokens: int
) -> None:
    """A second an iteration, four prompt tokens: in the thirteenth the KV of 16 tokens is known, or, where plans are made
    ahead, of 15; with three tokens a round, that of 17 in the seventh."""
    answer = a_trace((0, list(range(1, 10))), (at_s, list(range(1, 10))), output=32)
    trace = replace(answer, prompt_tokens=np.array([4, 36]))
    replica = ReplicaSpec(
        cost=Ranked(fixed_s=1.0), scheduler=vllm, kv_blocks=99, block_tokens=4, prefix_cache="blocks", decoding=decoding
    )
    for fast_forward in (True, False):
        router = Asked(Knowledge(prefixes=True), [])
        if ranks == 1:
            experiment = Experiment(workload=trace, replicas=(replica,) * 2, router=router)
        else:
            machine = MachineSpec(hosted=(replica,), ranks=ranks, rank_router=router)
            experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
        run(experiment, fast_forward=fast_forward)
        assert router.told == [[0, 0], [tokens, 0]]


def test_replicas_of_one_kind_are_priced_once() -> None:
    from sim.engine.simulation.cluster import Cluster

    one, other = (ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=99) for _ in range(2))
    cluster = Cluster(
        Experiment(workload=a_trace((0, [1])), replicas=(one,) * 50 + (other,), router=RoundRobin()), True, False
    )
    prices = [machine.cores[0].iterations.prices for machine in cluster._machines]
    assert [each is prices[0] for each in prices] == [True] * 50 + [False]


def test_iterations_of_many_replicas_are_told_in_one_pass() -> None:
    passes = 0

    class Counted(tuple[Any, ...]):
        def __iter__(self) -> Any:
            nonlocal passes
            passes += 1
            return super().__iter__()

    one = ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=99)
    trace = a_trace(*[(0, [1])] * 50)
    found = run(Experiment(workload=trace, replicas=(one,) * 50, router=RoundRobin()))
    blocks = list(replace(found, replicas=Counted(found.replicas)).iteration_blocks())
    assert sorted(np.concatenate([block["replica"] for block in blocks])) == list(range(50))
    assert passes <= 2


def test_plain_routers_are_told_nothing_and_pay_nothing() -> None:
    trace = a_trace((0, [1]), (1, [1]))
    from sim.engine.simulation.cluster import Cluster

    replica = ReplicaSpec(
        cost=Linear(), scheduler=Vllm(async_scheduling=False), kv_blocks=99, prefix_cache="blocks", block_tokens=4
    )
    experiment = Experiment(workload=trace, replicas=(replica, replica), router=RoundRobin())
    assert Cluster(experiment, True, False)._routing is None
    assert Cluster(replace(experiment, router=Prefix()), True, False)._routing is not None


def test_a_stage_begins_when_the_one_before_has_ended() -> None:
    load = SharedPrefix(groups=2, prompts_per_group=2, system_prompt_tokens=8, question_tokens=4, output_tokens=50,
                        block_tokens=4, pause_s=3.0,
                        stages=tuple(LoadStage(rate_per_s=5, duration_s=1) for _ in range(3)))  # fmt: skip
    trace = load.trace(seed=0)
    requests = served(trace, RoundRobin()).requests
    stage = load.stage_of()
    for before in (0, 1):
        ended = requests["finish_ns"][stage == before].max()
        mine = requests["arrival_ns"][stage == before + 1]
        nominal = trace.arrival_ns[stage == before + 1]
        assert mine.min() >= ended + 3 * S
        assert (np.diff(mine) == np.diff(nominal)).all()


def test_starts_are_those_of_the_arrival_process() -> None:
    talk = Conversations(
        sessions=3, turns=Fixed(tokens=1), user_tokens=Fixed(tokens=8), answer_tokens=Fixed(tokens=4), block_tokens=4
    )
    trace = talk.trace(Deterministic(rate_per_s=2.0), seed=0)
    assert trace.follows is None
    assert np.diff(trace.arrival_ns).tolist() == [S // 2, S // 2]


@pytest.mark.parametrize("router", [LeastOutstanding(), LeastQueue()])
def test_machines_kept_in_order_of_their_loads_get_the_requests_that_a_look_at_each_would_send_them(
    router: Any,
) -> None:
    kept = 0
    for seed in range(7):
        experiment = an_experiment(seed, speculative=seed % 4 == 0)
        experiment = replace(experiment, replicas=(*experiment.machines, *experiment.machines, *experiment.machines))
        in_order, asked = (run(replace(experiment, router=each)) for each in (router, router.route))
        assert_same(in_order, asked)
        kept += len(np.unique(in_order.requests["replica"])) > 2
    assert kept > 3


def _a_share(request: RoutedRequest, replicas: object) -> float:
    return 0.5


def _past_the_last(request: RoutedRequest, replicas: Sequence[object]) -> int:
    return len(replicas)


@pytest.mark.parametrize(("router", "answer"), [(_a_share, "0.5"), (_past_the_last, "2")])
def test_an_answer_that_names_no_replica_ends_the_run_in_a_sentence(router: Any, answer: str) -> None:
    """The function has its name there, and no address, which is another in every run."""
    said = f"{router.__name__} sent request 0 to replica {answer}; expected a whole number, 0 to 1"
    with pytest.raises(PolicyError, match=f"^{said}$"):
        served(a_trace((0.0, [1])), router)


def test_whole_numbers_of_numpy_name_replicas() -> None:
    columns = served(a_trace((0.0, [1]), (1.0, [2])), lambda request, replicas: np.int64(1))
    assert columns.requests["replica"].tolist() == [1, 1]
