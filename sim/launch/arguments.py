"""Options of the servers' commands, as the releases list them, and a command's words read by such a list."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.overheads import at_or_before, is_before
from hwmodels.stacks import stacks
from hwmodels.tables import packaged_rows
from sim.errors import RooftraceError
from sim.launch.engines import FOLDER, launches
from sim.scenario.yaml import parse_yaml
from sim.text import nearest, shown

ENGINES = tuple(launches())


def release_of(engine: str) -> str:
    """The release whose options are read."""
    return stacks()[engine].release


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
    strange: tuple[str, ...] = ()
    """Sentences about options that the release does not have."""
    others: tuple[str, ...] = ()
    """Options that its release has, and the one that is modelled has not."""


class _Gone(NamedTuple):
    """An option that older releases had."""

    takes: str
    gone: str
    now: str
    did: str

    def said(self, spelling: str, engine: str, release: str) -> str:
        when = f" ({self.gone})" if self.gone else ""
        read = f"; it is read as --{self.now}" if self.now else ""
        return f"{spelling} was removed from {engine} before {release}{when}; it {self.did}{read}"


@functools.lru_cache(maxsize=len(ENGINES))
def options_of(engine: str) -> Mapping[str, Option]:
    """Every option of an engine's command by each of its spellings, with underscores as the engines accept them too."""
    found: dict[str, Option] = {}
    for row in packaged_rows(FOLDER / engine / "options.csv"):
        option = Option(
            name=row["option"].lstrip("-").replace("_", "-"),
            takes=row["takes"],
            negated=row["negated"] == "yes",
            timing=row["timing"] != "no",
        )
        for spelling in (row["option"], *row["also"].split()):
            found[_plain(spelling)] = option
    return found


@functools.lru_cache(maxsize=len(ENGINES))
def _gone_from(engine: str) -> Mapping[str, _Gone]:
    """Options that older releases had, by their names."""
    file = FOLDER / engine / "removed.csv"
    rows = packaged_rows(file) if file.exists() else []
    return {row["option"]: _Gone(row["takes"], row["gone"], row["now"], row["did"]) for row in rows}


@functools.lru_cache(maxsize=len(ENGINES))
def _listed(engine: str) -> tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """The releases whose options are listed, the newest first; and for options that some of them lack, those that have it."""
    file = FOLDER / engine / "releases.csv"
    if not file.exists():
        return (release_of(engine),), {}
    rows = packaged_rows(file)
    releases = tuple(rows[0])[2:]
    return releases, {row["option"]: tuple(each for each in releases if row[each]) for row in rows}


def release_note(engine: str, release: str) -> str:
    """A sentence about what a command is read and simulated as: *release*, or the nearest whose options are listed."""
    releases, _ = _listed(engine)
    beyond = "newer" if is_before(releases[0], release) else "older" if is_before(release, releases[-1]) else None
    if beyond is None:
        return f"options, overheads and memory are those of {engine} {release}"
    end = releases[0] if beyond == "newer" else releases[-1]
    return (
        f"{engine} {release} is {beyond} than the {beyond[:-2]}est release whose options are listed: they are those of {end}, and "
        "overheads and memory those of the nearest releases that are known"
    )


def _has(engine: str, release: str, option: str) -> bool:
    """Whether *release* has an option that some listed release has: a release between two that are listed has what either has."""
    releases, having = _listed(engine)
    own = at_or_before(release, releases)
    near = {own}
    if own != release and is_before(own, release):
        near |= set(releases[max(0, releases.index(own) - 1) : releases.index(own)])
    return option not in having or not near.isdisjoint(having[option])


def read_words(words: Sequence[str], *, strict: bool = False, release: str | None = None) -> Command:
    """The command of these words; RooftraceError where it starts no known server. Options that the *release* (None: the one that is
    modelled) does not have are named in its sentences, or, *strict*, refused."""
    found = server_in(words)
    if found is None:
        raise RooftraceError(NO_SERVER)
    engine, begin, rest = found
    found = _read(engine, tuple(words[:begin]), rest, release or release_of(engine))
    if strict and found.strange:
        raise RooftraceError(found.strange[0])
    return found


