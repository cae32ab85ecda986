"""Options of the servers' commands, as the releases list them, and a command's words read by such a list."""

from __future__ import annotations

import csv
import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import RooftraceError
from sim.text import nearest, shown

ENGINES = ("vllm", "sglang", "trtllm")
RELEASES: Mapping[str, str] = {"vllm": "0.32.0", "sglang": "0.5.23", "trtllm": "1.2"}
"""Whose lists of options are in `data/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command, under its first long name."""

    name: str
    takes: str
    """value, list, optional (a value that may be left out) or switch."""
    negated: bool
    """Whether --no-NAME is its opposite."""
    timing: bool
    """Whether it may change how long requests take, as an address or the level of logs cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that starts a server, its options by name: text, a list of texts, or True and False of a switch."""

    engine: str
    model: str | None
    options: Mapping[str, Any]
    aside: tuple[str, ...]
    """Words before the server's own, such as variables of the environment."""


@functools.lru_cache(maxsize=len(ENGINES))
def options_of(engine: str) -> Mapping[str, Option]:
    """Every option of an engine's command by each of its spellings, with underscores as the engines accept them too."""
    text = (Path(__file__).parent / "data" / f"{engine}.csv").read_text(encoding="utf-8")
    found: dict[str, Option] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        option = Option(
            name=row["option"].lstrip("-").replace("_", "-"),
            takes=row["takes"],
            negated=row["negated"] == "yes",
            timing=row["timing"] != "no",
        )
        for spelling in (row["option"], *row["also"].split()):
            found[_plain(spelling)] = option
    return found


def read_command(text: str) -> Command:
    """The command written in *text*; RooftraceError where it starts no known server, or has options that are not its own."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RooftraceError(
            f"the command is not complete: {str(error).lower()}; give it in one pair of quotes"
        ) from None
    engine, begin, rest = _server(words)
    return _read(engine, tuple(words[:begin]), rest)


def _server(words: Sequence[str]) -> tuple[str, int, Sequence[str]]:
    """The engine, how many words stand before its own, and the words after its name."""
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "vllm" and words[at + 1 : at + 2] == ["serve"]:
            return "vllm", at, words[at + 2 :]
        if name == "trtllm-serve":
            rest = words[at + 1 :]
            return "trtllm", at, rest[1:] if rest[:1] == ["serve"] else rest
        if name == "sglang" and words[at + 1 : at + 2] == ["serve"]:
            return "sglang", at, words[at + 2 :]
        for module, engine in _MODULES.items():
            if word == module or word.endswith(f"/{module.replace('.', '/')}.py"):
                start = at - 2 if at >= 2 and words[at - 1] == "-m" else at
                return engine, start, words[at + 1 :]
        if name.startswith("vllm-openai"):  # the image's entry point is the server
            return "vllm", at + 1, words[at + 1 :]
    raise RooftraceError(
        "the command starts no server that is known: vllm serve MODEL, python -m sglang.launch_server --model-path MODEL, or "
        "trtllm-serve MODEL"
    )


_MODULES: Mapping[str, str] = {"vllm.entrypoints.openai.api_server": "vllm", "sglang.launch_server": "sglang"}


def _read(engine: str, aside: tuple[str, ...], words: Sequence[str]) -> Command:
    table = options_of(engine)
    words = [each for word in words for each in _levels(word)] if engine == "vllm" else words
    model: str | None = None
    options: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_option(word):
            if model is not None:
                raise RooftraceError(
                    f"{word!r} belongs to no option of {engine}, and the model is {model!r}; put it in quotes, or "
                    "give it after its option"
                )
            model = word
            continue
        spelling, equals, inline = word.partition("=")
        name, _, within = spelling.partition(".") if spelling.startswith("--") else (spelling, "", "")
        option, value = _option(engine, table, name)
        if option.takes != "switch":
            values = [inline] if equals else []
            wanted = {"value": 1, "optional": 1, "list": len(words)}[option.takes]
            while len(values) < wanted and at < len(words) and not _is_option(words[at]):
                if option.takes == "optional" and not equals and model is None and at == len(words) - 1:
                    break
                values.append(words[at])
                at += 1
            if not values and option.takes != "optional":
                raise RooftraceError(f"{spelling} of {engine} needs a value")
            value = values if option.takes == "list" else (values or [""])[0]
        elif equals:
            value = value == (inline.lower() not in ("false", "0", "no"))
        if within:
            _put_within(options, option.name, within, value)
        else:
            options[option.name] = value
    return Command(engine=engine, model=model, options=options, aside=aside)


_ABBREVIATED = ("vllm", "sglang")
"""Whose parser, Python's argparse, takes the beginning of an option's name for it where no other begins so."""


def _levels(word: str) -> list[str]:
    """vLLM's -O3, -O=3 and -O 3 as the option that they stand for (vllm/utils/argparse_utils.py)."""
    if not word.startswith("-O"):
        return [word]
    level = word[2:].removeprefix("=")
    return ["--optimization-level", level] if level else ["--optimization-level"]


def _is_option(word: str) -> bool:
    """Whether *word* is an option rather than a value; negative numbers are values."""
    return word.startswith("-") and word != "-" and not word[1:2].isdigit() and word[1:2] != "."


def _option(engine: str, table: Mapping[str, Option], spelling: str) -> tuple[Option, bool]:
    """The option of a spelling, and what a switch is then: --no-NAME is False."""
    plain = _plain(spelling)
    if plain in table:
        return table[plain], True
    opposite = f"--{plain.removeprefix('--no-')}"
    if plain.startswith("--no-") and opposite in table and table[opposite].negated:
        return table[opposite], False
    if engine in _ABBREVIATED and plain.startswith("--"):
        meant = {option.name: option for name, option in table.items() if name.startswith(plain)}
        if len(meant) == 1:
            return next(iter(meant.values())), True
        if meant:
            raise RooftraceError(
                f"{spelling} of {engine} may be {', '.join(f'--{name}' for name in meant)}; write it out"
            )
    near = nearest(plain, sorted(table))
    way_out = f"did you mean {near}?" if near else f"the release's --help lists its {len(set(table.values()))} options"
    raise RooftraceError(f"{spelling} is no option of {engine} {RELEASES[engine]}; {way_out}")


def _plain(spelling: str) -> str:
    return spelling.replace("_", "-") if spelling.startswith("--") else spelling


def _put_within(options: dict[str, Any], name: str, path: str, value: Any) -> None:
    """--speculative-config.method mtp, which is a key of the object that the option takes."""
    whole = options.setdefault(name, {})
    if isinstance(whole, str):
        whole = options[name] = json_object(whole, f"--{name}")
    *parts, last = path.split(".")
    for part in parts:
        whole = whole.setdefault(part, {})
    whole[last] = value


def json_object(value: Any, option: str) -> dict[str, Any]:
    """The object that an option's value holds; RooftraceError where it is none."""
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RooftraceError(f"{option}: not JSON ({error}); got {shown(value)}") from None
    if not isinstance(found, dict):
        raise RooftraceError(f"{option} takes a JSON object; got {value!r}")
    return found
