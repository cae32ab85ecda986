"""Requests that come while a run goes on."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from sim import Scenario
from sim.engine import Experiment, LiveRun, live_trace, run
from sim.engine.kv.content import GrowingContents, contents_of
from sim.scenario.assembly import resolve


class Log:
    """Every token of every request, and how each ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}
        self.discarded = 0
        self.refusals: dict[int, str] = {}

    def emitted(self, id_: int, tokens: int, now_ns: int) -> None:
        self.tokens.setdefault(id_, []).extend([now_ns] * tokens)

    def ended(self, id_: int, now_ns: int) -> None:
        self.ends[id_] = now_ns

    def begins_anew(self, id_: int, now_ns: int) -> None:
        self.discarded += len(self.tokens.pop(id_, []))

    def refused(self, id_: int, reason: str, now_ns: int) -> None:
        self.refusals[id_] = reason


def experiment_of(*settings: str) -> Experiment:
    return resolve(Scenario.default().with_set(*settings), workload=live_trace((), 16)).experiment


def played(experiment: Experiment, seed: int, n: int = 40, gone: float = 0.2) -> tuple[LiveRun, Log]:
    """A live run of *n* random requests, half of which share beginnings, and of which a share goes before the end."""
    rng = np.random.default_rng(seed)
    log = Log()
    live = LiveRun(experiment, log)
    leaving: list[tuple[int, int]] = []
    at = 0
    for i in range(n):
        at += int(rng.exponential(2e7))
        while leaving and leaving[0][0] <= at:
            when, id_ = leaving.pop(0)
            live.advance(max(when, live.now_ns))
            live.give_up(id_)
        live.advance(max(at, live.now_ns))
        prompt, output = int(rng.integers(1, 3000)), int(rng.integers(1, 120))
        shared = [int(rng.integers(0, 3))] * (prompt // 16 // 2)
        digests = shared + [1000 + i] * (prompt // 16 - len(shared))
        id_ = live.send(
            prompt_tokens=prompt, output_tokens=output, max_tokens=output + 7, digests=digests,
            session=int(rng.integers(-1, 4)), came_ns=live.now_ns - int(rng.exponential(5e6)) if i % 2 else None,
        )  # fmt: skip
        if rng.random() < gone:
            leaving = sorted([*leaving, (live.now_ns + int(rng.exponential(3e8)), id_)])
    live.advance(live.now_ns + 500_000_000)
    return live, log


FAILS = "times: [{machine: 0, at_s: 0.3, for_s: 0.4}, {machine: 1, at_s: 0.8, for_s: 0.1}]"
PARTS = (
    "times: [{machine: 0, at_s: 0.3, for_s: 0.4}, {machine: 2, at_s: 0.5, for_s: 0.1}, {machine: 3, at_s: 0.85, for_s: 0.2}, "
    "{machine: 1, at_s: 1.0, for_s: 0.1}]"
)
APART = "pools={first: {role: prefill, replicas: 2}, second: {role: decode, replicas: 2}}"
LINK = "links={net: {bandwidth_gb_per_s: 5}}"
CASES = [
    (),
    ("replicas=3", "router=power_of_two"),
    ("replicas=2", "router=session"),
    ("scheduler={policy: vllm-v0}",),
    ("memory.kv_blocks=600",),
    ("parallel.pipeline=2",),
    ("serving_stack=sglang", "scheduler={policy: sglang}", "memory.block_tokens=1"),
    ("decoding={method: ngram, num_speculative_tokens: 3, acceptance: {alpha: 0.6}}",),
    ("memory.kv_blocks=600", "memory.tiers=[{kind: host, gib: 2}]"),
    ("replicas=3", "router={policy: llm_d, index: approximate}"),
    ("replicas=3", "router={policy: llm_d, index: approximate, capacity_blocks: 90}"),
    ("replicas=3", "router={policy: llm_d, poll_s: 0.3}"),
    ("replicas=2", "router=least_outstanding", "failures={slow: [{machine: 1, factor: 2}]}"),
    ("replicas=2", "router=least_outstanding", f"failures={{{FAILS}, in_flight: resume}}"),
    ("replicas=2", "router=least_outstanding", f"failures={{{FAILS}, in_flight: retry}}"),
    ("replicas=2", "router=least_outstanding", f"failures={{{FAILS}, in_flight: lose, when_none: lose}}"),
    ("replicas=3", "router={policy: llm_d, index: approximate}", "failures={mean_up_s: 0.5, mean_down_s: 0.2}"),
    (
        "router=least_outstanding",
        "autoscale={policy: {policy: target_tracking, measure: concurrency, target: 4}, min: 1, "
        "max: 4, interval_s: 0.2, start: {load: 0.1}}",
    ),
    (APART, LINK, "handover={like: vllm}"),
    (APART, LINK, "handover={like: sglang}"),
    (APART, LINK, "handover={like: splitwise}"),
    (APART, LINK, "handover={like: trtllm}"),
    (APART, LINK, "handover={like: dynamo}", "memory.kv_blocks=900"),
    (APART, LINK, "handover={like: vllm}", f"failures={{{PARTS}, in_flight: resume}}"),
    (APART, LINK, "handover={like: sglang}", f"failures={{{PARTS}, in_flight: resume}}"),
    (APART, LINK, "handover={like: splitwise}", f"failures={{{PARTS}, in_flight: retry}}"),
    (
        "pools={first: {role: prefill, replicas: 2}, second: {role: decode, autoscale: {policy: {policy: target_tracking, "
        "measure: concurrency, target: 4}, min: 1, max: 4, interval_s: 0.2, start: {load: 0.1}}}}",
        LINK,
    ),
    (APART, LINK, "handover={like: vllm}", f"failures={{{FAILS}, in_flight: resume}}"),
    (APART, LINK, "handover={like: vllm}", f"failures={{{FAILS}, in_flight: retry}}"),
    (
        APART,
        LINK,
        "handover={like: splitwise}",
        "failures={times: [{machine: 2, at_s: 0.4, for_s: 0.3}], in_flight: retry}",
    ),
    (APART, LINK, "handover={like: sglang}", "failures={mean_up_s: 0.5, mean_down_s: 0.2, in_flight: lose}"),
    ("replicas=2", "memory.kv_blocks=600", "memory.tiers=[{kind: host, gib: 2}]", f"failures={{{FAILS}}}"),
    ("model=qwen3-30b-a3b", "parallel={data: 2, expert: 2}"),
]


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: " ".join(settings) or "default")
def test_a_trace_of_what_came_gives_the_same_run(settings: tuple[str, ...]) -> None:
    experiment = experiment_of(*settings)
    live, log = played(experiment, seed=3)
    columns = live.stop()
    if "fails" in columns.meta.get("fleet", {}):
        # A first token that no client had got is discarded without being taken back.
        unseen = columns.meta["fleet"]["discarded_tokens"] - log.discarded
        waits = experiment.handover is not None and experiment.handover.first_token == "arrival"
        assert 0 <= unseen <= (columns.requests["failures"].sum() if waits else 0)
    again = run(replace(experiment, workload=live.trace()))
    for name, column in again.requests.items():
        assert np.array_equal(column, columns.requests[name]), name
    assert {0, 3} <= set(columns.requests["status"].tolist())
    ended = np.flatnonzero(columns.requests["status"] == 0).tolist()
    assert sorted(log.ends) == ended
    seen = np.flatnonzero(columns.requests["scheduled_ns"] >= 0)
    if "computed_prompt_tokens" in columns.requests and experiment.handover is None and experiment.fleet is None:
        found = (columns.requests["prompt_tokens"] - columns.requests["computed_prompt_tokens"])[seen]
        assert [live.cached_tokens(id_) for id_ in seen.tolist()] == found.tolist()
        if experiment.hosted[0].tiers:
            assert columns.requests["host_hit_tokens"].any()
    for id_ in ended:
        told = log.tokens.get(id_, [])
        rest = columns.requests["output_tokens"][id_] - len(told)
        # Those of the last step are told of by its end.
        assert rest == 1 if experiment.hosted[0].decoding is None else 1 <= rest <= 4
        assert (told or [log.ends[id_]])[0] == columns.requests["first_token_ns"][id_]
        assert log.ends[id_] == columns.requests["finish_ns"][id_]
    gaps = np.concatenate([np.diff([*log.tokens.get(id_, []), log.ends[id_]]) for id_ in ended])
    assert gaps.sum() == (columns.requests["finish_ns"] - columns.requests["first_token_ns"])[ended].sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_tree_that_grows_names_what_all_at_once_do(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tree = GrowingContents(16)
    grown = tree.contents_in(size)
    rows, prompts, outputs = [], [], []
    for _ in range(200):
        start = rows[int(rng.integers(len(rows)))][: int(rng.integers(0, 12))] if rows else []
        row = [*start, *rng.integers(0, 4, int(rng.integers(0, 6))).tolist()]
        prompt = len(row) * 16 + int(rng.integers(0, 16)) + (not row)
        output = int(rng.integers(1, 50))
        if rng.random() < 0.3 and len(row) > 1:
            # The last ids are of what is emitted.
            output, prompt = 40, prompt - 32 + (prompt == 32)
        rows.append(row)
        prompts.append(prompt)
        outputs.append(output)
        tree.add(row, prompt, output)
    keys: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
    for id_, (row, prompt, output) in enumerate(zip(rows, prompts, outputs, strict=True)):
        told = min(16 * len(row), prompt + (output if 16 * len(row) >= prompt + 16 else 0))
        path = grown.path(id_, told // size)
        blocks = [(chain, block) for chain, lo, hi in path for block in range(lo, hi)]
        assert [block for _, block in blocks] == list(range(told // size))
        for chain, block in blocks:
            # Blocks are equal where all ids up to their last token are.
            same = tuple(row[: -(-(block + 1) * size // 16)]), block
            assert keys.setdefault(same, (chain, block)) == (chain, block)
    assert len({*keys.values()}) == len(keys)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    flat = np.array([id_ for row in rows for id_ in row], np.int64)
    whole = contents_of(flat, offsets, 16, np.array(prompts), np.array(outputs), size)
    for name in ("start", "parent", "chain", "named"):
        assert getattr(grown, name) == getattr(whole, name), name
    assert [tree.digests_of(i) for i in range(len(rows))] == rows


def test_requests_of_one_instant_are_told_apart() -> None:
    live = LiveRun(experiment_of(), Log())
    ids = [live.send(prompt_tokens=10, output_tokens=2, max_tokens=2, digests=[]) for _ in range(3)]
    assert ids == [0, 1, 2]
    assert [live.arrival_ns(id_) for id_ in ids] == [0, 1, 2]


def test_a_request_is_sent_when_it_came_as_far_as_nothing_was_missed() -> None:
    experiment = experiment_of()
    live = LiveRun(experiment, Log())
    waits_ns = round((experiment.admission_serial_s + experiment.admission_s) * 1e9)
    assert waits_ns > 10**7
    live.advance(10**9)
    asked = {"prompt_tokens": 10, "output_tokens": 2, "max_tokens": 2, "digests": []}
    found = [live.arrival_ns(live.send(**asked, came_ns=at)) for at in (10**9 - 10**6, 10**9 - 2 * 10**6, 10**9 + 5)]
    # Behind the one before it; and not after the present.
    assert found == [10**9 - 10**6, 10**9 - 10**6 + 1, 10**9]
    live.advance(10**10)
    late = live.arrival_ns(live.send(**asked, came_ns=0))
    per_prompt_ns = 10 * experiment.admission_s_per_token * 1e9
    assert late == pytest.approx(10**10 - waits_ns - per_prompt_ns, abs=2)


def test_loads_are_polled_whoever_comes() -> None:
    live = LiveRun(experiment_of("replicas=2", "router={policy: llm_d, poll_s: 0.3}"), Log())
    asked = {"prompt_tokens": 10, "output_tokens": 400, "max_tokens": 400, "digests": []}
    live.advance(650_000_000)
    for _ in range(4):
        live.send(**asked)
    assert live._routing is not None
    for at_ns, read_ns in ((899_999_999, 600_000_000), (900_000_001, 900_000_000), (1_700_000_000, 1_500_000_000)):
        live.advance(at_ns)
        assert live._routing._latest[0] == read_ns
        assert sum(running for _, running, *_ in live._routing._latest[1]) == (4 if read_ns > 600_000_000 else 0)
    live.stop()
    assert live.next_ns() is None


def test_who_can_never_fit_is_known_before() -> None:
    log = Log()
    live = LiveRun(experiment_of("memory.kv_blocks=100"), log)
    reason = live.refusal(5000, 10)
    assert reason is not None
    assert "KV blocks" in reason
    live.send(prompt_tokens=5000, output_tokens=10, max_tokens=10, digests=[])
    live.advance(10**12)
    assert log.refusals == {0: reason}
    assert live.refusal(100, 10) is None


def test_columns_of_a_live_run_hold_what_came() -> None:
    live, _ = played(experiment_of(), seed=1, n=5, gone=0)
    columns = live.stop()
    assert len(live) == 5
    assert {len(column) for column in columns.requests.values()} == {5}
    assert isinstance(live.trace().prompt_tokens, np.ndarray)
    assert array("q", live.trace().arrival_ns.tolist()) == array("q", columns.requests["arrival_ns"].tolist())
