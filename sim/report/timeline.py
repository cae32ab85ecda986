"""Chrome trace events of a run, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.engine.record.columns import BUBBLES
from sim.metrics.columns import PLACES, TRANSFER_NAMES
from sim.metrics.handover import STAGES
from workloads.write import open_whole

if TYPE_CHECKING:
    from sim.engine.record.columns import Columns

MOST_EVENTS = 2_000_000
_REQUESTS = 1_000_000
"""Process number of the rows of requests; replicas count from 0."""
_LINKS = 2_000_000
"""Process number of the rows of transfers."""


def events(
    columns: Columns, *, begin_s: float = 0.0, end_s: float = float("inf"), pools: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Trace events of what overlaps the time from *begin_s* to *end_s*; times in microseconds from the run's start.

    *pools*: those of the run's manifest, of which each replica says the one that it belongs to.

    A replica is a process, a pipeline stage (or the replica itself) a thread; bubbles are slices of their own. Counters
    show requests running and waiting and KV blocks in use; each request is a pair of slices, queued and served, and,
    where there is no pipeline, an arrow through the iterations that begin it, give its first token and its last. Where prefill and
    decode are apart a request has a slice for each stage of its life, and its arrow goes through the iterations of the machine that
    decodes it. Transfers of KV have rows of their own, one for each place that they come from.
    """
    begin_ns, end_ns = begin_s * 1e9, end_s * 1e9
    iterations = columns.iterations()
    called = [f"replica {index}" for index in range(len(columns.replicas))]
    for name, pool in (pools or {}).items():
        first, last = pool["rows"]
        called[first : last + 1] = [f"{each} ({name})" for each in called[first : last + 1]]
    for index, replica in enumerate(columns.replicas):
        yield {"ph": "M", "pid": index, "name": "process_name", "args": {"name": called[index]}}
        stages = replica.stages
        if len(stages):
            yield from _stage_events(index, replica, begin_ns, end_ns)
        mine = np.flatnonzero(
            (iterations["replica"] == index)
            & (iterations["start_ns"] + iterations["duration_ns"] > begin_ns)
            & (iterations["start_ns"] < end_ns)
        )
        if not len(stages):
            yield {"ph": "M", "pid": index, "tid": 0, "name": "thread_name", "args": {"name": "iterations"}}
        names = ("prefill_tokens", "decode_tokens", "sequences", "running", "waiting", "kv_blocks_used")
        table = {name: iterations[name][mine].tolist() for name in names}
        start, duration = iterations["start_ns"][mine].tolist(), iterations["duration_ns"][mine].tolist()
        for i, at in enumerate(start):
            if not len(stages):
                prompt, decodes = table["prefill_tokens"][i], table["decode_tokens"][i]
                yield {
                    "ph": "X", "pid": index, "tid": 0, "ts": at / 1e3, "dur": duration[i] / 1e3,
                    "name": _name(prompt, decodes), "cat": "iteration",
                    "args": {name: column[i] for name, column in table.items()},
                }  # fmt: skip
            yield {
                "ph": "C", "pid": index, "ts": at / 1e3, "name": "requests",
                "args": {"running": table["running"][i], "waiting": table["waiting"][i]},
            }  # fmt: skip
            yield {
                "ph": "C", "pid": index, "ts": at / 1e3, "name": "KV blocks",
                "args": {"used": table["kv_blocks_used"][i]},
            }  # fmt: skip
    yield from _request_events(columns, begin_ns, end_ns)
    transfers = columns.transfers()
    if transfers is not None:
        yield from _transfer_events(transfers, called, begin_ns, end_ns)
    for index, replica in enumerate(columns.replicas):
        if not len(replica.stages):
            yield from _flow_events(index, columns.requests, iterations, begin_ns, end_ns)


def _name(prompt: int, decodes: int) -> str:
    if prompt and decodes:
        return f"hybrid {prompt} + {decodes}"
    return f"prefill {prompt}" if prompt else f"decode {decodes}"


def _stage_events(index: int, replica: Any, begin_ns: float, end_ns: float) -> Iterator[dict[str, Any]]:
    stages, spans = replica.stages, replica.spans
    for stage in range(int(stages["stage"].max()) + 1):
        yield {
            "ph": "M", "pid": index, "tid": stage, "name": "thread_name", "args": {"name": f"stage {stage + 1}"},
        }  # fmt: skip
    inside = (stages["start_ns"] + stages["duration_ns"] > begin_ns) & (stages["start_ns"] < end_ns)
    for record in stages[inside].tolist():
        micro_batch, stage, start, duration, bubble_ns, bubble = record
        span = spans[micro_batch]
        prompt, decodes = int(span["prefill_rows"]), int(span["decode_seqs"] * span["query_tokens"])
        if bubble_ns:
            yield {
                "ph": "X", "pid": index, "tid": stage, "ts": (start - bubble_ns) / 1e3, "dur": bubble_ns / 1e3,
                "name": f"bubble {BUBBLES[bubble]}", "cat": "bubble",
            }  # fmt: skip
        yield {
            "ph": "X", "pid": index, "tid": stage, "ts": start / 1e3, "dur": duration / 1e3,
            "name": _name(prompt, decodes), "cat": "micro-batch",
            "args": {"micro_batch": micro_batch, "lane": int(span["lane"])},
        }  # fmt: skip


