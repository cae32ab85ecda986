"""YAML as people expect it: 1e9 is a whole number, and a key given twice is an error."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from sim.errors import ScenarioError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key is a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_MOST_WHOLE = 1e18
"""A number with an exponent is a whole one up to here; beyond it is no count of anything."""


def _number(loader: Any, node: Any) -> int | float:
    """A number with a point or an exponent: 1e6 and 2.5e3 are whole, 1.0 is what it is written as."""
    value = loader.construct_yaml_float(node)
    if "e" not in node.value.lower() or not abs(value) <= _MOST_WHOLE:
        return value
    exact = Decimal(node.value.replace("_", ""))
    return int(exact) if exact == int(exact) else value


# YAML 1.1 reads 1e9 as text, 4:16 as 256 and 010 as 8; YAML 1.2 and people read a number, a text and, at most, ten.
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z"
    ),
    list("-+0123456789."),
)


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


_DEEPEST = 100
"""Lists and mappings inside each other that are read at most: people nest a dozen, and what walks through them recurses."""
_MOST_VALUES = 1_000_000
"""Values that a text holds at most when its anchors are written out: a few lines of anchors of anchors stand for billions."""


def parse_yaml(text: str, source: str) -> Any:
    """The value that *text* holds; ScenarioError naming *source* and the line where it is not YAML, or nested without end."""
    try:
        if len(text) > _DEEPEST or "*" in text:  # a shorter one without aliases cannot be deeper
            _check_nesting(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ScenarioError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ScenarioError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None


def read_text(file: Path) -> str:
    """The text of a scenario's *file*; ScenarioError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScenarioError(f"scenario {file} does not exist") from None
    except IsADirectoryError:
        raise ScenarioError(f"scenario {file} is a folder; give a YAML file") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{file} is not text; a scenario is a YAML file in UTF-8") from None
    except OSError as error:
        raise ScenarioError(f"cannot read scenario {file}: {error.strerror}") from None


class _Open:
    """A list or mapping that has not ended: the depth below it, and how many values it holds."""

    def __init__(self, anchor: str | None) -> None:
        self.anchor = anchor
        self.depth = 0
        self.values = 1

    def hold(self, depth: int, values: int) -> None:
        self.depth = max(self.depth, depth + 1)
        self.values += values


def _check_nesting(text: str) -> None:
    """MarkedYAMLError for what is nested too deeply, or within itself: the loader recurses, in C without a limit."""
    top = _Open(None)
    within = [top]
    anchored: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            within.append(_Open(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = within.pop()
            if ended.anchor is not None:
                anchored[ended.anchor] = (ended.depth, ended.values)
            within[-1].hold(ended.depth, ended.values)
        elif isinstance(event, yaml.AliasEvent):
            if any(each.anchor == event.anchor for each in within):
                raise yaml.MarkedYAMLError(
                    problem=f"*{event.anchor} stands within itself", problem_mark=event.start_mark
                )
            within[-1].hold(*anchored.get(event.anchor, (0, 1)))
        elif isinstance(event, yaml.ScalarEvent):
            within[-1].values += 1
        if len(within) + within[-1].depth > _DEEPEST:
            problem = f"lists and mappings are nested more than {_DEEPEST} deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if within[-1].values > _MOST_VALUES:
            problem = f"there are more than {_MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
