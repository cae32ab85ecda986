"""Prompts put together from components: a system prompt, passages, a history, a question.

A line of JSON is a request; its `hash_ids` have the ids of its components by kind, in the order of the prompt, and a table beside
the file has the tokens of each id. Two prompts begin alike as far as their components are the same, so that a block's content is
known by the components up to the one that its last token is of.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from workloads.columns import IntArray

ComponentOrder = Literal["as_sent", "seen"]
"""The order of a prompt's components: as the prompt has them; or, one after the other, the one that most earlier prompts had behind
the same beginning, where none had, the one of which most tokens were sent before, and new ones last."""
BLOCK_TOKENS = 16
"""Tokens of one block that is named."""


def check_order(order: str) -> None:
    """ValueError for what is no `ComponentOrder`."""
    if order not in get_args(ComponentOrder):
        raise ValueError(f"component_order is one of {', '.join(get_args(ComponentOrder))}; got {order!r}")


def lengths_beside(path: Any) -> dict[int, int]:
    """Tokens by id, of the table beside a file of components: X_component_lengths.csv of X_components.jsonl."""
    given = Path(path)
    stem = given.name.partition(".")[0]
    table = given.with_name(f"{stem.removesuffix('s')}_lengths.csv")
    if not table.is_file():
        raise ValueError(
            f"{path}: the tokens of its components are in {table.name} beside it (id, tokens), which is not there"
        )
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            found = {int(row["id"]): int(row["tokens"]) for row in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{table}: expected whole numbers in columns id and tokens; {error}") from None
    if any(tokens < 0 for tokens in found.values()):
        raise ValueError(f"{table}: tokens are whole numbers from 0")
    return found


def components_of(where: str, record: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ids of one request's components by kind; ValueError names *where* where they are none."""
    kinds: Any = record.get("hash_ids")
    lists = kinds.values() if isinstance(kinds, dict) else [None]
    if not all(isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids) for ids in lists):
        raise ValueError(f"{where}, column hash_ids: expected lists of ids by kind of component; got {str(kinds)[:60]}")
    found: dict[str, list[int]] = kinds
    return found


class Prompts:
    """Names of the blocks of prompts, one prompt after the other."""

    def __init__(self, tokens: Mapping[int, int], order: ComponentOrder) -> None:
        check_order(order)
        self._tokens = tokens
        self._order = order
        self._nodes: dict[tuple[int, int], int] = {}
        """A place that prompts reach by a component from another place."""
        self._first_block: list[int] = []
        """For each place the name of its first block."""
        self._names = 0
        self._next: dict[int, Counter[int]] = {}
        """Components that followed each place, and how often."""
        self._often: Counter[int] = Counter()
        self.seen_tokens = 0
        """Tokens of components that an earlier prompt had, at whatever place."""

    def add(self, where: str, kinds: Mapping[str, Sequence[int]]) -> IntArray:
        """The names of the full blocks of the next prompt."""
        names: list[IntArray] = []
        node, at = -1, 0
        rest = [part for ids in kinds.values() for part in ids]
        if missing := [part for part in rest if part not in self._tokens]:
            raise ValueError(
                f"{where}: component {missing[0]} has no length in the table beside the file; mend one of them"
            )
        parts = tuple(rest)
        while rest:
            part = rest.pop(0 if self._order == "as_sent" else self._likely(node, rest))
            end = at + self._tokens[part]
            blocks = end // BLOCK_TOKENS - at // BLOCK_TOKENS
            self._next.setdefault(node, Counter())[part] += 1
            node = self._place(node, part, blocks)
            names.append(np.arange(self._first_block[node], self._first_block[node] + blocks))
            at = end
        self._count(parts)
        return np.concatenate(names) if names else np.empty(0, np.int64)

    def _likely(self, node: int, rest: Sequence[int]) -> int:
        """The place in *rest* of the component that goes first behind a place of prompts."""
        followed = self._next.get(node, Counter())
        return max(
            range(len(rest)), key=lambda i: (followed[rest[i]], self._often[rest[i]] * self._tokens[rest[i]], -i)
        )

    def _place(self, node: int, part: int, blocks: int) -> int:
        found = self._nodes.setdefault((node, part), len(self._nodes))
        if found == len(self._first_block):
            self._first_block.append(self._names)
            self._names += blocks
        return found

    def _count(self, parts: Iterable[int]) -> None:
        for part in parts:
            self.seen_tokens += self._tokens[part] if self._often[part] else 0
            self._often[part] += 1
