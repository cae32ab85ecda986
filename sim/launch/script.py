"""Shell text as the commands in it: which of them start servers, and what stands around these."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sim.errors import RooftraceError
from sim.launch.arguments import server_in
from sim.launch.engines import launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A command that starts a server, and what is known of it beside: name and role of its pool, how many there are, ..."""

    words: tuple[str, ...]
    name: str | None = None
    named: bool = False
    """Whether the name is that of a pool, as `export` writes it; otherwise a pool with a role goes by this."""
    role: str | None = None
    replicas: int = 1
    router: str | None = None
    hardware: str | None = None
    autoscale: Mapping[str, Any] | None = None
    release: str | None = None
    """The engine's release, by the tag of its image; None where there is none."""


@dataclass(slots=True)
class Script:
    """Servers in the order in which they are started, and sentences about what is not read."""

    servers: list[Server] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def not_read(self, what: str) -> None:
        self.notes.append(f"not read: {textwrap.shorten(what, 160, placeholder=' ...')}")

    def add(self, other: Script, change: Callable[[Server], Server] = lambda server: server) -> None:
        self.servers += map(change, other.servers)
        self.notes += other.notes


_COMMENT = re.compile(
    r"# (?:pool (?P<name>[\w-]+), .*: )?start this (?P<times>\d+) times(?:, behind a router \((?P<router>[\w:.]+)\))?$"
)
"""As `export` writes it."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")
_ASSIGNED = re.compile(r"\w+=")
_SECRET = re.compile(r"token|key|secret|passw", re.IGNORECASE)


def read_script(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """The servers that the commands in *text* start, *variables* being set; RooftraceError where a quote does not end."""
    found, known = Script(), dict(variables or {})
    said: dict[str, Any] = {}
    own = [f"{name}={value}" for name, value in known.items()]
    for piece in _joined(_pieces(text)):
        if match := _COMMENT.match(piece):
            said = {"name": match["name"], "named": True, "replicas": int(match["times"]), "router": match["router"]}
            continue
        if piece.startswith("#"):
            continue
        words = split(piece)
        words, aside = _without_redirections(words)
        for word in aside:
            found.not_read(word)
        names = words[1:] if words[:1] == ["export"] else words
        if all(_ASSIGNED.match(word) for word in names):
            known |= dict(word.split("=", 1) for word in names)
            own += names
            continue
        inner = read_words([expanded(word, known) for word in words], own)
        found.add(inner, lambda server, said=said: replace(server, **said) if said else server)
        if inner.servers:
            said, own = {}, []
    return found


def read_words(words: Sequence[str], aside: Sequence[str] = ()) -> Script:
    """The servers that one command starts, itself, in a shell, or in a container; *aside*: variables that are set for it."""
    found, at = Script(), 0
    while at < len(words) and (_ASSIGNED.match(words[at]) or words[at] in ("env", "sudo", "exec", "nohup", "time")):
        at += 1
    rest = list(words[at:])
    aside = [*aside, *(word for word in words[:at] if _ASSIGNED.match(word))]
    if len(rest) > 1 and rest[0].rpartition("/")[2] in _ENGINES_OF_CONTAINERS and "run" in rest[:3]:
        return _docker(rest[rest.index("run") + 1 :], aside)
    shell = _in_shell(rest)
    if shell is not None:
        return read_script(shell, dict(word.split("=", 1) for word in aside))
    if server_in(rest) is None:
        found.not_read(shlex.join(masked(rest)))
        return found
    found.servers.append(Server(words=(*aside, *rest)))
    return found


_ENGINES_OF_CONTAINERS = ("docker", "podman", "nerdctl")
_SWITCHES = frozenset(
    [
        "-d",
        "-i",
        "-t",
        "-it",
        "-ti",
        "-P",
        "--rm",
        "--detach",
        "--interactive",
        "--tty",
        "--privileged",
        "--init",
        "--publish-all",
        "--read-only",
        "--no-healthcheck",
        "--sig-proxy",
        "--oom-kill-disable",
        "--disable-content-trust",
        "--quiet",
        "-q",
    ]
)
"""Options of docker run that take no value; all others do."""


def _docker(words: Sequence[str], aside: Sequence[str]) -> Script:
    """`docker run` with *words* behind it: variables, the entry point and the image are read, volumes and ports are not."""
    variables, entry, at = dict(word.split("=", 1) for word in aside), None, 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if name in _SWITCHES or re.fullmatch("-[ditP]+", name):
            continue
        if not equals:
            value = words[at] if at < len(words) else ""
            at += 1
        if name in ("-e", "--env") and "=" in value:
            variables |= dict([value.split("=", 1)])
        elif name == "--entrypoint":
            entry = split(value)
    if at >= len(words):
        raise RooftraceError("the command runs no image: docker run [OPTIONS] IMAGE [ARGUMENTS] is expected")
    return read_container(words[at], entry, words[at + 1 :], variables)


def read_container(
    image: str, command: Sequence[str] | None, args: Sequence[str], variables: Mapping[str, str]
) -> Script:
    """The servers that a container starts: *command* in place of the image's entry point, where it is given, and *args*."""
    args = [expanded(word, variables) for word in args]
    words = [*(expanded(word, variables) for word in command or ()), *args]
    folder, _, last = image.partition("@")[0].rpartition("/")
    name, _, tag = last.partition(":")
    if not command:
        own = next((entry for part, entry in _ENTRY_POINTS.items() if name.startswith(part)), ())
        if own and server_in(args) is None and _in_shell(args) is None:
            words = [*own, *args]
    found = read_words(words, [f"{name}={value}" for name, value in variables.items()])
    if not found.servers:
        found.notes = []
        found.not_read(f"image {image} starts {shlex.join(masked(words)) or 'what its own entry point is'}")
        return found
    own = (each for launch in launches().values() for each in launch.released_as)
    if (release := _TAG.match(tag)) is not None and any(f"/{folder}/{name}".endswith(f"/{each}") for each in own):
        found.servers = [replace(server, release=release[1]) for server in found.servers]
    return found


