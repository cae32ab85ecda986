"""A tree of contents over the pages of a pool: what `sim.engine.cache.radix_cache` finds, puts in, locks and evicts.

A node is a run of pages, of which only the ends are known: contents are compared by the chains of `sim.engine.kv.content`, so that
work grows with forks of prompts and not with their length.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sim.engine.kv.content import Contents
from sim.engine.kv.pool import KvPool

_ENDLESS = 1 << 60
_STEP = 1 << 32
"""The step of uses; nodes nearer to the root are a little older."""

Keys = list[tuple[int, int]]
"""(key, end page) in sequence: a key is a chain of the contents, or -1 - id for a request's own pages."""


class Node:
    """Pages *lo* to *hi*, counted from the beginning of the prompts."""

    __slots__ = ("children", "hi", "keys", "lo", "parent", "refs", "used")

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


class Held:
    """A sequence's part of the tree."""

    __slots__ = ("computed", "found", "node", "order")

    def __init__(self, order: int, found: int, node: Node) -> None:
        self.order = order
        """The number of its admission."""
        self.found = found
        """Pages that it found when it was admitted."""
        self.node = node
        """The node on which its part ends."""
        self.computed = 0
        """Tokens of which the tree has the full pages."""


class TreePool(KvPool):
    """A pool whose free pages are without content or in unheld nodes of a tree."""

    __slots__ = (
        "_blank", "_clock", "_contents", "_gone", "_heap", "_held", "_n_nodes", "_n_pushed", "_paths", "_root",
        "_walked",
    )  # fmt: skip

    def __init__(
        self, total: int, block_tokens: int, contents: Contents, *, by_chunk: bool = False, lookahead_tokens: int = 0,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(total, block_tokens, by_chunk=by_chunk, lookahead_tokens=lookahead_tokens, limit=limit)
        self.caches = self.caches_late = True
        self._contents = contents
        self._clock = self._n_pushed = 0
        self._start()

    def _start(self) -> None:
        self._blank = self.total
        """Free pages without content."""
        self._root = Node(0, 0, [], None, 1, 0)
        self._n_nodes = 0
        self._walked: dict[int, tuple[int, Node, int]] = {}
        """(page limit, node, end page) of each request's latest walk since the tree changed."""
        self._heap: list[tuple[int, int, Node]] = []
        """Unheld leaves by their last use; outdated entries stay until they are met."""
        self._held: dict[int, Held] = {}
        self._paths: dict[int, Keys] = {}
        self._gone: list[tuple[tuple[int, int, Node], Node]] | None = None
        """Leaves evicted while a plan is tried out, as they stood in the heap, and their parents."""

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
            above.used = used
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
                node.children[keys[0][0]] = leaf
                self._n_nodes += 1
                self.free += upto - end
                return leaf, end
            self._clock += 1
            child.used = self._clock * _STEP
            if not child.refs and not child.children:
                self._push(child)
            end = self._common(child, path, at, upto)
            if end < child.hi:
                node = self._split(child, end)
                self._use(node)
                self._use(child)
            else:
                node = child
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
        parent.children[keys[0][0]] = upper
        node.keys = keys = [key for key in keys if key[1] > at]
        node.lo, node.parent = at, upper
        upper.children[keys[0][0]] = node
        self._n_nodes += 1
        return upper

    def _join(self, upper: Node) -> None:
        """Undoes the split that made *upper*."""
        (node,) = upper.children.values()
        self._walked.clear()
        node.keys = [key for key in upper.keys if key[1] <= upper.hi] + node.keys
        node.lo, node.parent = upper.lo, upper.parent
        assert node.parent is not None
        node.parent.children[node.keys[0][0]] = node
        upper.parent = None
        self._n_nodes -= 1

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
        heappush(heap, (leaf.used, self._n_pushed, leaf))

    @staticmethod
    def _is_due(entry: tuple[int, int, Node]) -> bool:
        used, _, node = entry
        return node.parent is not None and node.used == used and not node.refs and not node.children

    def _lock(self, node: Node) -> None:
        while node.parent is not None:
            if not node.refs:
                self.free -= node.hi - node.lo
            node.refs += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.refs -= 1
            if not node.refs:
                self.free += node.hi - node.lo
                if not node.children:
                    self._push(node)
            node = node.parent

    def make_room(self, blocks: int) -> None:
        """Evicts leaves until *blocks* pages are without content, or no leaf can be evicted."""
        if self._blank >= blocks:
            return
        heap = self._heap
        self._walked.clear()
        while self._blank < blocks and heap:
            entry = heappop(heap)
            if not self._is_due(entry):
                continue
            leaf = entry[2]
            parent = leaf.parent
            assert parent is not None
            if self._gone is not None:
                self._gone.append((entry, parent))
            del parent.children[leaf.keys[0][0]]
            leaf.parent = None
            self._n_nodes -= 1
            self._blank += leaf.hi - leaf.lo
            self.evicted += leaf.hi - leaf.lo
            if parent.parent is not None and not parent.refs and not parent.children:
                self._push(parent)

    def _put_back(self, evicted: list[tuple[tuple[int, int, Node], Node]]) -> None:
        """Restores evicted leaves to where they were."""
        self._walked.clear()
        for entry, parent in evicted:
            leaf = entry[2]
            parent.children[leaf.keys[0][0]] = leaf
            leaf.parent = parent
            self._n_nodes += 1
            self._blank -= leaf.hi - leaf.lo
            self.evicted -= leaf.hi - leaf.lo
            heappush(self._heap, entry)

    @property
    def held_again(self) -> int:
        return sum((node.hi - node.lo) * (node.refs - 1) for node in self._nodes() if node.refs > 1)

    def _nodes(self) -> list[Node]:
        found: list[Node] = []
        left = list(self._root.children.values())
        while left:
            node = left.pop()
            found.append(node)
            left.extend(node.children.values())
        return found

    def fault(self) -> str | None:
        """The first invariant that does not hold, or None. For `sim.engine.simulation.invariants`."""
        holders: dict[Node, int] = {}
        for held in self._held.values():
            node = held.node
            while node.parent is not None:
                holders[node] = holders.get(node, 0) + 1
                node = node.parent
            if node is not self._root:
                return "somebody holds pages that are not in the tree"
        queued = {entry[2] for entry in self._heap if self._is_due(entry)}
        nodes = self._nodes()
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
        said = self.free  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return None if free == said else f"{free} pages are free, and {said} are said to be"
