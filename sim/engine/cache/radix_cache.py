"""KV pages that stay in a tree of contents after their sequence ends: the radix cache of SGLang.

The rules are those of `mem_cache/unified_radix_cache.py` and `mem_cache/unified_cache/` of release 0.5.23, its default:

* content enters the tree when the iteration that computed it has ended: a prompt's when it is complete, a chunk's before the next
  plan, decoded tokens' when the sequence has ended; what a retracted sequence decoded does not;
* a request finds the longest prefix that the tree has, all tokens but one at most, in whole pages;
* content that several sequences computed at once is kept once, and other copies are freed;
* nodes on the path of what a sequence holds are locked; where room is needed the least recently used leaf is evicted, whole, and
  then perhaps its parent. Looking a prompt up counts as use of what is found, and so does inserting it.

The tree itself is in `sim.engine.kv.page_tree`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

from policies.view import NO_BLOCKS, Looks
from sim.engine.kv.content import Contents
from sim.engine.kv.page_tree import HeldNode, TreePool
from sim.engine.kv.pool import WHOLE_PROMPTS, OutOfBlocks, Slots

RETRACT_DECODE_STEPS = 20
"""Tokens of each remaining sequence for which room is made when one of a batch has been retracted: environ.py."""


class RadixCache(TreePool):
    """A pool whose pages are found again in a tree of contents. A block is a page."""

    __slots__ = ("_prompts", "_tokens", "put_in", "used_by_looks")

    def __init__(
        self, total: int, block_tokens: int, contents: Contents, prompts: array[int], *,
        token_contents: Contents | None = None, slots: Slots = WHOLE_PROMPTS,
    ) -> None:  # fmt: skip
        """*prompts*: tokens of each request's prompt; *token_contents*: the contents in blocks of one token, where pages are
        longer."""
        super().__init__(total, block_tokens, contents, slots)
        self.used_by_looks = False
        """Whether the scheduler's own look-ups (`use`) count as use, and admission does not."""
        self.put_in: Callable[[int, int], None] | None = None
        """Called with a request and how many of its pages the tree has from now on."""
        self._tokens = contents if token_contents is None else token_contents
        self._prompts = prompts

    # Contents.

    def beginning(self, id_: int, tokens: int) -> object:
        """A name of the first *tokens* tokens of a request: equal for all that begin with them."""
        return self._tokens.path(id_, tokens, tokens - 1)[0][0]

    # Look-ups.

    def found_blocks(self, id_: int, tokens: int) -> int:
        """Pages that a request with *tokens* tokens would find: one token at least is computed."""
        found = self._walk(id_, (tokens - 1) // self.block_tokens)[1]
        return found - 1 if found and self.drops_last else found

    def use(self, looks: Looks) -> None:
        """Marks what was looked up as used, in the order of the look-ups."""
        used, of_queue = looks
        for id_, tokens in used:
            self._match(id_, (tokens - 1) // self.block_tokens)
        self.queue_looks += of_queue

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int] = NO_BLOCKS) -> int:
        """Pages, of a request's first *blocks* in the tree, that no sequence holds: they count as free until taken."""
        node, end = self._walk(id_, blocks)
        unheld = 0
        while node.parent is not None and not node.refs:
            begin = held.get(node, node.lo)
            if begin < end:
                unheld += end - begin
            if begin > node.lo:
                # All before it is held with it.
                break
            end, node = node.lo, node.parent
        return unheld

    def hold(self, id_: int, blocks: int, held: dict[object, int]) -> None:
        node, end = self._walk(id_, blocks)
        while node.parent is not None and held.get(node, node.lo) < end:
            held[node] = end
            end, node = node.lo, node.parent

    # Moves.

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* pages, which are in the tree, unless it holds some already."""
        if id_ in self._held:
            return
        node, end = self._walk(id_, blocks)
        assert end == blocks
        if end < node.hi:
            rest, node = node, self._split(node, end)
            node.used = rest.used - 1
        self._lock(node)
        if not self.used_by_looks:
            self._match(id_, blocks)
        self._n_admitted += 1
        held = self._held[id_] = HeldNode(self._n_admitted, blocks, node)
        held.computed = blocks * self.block_tokens
        if self.next_uses is not None:
            self.next_uses.begin(id_)
        if self.eviction is not None:
            for part in self._parts(id_):
                part.uses += 1

    def computed(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of an admitted request have been computed: its full pages are put into the tree."""
        held = self._held.get(id_)
        if held is None or tokens <= held.computed:
            return
        held.computed = tokens
        pages = tokens // self.block_tokens
        if not pages:
            return
        had, node = held.node.hi, held.node
        held.node, known = self._insert(id_, pages)
        of_the_prompt = (self._prompts[id_] or 1) // self.block_tokens
        if 0 < of_the_prompt < pages:
            # Decoded pages are evicted before the prompt.
            self._insert(id_, of_the_prompt)
        # Pages that others have inserted are held twice no longer.
        self.give(known - had)
        self._lock(held.node)
        self._unlock(node)
        if self.put_in is not None:
            self.put_in(id_, pages)

    def loaded(self, id_: int, tokens: int) -> None:
        self.computed(id_, tokens)
        held = self._held[id_]
        held.found = held.node.hi

    def release(self, id_: int, blocks: int, tokens: int, *, ended: bool = False) -> None:
        """Frees all *blocks* pages of a request; the tree keeps full pages of its first *tokens* tokens; 0: no more than it
        has."""
        self.computed(id_, tokens)
        held = self._held.pop(id_)
        self._paths.pop(id_, None)
        self.give(blocks - held.node.hi)
        self._unlock(held.node)

    def take(self, blocks: int) -> None:
        if blocks > self.free:
            raise OutOfBlocks
        if blocks > self._blank:
            self.make_room(blocks)
        self.free -= blocks
        self._blank -= blocks

    def before_prompts(self, tokens: int, prompts: int) -> None:
        """Makes room for prompts as `alloc_paged_token_slots_extend` does: where pages are long, with one more for each."""
        if self.block_tokens > 1:
            self.make_room(-(-tokens // self.block_tokens) + prompts)

    def before_decodes(self, sequences: int) -> None:
        """Makes room for a decode step as `alloc_paged_token_slots_decode` does: where pages are long, one for each."""
        if self.block_tokens > 1:
            self.make_room(sequences)

    def gave_way(self, kept: int) -> None:
        """Makes room for later decode steps of *kept* sequences, when one of a batch was preempted: `release_req`."""
        self.make_room(-(-RETRACT_DECODE_STEPS * kept // self.block_tokens))

    def reset(self) -> None:
        """Frees every page, and empties the tree."""
        self.free = self.total
        self._start()

    def full_blocks(self, id_: int) -> int:
        """Pages of an admitted request in the tree."""
        return self._held[id_].node.hi
