"""Published runs of users with sessions as runs of our own: one server with a prefix cache, with and without host memory behind it.

Two kinds of table. *Agentic*: users replay recorded coding sessions, one request at a time, with a think time before the next.
The table of users says who started when, at which request of which session; that of requests has the prompts, answers and gaps of
some runs. A request that no table has is drawn (`_Recorded`): its prompt grows, keeps its beginning and follows after a gap as some
recorded request did, and its answer is one of those recorded, in the mean as long as those of its run. *Multi-turn*: clients take
conversations one after the other and think for no time.

Each run is replayed until its server's counters end. Nothing is fitted to these tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hwmodels.slowed import slowed
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import rows_of
from sim.engine import run as simulated
from sim.scenario import Scenario
from sim.scenario.assembly import build
from workloads import Follows, Trace, Workload

if TYPE_CHECKING:
    from hwmodels.cost import CostModel
    from hwmodels.measured import Measurement
    from sim.engine import Columns, Experiment

AGENTIC, MULTI_TURN = "e2e_agentic", "e2e_multiturn"
_BUDGET = 8192
_LONGEST_TOKENS = 128_000
"""The longest prompt of the recorded sessions that were kept."""
_CLIENT_BLOCK_TOKENS = 64
_LONGEST_GAP_S = 61.0
"""Think times were cut at 60 s; longer gaps are of requests that failed."""
_LEAST_S = 20.0
"""A user sends no more often than this: 2,000 tokens of answer at 7 ms, and a gap."""
_TICK_S = 20.0
_SEED = 0
Ids = NDArray[np.int32]


class Server(NamedTuple):
    """The server of a table, as its command and its log have it."""

    model: str
    block_tokens: int
    host_gib: float
    """Host memory in all where KV is offloaded."""
    host_gib_per_gpu: float = 0.0
    expert_parallel: bool = False


SERVERS = {
    "dsr1-fp4": Server("nvidia/DeepSeek-R1-0528-FP4", block_tokens=32, host_gib=600.0, expert_parallel=True),
    "llama3.3-70b-fp4": Server("nvidia/Llama-3.3-70B-Instruct-FP4", block_tokens=16, host_gib=0.0, host_gib_per_gpu=300.0),
}  # fmt: skip
"""By the model in a table's name. In all of them caches are of 8 bits, steps have 8,192 tokens at
most, and graphs are for decode steps alone."""


class Seen(NamedTuple):
    """Figures of one run, measured or simulated; NaN where they are not known."""

    hit: float
    """Tokens found in the GPUs' cache over tokens looked up, as vLLM counts both: at each look, so that a request at the head of
    the queue that does not fit in memory counts again with every step."""
    host_hit: float
    """Tokens found in host memory over prompt tokens, once for each request."""
    kv_use: float
    """Share of the KV blocks in use: the mean over time of agentic runs, the most of multi-turn ones."""
    gap_s: float
    """Median over requests of the mean time between tokens."""
    ttft_s: float
    """Median."""
    requests: float
    found: float = np.nan
    """Tokens found in the GPUs' cache over prompt tokens, once for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun:
    """One row of a table of sessions: the server, its users, and what was measured."""

    file: str
    name: str
    device: str
    tensor: int
    users: int
    offload: bool
    clean: bool
    """Whether the run ended without a stall of a minute, as its table says."""
    measured: Seen
    scenario: Mapping[str, Any]
    workload: Workload
    until_s: float | None = None
    """The time of the last of the server's counters; None: all requests ended."""
    ticks: tuple[tuple[float, float], ...] = ()
    """Seconds, and the share of KV blocks then in use."""


def session_runs(measurement: Measurement, others: Sequence[Measurement]) -> list[SessionRun]:
    """The runs of a table; `Unmodelled` where the model, or a table beside it that says what users sent, is not there."""
    server = SERVERS.get(label := measurement.labels.get("model", ""))
    if server is None:
        raise Unmodelled(f"the server of sessions with {label or 'an unnamed model'} is not known")
    made = _agentic if measurement.kind == AGENTIC else _multi_turn
    return list(made(measurement, others, server))


class KvInUse(NamedTuple):
    """The share of KV blocks in use at the ticks of a run; empty where its table has no series."""

    t_s: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()
    simulated: tuple[float, ...] = ()

    @property
    def apart(self) -> float:
        """The mean distance between the two; NaN where there are no ticks."""
        return float(np.abs(np.subtract(self.measured, self.simulated)).mean()) if self.t_s else np.nan