def _request_events(columns: Columns, begin_ns: float, end_ns: float) -> Iterator[dict[str, Any]]:
    requests = columns.requests
    yield {"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests"}}
    served = (requests["finish_ns"] >= 0) & (requests["finish_ns"] > begin_ns) & (requests["arrival_ns"] < end_ns)
    names = (
        "request_id",
        "arrival_ns",
        "scheduled_ns",
        "first_token_ns",
        "finish_ns",
        "prompt_tokens",
        "output_tokens",
    )
    instants = (
        {name: requests[name].tolist() for pair in STAGES.values() for name in pair} if "landed_ns" in requests else {}
    )
    for id_, arrival, scheduled, first, finish, prompt, output in zip(
        *(requests[name][served].tolist() for name in names), strict=True
    ):
        args = {"prompt_tokens": prompt, "output_tokens": output, "first_token_us": first / 1e3}
        # Requests overlap, so each is a track of its own: an asynchronous slice.
        slices = [("queued", arrival, scheduled), ("served", scheduled, finish)]
        if instants and instants["joined_ns"][id_] >= 0:
            slices = [
                (name.removesuffix("_s").replace("_", " "), instants[begin][id_], instants[end][id_])
                for name, (begin, end) in STAGES.items()
            ]
        for name, start, end in slices:
            if end > start:
                common = {"pid": _REQUESTS, "cat": "request", "id": id_, "name": name}
                yield {"ph": "b", "ts": start / 1e3, "args": args, **common}
                yield {"ph": "e", "ts": end / 1e3, **common}


def _transfer_events(transfers: Any, called: Sequence[str], begin_ns: float, end_ns: float) -> Iterator[dict[str, Any]]:
    """Slices of transfers, from when they begin until their KV is laid out where it arrives; those from one place may overlap."""
    yield {"ph": "M", "pid": _LINKS, "name": "process_name", "args": {"name": "KV transfers"}}

    def place(kind: int, replica: int) -> str:
        if replica < 0:
            return PLACES[kind]
        return called[replica] if PLACES[kind] == "device" else f"{PLACES[kind]} of {called[replica]}"

    went = (transfers["arrived_ns"] > begin_ns) & (transfers["begin_ns"] < end_ns)
    ends = ("source", "source_replica", "destination", "destination_replica")
    names = (*ends, "what", "request", "bytes", "begin_ns", "arrived_ns")
    threads: dict[str, int] = {}
    for number, row in enumerate(zip(*(transfers[name][went].tolist() for name in names), strict=True)):
        source, destination = place(*row[:2]), place(*row[2:4])
        if source not in threads:
            threads[source] = len(threads)
            name = f"from {source}"
            yield {"ph": "M", "pid": _LINKS, "tid": threads[source], "name": "thread_name", "args": {"name": name}}
        what, request, n_bytes, begin, arrived = row[4:]
        common = {"pid": _LINKS, "tid": threads[source], "cat": "transfer", "id": number, "name": f"to {destination}"}
        args = {"what": TRANSFER_NAMES[what], "request": request, "bytes": n_bytes}
        yield {"ph": "b", "ts": begin / 1e3, "args": args, **common}
        yield {"ph": "e", "ts": arrived / 1e3, **common}


def _flow_events(
    index: int, requests: Any, iterations: Any, begin_ns: float, end_ns: float
) -> Iterator[dict[str, Any]]:
    """Arrows through the iterations of a replica without stages, one for each request: begun, first token, last token.

    A flow event belongs to the slice around it, so each lies in the middle of its iteration. Requests that begin or end
    outside the stretch have no arrow, since half of one would be an error.
    """
    mine = iterations["replica"] == index
    start, duration = iterations["start_ns"][mine], iterations["duration_ns"][mine]
    middle = start + duration // 2
    served = (requests["replica"] == index) & (requests["finish_ns"] >= 0) & (requests["first_token_ns"] >= 0)
    began_ns, first_ns = requests["scheduled_ns"], requests["first_token_ns"]
    if "joined_ns" in requests:
        began_ns = np.where(requests["joined_ns"] >= 0, requests["joined_ns"], began_ns)
        first_ns = np.maximum(first_ns, began_ns)
    begun = np.searchsorted(start, began_ns[served], side="right") - 1
    # A token comes out when its iteration ends, so the slice is the last that began before.
    first = np.searchsorted(start, first_ns[served], side="left") - 1
    last = np.searchsorted(start, requests["finish_ns"][served], side="left") - 1
    whole = (begun >= 0) & (start[begun] >= begin_ns) & (start[last] + duration[last] <= end_ns) & (last > begun)
    places = (requests["request_id"][served], begun, first, last)
    for id_, *steps in zip(*(column[whole].tolist() for column in places), strict=True):
        common = {"pid": index, "tid": 0, "cat": "request", "name": "request", "id": id_}
        yield {"ph": "s", "ts": int(middle[steps[0]]) / 1e3, **common}
        if steps[0] < steps[1] < steps[2]:
            yield {"ph": "t", "ts": int(middle[steps[1]]) / 1e3, **common}
        yield {"ph": "f", "bp": "e", "ts": int(middle[steps[2]]) / 1e3, **common}


def write_timeline(
    columns: Columns, path: str | os.PathLike[str], *, begin_s: float = 0.0, end_s: float = float("inf"),
    pools: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Write the `events` as JSON to *path*, whole or not at all; returns how many.

    ValueError, naming the way out, beyond MOST_EVENTS: viewers do not open such files.
    """
    count = 0
    with open_whole(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in events(columns, begin_s=begin_s, end_s=end_s, pools=pools):
            count += 1
            if count > MOST_EVENTS:
                raise ValueError(
                    f"the timeline has more than {MOST_EVENTS:,} events, which no viewer opens; "
                    "give a shorter stretch with begin_s and end_s, or fewer requests"
                )
            file.write((",\n" if count > 1 else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return count
