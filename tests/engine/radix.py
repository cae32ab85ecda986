"""A plain count of what a tree of tokens finds, leaves evicted by their last use, requests one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, takewhile

LOOKS = 32
"""One in so many looks at the queue counts as use of all that the request would find."""


@dataclass(eq=False)
class Leaf:
    """Tokens, what may come after them, and when they were used last."""

    tokens: list[int] = field(default_factory=list)
    after: list[Leaf] = field(default_factory=list)
    used: float = 0.0

    def walk(self, path: list[Leaf] | None = None) -> list[list[Leaf]]:
        """The path to each node."""
        path = [*(path or []), self]
        return [path, *(found for child in self.after for found in child.walk(path))]


def alike(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Tree:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.root = Leaf()
        self.clock = count(1)
        self.evicted = 0

    @property
    def size(self) -> int:
        return sum(len(path[-1].tokens) for path in self.root.walk())

    def path(self, tokens: list[int], *, split: bool) -> list[Leaf]:
        """The nodes that *tokens* begin with; the last is cut to them."""
        found, left = [self.root], tokens
        while True:
            child = next((child for child in found[-1].after if left and child.tokens[0] == left[0]), None)
            if child is None:
                return found
            n = alike(child.tokens, left)
            if n < len(child.tokens) and split:
                rest = Leaf(child.tokens[n:], child.after, 0.0)
                child.tokens, child.after = child.tokens[:n], [rest]
                rest.used = next(self.clock)
            found.append(child)
            left = left[n:]
            if child.after and n == len(child.tokens):
                continue
            return found

    def match(self, tokens: list[int]) -> list[Leaf]:
        found = self.path(tokens, split=True)
        now = next(self.clock)
        for depth, node in enumerate(reversed(found)):
            node.used = now - depth * 1e-6
        return found

    def insert(self, tokens: list[int]) -> list[Leaf]:
        found, left = [self.root], tokens
        while left:
            child = next((child for child in found[-1].after if child.tokens[0] == left[0]), None)
            if child is None:
                child = Leaf(left)
                found[-1].after.append(child)
            child.used = next(self.clock)
            n = alike(child.tokens, left)
            if n < len(child.tokens):
                rest = Leaf(child.tokens[n:], child.after)
                child.tokens, child.after = child.tokens[:n], [rest]
                child.used, rest.used = next(self.clock), next(self.clock)
            found.append(child)
            left = left[n:]
        return found

    def make_room(self, tokens: int, held: list[Leaf], beside: int) -> None:
        """*beside*: tokens that the request has of its own."""
        while self.capacity - self.size - beside < tokens:
            leaves = [
                path for path in self.root.walk() if len(path) > 1 and not path[-1].after and path[-1] not in held
            ]
            path = min(leaves, key=lambda path: path[-1].used)
            path[-2].after.remove(path[-1])
            self.evicted += len(path[-1].tokens)


def found_tokens(requests: list[tuple[list[int], list[int]]], capacity: int) -> tuple[list[int], int]:
    """Tokens that each request (prompt, answer) finds, and tokens evicted in all, where *capacity* are kept."""
    tree, found = Tree(capacity), []
    for n, (prompt, answer) in enumerate(requests):
        if n % LOOKS == 0:
            tree.match(prompt)
        held = tree.match(prompt[:-1])
        had = sum(len(node.tokens) for node in held)
        found.append(had)
        tree.make_room(len(prompt) - had, held, 0)
        if len(answer) > 1:
            held = tree.insert(prompt)
            for i in range(len(answer) - 1):
                tree.make_room(1, held, i)
        # The last token is never computed.
        tree.insert(prompt + answer[:-1])
        if len(answer) > 1:
            tree.insert(prompt)
    return found, tree.evicted