def replayed(run: SessionRun, hardware: str | None = None, *, slower: float = 1.0) -> tuple[Seen, KvInUse]:
    """The figures of *run* simulated, and its KV blocks in use over time.

    *slower*: every step takes so many times as long, to tell what comes of the price of steps and what does not.
    """
    scenario = dict(run.scenario) if hardware is None else {**run.scenario, "hardware": hardware}
    horizon_ns = None if run.until_s is None else round(run.until_s * 1e9)
    experiment = replace(build(Scenario.from_mapping(scenario)), workload=run.workload, horizon_ns=horizon_ns)
    (server,) = experiment.hosted
    if slower != 1.0:
        server = replace(server, cost=slowed(cast("CostModel", server.cost), slower))
        experiment = replace(experiment, replicas=(server,))
    columns = simulated(experiment)
    over_time = _kv_use(columns, server.kv_blocks - 1)
    in_use = KvInUse()
    if run.ticks:
        at_s, use = zip(*run.ticks, strict=True)
        place = np.clip(np.searchsorted(over_time.start_s, at_s, side="right") - 1, 0, None)
        in_use = KvInUse(at_s, use, tuple(over_time.share[place].tolist()))
    kv_use = float(np.average(over_time.share, weights=over_time.duration_s) if run.ticks else over_time.share.max())
    return _seen(columns, experiment, kv_use), in_use


class _KvUse(NamedTuple):
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    share: NDArray[np.float64]


def _kv_use(columns: Columns, blocks: int) -> _KvUse:
    """The share of KV blocks in use, iteration by iteration."""
    table = columns.iterations()
    return _KvUse(table["start_ns"] * 1e-9, table["duration_ns"] * 1e-9, table["kv_blocks_used"] / blocks)


def _seen(columns: Columns, experiment: Experiment, kv_use: float) -> Seen:
    requests = columns.requests
    done = requests["status"] == 0
    if not done.any():
        raise Unmodelled("no request finishes")
    ttft_s = (requests["first_token_ns"] - requests["arrival_ns"])[done] * 1e-9
    answer_s = (requests["finish_ns"] - requests["first_token_ns"])[done] * 1e-9
    admitted = requests["scheduled_ns"] >= 0
    looked_up, hits = requests["prompt_tokens"][admitted].sum(), requests["prefix_hit_tokens"][admitted].sum()
    host = requests["host_hit_tokens"][admitted].sum() if "host_hit_tokens" in requests else np.nan
    again, found_again = _looked_up_again(columns, experiment)
    return Seen(
        hit=float((hits + found_again) / (looked_up + again)),
        host_hit=float(host / looked_up),
        kv_use=kv_use,
        gap_s=float(np.median(answer_s / np.maximum(requests["output_tokens"][done] - 1, 1))),
        ttft_s=float(np.median(ttft_s)),
        requests=float(done.sum()),
        found=float(hits / looked_up),
    )


