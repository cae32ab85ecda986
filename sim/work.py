"""The work of a run's devices, computed from its records: arithmetic, memory traffic, and the power it draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.power import ANY, PowerModel, power_model
from hwmodels.totals import Totals
from sim.engine import Columns, Experiment
from sim.engine.batch.prices import StageTable
from sim.engine.record.spill import in_blocks
from sim.engine.time.clock import TICK_BITS

_SPAN_FIELDS = (
    *("n", "prefill_rows", "prefill_chunks", "prefill_pairs", "prefill_kv_tokens", "decode_seqs", "query_tokens"),
    *("decode_kv_tokens", "completions", "prefill_pairs_window", "decode_kv_window", "window_growth"),
    "draft_steps",
)
_SPANS_AT_ONCE = 1 << 17


def work_done(experiment: Experiment, columns: Columns, power: Sequence[PowerModel] = ()) -> dict[str, Any]:
    """Arithmetic and memory traffic of a run over all replicas, and what their GPUs could do in a second.

    *power* has the model of each machine's devices; without it they draw what devices do that were not measured.

    Keys: flops, hbm_bytes, peak_flops_per_s, peak_bytes_per_s (`machine_peaks` has the last two of each machine, where they come
    and go); by machine busy_s and power_share_s, the share of their TDP that its devices draw integrated over the time for which it
    is busy; and prompt_share, the part of the busy time that prompts take, by the time that prompts and decodes of each iteration
    would take on a roofline of their own, with prompt_attention_share and decode_kv_share, the parts of these that attention over
    what came before takes, by what the roofline is without. Within a span only the KV tokens read change, evenly, and work is
    affine in them, but where contexts grow beyond the keys that a query chooses: the mean of its first and last iteration is that
    of all; power and shares are the mean of the two. Empty where a model is known by a table of latencies only, which says nothing
    of its work.
    """
    done: dict[str, Any] = {"flops": 0.0, "hbm_bytes": 0.0, "peak_flops_per_s": 0.0, "peak_bytes_per_s": 0.0}
    done |= {"prompt_s": 0.0, "prompt_attention_s": 0.0, "decode_kv_s": 0.0}
    machines = experiment.machines
    draws = list(power) if len(power) == len(machines) else [power_model(ANY)] * len(machines)
    done |= {name: np.zeros(len(machines)) for name in ("busy_s", "power_share_s")}
    rows = iter(columns.replicas)
    peaks: list[tuple[float, float]] = []
    alike: dict[tuple[int, int, bool, PowerModel], _Alike] = {}
    for index, machine in enumerate(machines):
        of_ranks = [[next(rows).spans for _ in range(machine.ranks)] for _ in machine.hosted]
        costs = [spec.cost for spec in machine.hosted if not isinstance(spec.cost, StageTable)]
        if len(costs) < len(machine.hosted):
            return {}
        # Models that share a machine share its GPUs; one that computes in a narrower format has the higher peak.
        peaks.append((max(cost.peak_flops_per_s for cost in costs), max(cost.peak_bytes_per_s for cost in costs)))
        done["peak_flops_per_s"] += peaks[-1][0]
        done["peak_bytes_per_s"] += peaks[-1][1]
        spans = [together(each) if machine.ranks > 1 else each[0] for each in of_ranks]
        for cost, spec, of_it in zip(costs, machine.hosted, spans, strict=True):
            key = (id(cost), id(spec.draft_cost), machine.ranks > 1, draws[index])
            alike.setdefault(key, _Alike(cost, spec.draft_cost, draws[index], [])).parts.append((index, of_it))
    for each in alike.values():
        for bulk in _in_bulk(each.parts):
            _add_work(done, each, bulk)
    done |= {name: done[name].tolist() for name in ("busy_s", "power_share_s")}
    busy_s, prompt_s = sum(done["busy_s"]), done.pop("prompt_s")
    attention_s, kv_s = done.pop("prompt_attention_s"), done.pop("decode_kv_s")
    done["prompt_share"] = prompt_s / busy_s if busy_s else None
    done["prompt_attention_share"] = attention_s / prompt_s if prompt_s else 0.0
    done["decode_kv_share"] = kv_s / (busy_s - prompt_s) if busy_s > prompt_s else 0.0
    return done if experiment.fleet is None else {**done, "machine_peaks": peaks}


def together(of_ranks: list[np.ndarray]) -> np.ndarray:
    """The steps of ranks, each an iteration of all of them: what is read once by all is counted once."""
    spans = np.concatenate(of_ranks)
    starts, step = np.unique(spans["start_ns"], return_inverse=True)
    found = np.zeros(len(starts), [(name, np.int64) for name in (*_SPAN_FIELDS, "first_ticks", "growth_ticks")])
    for name in _SPAN_FIELDS:
        np.add.at(found[name], step, spans[name].astype(np.int64))
    # A step lasts as long for all of its ranks.
    np.maximum.at(found["first_ticks"], step, spans["first_ticks"])
    found["n"] = 1
    queries = np.zeros(len(starts), np.int64)
    np.add.at(queries, step, spans["decode_seqs"].astype(np.int64) * spans["query_tokens"])
    found["query_tokens"] = -(-queries // np.maximum(found["decode_seqs"], 1))
    found["draft_steps"] = 0
    np.maximum.at(found["draft_steps"], step, spans["draft_steps"].astype(np.int64))
    return found


class _Alike(NamedTuple):
    """The records of machines that have the same prices, and which machine each is of."""

    cost: CostModel
    draft_cost: CostModel | None
    power: PowerModel
    parts: list[tuple[int, np.ndarray]]


class _Bulk(NamedTuple):
    """Records of machines, one machine after the other: which, and where each begins."""

    spans: np.ndarray
    machines: list[int]
    begins: list[int]

    def add(self, name: str, done: dict[str, Any], values: np.ndarray) -> None:
        """Add half of the *values* of each machine to its own."""
        for machine, mine in zip(self.machines, np.split(values, self.begins[1:]), strict=True):
            done[name][machine] += 0.5 * float(mine.sum())


def _in_bulk(parts: Iterable[tuple[int, np.ndarray]]) -> Iterator[_Bulk]:
    """Many small records together, as thousands of machines have them, and large ones in pieces."""
    held: list[tuple[int, np.ndarray]] = []
    n = 0
    for machine, spans_of in parts:
        for spans in in_blocks(spans_of, _SPANS_AT_ONCE):
            held.append((machine, spans))
            n += len(spans)
            if n >= _SPANS_AT_ONCE:
                yield _joined(held)
                held, n = [], 0
    if held:
        yield _joined(held)


def _joined(held: list[tuple[int, np.ndarray]]) -> _Bulk:
    parts = [each for _, each in held]
    begins = np.cumsum([0, *map(len, parts[:-1])]).tolist()
    # As bytes: of thousands of arrays numpy compares the fields of each with those of the next.
    spans = parts[0] if len(parts) == 1 else np.frombuffer(b"".join(map(np.ndarray.tobytes, parts)), parts[0].dtype)
    return _Bulk(spans, [machine for machine, _ in held], begins)


def _add_work(done: dict[str, Any], alike: _Alike, bulk: _Bulk) -> None:
    """Add the work (FLOPs, bytes, seconds) of one model's iterations on some machines to *done*."""
    cost = alike.cost
    span, seconds = in_full(bulk.spans), seconds_of(bulk.spans)
    for steps in (0, span["n"] - 1):
        totals = totals_of(span, steps)
        work = cost.work(totals)
        done["flops"] += 0.5 * float(_total(work.flops, span["n"]))
        done["hbm_bytes"] += 0.5 * float(_total(work.hbm_bytes, span["n"]))
        _add_power(done, alike, work, span["n"], seconds, bulk)
        parts = _parts(cost, totals, span["completions"])
        for name, part in zip(("prompt_s", "prompt_attention_s", "decode_kv_s"), parts, strict=True):
            done[name] += float((part * 0.5 * seconds).sum())
    if alike.draft_cost is not None:
        _add_draft_work(done, alike.draft_cost, span)