NO_SERVER = "the command starts no server that is known: " + " or ".join(each.example for each in launches().values())


def server_in(words: Sequence[str]) -> tuple[str, int, Sequence[str]] | None:
    """The engine, how many words stand before its own, and the words after its name; None where they start no server."""
    for at, word in enumerate(words):
        for engine, launch in launches().items():
            for program in launch.programs:
                if (word.rpartition("/")[2], *words[at + 1 : at + len(program)]) == program:
                    return engine, at, words[at + len(program) :]
            for module in launch.modules:
                if word == module or word.endswith(f"/{module.replace('.', '/')}.py"):
                    start = at - 2 if at >= 2 and words[at - 1] == "-m" else at
                    return engine, start, words[at + 1 :]
    return None


def _read(engine: str, aside: tuple[str, ...], words: Sequence[str], release: str) -> Command:
    reading = _Words(engine, release, [each for word in words for each in launches()[engine].respelt(word)])
    while reading.words:
        reading.take()
    return Command(
        engine=engine, model=reading.model, options=reading.options, aside=aside,
        strange=tuple(reading.strange), others=tuple(reading.others),
    )  # fmt: skip


class _Words:
    """The words of a server that have yet to be read, and what has been read of them."""

    def __init__(self, engine: str, release: str, words: list[str]) -> None:
        self._engine, self._release = engine, release
        self._table, self._gone_from = options_of(engine), _gone_from(engine)
        self.words = words
        self.model: str | None = None
        self.options: dict[str, Any] = {}
        self.strange: list[str] = []
        self.others: list[str] = []

    def take(self) -> None:
        """Reads the next word, and the values that follow it where it is an option."""
        word = self.words.pop(0)
        if not _is_option(word):
            self._take_model(word)
            return
        spelling, _, _ = word.partition("=")
        name, _, within = spelling.partition(".") if spelling.startswith("--") else (spelling, "", "")
        gone = self._gone_from.get(_plain(name))
        known = None
        if not gone or gone.now:
            known = _option(self._engine, self._table, f"--{gone.now}" if gone else name)
        if known is None:
            self._take_unmodelled(word, name, gone)
            return
        option, switched = known
        if (lacking := _lacking(self._engine, self._release, name, f"--{option.name}", gone)) is not None:
            self.strange.append(lacking)
        value = self._value(word, option, switched)
        if within:
            _put_within(self.options, option.name, within, value)
        else:
            self.options[option.name] = value

    def _take_model(self, word: str) -> None:
        if self.model is not None:
            raise RooftraceError(
                f"{word!r} belongs to no option of {self._engine}, and the model is {self.model!r}; put it in quotes, or "
                "give it after its option"
            )
        self.model = word

    def _take_unmodelled(self, word: str, name: str, gone: _Gone | None) -> None:
        end = 0 if "=" in word else _values_end(self.words, self.model, gone)
        written = " ".join([word, *self._next(end)])
        why = _unmodelled(self._engine, self._release, written, name, gone)
        if why is not None:
            self.strange.append(why)
        else:
            did = f", which {gone.did}" if gone else ""
            self.others.append(f"{written} of {self._engine} {self._release}{did}")

    def _value(self, word: str, option: Option, switched: bool) -> Any:
        """The value of an *option*: text, a list of texts, or True and False of a switch, which its spelling has *switched*."""
        spelling, equals, inline = word.partition("=")
        if option.takes == "switch":
            return switched == (inline.lower() not in ("false", "0", "no")) if equals else switched
        values = [inline] if equals else []
        values += self._next(_end_of(option, self.words, values, self.model))
        if not values and option.takes != "optional":
            raise RooftraceError(f"{spelling} of {self._engine} needs a value")
        return values if option.takes == "list" else (values or [""])[0]

    def _next(self, count: int) -> list[str]:
        """Takes the next *count* words."""
        taken, self.words = self.words[:count], self.words[count:]
        return taken


