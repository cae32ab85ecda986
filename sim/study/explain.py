"""Where the time of a run's tokens went: TPOT and TTFT of each request divided by cause, so that the parts add up to it.

Every iteration's time is divided by the cost model that priced it (`hwmodels.time_parts`); a request's time is that of the
iterations of its micro-batch between two instants, and what it waits in between has a name of its own. Nothing is sampled: what
remains after all names is shown as `other`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from hwmodels.layerwise import LayerwiseCost
from hwmodels.slowed import Slowed
from hwmodels.time_parts import PARTS
from hwmodels.totals import Totals
from sim.engine import Columns, Experiment
from sim.engine.batch.grammars import GrammarSpec
from sim.engine.record.columns import ADAPTERS, IMAGES, MASKS, ReplicaColumns
from sim.engine.record.iterations import latest
from sim.engine.time.clock import TICK_BITS, TICKS_PER_S
from sim.errors import RooftraceError
from sim.work import apart, in_full, seconds_of, together, totals_of

FloatArray = NDArray[np.float64]

ITERATION = {
    **PARTS,
    "drafting": "passes of the drafter, over prompts too, and what a round of speculation costs beside them",
    "adapters": "kernels of LoRA adapters",
    "adapter_loads": "LoRA adapters on their way to a slot, for the whole batch",
    "images": "encoding images in the step of the prompt",
    "masks": "masks of grammars: filling them as far as the device waits for it, and applying them",
    "waiting_inside": "waiting for other ranks, for other stages of the pipeline, and for a slower machine",
}
"""The parts of an iteration's time, and what each is."""
_BESIDE = (ADAPTERS, IMAGES, MASKS)
CAUSES = {
    **ITERATION,
    "prompts": "prompts of other requests in the same iterations",
    "decodes": "decodes of other requests in the same iterations",
    "between": "other micro-batches and models of the machine, and gaps between its iterations",
    "front_end": "the front end: tokenisation and admission",
    "encoding": "the encoder, its queue and its link",
    "queue": "waiting for the scheduler to take the request, and in a burst for the front end",
    "transfer": "KV on its way from the machine that computed the prompt, and waiting for room for it",
    "preemption": "preempted: waiting, and computing again or loading what was given up",
    "other": "none of these: lost work of machines that failed; prompts in a pipeline whose micro-batch no record says",
}
"""The causes of a request's time, and what each is."""
FULL = 0.9
"""The share of a replica's KV blocks from which its cache counts as full: what is left is what running sequences grow into."""


_SLOWEST = 0.99


class NotExplained(RooftraceError):
    """The run's time cannot be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Seconds of each request by cause: rows as in `requests`, NaN where the request has no such latency."""

    tpot_s: dict[str, FloatArray]
    ttft_s: dict[str, FloatArray]
    busy_s: dict[str, float]
    """Seconds of all iterations of all machines by what they were spent on (`ITERATION`)."""
    short_of_memory: float
    """The share of busy time in which requests wait while at least `FULL` of the KV blocks are in use, or so many that a prompt of
    mean length does not fit beside them."""

    waiting: float = 0.0
    """Requests that wait while machines are busy, in the mean."""
    waiting_for_slot: float = 0.0
    """Those of them whose adapter has no slot, where all slots are taken."""

    def mean(self, measure: str, chosen: NDArray[np.bool_]) -> dict[str, float]:
        """The mean of *measure* (tpot_s or ttft_s) over the requests *chosen* that have it, by cause: its values add up to the
        mean; causes of no time are left out. Empty where no request has it."""
        parts: dict[str, FloatArray] = getattr(self, measure)
        rows = chosen & np.isfinite(next(iter(parts.values())))
        if not rows.any():
            return {}
        means = {cause: float(each[rows].mean()) for cause, each in parts.items()}
        return {cause: value for cause, value in means.items() if value != 0.0}

    def means(self, measure: str, inside: NDArray[np.bool_]) -> tuple[dict[str, float], dict[str, float]]:
        """`mean` over the requests *inside*, and over the slowest hundredth of them."""
        whole = np.add.reduce(list(getattr(self, measure).values()))
        known = inside & np.isfinite(whole)
        least = float(np.quantile(whole[known], _SLOWEST)) if known.any() else 0.0
        return self.mean(measure, known), self.mean(measure, known & (whole >= least))