def _looked_up_again(columns: Columns, experiment: Experiment) -> tuple[int, int]:
    """Tokens that vLLM's counters have beyond one look a request, and how many of them were found.

    With each step that has room in its budget, the scheduler looks up the first request that waits and counts it, whether its
    blocks are then found to fit or not. The requests are served in order, so the first is the next one that is admitted.
    """
    (server,) = experiment.hosted
    requests, table = columns.requests, columns.iterations()
    admitted = np.flatnonzero(requests["scheduled_ns"] >= 0)
    order = admitted[np.argsort(requests["scheduled_ns"][admitted], kind="stable")]
    scheduled, arrived = requests["scheduled_ns"][order], requests["arrival_ns"][order]
    first = np.maximum(arrived, np.concatenate(([0], scheduled[:-1])))
    steps = table["start_ns"]
    free = server.kv_blocks - 1 - table["kv_blocks_used"]
    looked_up = found = 0
    for row, since, until in zip(order.tolist(), first.tolist(), scheduled.tolist(), strict=True):
        between = slice(int(np.searchsorted(steps, since)), int(np.searchsorted(steps, until)))
        prompt, hit = int(requests["prompt_tokens"][row]), int(requests["prefix_hit_tokens"][row])
        lacking = free[between] < -(-(prompt - hit) // server.block_tokens)
        n = int(np.count_nonzero(lacking & (table["rows"][between] < _BUDGET)))
        looked_up, found = looked_up + n * prompt, found + n * hit
    return looked_up, found


# Tables.


def _scenario(server: Server, measurement: Measurement, row: Mapping[str, Any], **scheduler: Any) -> dict[str, Any]:
    """The deployment of a row; the number of KV blocks is that of the log, where the row has it."""
    tensor = int(row["tp"])
    memory: dict[str, Any] = {"block_tokens": server.block_tokens, "gpu_memory_utilization": 0.9}
    if np.isfinite(row["kv_tokens"]):
        memory["kv_blocks"] = int(row["kv_tokens"]) // server.block_tokens + 1
    if row["kv_offload"] == "on":
        memory["tiers"] = [{"kind": "host", "gib": server.host_gib + server.host_gib_per_gpu * tensor}]
    return {
        "model": server.model,
        "hardware": measurement.device,
        "kv_precision": "fp8",
        "serving_stack": measurement.source,
        "serving_release": measurement.version,
        "cuda_graphs": {"decode_only": True},
        "parallel": {"tensor": tensor, "expert": tensor if server.expert_parallel else 1},
        "scheduler": {"policy": measurement.source, "max_num_batched_tokens": _BUDGET, **scheduler},
        "memory": memory,
        "workload": {"trace": "conversation"},
    }


def _beside(measurement: Measurement, others: Sequence[Measurement], kind: str, what: str) -> list[dict[str, Any]]:
    """The rows of the table of *kind* on the same model and device; `Unmodelled` where there is none."""
    for other in others:
        if other.kind == kind and (other.device, other.labels["model"]) == (
            measurement.device,
            measurement.labels["model"],
        ):
            return rows_of(other)
    raise Unmodelled(f"what {what} (a table of kind {kind}) is not in the folder")


def _agentic(measurement: Measurement, others: Sequence[Measurement], server: Server) -> Iterator[SessionRun]:
    recorded = _Recorded(_beside(measurement, others, "e2e_agentic_requests", "users sent"))
    users = _beside(measurement, others, "e2e_agentic_users", "users started with")
    series = _beside(measurement, others, "e2e_agentic_series", "the server counted")
    for row in rows_of(measurement):
        ticks = tuple((float(each["t_s"]), float(each["kv_use"])) for each in series if each["run"] == row["run"])
        until_s = max((t for t, _ in ticks), default=row["duration_s"] - _TICK_S) + _TICK_S
        mine = [user for user in users if user["run"] == row["run"] and user["start_s"] < until_s]
        if not mine or not np.isfinite(until_s):
            raise Unmodelled(f"{row['run']}: its users or its length are not known")
        yield SessionRun(
            file=measurement.path.name,
            name=str(row["run"]),
            device=measurement.device,
            tensor=int(row["tp"]),
            users=int(row["users"]),
            offload=row["kv_offload"] == "on",
            clean=row["clean"] == "yes",
            measured=Seen(
                hit=row["prefix_hit_rate"],
                host_hit=row["cpu_prefix_hit_rate"],
                kv_use=row["kv_use_mean"],
                gap_s=row["itl_p50_ms"] * 1e-3,
                ttft_s=row["ttft_p50_ms"] * 1e-3,
                requests=row["requests_ok"],
            ),
            scenario=_scenario(server, measurement, row),
            workload=recorded.trace(str(row["run"]), mine, row["output_len_mean"], until_s, server.block_tokens),
            until_s=until_s,
            ticks=ticks[1:],
        )


class _Step(NamedTuple):
    """A request beside the one before it in its session."""

    growth_tokens: float
    lost_tokens: float
    """Tokens of the prompt before that it no longer begins with."""
    gap_s: float


class _Recorded:
    """The requests of all runs of a table, by session and number in it; those of sub-agents are left out."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        rows = sorted(
            (row for row in rows if ":" not in row["trace_id"]),
            key=lambda row: (row["run"], row["user"], row["request_idx"]),
        )
        self._prompt: dict[tuple[str, int], tuple[int, int]] = {}
        self._gap_s: dict[tuple[str, int], float] = {}
        self._answer: dict[tuple[str, str, int], int] = {}
        steps: list[_Step] = []
        for row in rows:
            key = str(row["trace_id"]), int(row["request_idx"])
            self._prompt[key] = int(row["input_tokens"]), int(row["client_hit_blocks"]) * _CLIENT_BLOCK_TOKENS
            if row["ok"]:
                self._answer[str(row["run"]), str(row["user"]), key[1]] = int(row["output_tokens"])
        for before, row in itertools.pairwise(rows):
            key = str(row["trace_id"]), int(row["request_idx"])
            follows = (before["run"], before["user"], before["request_idx"] + 1) == (row["run"], row["user"], key[1])
            gap_s = row["start_s"] - before["start_s"] - before["e2e_ms"] * 1e-3
            if follows and before["ok"] and 0 <= gap_s < _LONGEST_GAP_S:
                self._gap_s[key] = gap_s
                prompt, kept = self._prompt[key]
                lost = before["input_tokens"] - kept
                # The last block of a prompt is not full, so that up to a block less is found again.
                lost = lost if lost > _CLIENT_BLOCK_TOKENS else 0
                steps.append(_Step(prompt - before["input_tokens"], lost, gap_s))
        if not steps:
            raise Unmodelled("no session has two requests in the table of requests")
        self._steps = steps
        self._growth_tokens = float(np.mean([step.growth_tokens for step in steps]))
        self._answers = np.array([answer for answer in self._answer.values() if answer > 0])

    def trace(
        self, run: str, users: Sequence[Mapping[str, Any]], mean_answer: float, until_s: float, block_tokens: int
    ) -> Trace:
        """The requests of *users* in order of a place in time, each behind the one before it."""
        rng = np.random.default_rng(_SEED)
        scale = mean_answer / self._answers.mean() if np.isfinite(mean_answer) else 1.0
        prompt: list[int] = []
        answer: list[int] = []
        nominal_s: list[float] = []
        gap_s: list[float] = []
        session: list[int] = []
        ids: list[Ids] = []
        fresh = _Fresh()
        for number, user in enumerate(users):
            first = int(user["first_request"])
            n = int(min(user["requests_left"], 1 + (until_s - user["start_s"]) // _LEAST_S))
            draws = rng.integers(len(self._steps), size=n).tolist()
            answers = np.maximum(rng.choice(self._answers, n) * scale, 2).astype(np.int64).tolist()
            length, content = int(user["first_input_tokens"]), np.empty(0, np.int32)
            kept, after_s = 0, 0.0
            # The growth of sessions that would become longer than any recorded one is smaller in proportion.
            share = min(1.0, (_LONGEST_TOKENS - length) / max(user["requests_left"] * self._growth_tokens, 1.0))
            for i in range(n):
                if i:
                    before, step = length, self._steps[int(draws[i])]
                    key = str(user["trace_id"]), first + i
                    grown = int(np.clip(before + share * step.growth_tokens, block_tokens, _LONGEST_TOKENS))
                    length, kept = self._prompt.get(key, (grown, int(before - step.lost_tokens)))
                    kept, after_s = min(kept, before, length), self._gap_s.get(key, step.gap_s)
                own = content[: max(kept, 0) // block_tokens]
                content = np.concatenate((own, fresh.take(length // block_tokens - len(own))))
                prompt.append(length)
                answer.append(self._answer.get((run, str(user["user"]), first + i), int(answers[i])))
                nominal_s.append(user["start_s"] if not i else nominal_s[-1] + after_s)
                gap_s.append(after_s)
                session.append(number)
                ids.append(content)
        return _in_order(np.array(prompt), np.array(answer), np.array(nominal_s), np.array(gap_s), np.array(session),
                         ids, block_tokens)  # fmt: skip


class _Fresh:
    """Ids of blocks that nobody has had."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, n: int) -> Ids:
        self._next += max(n, 0)
        return np.arange(self._next - max(n, 0), self._next, dtype=np.int32)


def _in_order(
    prompt: NDArray[np.int64], answer: NDArray[np.int64], nominal_s: NDArray[np.float64], gap_s: NDArray[np.float64],
    session: NDArray[np.int64], ids: Sequence[Ids], block_tokens: int,
) -> Trace:  # fmt: skip
    """The requests, session after session, as a trace in which each waits for the one before it in its session."""
    order = np.lexsort((np.arange(len(prompt)), nominal_s))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    waits = np.concatenate(([False], session[1:] == session[:-1]))[order]
    pieces = [ids[row] for row in order.tolist()]
    return Trace(
        arrival_ns=np.rint(nominal_s[order] * 1e9).astype(np.int64),
        prompt_tokens=prompt[order],
        output_tokens=answer[order],
        session=session[order],
        prefix_blocks=np.concatenate(pieces),
        prefix_offsets=np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))),
        prefix_block_tokens=block_tokens,
        follows=Follows(
            offsets=np.concatenate(([0], np.cumsum(waits))),
            rows=place[order[waits] - 1],
            delay_ns=np.rint(gap_s[order[waits]] * 1e9).astype(np.int64),
        )
        if waits.any()
        else None,
    )


