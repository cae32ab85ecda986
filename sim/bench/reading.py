"""Result files of benchmark tools: which tool wrote one, by its content, and the measured runs in it.

Nothing of a file is executed: JSON, YAML without tags, CSV and text. A file that cannot be read is one sentence, and the others are
read all the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim.bench.fields import Unreadable
from sim.bench.formats import aiperf, guidellm, inference_perf, prometheus, sglang_bench, tables, vllm_bench, vllm_log
from sim.bench.measured import BenchRun
from sim.errors import ScenarioError
from sim.scenario.yaml import parse_yaml
from sim.text import shown

LARGEST_BYTES = 1 << 30
_LONGEST = 400
KNOWN = (
    "vllm bench serve, sglang.bench_serving, GuideLLM, AIPerf, genai-perf, inference-perf, metrics or logs of vLLM and metrics of "
    "SGLang, and CSV files of runs or of requests"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content of files: runs in their order, and a sentence for each file, or part of one, that is none."""

    runs: tuple[BenchRun, ...]
    problems: tuple[str, ...]


def read_files(paths: Iterable[str | os.PathLike[str]], *, before: str | os.PathLike[str] | None = None) -> Reading:
    """The measured runs in files, whatever tool wrote them.

    *before*: metrics of a server from before a run, which are taken off those of the files; `Unreadable` where it has none.
    """
    earlier = None
    if before is not None:
        try:
            earlier = _text_of(_bytes_of(Path(before)))
            if not prometheus.is_one(earlier):
                raise Unreadable("it has no metrics of a server; save what its /metrics answers")
        except Unreadable as error:
            raise Unreadable(f"{before}: {error}") from None
    runs: list[BenchRun] = []
    problems: list[str] = []
    paths = [Path(path) for path in paths]
    names = _short_names(paths)
    for path, name in zip(paths, names, strict=True):
        try:
            data = _bytes_of(path)
        except Unreadable as error:
            problems.append(f"{path}: {error}")
            continue
        found = read_bytes(data, name=name, file=str(path), before=earlier)
        runs += found.runs
        problems += found.problems
    return Reading(runs=tuple(runs), problems=tuple(problems))


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest of file name without its ending, file name, and path that tells each apart."""
    ways = [[path.stem for path in paths], [path.name for path in paths]]
    return [
        next((names[at] for names in ways if names.count(names[at]) == 1), str(path)) for at, path in enumerate(paths)
    ]


def _bytes_of(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise Unreadable("it is a folder; give the files in it")
        if path.stat().st_size > LARGEST_BYTES:
            raise Unreadable(f"it has more than {LARGEST_BYTES >> 20:,} MiB; cut it into parts")
        return path.read_bytes()
    except FileNotFoundError:
        raise Unreadable("there is no such file") from None
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None


def read_bytes(data: bytes, *, name: str, file: str, before: str | None = None) -> Reading:
    """The measured runs in the content of one file; *before* as for `read_files`, as text."""
    problems: list[str] = []
    try:
        runs = _runs_in(_text_of(data), name, file, problems, before)
    except Unreadable as error:
        runs = []
        problems.append(str(error))
    except (RecursionError, MemoryError):
        runs = []
        problems.append("it is nested or filled beyond what a result of a benchmark is")
    return Reading(runs=tuple(runs), problems=tuple(f"{file}: {_sentence(each)}" for each in problems))


def _sentence(text: str) -> str:
    """One line of a length that a person reads, whatever the file has put into it."""
    words = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 60]} ... {words[-50:]}"


def _text_of(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not text in UTF-8 (byte {error.start:,})") from None
    # A carriage return ends a line wherever it stands, as old spreadsheets write it.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise Unreadable("it is empty")
    if "\0" in text:
        raise Unreadable("it is not text: it holds zero bytes")
    return text


def _runs_in(text: str, name: str, file: str, problems: list[str], before: str | None) -> list[BenchRun]:
    first = text.lstrip()[0]
    if first in "{[":
        return _of_json(text, name, file, problems)
    if prometheus.is_one(text):
        return prometheus.read(text, name, file, before)
    if vllm_log.is_one(text):
        return vllm_log.read(text, name, file)
    if aiperf.is_csv(text):
        return aiperf.read_csv(text, name, file)
    if tables.is_runs(text):
        runs, rows = tables.read_runs(text, name, file)
        problems += rows
        return runs
    if tables.is_log(text):
        return tables.read_log(text, name, file)
    heads = tables.heads_of(text)
    if len(heads) > 2 and ":" not in heads[0]:
        raise Unreadable(
            f"it is a table, and its columns ({shown(', '.join(heads))}) are neither latencies of runs (ttft_mean_s, p99_tpot_ms) "
            "nor times of requests (arrival_s, first_token_s, end_s)"
        )
    return _of_document(_yaml(text), name, file)


def _of_json(text: str, name: str, file: str, problems: list[str]) -> list[BenchRun]:
    """A document, or documents one a line."""
    try:
        return _of_document(_json(text), name, file)
    except json.JSONDecodeError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        # A document over several lines begins with a brace alone; lines of their own are whole each.
        if len(lines) < 2 or not _is_whole(lines[0]):
            raise Unreadable(_broken(text, error)) from None
    documents: list[Any] = []
    for at, line in enumerate(lines):
        try:
            documents.append(_json(line))
        except json.JSONDecodeError as error:
            problems.append(f"line {at + 1} is left out: {_broken(line, error)}")
    if aiperf.is_lines(documents):
        return aiperf.read_lines(documents, name, file)
    runs: list[BenchRun] = []
    for at, document in enumerate(documents):
        try:
            runs += _of_document(document, f"{name}, {at + 1}", file)
        except Unreadable as error:
            problems.append(f"line {at + 1}: {error}")
    return runs


def _is_whole(line: str) -> bool:
    try:
        return isinstance(_json(line), dict)
    except json.JSONDecodeError:
        return False


def _broken(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg:
        return f"it is cut off: the JSON ends in line {error.lineno} before its last bracket"
    return f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"


def _json(text: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise Unreadable(f"the key {shown(twice)} is there twice, and which one counts is not said")
        return found

    try:
        return json.loads(text, object_pairs_hook=mapping)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # A number of thousands of digits.
        raise Unreadable(f"it holds a number that cannot be one: {error}") from None


def _yaml(text: str) -> Any:
    try:
        return parse_yaml(text, "it")
    except (ScenarioError, yaml.YAMLError, ValueError) as error:
        line = " ".join(str(error).split()).removeprefix("it, ").replace("not valid YAML: ", "")
        raise Unreadable(f"it is neither JSON, CSV, YAML ({line[:200]}) nor text that is known here") from None


def _of_document(document: Any, name: str, file: str) -> list[BenchRun]:
    """The runs of a document, by the first tool whose it is."""
    for is_one, read in (
        (guidellm.is_one, guidellm.read),
        (aiperf.is_aggregate, aiperf.read),
        (sglang_bench.is_one, sglang_bench.read),
        (vllm_bench.is_one, vllm_bench.read),
        (inference_perf.is_one, inference_perf.read),
        (inference_perf.is_requests, inference_perf.read_requests),
    ):
        if is_one(document):
            return read(document, name, file)
    if aiperf.is_lines([document]):
        return aiperf.read_lines([document], name, file)
    if (
        isinstance(document, list)
        and document
        and all(vllm_bench.is_one(one) or sglang_bench.is_one(one) for one in document)
    ):
        return [run for at, one in enumerate(document) for run in _of_document(one, f"{name}, {at + 1}", file)]
    if isinstance(document, dict):
        keys = ", ".join(map(str, list(document)[:6]))
        raise Unreadable(f"it is not a result that is known here (its keys: {shown(keys)}); read are {KNOWN}")
    raise Unreadable(f"it is not a result that is known here ({shown(document)}); read are {KNOWN}")