def check_explained(experiment: Experiment) -> None:
    """NotExplained where a cost model of *experiment* does not say what its time is spent on."""
    for machine in experiment.machines:
        for spec in machine.hosted:
            cost = _as_it_is(spec.cost)
            if not isinstance(cost, LayerwiseCost):
                raise NotExplained(
                    f"{type(cost).__name__} gives the time of an iteration and not what it is spent on; choose cost_model: "
                    "calibrated or roofline"
                )


def _as_it_is(cost: Any) -> Any:
    """*cost* of a machine that is not slowed down: what a slower one takes longer is in no price."""
    return cost.inner if isinstance(cost, Slowed) else cost


def explained(experiment: Experiment, columns: metrics.Columns) -> Explained:
    """The latencies of *columns*, a run of *experiment*, by cause. NotExplained where a cost model does not say what its time is
    spent on, and for columns that were read from a folder, which have no records of the engine."""
    if not isinstance(columns, Columns):
        raise NotExplained(
            "a stored result lacks the records of its run; run its scenario again, as `rooftrace explain` does"
        )
    check_explained(experiment)
    machines = _Machines(experiment, columns)
    requests = columns.requests
    return Explained(
        tpot_s=_of_tokens(requests, columns, machines),
        ttft_s=_of_first_tokens(experiment, requests, machines),
        busy_s=machines.busy_s,
        short_of_memory=_short_of_memory(columns),
        **_waiting(columns),
    )


def _waiting(columns: Columns) -> dict[str, float]:
    busy = waiting = for_slot = 0.0
    for replica in columns.replicas:
        lasting = seconds_of(replica.spans)
        busy += float(lasting.sum())
        waiting += float((lasting * replica.spans["waiting"]).sum())
        for_slot += 0.0 if replica.adapters is None else replica.adapters.waiting_ns * 1e-9
    return {"waiting": waiting / busy, "waiting_for_slot": for_slot / busy} if busy else {}


def _short_of_memory(columns: Columns) -> float:
    busy = waiting = 0.0
    prompt_tokens = float(columns.requests["prompt_tokens"].mean()) if len(columns.requests["prompt_tokens"]) else 0.0
    for replica in columns.replicas:
        spans = replica.spans
        lasting = seconds_of(spans)
        prompt = prompt_tokens / replica.block_tokens
        full = spans["kv_blocks_used"] >= min(FULL * replica.kv_blocks_total, replica.kv_blocks_total - prompt)
        busy += float(lasting.sum())
        waiting += float(lasting[full & (spans["waiting"] > 0)].sum())
    return waiting / busy if busy else 0.0


class _Timeline:
    """The iterations of a micro-batch in order, and the seconds of each cause that have passed at each instant."""

    def __init__(self, start_ns: FloatArray, end_ns: FloatArray, parts: FloatArray) -> None:
        """*parts* [iterations, causes] add up to the seconds of each."""
        order = np.argsort(start_ns, kind="stable")
        passed = np.concatenate((np.zeros((1, parts.shape[1])), np.cumsum(parts[order], axis=0)))
        # At the start of an iteration what has passed is what had at the end of the one before.
        self._at_ns = np.stack((start_ns[order], end_ns[order]), axis=1).ravel()
        self._passed = np.stack((passed[:-1], passed[1:]), axis=1).reshape(-1, parts.shape[1])

    def between(self, since_ns: FloatArray, until_ns: FloatArray) -> FloatArray:
        """Seconds by cause from *since_ns* to *until_ns*: [intervals, causes]."""
        if not len(self._at_ns):
            return np.zeros((len(since_ns), self._passed.shape[1]))
        return np.stack(
            [
                np.interp(until_ns, self._at_ns, each) - np.interp(since_ns, self._at_ns, each)
                for each in self._passed.T
            ],
            axis=1,
        )


