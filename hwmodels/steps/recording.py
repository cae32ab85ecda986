"""Steps of an engine from the gaps between tokens that vllm-vcr recorded, request by request."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels.steps.rows import StepRows
from hwmodels.steps.surface import Points, Surface
from hwmodels.steps.table import keys_of_prompts

_META = (
    *("model", "gpu", "tp", "max_num_seqs", "source", "block_size", "config_hash", "vllm_version"),
    *("pp", "dp", "dtype", "quantization", "kv_cache_dtype", "max_num_batched_tokens"),
)
_KEYS = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "itl_ms", "itl_summary", "itl_tokens", "itl_ctx"),
    *("arrival_ms", "concurrency", "block_hashes", "mm_hashes", "output_token_ids", "finish_reason"),
)
_PARTS = 4
"""Contexts within a fourth of an octave of each other are one point: a recording has no two alike."""


@dataclass(frozen=True)
class _Request:
    """A request's first token and gaps in milliseconds, and by gap what ran in the step that closed it."""

    prompt: int
    cached: int
    ttft_ms: float
    alone: bool
    begin_ms: float | None
    gaps_ms: tuple[float, ...]
    running: tuple[int, ...]
    prefilled: tuple[int, ...]

    def token_ms(self) -> list[float]:
        """When each token came, from the recording's start; from its own arrival where that is not known."""
        begin = (self.begin_ms or 0.0) + self.ttft_ms
        return [begin, *(begin + np.cumsum(self.gaps_ms)).tolist()]


class _Gap(NamedTuple):
    """A step: running sequences, the mean keys of each, the prompt tokens whose prefill ended in it, and its time."""

    running: int
    keys: float
    prefilled: int
    seconds: float


def recorded_rows(file: Path) -> StepRows:
    """The steps of a recording of vllm-vcr (JSONL, gzip where it ends in .gz).

    A gap with no prompt in it is a decode step of as many sequences as ran, at the mean of the contexts that the requests had then.
    The first token of a request that was alone is a prompt step; a gap in which prompts ended is one of those tokens, less what its
    decodes take beyond the least decode step. Steps with speculation are left out.
    """
    meta, lines = _read(file)
    dropped: dict[str, int] = {}
    requests = [each for line in lines if (each := _request(line, dropped, file)) is not None]
    gaps = list(_gaps(requests))
    decodes = _binned([(gap.running, gap.keys, gap.seconds) for gap in gaps if not gap.prefilled])
    if len(decodes.seconds) < 2:
        raise ValueError(
            f"{file} has {len(decodes.seconds)} different decode steps without prompts; two or more are needed"
        )
    surface = Surface(decodes)
    rows = [
        (each.prompt - each.cached, keys_of_prompts(each.prompt - each.cached, each.cached), each.ttft_ms * 1e-3)
        for each in requests
        if each.alone
    ]
    for gap in gaps:
        if gap.prefilled:
            own = gap.seconds - (surface.second(gap.running, gap.keys) - surface.least_s)
            if own > 0:
                rows.append((gap.prefilled, keys_of_prompts(gap.prefilled, 0), own))
            else:
                dropped["gaps with prompts that took no longer than their decodes"] = (
                    dropped.get("gaps with prompts that took no longer than their decodes", 0) + 1
                )
    says = {"model": meta.get("model"), "gpu": meta.get("gpu"), "tp": meta.get("tp")}
    says["backend_version"] = meta.get("vllm_version")
    notes = [f"{file.name}: {n} {what} are left out." for what, n in dropped.items()]
    notes.append(
        f"{file.name} is a recording: contexts are those of the requests that completed, and prompts whose prefill was cut into "
        "several steps count as of one."
    )
    return StepRows(
        kind="recording",
        prompts=_binned(rows),
        decodes=decodes,
        says={name: str(value) for name, value in says.items() if value is not None},
        notes=tuple(notes),
    )