def in_full(spans: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of spans that say what was computed, as 64-bit integers."""
    return {name: spans[name].astype(np.int64) for name in _SPAN_FIELDS}


def seconds_of(spans: np.ndarray) -> np.ndarray:
    """The seconds of all iterations of each span."""
    n = spans["n"].astype(np.int64)
    return (n * spans["first_ticks"] + spans["growth_ticks"] * (n * (n - 1) // 2)) * (1e-9 / (1 << TICK_BITS))


def totals_of(span: Mapping[str, np.ndarray], steps: np.ndarray | int) -> Totals:
    """The totals of each span's iteration number *steps*; half of one reads half the KV tokens that one adds."""
    queries = span["decode_seqs"] * span["query_tokens"]
    return Totals(
        rows=span["prefill_rows"] + queries,
        prefill_rows=span["prefill_rows"],
        prefill_chunks=span["prefill_chunks"],
        prefill_pairs=span["prefill_pairs"],
        prefill_kv_tokens=span["prefill_kv_tokens"],
        decode_seqs=span["decode_seqs"],
        decode_kv_tokens=span["decode_kv_tokens"] + (steps * span["decode_seqs"]).astype(np.int64),
        logit_rows=queries + span["completions"],
        prefill_pairs_window=span["prefill_pairs_window"],
        decode_kv_window=span["decode_kv_window"] + (steps * span["window_growth"]).astype(np.int64),
    )


class Iterations(NamedTuple):
    """Spans of iterations of one machine: how long each is, and what it reaches of the peaks, with rows that only fill tiles."""

    seconds: np.ndarray
    bandwidth: np.ndarray
    arithmetic: np.ndarray
    still: np.ndarray
    """The part of each in which nothing is multiplied."""
    tokens: int
    """Output tokens of all of them."""


def iterations_of(cost: CostModel, columns: Columns, *, from_ns: int, to_ns: int) -> Iterations:
    """The iterations that begin in a time on the one machine of a run, which hosts one model; what they reach is that of the middle
    of a span."""
    of_ranks = []
    for replica in columns.replicas:
        spans = replica.spans
        of_ranks.append(spans[(spans["start_ns"] >= from_ns) & (spans["start_ns"] < to_ns)])
    tokens = sum(int((spans["emitted"].astype(np.int64) * spans["n"]).sum()) for spans in of_ranks)
    spans = together(of_ranks) if len(of_ranks) > 1 else of_ranks[0]
    span, seconds = in_full(spans), seconds_of(spans)
    each = np.maximum(seconds / np.maximum(span["n"], 1), 1e-12)
    work = cost.work(totals_of(span, (span["n"] - 1) // 2))
    return Iterations(
        seconds=seconds,
        bandwidth=work.hbm_bytes / (each * cost.peak_bytes_per_s),
        arithmetic=(work.flops + work.tile_flops) / (each * cost.peak_flops_per_s),
        still=work.still_s / each,
        tokens=tokens,
    )


def _add_power(
    done: dict[str, Any], alike: _Alike, work: Any, times: np.ndarray, seconds: np.ndarray, bulk: _Bulk
) -> None:
    """Add half of spans of *times* iterations that took *seconds* in all, in each of which *work* was done; a draft's passes draw
    what the target's step draws."""
    busy = seconds > 0
    each = np.where(busy, seconds / times, 1.0)
    memory = np.broadcast_to(work.hbm_bytes, times.shape) / (each * alike.cost.peak_bytes_per_s)
    multiplied = np.broadcast_to(work.flops + work.tile_flops, times.shape)
    compute = multiplied / (each * alike.cost.peak_flops_per_s)
    drawn = alike.power.iteration_share(memory, compute, work.still_s / each)
    bulk.add("busy_s", done, seconds)
    bulk.add("power_share_s", done, np.where(busy, drawn * seconds, 0.0))


def apart(totals: Totals, completions: np.ndarray) -> tuple[Totals, Totals]:
    """The prompts of iterations without their decodes, and the decodes without the prompts, of which *completions* complete."""
    zero = np.zeros_like(totals.prefill_rows)
    prompts = totals._replace(
        rows=totals.prefill_rows, decode_seqs=zero, decode_kv_tokens=zero, logit_rows=completions, decode_kv_window=zero
    )
    decodes = totals._replace(
        rows=totals.rows - totals.prefill_rows, prefill_rows=zero, prefill_chunks=zero, prefill_pairs=zero,
        prefill_kv_tokens=zero, logit_rows=totals.logit_rows - completions, prefill_pairs_window=zero,
    )  # fmt: skip
    return prompts, decodes


def _parts(cost: CostModel, totals: Any, completions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts of each iteration that its prompts take, their attention, and reading the KV of its decodes: both
    kinds of rows alone on the device's roofline, and without attention over what came before."""
    zero = np.zeros_like(totals.prefill_rows)
    prompts, decodes = apart(totals, completions)
    bare = (
        prompts._replace(prefill_pairs=zero, prefill_kv_tokens=zero, prefill_pairs_window=zero),
        decodes._replace(decode_kv_tokens=zero, decode_kv_window=zero),
    )
    of_prompts, of_decodes, without, unread = (
        _roofline_s(cost, each) * (each.rows > 0) for each in (prompts, decodes, *bare)
    )
    both = np.where(of_prompts + of_decodes > 0, of_prompts + of_decodes, 1.0)
    return of_prompts / both, np.maximum(of_prompts - without, 0.0) / both, np.maximum(of_decodes - unread, 0.0) / both


def _roofline_s(cost: CostModel, totals: Any) -> np.ndarray:
    work = cost.work(totals)
    return np.maximum(
        np.asarray(work.flops) / cost.peak_flops_per_s, np.asarray(work.hbm_bytes) / cost.peak_bytes_per_s
    )


def _add_draft_work(done: dict[str, Any], draft: CostModel, span: Mapping[str, Any]) -> None:
    """Prompts and passes of the draft model; a draft of which only a time is known adds nothing."""
    zero = np.zeros_like(span["n"])
    prompts = Totals(
        rows=span["prefill_rows"],
        prefill_rows=span["prefill_rows"],
        prefill_chunks=span["prefill_chunks"],
        prefill_pairs=span["prefill_pairs"],
        prefill_kv_tokens=span["prefill_kv_tokens"],
        decode_seqs=zero,
        decode_kv_tokens=zero,
        logit_rows=zero,
        prefill_pairs_window=span["prefill_pairs_window"],
        decode_kv_window=zero,
    )
    seqs, kv = span["decode_seqs"], span["decode_kv_tokens"]
    window = zero if draft.window_tokens is None else span["decode_kv_window"]
    passes = Totals(seqs, zero, zero, zero, zero, seqs, kv, seqs, zero, window)
    decoding = span["draft_steps"] * (seqs > 0)
    done_by = [(prompts, span["n"] * (span["prefill_rows"] > 0)), (passes, span["n"] * decoding)]
    if getattr(draft, "reads_whole_step", False):
        first = (decoding > 0).astype(np.int64)
        whole = passes._replace(rows=seqs * span["query_tokens"])
        done_by[1:] = [(whole, span["n"] * first), (passes, span["n"] * (decoding - first))]
    for totals, times in done_by:
        work = draft.work(totals)
        done["flops"] += float(_total(work.flops, times))
        done["hbm_bytes"] += float(_total(work.hbm_bytes, times))


def _total(each: Any, times: np.ndarray) -> Any:
    return (np.broadcast_to(each, times.shape) * times).sum()