def _multi_turn(measurement: Measurement, others: Sequence[Measurement], server: Server) -> Iterator[SessionRun]:
    said = _beside(measurement, others, "e2e_multiturn_conversations", "the conversations were")
    for row in rows_of(measurement):
        clients = int(row["clients"])
        yield SessionRun(
            file=measurement.path.name,
            name=f"tp{int(row['tp'])}_{clients}_{row['kv_offload']}",
            device=measurement.device,
            tensor=int(row["tp"]),
            users=clients,
            offload=row["kv_offload"] == "on",
            clean=True,
            measured=Seen(
                hit=row["gpu_hit_rate"],
                host_hit=row["cpu_hit_rate"],
                kv_use=row["kv_use_max"],
                gap_s=row["tpot_p50_ms"] * 1e-3,
                ttft_s=row["ttft_p50_ms"] * 1e-3,
                requests=row["requests"],
            ),
            scenario=_scenario(server, measurement, row, max_num_seqs=clients),
            workload=_turns(said, int(row["requests"]), clients, server.block_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Turns(Workload):
    """Conversations, the turns of each in a row, and clients that take one after the other and send its turns without a pause."""

    concurrency: int

    def clients(self) -> _Takers:
        assert self.session is not None
        return _Takers(self.session.tolist(), self.concurrency)


class _Takers:
    """The clients of one run."""

    def __init__(self, conversation: Sequence[int], concurrency: int) -> None:
        self._conversation = conversation
        self._firsts = iter([row for row, own in enumerate(conversation) if not row or own != conversation[row - 1]])
        self.starts_ns: Sequence[int] = [0] * concurrency

    def start(self, now_ns: int, /) -> Iterator[tuple[int, int]]:
        row = next(self._firsts, None)
        if row is not None:
            yield row, now_ns

    def ended(self, row: int, now_ns: int, /) -> Iterator[tuple[int, int]]:
        if row + 1 < len(self._conversation) and self._conversation[row + 1] == self._conversation[row]:
            yield row + 1, now_ns
        else:
            yield from self.start(now_ns)


def _turns(rows: Sequence[Mapping[str, Any]], requests: int, clients: int, block_tokens: int) -> _Turns:
    """So many requests of the conversations in order; other clients than the recorded ones need more of them, which come again as
    conversations of their own."""
    rows = sorted(rows, key=lambda row: (row["conversation"], row["turn"]))
    rounds = -(-requests // len(rows))
    number = np.array([int(row["conversation"]) for row in rows])
    prompt, answer = (
        np.tile([int(row[name]) for row in rows], rounds)[:requests] for name in ("prompt_tokens", "output_tokens")
    )
    session = np.concatenate([number + i * (int(number.max()) + 1) for i in range(rounds)])[:requests]
    # The ids of a turn name its answer as well, which the next prompt contains.
    counts = np.maximum((prompt + answer) // block_tokens, -(-prompt // block_tokens))
    longest = np.zeros(int(session.max()) + 1, np.int64)
    np.maximum.at(longest, session, counts)
    base = np.cumsum(longest) - longest
    offsets = np.concatenate(([0], np.cumsum(counts)))
    blocks = np.repeat(base[session] - offsets[:-1], counts) + np.arange(offsets[-1])
    return _Turns(
        prompt_tokens=prompt,
        output_tokens=answer,
        session=session,
        prefix_blocks=blocks.astype(np.int64),
        prefix_offsets=offsets,
        prefix_block_tokens=block_tokens,
        concurrency=clients,
    )
