"""Times at which clients get tokens that the server sends in groups. Nothing that the engine does depends on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.engine.record.spill import in_blocks
from sim.engine.time.clock import TICK_BITS

IntArray = NDArray[np.int64]

_EVENTS_AT_ONCE = 1 << 20
_SPANS_AT_ONCE = 1 << 16
_TIMES: tuple[str, ...] = ("n", "start_ns", "start_frac", "first_ticks", "growth_ticks")


@dataclass(frozen=True)
class Stream:
    """The tokens that reach the client together. The first is sent at once and the last when it is there, whatever the rule.

    `tokens`: whenever *interval* or more have not been sent (vLLM 0.32.0, vllm/v1/engine/output_processor.py,
    `RequestState.make_request_output`; SGLang 0.5.23, srt/managers/scheduler_components/output_streamer.py). `iterations`: in every
    *interval*-th iteration that emits for the request, counted from its first token (TensorRT-LLM 1.2,
    tensorrt_llm/_torch/pyexecutor/py_executor.py, `PyExecutor._handle_responses`). With one token an iteration and groups of 10
    that is after 1, 11, 21, ... tokens and after 1, 10, 20, ...
    """

    interval: int = 1
    rule: Literal["tokens", "iterations"] = "tokens"

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"a stream's interval is at least 1; got {self.interval}")


class Record(Protocol):
    """A replica's records; see `sim.engine.record.columns.ReplicaColumns`."""

    @property
    def spans(self) -> NDArray[Any]: ...

    @property
    def joins(self) -> NDArray[Any]: ...

    @property
    def emitted(self) -> Mapping[int, IntArray] | None: ...


class _Source(NamedTuple):
    """A micro-batch: its rounds in time, and what each stay of a sequence in it emitted."""

    rounds: IntArray
    """Decode rounds before each of its spans, and after the last."""
    spans: NDArray[Any]
    emitted: IntArray | None
    """Tokens of every round of every stay, stay after stay; None: one each."""


class _Events(NamedTuple):
    """Tokens that a request has got, and when."""

    request: IntArray
    token: IntArray
    """Its number of tokens then."""
    time_ns: IntArray


def streamed_gaps(
    replicas: Sequence[Record], requests: Mapping[str, NDArray[Any]], stream: Stream
) -> Iterator[tuple[IntArray, IntArray]]:
    """Gaps in ns between what reaches each client, first token to last, and weights of 1, in pieces. Requests that the run's end
    cut off have the gaps until then; tokens that a retry has discarded are no part of an answer."""
    sources, stays = _stays(replicas)
    first_ns = requests["first_token_ns"][stays["request"]]
    kept = (first_ns >= 0) & (stays["token_ns"] >= first_ns)
    stays = {name: column[kept] for name, column in stays.items()}
    plain = all(source.emitted is None for source in sources)
    order = np.argsort(stays["request"], kind="stable")
    stays = {name: column[order] for name, column in stays.items()}
    n_events = np.bincount(stays["request"], weights=stays["rounds"] + 1, minlength=len(requests["status"]))
    turn = np.cumsum(n_events.astype(np.int64) + 2) // _EVENTS_AT_ONCE
    edges = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(turn)]
    for first, last in itertools.pairwise(edges):
        low, high = np.searchsorted(stays["request"], (first, last))
        mine = {name: column[low:high] for name, column in stays.items()}
        events = _events(sources, mine, requests, first, last, stream if plain else Stream())
        sent = _sent(events, requests, stream, plain)
        request, time_ns = events.request[sent], events.time_ns[sent]
        gaps = np.diff(time_ns)[request[1:] == request[:-1]]
        yield gaps, np.ones(len(gaps), np.int64)


def _stays(replicas: Sequence[Record]) -> tuple[list[_Source], dict[str, IntArray]]:
    """The micro-batches, and every stay of a sequence in one: request, source, since, rounds, cached, token_ns, and where its
    rounds begin in what the micro-batch emitted."""
    sources: list[_Source] = []
    parts: list[dict[str, IntArray]] = []
    for replica in replicas:
        joins, spans = replica.joins, replica.spans
        for batch in np.unique(joins["lane"]).tolist():
            stays = joins[joins["lane"] == batch]
            rounds = (stays["until"] - stays["since"]).astype(np.int64)
            parts.append(
                {
                    "source": np.full(len(stays), len(sources)),
                    "rounds": rounds,
                    "begin": np.cumsum(rounds) - rounds,
                    **{name: stays[name].astype(np.int64) for name in ("request", "since", "cached", "token_ns")},
                }
            )
            mine = _rounds_of(spans, batch)
            before = np.concatenate(([0], np.cumsum(mine["n"], dtype=np.int64)))
            emitted = None if replica.emitted is None else replica.emitted[batch].astype(np.int64)
            sources.append(_Source(before, mine, emitted))
    names = ("source", "rounds", "begin", "request", "since", "cached", "token_ns")
    none = np.empty(0, np.int64)
    return sources, {name: np.concatenate([none, *(part[name] for part in parts)]) for name in names}