def _lacking(engine: str, release: str, spelling: str, option: str, gone: _Gone | None) -> str | None:
    """Why *release* does not take a *spelling* that is read as *option*; None where it does."""
    releases, having = _listed(engine)
    if gone is not None:
        plain = _plain(spelling)
        return None if plain in having and _has(engine, release, plain) else gone.said(spelling, engine, release)
    if _has(engine, release, option):
        return None
    return f"{spelling} is no option of {engine} {release}; {_those(having[option], releases)} it, and it is read as theirs"


def _unmodelled(engine: str, release: str, written: str, spelling: str, gone: _Gone | None) -> str | None:
    """Why *release* does not take an option that the one that is modelled does not have; None where it does."""
    releases, having = _listed(engine)
    plain = _plain(spelling)
    opposite = f"--{plain.removeprefix('--no-')}"
    name = plain if plain in having else opposite
    if name in having and _has(engine, release, name):
        return None
    if gone is not None:
        return gone.said(spelling, engine, release)
    if name in having:
        return f"{written} is no option of {engine} {release}; {_those(having[name], releases)} it"
    table = options_of(engine)
    whose = (
        f"{engine} {release}"
        if len(releases) == 1
        else f"{engine} {release}, nor of any from {releases[-1]} to {releases[0]}"
    )
    near = nearest(plain, sorted(table))
    way_out = f"did you mean {near}?" if near else f"the release's --help lists its {len(set(table.values()))} options"
    return f"{written} is no option of {whose}; {way_out}"


def _those(having: Sequence[str], releases: Sequence[str]) -> str:
    """The releases that have something, in words: 0.28.0 to 0.32.0 have."""
    if having[-1] == having[0]:
        return f"{having[0]} has"
    return f"those from {having[-1]} have" if having[0] == releases[0] else f"{having[-1]} to {having[0]} have"


def _end_of(option: Option, words: Sequence[str], given: Sequence[str], model: str | None) -> int:
    """The number of *words* that are values of an option, some of which may be *given* within its own word."""
    wanted = {"value": 1, "optional": 1, "list": len(words)}[option.takes] - len(given)
    end = 0
    while end < len(words) and end < wanted and not _is_option(words[end]):
        if option.takes == "optional" and model is None and end == len(words) - 1:
            break
        end += 1
    return end


def _values_end(words: Sequence[str], model: str | None, gone: _Gone | None) -> int:
    """The number of *words* that are values of an option that the release does not have: the last of a command may be its model."""
    most = {"switch": 0, "value": 1}.get(gone.takes, len(words)) if gone else len(words)
    end = 0
    while end < len(words) and end < most and not _is_option(words[end]):
        if gone is None and model is None and end == len(words) - 1:
            break
        end += 1
    return end


def _is_option(word: str) -> bool:
    """Whether *word* is an option rather than a value; negative numbers are values."""
    return word.startswith("-") and word != "-" and not word[1:2].isdigit() and word[1:2] != "."


def _option(engine: str, table: Mapping[str, Option], spelling: str) -> tuple[Option, bool] | None:
    """The option of a spelling, and what a switch is then: --no-NAME is False. None: the release has none of that name."""
    plain = _plain(spelling)
    if plain in table:
        return table[plain], True
    opposite = f"--{plain.removeprefix('--no-')}"
    if plain.startswith("--no-") and opposite in table and table[opposite].negated:
        return table[opposite], False
    if launches()[engine].abbreviates and plain.startswith("--"):
        meant = {option.name: option for name, option in table.items() if name.startswith(plain)}
        if len(meant) == 1:
            return next(iter(meant.values())), True
        if meant:
            raise RooftraceError(
                f"{spelling} of {engine} may be {', '.join(f'--{name}' for name in meant)}; write it out"
            )
    return None


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


def yaml_file(path: str, name: str) -> Any:
    """The content of a file that a command names; RooftraceError, which calls it *name*, where it cannot be read."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise RooftraceError(f"{name} {path} cannot be read: {error}") from None
