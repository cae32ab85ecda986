"""Answers orders, a line of JSON each, with the scheduler of a release that is installed beside this interpreter.

    PYTHON lines.py WORKER.py

Runs by itself, in an environment that need not have this project: `policies.installed.connection` starts it. WORKER.py has
a class `Release`, of which one is made when the first engine starts, a class `Engine`, TITLE and ENVIRONMENT. Each line that comes
is an order for one of several engines, and each is answered by one line:

* {"start": settings} makes an engine; "release" comes back, or "error", a sentence.
* {"drop": true} forgets it.
* {"done": ..., "add": ..., "abort": ..., "ready": ...} tells of the oldest plan in flight that it has run and how many tokens each
  request may emit, then of requests that have come, gone, or whose grammar is compiled. What was emitted comes back, and the next
  plan where there is one.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Unfit(Exception):
    """The release cannot do what is asked of it: a sentence that names it."""


class Found:
    """Names of a release that is installed here, found by inspection."""

    def __init__(self, title: str, package: str) -> None:
        try:
            self.name = f"{title} {version(package)}"
        except PackageNotFoundError:
            raise Unfit(f"{sys.executable} has no {title}; give scheduler.python the interpreter that has it") from None
        self.found: dict[str, Any] = {}

    def find(self, needed: Mapping[str, Sequence[str]]) -> None:
        """Import *needed*, names by module."""
        for module, names in needed.items():
            there = self.module(module)
            for name in names:
                if not hasattr(there, name):
                    raise Unfit(f"{self.name} has no {name} in {module}, by which its scheduler is driven")
                self.found[name] = getattr(there, name)

    def module(self, name: str) -> Any:
        try:
            return import_module(name)
        except Exception as error:  # whatever the release's own code raises while it is imported
            raise Unfit(
                f"{self.name} has no {name} that can be imported here ({type(error).__name__}: {error})"
            ) from error

    def takes(self, name: str, method: str, arguments: Sequence[str] = ()) -> None:
        """See to it that the class called *name* has a *method* with these *arguments*."""
        found = getattr(self.found[name], method, None)
        if found is None:
            raise Unfit(f"{self.name}: {name} has no {method}, by which its scheduler is driven")
        lacks = [each for each in arguments if each not in inspect.signature(found).parameters]
        if lacks:
            raise Unfit(f"{self.name}: {name}.{method} takes no {', '.join(lacks)}, by which its scheduler is driven")

    def __getattr__(self, name: str) -> Any:
        return self.found[name]

    def has_settings(self, what: str, asked: Iterable[str]) -> Collection[str]:
        """Settings of the class *what*, to which those that were *asked* for belong."""
        kind = self.found[what]
        # A class that hands all on takes what its base takes.
        while any(each.kind is each.VAR_KEYWORD for each in inspect.signature(kind).parameters.values()):
            kind = kind.__base__
        own = inspect.signature(kind).parameters
        for name in asked:
            if name not in own:
                raise Unfit(f"{self.name}: {what} has no {name}; leave it out, or take a release that has it")
        return own

    def made(self, what: str, given: Mapping[str, Any], asked: Sequence[str] = ()) -> Any:
        """An object of the class *what*; those settings of *given* that were *asked* for must be its own, others are left out where
        it has none of the name."""
        own = self.has_settings(what, asked)
        return self.found[what](**{name: value for name, value in given.items() if name in own})


def name_of(id_: int) -> str:
    """A request as the release calls it: of equal priority and arrival the one with the smaller number goes first."""
    return f"{id_:012d}"


STOP = 99
"""The token that ends an answer where none has a name."""
PLAIN = 1
_OWN, _OWN_EACH = 10_000_000_000, 10_000_000
"""Tokens of a request alone: from _OWN on, _OWN_EACH for each."""
_FIRST_NAMED, _NEXT_NAMED = 1000, 5_000_000_000


def text(told: Mapping[str, Any], place: int, block_tokens: int) -> int:
    """The token of a request at *place*: equal where its blocks have equal names, its own elsewhere; and equal where it is the one
    behind a block that has an equal name with it."""
    names, with_next = told["names"], told["names_with_next"]
    block, within = divmod(place, block_tokens)
    if not within and 0 < block <= len(with_next):
        return _NEXT_NAMED + with_next[block - 1]
    if block < len(names):
        return _FIRST_NAMED + names[block] * block_tokens + within
    return _OWN + told["id"] * _OWN_EACH + place


def answered(told: Mapping[str, Any], worker: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The answer to one order. *state*: the release once it is there, and the engines by number."""
    number = told["engine"]
    engines = state["engines"]
    try:
        if "start" in told:
            state["release"] = release = state["release"] or worker.Release()
            engines[number] = worker.Engine(release, told["start"])
            return {"release": release.name}
        if "drop" in told:
            return {"dropped": engines.pop(number, None) is not None}
        return engines[number].step(told)
    except Unfit as error:
        return {"error": str(error)}
    except Exception as error:
        # The release's own code, or what is asked of it here, which another release may not understand; the traceback is on the
        # standard error.
        name = worker.TITLE if state["release"] is None else state["release"].name
        traceback.print_exc()
        return {"error": f"driving {name} failed: {type(error).__name__}: {' '.join(str(error).split())}"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # Whatever else writes, writes to the other stream.
    os.dup2(2, 1)
    # The worker imports this module by the name that it has in the project, which is not here.
    sys.modules["policies.installed.lines"] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    os.environ.update(worker.ENVIRONMENT)
    state: dict[str, Any] = {"release": None, "engines": {}}
    for line in sys.stdin:
        answers.write(json.dumps(answered(json.loads(line), worker, state)) + "\n")
        answers.flush()


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # This file's folder, where folders are named as releases are.
    main()