class _View(NamedTuple):
    """A micro-batch as its decodes see it, prompts being a cause, and as its prompts see it, decodes being one."""

    decodes: _Timeline
    prompts: _Timeline


DECODES = (*ITERATION, "prompts")
PROMPTS = (*ITERATION, "decodes")


class _Machines:
    """The timelines of every micro-batch of every replica of a run."""

    def __init__(self, experiment: Experiment, columns: Columns) -> None:
        self._views: dict[tuple[int, int], _View] = {}
        self.lanes: list[tuple[int, ...]] = []
        """The micro-batches of each replica that had work."""
        self._first_lane: list[dict[int, int]] = []
        self.busy_s = dict.fromkeys(ITERATION, 0.0)
        rows = iter(columns.replicas)
        for machine in experiment.machines:
            for spec in machine.hosted:
                replicas = [next(rows) for _ in range(machine.ranks)]
                cost = _as_it_is(spec.cost)
                for replica, of_rank in zip(replicas, _steps([each.spans for each in replicas]), strict=True):
                    number = len(self.lanes)
                    self.lanes.append(tuple(np.unique(replica.spans["lane"]).tolist()))
                    stays = replica.joins[np.argsort(replica.joins["token_ns"], kind="stable")[::-1]]
                    self._first_lane.append(dict(zip(stays["request"].tolist(), stays["lane"].tolist(), strict=True)))
                    for lane in self.lanes[-1]:
                        mine = of_rank.of(replica.spans["lane"] == lane)
                        beside = _Beside(replica, lane, mine.start_ticks, spec.grammars)
                        self._views[number, lane] = self._view(cost, mine, beside, drafts=spec.decoding is not None)

    def _view(self, cost: LayerwiseCost, steps: _Steps, beside: _Beside, *, drafts: bool) -> _View:
        """*steps* of one micro-batch with what they take *beside* the model; *drafts*: what is left is spent on drafting."""
        n = steps.computed["n"]
        each_s = (steps.end_ns - steps.start_ns) * 1e-9 / np.maximum(n, 1)
        # Within a span only the KV tokens read change, evenly: its middle stands for all of it.
        totals = totals_of(steps.computed, (n - 1) / 2)
        prompts, decodes = apart(totals, steps.computed["completions"])
        whole = _columns(cost, totals)
        whole_s = whole.sum(axis=1)
        found: list[_Timeline] = []
        for own, of_all in (
            (whole, True),
            (_columns(cost, decodes), False),
            (_columns(cost, prompts), False),
        ):
            own_s = own.sum(axis=1)
            # Prices are lines between points that the cost model gave; a step that took less than its price is shared alike.
            unpriced = np.maximum(each_s - np.maximum(whole_s, own_s), 0.0)
            named, unpriced = beside.of(unpriced, whole_s)
            unpriced = np.where(unpriced > _ROUNDING * each_s, unpriced, 0.0)
            drafting, inside = (unpriced, 0.0 * unpriced) if drafts else (0.0 * unpriced, unpriced)
            table = np.column_stack((own, drafting, *named, inside, np.maximum(whole_s - own_s, 0.0)))
            priced = table.sum(axis=1)
            factor = np.divide(each_s, priced, out=np.zeros_like(priced), where=priced > 0)
            table *= (factor * n)[:, None]
            if of_all:
                for cause, seconds in zip(ITERATION, table.sum(axis=0).tolist(), strict=False):
                    self.busy_s[cause] += seconds
            else:
                found.append(_Timeline(steps.start_ns, steps.end_ns, table))
        return _View(*found)

    def lane_of(self, replica: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The micro-batch in which each of *rows* was on *replica* at its first token; -1 where nothing says so: in a pipeline a
        request without a second token leaves no trace of it."""
        only = self.lanes[replica][0] if len(self.lanes[replica]) == 1 else -1
        lanes = self._first_lane[replica]
        return np.array([lanes.get(row, only) for row in rows.tolist()], np.int64)

    def view(self, replica: int, lane: int) -> _View:
        return self._views[replica, lane]


class _Beside:
    """Seconds that each iteration of a micro-batch takes beside the model: kernels of adapters, their loads, images, masks."""

    def __init__(
        self, replica: ReplicaColumns, lane: int, start_ticks: NDArray[np.int64], grammars: GrammarSpec | None
    ) -> None:
        self._grammars = grammars
        mine = replica.extras[replica.extras["lane"] == lane]
        adapters, images, self._masks = (latest(mine[mine["what"] == what], start_ticks) for what in _BESIDE)
        self._images_s = images / TICKS_PER_S
        self._loads_s = np.zeros(len(start_ticks))
        if replica.adapters is not None and replica.adapters.loads and len(start_ticks):
            at_ns, _, _, loads_ns = np.array(replica.adapters.loads, np.int64).T
            spans = np.searchsorted(start_ticks >> TICK_BITS, at_ns, side="right") - 1
            np.add.at(self._loads_s, np.maximum(spans, 0), loads_ns * 1e-9)
        self._adapters_s = adapters / TICKS_PER_S - self._loads_s

    def of(self, unpriced_s: FloatArray, forward_s: FloatArray) -> tuple[list[FloatArray], FloatArray]:
        """The part of *unpriced_s* that is spent on each, and what is left; *forward_s*: the model's own time."""
        found: list[FloatArray] = []
        device_s = forward_s + self._adapters_s + self._loads_s + self._images_s
        for each in (self._adapters_s, self._loads_s, self._images_s, self._masks_s(device_s)):
            found.append(np.clip(each, 0.0, unpriced_s))
            unpriced_s = unpriced_s - found[-1]
        return found, unpriced_s

    def _masks_s(self, device_s: FloatArray) -> FloatArray:
        spec = self._grammars
        if spec is None:
            return np.zeros_like(device_s)
        host_s = spec.step_s + self._masks * spec.mask_s
        waits_s = np.maximum(host_s - device_s, 0.0) if spec.overlapped else host_s
        return np.where(self._masks > 0, waits_s + self._masks * spec.apply_s, 0.0)


class _Steps(NamedTuple):
    """Spans of one replica: what was computed in each, of all ranks together, and when it began and ended."""

    computed: dict[str, NDArray[np.int64]]
    start_ticks: NDArray[np.int64]
    start_ns: FloatArray
    end_ns: FloatArray

    def of(self, chosen: NDArray[np.bool_]) -> _Steps:
        """Those *chosen*."""
        computed = {name: each[chosen] for name, each in self.computed.items()}
        return _Steps(computed, self.start_ticks[chosen], self.start_ns[chosen], self.end_ns[chosen])


def _steps(of_ranks: Sequence[NDArray[Any]]) -> Iterator[_Steps]:
    """The spans of each rank; cost models are given the work of all ranks in the same step."""
    whole = together(list(of_ranks)) if len(of_ranks) > 1 else of_ranks[0]
    starts = np.unique(np.concatenate([spans["start_ns"] for spans in of_ranks]))
    for spans in of_ranks:
        computed = in_full(whole[np.searchsorted(starts, spans["start_ns"])] if len(of_ranks) > 1 else spans)
        start_ns = spans["start_ns"] + spans["start_frac"] * (1e9 / TICKS_PER_S)
        start_ticks = (spans["start_ns"] << TICK_BITS) + spans["start_frac"]
        yield _Steps(computed, start_ticks, start_ns, start_ns + seconds_of(spans) * 1e9)


_ROUNDING = 1e-5
"""The share of an iteration below which what its price lacks is rounding: lines are within 2e-7 of it, ticks within 1e-9 s."""


def _columns(cost: LayerwiseCost, totals: Totals) -> FloatArray:
    """Seconds of iterations by part, zero for those without a token: [iterations, parts]."""
    parts = cost.parts_s(totals)
    return np.stack(list(parts.values()), axis=1) * (totals.rows > 0)[:, None]


def _sum(parts: Mapping[str, FloatArray]) -> FloatArray:
    first, *others = parts.values()
    return functools.reduce(operator.add, others, first)


class _Shares:
    """Seconds of each request by cause, while they are found."""

    def __init__(self, n: int) -> None:
        self.seconds = {cause: np.zeros(n) for cause in CAUSES}

    def add(self, cause: str, rows: NDArray[np.int64], seconds: FloatArray) -> None:
        np.add.at(self.seconds[cause], rows, np.maximum(seconds, 0.0))

    def add_running(
        self,
        timeline: _Timeline,
        causes: Sequence[str],
        rows: NDArray[np.int64],
        since_ns: FloatArray,
        until_ns: FloatArray,
    ) -> None:
        """Add the time from *since_ns* to *until_ns* by what *timeline* did then, and as `between` that between its iterations."""
        lasting = np.maximum(until_ns - since_ns, 0.0) * 1e-9
        found = timeline.between(since_ns, np.maximum(until_ns, since_ns))
        for cause, seconds in zip(causes, found.T, strict=True):
            self.add(cause, rows, seconds)
        self.add("between", rows, lasting - found.sum(axis=1))

    def whole(self) -> FloatArray:
        """Seconds of each request that have a cause."""
        return _sum(self.seconds)

    def of(self, whole_s: FloatArray, divisor: Any = 1.0) -> dict[str, FloatArray]:
        """By cause, with what is left of *whole_s*; NaN where that is."""
        found = {cause: np.where(np.isfinite(whole_s), each / divisor, np.nan) for cause, each in self.seconds.items()}
        found["other"] = found["other"] + (whole_s - _sum(found))
        return found


def _of_tokens(requests: Mapping[str, Any], columns: Columns, machines: _Machines) -> dict[str, FloatArray]:
    """TPOT by cause. From the token with which a stay in a micro-batch begins to its last one: the wait for its first iteration,
    and then what its iterations spend."""
    n = len(requests["arrival_ns"])
    shares = _Shares(n)
    landed_ns = requests.get("landed_ns", np.full(n, -1)).astype(float)
    first_ns, finish_ns = requests["first_token_ns"].astype(float), requests["finish_ns"].astype(float)
    for number, replica in enumerate(columns.replicas):
        for lane in machines.lanes[number]:
            view = machines.view(number, lane)
            stays = replica.joins[replica.joins["lane"] == lane]
            stays = stays[(stays["until"] > stays["since"]) & (first_ns[stays["request"]] >= 0)]
            if not len(stays):
                continue
            rounds = _round_of(replica.spans, lane)
            rows = stays["request"].astype(np.int64)
            since_ns = np.maximum(stays["token_ns"].astype(float), first_ns[rows])
            until_ns = np.minimum(rounds.ends_ns(stays["until"]), finish_ns[rows])
            # KV that another machine sends lands first; after that other iterations of the machine may be.
            on_links = np.where(stays["token_ns"] <= first_ns[rows], np.maximum(landed_ns[rows] - since_ns, 0.0), 0.0)
            on_links = np.minimum(on_links, until_ns - since_ns) * 1e-9
            shares.add("transfer", rows, on_links)
            shares.add_running(view.decodes, DECODES, rows, since_ns + on_links * 1e9, until_ns)
    # A preempted sequence is in no micro-batch until it has been computed again, and has a token, or is back.
    preempted = np.flatnonzero((requests["preemptions"] > 0) & (first_ns >= 0))
    shares.add("preemption", preempted, (finish_ns - first_ns)[preempted] * 1e-9 - shares.whole()[preempted])
    return shares.of(metrics.tpot_s(requests), np.maximum(requests["output_tokens"] - 1, 1))


class _Rounds:
    """Instants of a micro-batch's decode rounds."""

    def __init__(self, first: NDArray[np.int64], spans: NDArray[Any]) -> None:
        self._first, self._spans = first, spans

    def ends_ns(self, rounds: NDArray[Any]) -> FloatArray:
        """The end of the round before each of *rounds*, counted from 0."""
        last = rounds.astype(np.int64) - 1
        at = np.clip(np.searchsorted(self._first, last, side="right") - 1, 0, len(self._first) - 1)
        span = self._spans[at]
        n = np.clip(last - self._first[at] + 1, 1, span["n"])
        ticks = span["start_frac"] + n * span["first_ticks"] + span["growth_ticks"] * (n * (n - 1) // 2)
        return np.asarray(span["start_ns"] + ticks * (1e9 / TICKS_PER_S), np.float64)


def _round_of(spans: NDArray[Any], lane: int) -> _Rounds:
    mine = spans[(spans["lane"] == lane) & (spans["decode_seqs"] > spans["in_vain"])]
    n = mine["n"].astype(np.int64)
    return _Rounds(np.cumsum(n) - n, mine)


def _of_first_tokens(experiment: Experiment, requests: Mapping[str, Any], machines: _Machines) -> dict[str, FloatArray]:
    """TTFT by cause: until the request is scheduled, and from there what its machine's iterations spend."""
    n = len(requests["arrival_ns"])
    shares = _Shares(n)
    rows = np.flatnonzero(np.isfinite(metrics.ttft_s(requests)))
    at = {name: requests[name][rows].astype(float) for name in ("arrival_ns", "scheduled_ns", "first_token_ns")}
    seen_ns = at["arrival_ns"]
    if "encode_landed_ns" in requests:
        landed_ns = np.maximum(requests["encode_landed_ns"][rows].astype(float), seen_ns)
        shares.add("encoding", rows, (landed_ns - seen_ns) * 1e-9)
        seen_ns = landed_ns
    queued_s = (at["scheduled_ns"] - seen_ns) * 1e-9
    front_s = np.minimum(
        experiment.admission_s
        + experiment.admission_serial_s
        + experiment.admission_s_per_token * requests["prompt_tokens"][rows],
        queued_s,
    )
    shares.add("front_end", rows, front_s)
    shares.add("queue", rows, queued_s - np.maximum(front_s, 0.0))
    replica, since_ns = requests["replica"][rows], at["scheduled_ns"]
    if "prefill_replica" in requests:
        replica, since_ns = _handed(shares, requests, rows, since_ns, machines)
    _run(shares, machines, replica, rows, since_ns, at["first_token_ns"])
    return shares.of(metrics.ttft_s(requests))


def _handed(
    shares: _Shares, requests: Mapping[str, Any], rows: NDArray[np.int64], since_ns: FloatArray, machines: _Machines
) -> tuple[NDArray[Any], FloatArray]:
    """Add what a request that was handed over does before the machine that decodes it takes it: the machine of each request after
    that, and the instant from which it is there."""
    first, landed = requests["prefill_replica"][rows], requests["landed_ns"][rows].astype(float)
    handed = (first >= 0) & (landed >= 0) & (landed <= requests["first_token_ns"][rows])
    some = rows[handed]
    prefilled = requests["prefilled_ns"][some].astype(float)
    _run(shares, machines, first[handed], some, since_ns[handed], prefilled)
    shares.add("transfer", some, (landed[handed] - prefilled) * 1e-9)
    joined = np.clip(
        requests["joined_ns"][some].astype(float), landed[handed], requests["first_token_ns"][some].astype(float)
    )
    shares.add("queue", some, (joined - landed[handed]) * 1e-9)
    # A first token that the prefill machine had emitted came there.
    since = since_ns.copy()
    since[handed] = joined
    return np.where(handed | (first < 0), requests["replica"][rows], first), since


def _run(
    shares: _Shares,
    machines: _Machines,
    replica: NDArray[Any],
    rows: NDArray[np.int64],
    since_ns: FloatArray,
    until_ns: FloatArray,
) -> None:
    """Add what the prompts of *rows* see of their machines."""
    for number in np.unique(replica).tolist():
        mine = np.flatnonzero(replica == number)
        lanes = machines.lane_of(number, rows[mine])
        for lane in np.unique(lanes).tolist():
            some = mine[lanes == lane]
            if lane < 0:
                shares.add("other", rows[some], (until_ns[some] - since_ns[some]) * 1e-9)
            else:
                prompts = machines.view(number, lane).prompts
                shares.add_running(prompts, PROMPTS, rows[some], since_ns[some], until_ns[some])
