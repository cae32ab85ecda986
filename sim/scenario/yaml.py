"""YAML as people expect it: 1e9 is a number, and a key given twice is an error."""

from __future__ import annotations

import re
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


def parse_yaml(text: str, source: str) -> Any:
    """The value that *text* holds; ScenarioError naming *source* and the line where it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ScenarioError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