_TAG = re.compile(r"v?(\d+(?:\.\d+)+(?:\.?(?:a|b|rc|post|dev)\d+)?)")
"""A release at the beginning of an image's tag: v0.22.0, 1.2.0rc6, v0.5.14-cu126."""


_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    image: launch.entry for launch in launches().values() for image in launch.entry_images
}
"""Entry points of images, by how their names begin; other servers' images have a command behind them."""


def _in_shell(words: Sequence[str]) -> str | None:
    """The script of sh -c SCRIPT and its like."""
    if not words or words[0].rpartition("/")[2] not in ("sh", "bash", "zsh", "dash"):
        return None
    at = next((i for i, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)), None)
    return words[at + 1] if at is not None and at + 1 < len(words) else None


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """*word* with the values of the variables that are known."""
    return _VARIABLE.sub(lambda match: variables.get(next(filter(None, match.groups())), match[0]), word)


def masked(words: Sequence[str]) -> list[str]:
    """*words* without the values of variables that are secrets by their names."""
    return [f"{word.partition('=')[0]}=..." if _ASSIGNED.match(word) and _SECRET.search(word.partition("=")[0]) else word
            for word in words]  # fmt: skip


def split(piece: str) -> list[str]:
    """The words of shell text; RooftraceError where a quote does not end."""
    try:
        return shlex.split(piece)
    except ValueError as error:
        raise RooftraceError(
            f"the command is not complete: {str(error).lower()}; give it in one pair of quotes"
        ) from None


def _without_redirections(words: Sequence[str]) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    aside: list[str] = []
    rest = iter(words)
    for word in rest:
        if match := re.fullmatch(r"(?:\d|&)?(?:>>?|<)(?P<to>.*)", word):
            aside.append(word if match["to"] else f"{word} {next(rest, '')}".strip())
        else:
            kept.append(word)
    return kept, aside


def _joined(pieces: Iterator[str]) -> Iterator[str]:
    """A line that begins with an option belongs to the command above it, as in copies that lost their backslashes."""
    held = ""
    for piece in pieces:
        if piece.startswith("-") and held and not held.startswith("#"):
            held += f" {piece}"
            continue
        if held:
            yield held
        held = piece
    if held:
        yield held


def _pieces(text: str) -> Iterator[str]:
    """Simple commands, and comments of whole lines: what stands between line ends, `;`, `&`, `&&`, `|` and `||` outside quotes."""
    text, at, begin, quote = text.replace("\\\r\n", " ").replace("\\\n", " "), 0, 0, ""
    while at < len(text):
        letter = text[at]
        if quote:
            at += letter == "\\" and quote == '"'
            quote = "" if letter == quote else quote
        elif letter == "\\":
            at += 1
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or text[at - 1].isspace()):
            if before := text[begin:at].strip():
                yield before
            begin = at
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            yield text[begin:at].strip()
            begin = at
            continue
        elif letter in "\n;|" or (
            letter == "&" and text[at - 1 : at] not in (">", "<") and text[at + 1 : at + 2] != ">"
        ):
            if piece := text[begin:at].strip():
                yield piece
            begin = at + 1
        at += 1
    if piece := text[begin:].strip():
        yield piece