def _read(file: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    opener = gzip.open if file.suffix == ".gz" else open
    meta: Mapping[str, Any] = {}
    lines: list[Mapping[str, Any]] = []
    try:
        with opener(file, "rt", encoding="utf-8") as text:
            for at, line in enumerate(text, 1):
                if not line.strip():
                    continue
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError(f"{file}: line {at} is no JSON object")
                if "scheduler" in found:
                    raise ValueError(
                        f"{file} has the statistics of steps, which say nothing of their times; give the recording of requests"
                    )
                if "meta" in found:
                    meta = found["meta"]
                    _check_keys(meta, _META, f"{file}: line {at}: meta")
                    continue
                _check_keys(found, _KEYS, f"{file}: line {at}")
                lines.append(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSONL: {error}") from None
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return meta, lines


def _check_keys(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    strange = [key for key in found if key not in known]
    if strange:
        raise ValueError(f"{where} has a key {strange[0]}, which is not read; leave it out where it changes no time")


def _request(line: Mapping[str, Any], dropped: dict[str, int], file: Path) -> _Request | None:
    """The request of a line; None, and a count in *dropped*, where it says nothing of single steps."""

    def drop(what: str) -> None:
        dropped[what] = dropped.get(what, 0) + 1

    if any(tokens > 1 for tokens in line.get("itl_tokens") or ()):
        drop("requests with speculation (several tokens a step)")
        return None
    try:
        prompt, cached, ttft = int(line["prompt_tokens"]), int(line.get("cached_tokens") or 0), float(line["ttft_ms"])
        gaps = tuple(float(each) for each in line.get("itl_ms") or ())
        context = line.get("itl_ctx") or {}
        running, prefilled = (
            tuple(int(each) for each in context.get(key) or ()) for key in ("num_running", "prefill_tokens")
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file}: a request has prompt_tokens, ttft_ms, itl_ms and itl_ctx as numbers; {error!r}"
        ) from None
    if not (cached < prompt and ttft > 0 and all(gap > 0 for gap in gaps)):
        drop("requests with times of 0, or with no prompt token to compute")
        return None
    if gaps and not len(gaps) == len(running) == len(prefilled):
        drop("requests whose gaps do not say what ran in them (itl_ctx)")
        gaps, running, prefilled = (), (), ()
    if not gaps and line.get("itl_summary"):
        drop("requests with a mean gap alone (itl_summary)")
    arrival = line.get("arrival_ms")
    begin = None if arrival is None else float(arrival)
    return _Request(prompt, cached, ttft, line.get("concurrency") == 1, begin, gaps, running, prefilled)


def _gaps(requests: Sequence[_Request]) -> Iterator[_Gap]:
    """Every gap as a step, with the mean context of the requests that were decoding in it; of those without an arrival, its own."""
    placed = [(each, each.token_ms()) for each in requests if each.begin_ms is not None]
    starts = np.array([times[0] for _, times in placed])
    ends = np.array([times[-1] for _, times in placed])
    for each in requests:
        times = each.token_ms()
        for at, (gap, running, prefilled) in enumerate(zip(each.gaps_ms, each.running, each.prefilled, strict=True)):
            closed, own = times[at + 1], each.prompt + at + 1
            contexts = [own]
            if each.begin_ms is not None:
                middle = closed - gap / 2
                for i in np.flatnonzero((starts <= middle) & (ends >= middle)).tolist():
                    other, of_other = placed[i]
                    if other is not each:
                        contexts.append(other.prompt + int(np.searchsorted(of_other, middle)))
            yield _Gap(max(running, 1), float(np.mean(contexts)), prefilled, gap * 1e-3)


def _binned(steps: Sequence[tuple[float, float, float]]) -> Points:
    """The steps of equal rows and nearly equal keys together, at the median of each."""
    bins: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for rows, keys, seconds in steps:
        bins.setdefault((rows, round(_PARTS * float(np.log2(keys)))), []).append((keys, seconds))
    points = [
        (rows, float(2.0 ** (part / _PARTS)), float(np.median([seconds for _, seconds in each])))
        for (rows, part), each in sorted(bins.items())
    ]
    return Points(*np.array(points, np.float64).reshape(-1, 3).T)
