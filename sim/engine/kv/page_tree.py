"""A tree of contents over the pages of a pool: what `sim.engine.cache.radix_cache` finds, puts in, locks and evicts.

A node is a run of pages, of which only the ends are known: contents are compared by the chains of `sim.engine.kv.content`, so that
work grows with forks of prompts and not with their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from policies.eviction import Rank
from sim.engine.kv.caching_pool import CachingPool, Held
from sim.engine.kv.content import Contents
from sim.engine.kv.pool import WHOLE_PROMPTS, Slots

_ENDLESS = 1 << 60
_STEP = 1 << 32
"""The step of uses; nodes nearer to the root are a little older."""

Keys = list[tuple[int, int]]
"""(key, end page) in sequence: a key is a chain of the contents, or -1 - id for a request's own pages."""

Entry = tuple[Any, int, int, "Node"]
"""A leaf's rank, number and last use when it was entered, and the leaf."""


class Node:
    """Pages *lo* to *hi*, counted from the beginning of the prompts."""

    __slots__ = (
        "children", "entered", "hi", "idle_s", "keys", "lo", "parent", "refs", "used", "used_ns", "user", "uses",
    )  # fmt: skip

    def __init__(self, lo: int, hi: int, keys: Keys, parent: Node | None, refs: int, used: int) -> None:
        self.lo = lo
        self.hi = hi
        self.keys = keys
        self.parent = parent
        """None for the root, and for an evicted node."""
        self.children: dict[int, Node] = {}
        """Nodes by the first page's key."""
        self.refs = refs
        """Sequences that hold it or a node below it."""
        self.used = used
        """Clock of its last use."""
        self.entered = used
        self.uses = 1
        """Requests that have used it."""
        self.used_ns = 0
        self.idle_s = 0.0
        self.user = -1


class HeldNode(Held):
    """A sequence's part of the tree."""

    __slots__ = ("computed", "node")

    def __init__(self, order: int, found: int, node: Node) -> None:
        super().__init__(order, found)
        self.node = node
        """The node on which its part ends."""
        self.computed = 0
        """Tokens of which the tree has the full pages."""