def _rounds_of(spans: NDArray[Any], batch: int) -> NDArray[Any]:
    """The fields that `_round_ends` needs of a micro-batch's spans with decodes."""
    kept = np.dtype([(name, spans.dtype[name]) for name in _TIMES])
    parts = [np.empty(0, kept)]
    for block in in_blocks(spans, _SPANS_AT_ONCE):
        mine = (block["lane"] == batch) & (block["decode_seqs"] > block["in_vain"])
        parts.append(block[list(_TIMES)][mine].astype(kept))
    return np.concatenate(parts)


def _events(
    sources: Sequence[_Source],
    stays: Mapping[str, IntArray],
    requests: Mapping[str, NDArray[Any]],
    first: int,
    last: int,
    stream: Stream,
) -> _Events:
    """Tokens of requests *first* to *last*, in order of request and token. With one token a round only those that *stream* sends,
    or may."""
    # KV exists for all tokens but the latest.
    had = stays["cached"] - np.maximum(requests["prompt_tokens"][stays["request"]], 1) + 1
    n = stream.interval
    # Round k, from 1, brings token had + k: the first that is sent, and how many more.
    skip = (-had if stream.rule == "iterations" else 1 - had) % n
    skip = np.where(skip == 0, n, skip)
    stay, step = expand(np.maximum(0, (stays["rounds"] - skip) // n + 1))
    k = skip[stay] + step * n
    token, source, round_ = had[stay] + k, stays["source"][stay], stays["since"][stay] + k - 1
    time_ns = np.empty(len(k), np.int64)
    for i, batch in enumerate(sources):
        of = source == i
        if not of.any():
            continue
        time_ns[of] = _round_ends(batch, round_[of])
        if batch.emitted is not None:
            # All rounds are here: those of a stay follow one another.
            total = np.concatenate(([0], np.cumsum(batch.emitted)))
            begin = stays["begin"][stay[of]]
            token[of] = had[stay[of]] + total[begin + k[of]] - total[begin]
    ids = np.arange(first, last)
    got_first = ids[requests["first_token_ns"][first:last] >= 0]
    ended = ids[_ended(requests, ids)]
    request = np.concatenate((stays["request"][stay], stays["request"], got_first, ended))
    token = np.concatenate((token, had, np.ones(len(got_first), np.int64), requests["output_tokens"][ended]))
    time_ns = np.concatenate(
        (time_ns, stays["token_ns"], requests["first_token_ns"][got_first], requests["finish_ns"][ended])
    )
    order = np.lexsort((token, request))
    request, token, time_ns = request[order], token[order], time_ns[order]
    # A sequence that joins again without a new token, its first token and its last are there twice.
    new = np.ones(len(order), bool)
    new[1:] = (request[1:] != request[:-1]) | (token[1:] != token[:-1])
    return _Events(request[new], token[new], time_ns[new])


def _ended(requests: Mapping[str, NDArray[Any]], ids: IntArray) -> NDArray[np.bool_]:
    """Whether each of *ids* has got a last token."""
    return (requests["status"][ids] == 0) & (requests["first_token_ns"][ids] >= 0)


def _sent(events: _Events, requests: Mapping[str, NDArray[Any]], stream: Stream, plain: bool) -> NDArray[np.bool_]:
    """Whether each of *events* reaches the client."""
    request, token, _ = events
    n = stream.interval
    at = np.arange(len(request))
    begins = np.ones(len(request), bool)
    begins[1:] = request[1:] != request[:-1]
    sent = begins | ((token == requests["output_tokens"][request]) & _ended(requests, request))
    if plain:
        return sent | ((token if stream.rule == "iterations" else token - 1) % n == 0)
    heads = np.flatnonzero(begins)
    of = np.cumsum(begins) - 1
    if stream.rule == "iterations":
        return sent | ((at - heads[of] + 1) % n == 0)
    # Group after group, all requests at once: the first event that has n more tokens than what was sent last.
    stride = int(token.max(initial=0)) + n + 1
    keys = of * stride + token
    ends = np.append(heads[1:], len(request))
    latest, end = heads, ends
    while len(latest):
        latest = np.searchsorted(keys, keys[latest] + n)
        within = latest < end
        latest, end = latest[within], end[within]
        sent[latest] = True
    return sent


def _round_ends(source: _Source, rounds: IntArray) -> IntArray:
    """End times of rounds of a micro-batch, counted from 0 (ns)."""
    row = np.searchsorted(source.rounds, rounds, side="right") - 1
    spans, done = source.spans[row], rounds - source.rounds[row] + 1
    elapsed = done * spans["first_ticks"] + spans["growth_ticks"] * (done * (done - 1) // 2)
    return spans["start_ns"] + ((spans["start_frac"] + elapsed) >> TICK_BITS)


def expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Row index and position within the row for counts[i] copies of each row i."""
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - starts[row]