class TreePool(CachingPool[HeldNode]):
    """A pool whose free pages are without content or in unheld nodes of a tree."""

    __slots__ = ("_clock", "_heap", "_n_nodes", "_n_pushed", "_paths", "_root", "_walked")

    def __init__(self, total: int, block_tokens: int, contents: Contents, slots: Slots = WHOLE_PROMPTS) -> None:
        super().__init__(total, block_tokens, contents, slots)
        self.caches_late = True
        self._clock = self._n_pushed = 0
        self._start()

    def _start(self) -> None:
        self._blank = self.total
        self._root = Node(0, 0, [], None, 1, 0)
        self._n_nodes = 0
        self._walked: dict[int, tuple[int, Node, int]] = {}
        """(page limit, node, end page) of each request's latest walk since the tree changed."""
        self._heap: list[Entry] = []
        """Unheld leaves, the first to go first; outdated entries stay until they are met."""
        self._due.clear()
        self._held.clear()
        self._paths: dict[int, Keys] = {}

    def _path(self, id_: int) -> Keys:
        """Keys of all pages of a request."""
        path = self._paths.get(id_)
        if path is not None:
            return path
        path = [(key, hi) for key, _, hi in self._contents.path(id_, _ENDLESS)]
        self._paths[id_] = path
        return path

    def _walk(self, id_: int, upto: int) -> tuple[Node, int]:
        """(node, end): the tree has a request's first *upto* pages up to *end*, in or at *node*. Nothing is used or split."""
        walked = self._walked.get(id_)
        if walked is not None:
            most, node, end = walked
            # A walk up to what was found finds that.
            if upto in (most, end):
                return node, end
        path, node, end, at = self._paths.get(id_) or self._path(id_), self._root, 0, 0
        while end < upto:
            while path[at][1] <= end:
                at += 1
            child = node.children.get(path[at][0])
            if child is None:
                break
            end, node = self._common(child, path, at, upto), child
            if end < child.hi:
                break
        self._walked[id_] = upto, node, end
        return node, end

    def _match(self, id_: int, upto: int) -> tuple[Node, int]:
        """`_walk` that counts as use: the node is split, so that what is found ends with it."""
        node, end = self._walk(id_, upto)
        if end < node.hi:
            rest, node = node, self._split(node, end)
            self._use(rest)
        self._clock += 1
        used, above = self._clock * _STEP, node
        while above.parent is not None:
            above.used, above.user = used, id_
            if self.lasts_s is not None:
                above.used_ns, above.idle_s = self.now_ns(), 0.0
            used -= 1
            above = above.parent
        if node.parent is not None and not node.refs and not node.children:
            self._push(node)
        return node, end

    def _insert(self, id_: int, upto: int) -> tuple[Node, int]:
        """Inserts a request's first *upto* pages; returns the last node, and how many were there."""
        path, node, end, at = self._paths.get(id_) or self._path(id_), self._root, 0, 0
        while end < upto:
            while path[at][1] <= end:
                at += 1
            child = node.children.get(path[at][0])
            if child is None:
                self._walked.clear()
                keys = [key for i, key in enumerate(path[at:]) if not i or path[at + i - 1][1] < upto]
                self._clock += 1
                leaf = Node(end, upto, keys, node, 0, self._clock * _STEP)
                leaf.user = id_
                node.children[keys[0][0]] = leaf
                self._n_nodes += 1
                self.free += upto - end
                return leaf, end
            self._clock += 1
            child.used, child.user = self._clock * _STEP, id_
            end, node = self._common(child, path, at, upto), child
            if end < child.hi:
                node = self._split(child, end)
                self._use(node)
                self._use(child)
            elif not child.refs and not child.children:
                self._push(child)
        return node, end

    def _common(self, node: Node, path: Keys, at: int, limit: int) -> int:
        """The page up to which *node* and *path* are equal; both begin with the key of segment *at* of the path."""
        keys = node.keys
        if node.hi < limit:
            limit = node.hi
        end, ours = path[at][1], keys[0][1]
        if ours < end:
            end = ours
        if end >= limit:
            return limit
        here = 0
        while end < limit:
            while path[at][1] <= end:
                at += 1
            while keys[here][1] <= end:
                here += 1
            if path[at][0] != keys[here][0]:
                break
            end = min(path[at][1], keys[here][1], limit)
        return end

    def _split(self, node: Node, at: int) -> Node:
        """The part of *node* below page *at*, which becomes its parent."""
        parent = node.parent
        assert parent is not None
        self._walked.clear()
        keys = node.keys
        upper = Node(
            node.lo, at, [key for i, key in enumerate(keys) if not i or keys[i - 1][1] < at], parent, node.refs, 0
        )
        upper.entered, upper.uses, upper.user = node.entered, node.uses, node.user
        upper.used_ns, upper.idle_s = node.used_ns, node.idle_s
        parent.children[keys[0][0]] = upper
        node.keys = keys = [key for key in keys if key[1] > at]
        node.lo, node.parent = at, upper
        upper.children[keys[0][0]] = node
        self._n_nodes += 1
        return upper

    def _use(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock * _STEP
        if not node.refs and not node.children:
            self._push(node)

    def _push(self, leaf: Node) -> None:
        heap = self._heap
        if len(heap) > 64 + 4 * self._n_nodes:
            heap[:] = [entry for entry in heap if self._is_due(entry)]
            heapify(heap)
        self._n_pushed += 1
        if self.lasts_s is not None:
            self._note_when_due(leaf, self._n_pushed, inf)
        rank = leaf.used if self.eviction is None else self._rank_of_last(leaf)
        heappush(heap, (rank, self._n_pushed, leaf.used, leaf))

    def _rank_of_last(self, leaf: Node) -> Rank:
        """The rank of the last pages of *leaf*, from which those before with another rank are split off."""
        next_use = self._next_use(leaf)
        upto = self._end_of_rank(leaf, leaf.hi, next_use)
        while upto < leaf.hi:
            self._split(leaf, upto).used = leaf.used
            upto = self._end_of_rank(leaf, leaf.hi, next_use)
        return self._rank(leaf, leaf.lo, next_use)

    def _rank_again(self, number: int, used: int, part: Node) -> None:
        if part.used == used and self._is_due((0, number, used, part)):
            self._idle(part)
            self._use(part)

    def _next_use(self, node: Node) -> float:
        return inf if self.next_uses is None else self.next_uses.of(node.keys[0][0], node.lo, node.hi)[0]

    @staticmethod
    def _is_due(entry: Entry) -> bool:
        _, _, used, node = entry
        return node.parent is not None and node.used == used and not node.refs and not node.children

    def _lock(self, node: Node) -> None:
        while node.parent is not None:
            if not node.refs:
                self.free -= node.hi - node.lo
            node.refs += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        while (above := node.parent) is not None:
            node.refs -= 1
            if not node.refs:
                self.free += node.hi - node.lo
                if self.lasts_s is not None:
                    node.used_ns, node.idle_s = self.now_ns(), 0.0
                if not node.children:
                    self._push(node)
            node = above

    def make_room(self, blocks: int) -> None:
        """Evicts leaves until *blocks* pages are without content, or no leaf can be evicted."""
        if self._blank >= blocks:
            return
        heap = self._heap
        self._walked.clear()
        while self._blank < blocks and heap:
            if self._due:
                self.rank_again()
            entry = heappop(heap)
            if not self._is_due(entry):
                continue
            leaf = entry[3]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.keys[0][0]]
            leaf.parent = None
            self._n_nodes -= 1
            self._blank += leaf.hi - leaf.lo
            self.evicted += leaf.hi - leaf.lo
            if self.gives_up is not None:
                lo = leaf.lo
                for key, end in leaf.keys:
                    hi = min(end, leaf.hi)
                    self.gives_up(key, lo, hi)
                    lo = hi
            if parent.parent is not None and not parent.refs and not parent.children:
                self._push(parent)

    def _parts(self, id_: int) -> Iterator[Node]:
        node = self._held[id_].node
        while node.parent is not None:
            yield node
            node = node.parent

    def _all(self) -> list[Node]:
        found: list[Node] = []
        left = list(self._root.children.values())
        while left:
            node = left.pop()
            found.append(node)
            left.extend(node.children.values())
        return found

    def fault(self) -> str | None:
        """The first invariant that does not hold, or None. For `sim.engine.simulation.invariants`."""
        holders: dict[Any, int] = self._holders()
        for held in self._held.values():
            node = held.node
            while node.parent is not None:
                node = node.parent
            if node is not self._root:
                return "somebody holds pages that are not in the tree"
        queued = {entry[3] for entry in self._heap if self._is_due(entry)}
        nodes = self._all()
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if node.lo != parent.hi or node.hi <= node.lo or parent.children.get(node.keys[0][0]) is not node:
                return f"pages {node.lo} to {node.hi} follow those up to {parent.hi}"
            if node.refs != holders.get(node, 0):
                return f"a node is counted {node.refs} times and held by {holders.get(node, 0)}"
            if (node in queued) != (not node.refs and not node.children):
                return f"a {'leaf' if not node.children else 'node'} that {node.refs} hold is wrongly among those to be evicted"
        if len(nodes) != self._n_nodes:
            return f"the tree has {len(nodes)} nodes and counts {self._n_nodes}"
        free = self._blank + sum(node.hi - node.lo for node in nodes if not node.refs)
        return None if free == self.free else f"{free} pages are free, and {self.free} are said to be"
