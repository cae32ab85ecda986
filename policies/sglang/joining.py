"""Admission: the budgets of one step, spent as prompts are added (`PrefillAdder` over `mem_cache/prefill_budget.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.sglang.past import Past, Running
from policies.sglang.settings import Settings
from policies.view import PartialSeq, ReplicaView, WaitingSeq

CLIP_MAX_NEW_TOKENS = 4096
"""No request is expected to emit more than this: environ.py."""
IGNORE_EOS_RESERVE_TOKENS = 1
"""Reserve of each sequence, where all emit as much as they may: schedule_policy.py."""
INPUT_MARGIN = 6
"""Tokens that a prompt leaves of the pool at least: tp_worker.py (max_req_input_len), utils.py (validate_input_length)."""
OUT_OF_ROOM = "prompt leaves no room in the KV pool for an answer"
GO_ON, NO_MEMORY, SPENT = "go on", "no memory", "spent"
"""Verdicts of `PrefillAdder` on the next request: CONTINUE, NO_TOKEN, OTHER."""


class Room:
    """The pool, and what a request may emit by its client and by the pool."""

    def __init__(self, view: ReplicaView) -> None:
        self.page = view.block_tokens
        self.pool = view.total_blocks * view.block_tokens
        self._context = view.max_model_len
        self._limits = view.max_tokens
        self._prompts = view.prompt_tokens

    def paged(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def prompt(self, id_: int) -> int:
        return self._prompts[id_] or 1

    def max_new(self, id_: int) -> int:
        """`init_req_max_new_tokens`: what a request may emit fits the context, and the pool if it were alone there."""
        prompt = self.prompt(id_)
        room = min(self._context - 2 - prompt, self.pool - self.paged(prompt) - self.page - 1)
        return max(0, min(self._limits[id_], room))


class Adder(Room):
    """`PrefillAdder`: the budgets of one step, spent as prompts are added."""

    def __init__(self, settings: Settings, view: ReplicaView, past: Past, running: Sequence[Running]) -> None:
        super().__init__(view)
        self.chunks: list[tuple[int, int]] = []
        self.blocks = 0
        """KV blocks that the chunks take."""
        self.cut = False
        """Whether the last prompt is cut that was added from the queue."""
        self._settings = settings
        self._running = running
        self._by_chunk = view.by_chunk
        self._drafted = view.lookahead_tokens
        self._goes_on: tuple[int, int] | None = None
        self._lives: list[tuple[int, int]] | None = None
        beside = len(running) if settings.enable_mixed_chunk else 0
        chunk = settings.chunked_prefill_size
        self._chunk = None if chunk == -1 else chunk - beside
        self._input = settings.max_prefill_tokens - beside
        self._available = view.free_blocks * view.block_tokens
        ratio = 1.0 if settings.ignore_eos else past.ratio
        expected = 0.0
        for _, _, emitted, max_new in running:
            left = max_new - emitted
            expected += (left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS) * ratio
        self._now = beside
        self._in_all = beside + expected

    def _blocks(self, tokens: int) -> int:
        return -(-(tokens + self._drafted) // self.page) if tokens else 0

    @property
    def _left(self) -> float:
        """Tokens of the pool that are neither held nor expected to be needed."""
        return self._available - self._in_all

    def verdict(self) -> str:
        """The verdict on the next request: `budget_state`."""
        if not (self._left > 0 and self._available - self._now > 0):
            return NO_MEMORY
        if self._input <= 0 or (self._chunk is not None and self._chunk <= 0):
            return SPENT
        return GO_ON

    def _spend(self, id_: int, tokens: int, to_come: int) -> None:
        """`_update_prefill_budget`, in whole pages and one more."""
        paged = self.paged(tokens)
        self._now += paged + self.page
        self._in_all += paged + self.page + to_come
        self._input -= paged
        if self._chunk is not None:
            self._chunk -= paged
        self.chunks.append((id_, tokens))

    def go_on(self, seq: PartialSeq) -> bool:
        """`add_chunked_req`: add as much of the cut prompt as the chunk and the memory left allow, or the chunk where none is left.
        Return whether it stays cut."""
        left = seq.remaining_tokens
        chunk = left if self._chunk is None else self._chunk
        within = min(chunk, int(self._left))
        within = within if within > 0 else chunk
        tokens = min(left, within)
        if self._by_chunk:
            self.blocks += self._blocks(seq.cached_tokens + tokens) - self._blocks(seq.cached_tokens)
        self._goes_on = self._life(seq.id, seq.cached_tokens + left)
        self._spend(seq.id, tokens, 0 if left > within else self._clipped(seq.id))
        return left > within

    def _clipped(self, id_: int) -> int:
        return min(self.max_new(id_), CLIP_MAX_NEW_TOKENS)

    def _demand(self, seq: WaitingSeq) -> int:
        tokens = seq.cached_tokens + seq.tokens
        to_come = max(self.max_new(seq.id) - (tokens - self.prompt(seq.id)), 0)
        return tokens + min(to_come, CLIP_MAX_NEW_TOKENS) + self.page + self._drafted

    def never_fits(self, seq: WaitingSeq) -> bool:
        """Whether not even an empty pool holds it: SGLang refuses such a prompt at arrival, or leaves it at the queue's head for
        ever."""
        if self.prompt(seq.id) >= self.pool - INPUT_MARGIN:
            return True
        if self._settings.to_its_end:
            left, tokens = self._life(seq.id, seq.cached_tokens + seq.tokens)
            return self.paged(tokens) + self.page + max(left, 0) + IGNORE_EOS_RESERVE_TOKENS >= self.pool
        return self._demand(seq) >= self.pool

    def add(self, seq: WaitingSeq, found: int = 0, unheld: int = 0) -> str:
        """`add_one_req`: add the request if it fits, and return the verdict on the next one. *found*: pages of it in the prefix
        cache; *unheld*: those of them that no sequence holds, which count as free until it takes them."""
        most = self._settings.prefill_max_requests
        if most is not None and len(self.chunks) >= most:
            return SPENT
        if seq.kept_blocks:
            # A prompt that another machine has computed (`get_new_prebuilt_batch`) had its memory before.
            return self._take(seq, seq.tokens)
        shown = not found and seq.cached_tokens > 0
        if shown:
            # The engine has looked it up: blocks that no sequence holds count as above.
            found = -(-seq.cached_tokens // self.page)
            unheld = found - seq.shared_blocks
        if self._settings.to_its_end:
            return self._add_to_its_end(seq, unheld)
        # The pages that it finds are locked while it is considered.
        if self._demand(seq) - found * self.page >= self._left - unheld * self.page:
            return NO_MEMORY
        if found and not shown:
            seq = seq._replace(tokens=seq.tokens - found * self.page, cached_tokens=found * self.page)
        before, verdict = len(self.chunks), self._cut(seq)
        if len(self.chunks) == before:
            return verdict
        self._available -= unheld * self.page
        self.blocks -= found - unheld
        return self.verdict()

    def _cut(self, seq: WaitingSeq) -> str:
        """Take in of it what the budgets of the step allow."""
        paged = self.paged(seq.tokens)
        if self._chunk is None:
            if self.chunks and paged >= self._input:
                return SPENT
        elif paged > self._chunk:
            tokens = self._chunk // self.page * self.page
            if tokens <= 0:
                return SPENT
            return self._take(seq, tokens)
        return self._take(seq, seq.tokens)

    def _take(self, seq: WaitingSeq, tokens: int) -> str:
        self.cut = tokens < seq.tokens
        whole = self._blocks(seq.cached_tokens + (tokens if self._by_chunk else seq.tokens))
        self.blocks += max(whole - seq.kept_blocks, 0)
        self._spend(seq.id, tokens, 0 if self.cut else self._clipped(seq.id))
        return self.verdict()

    def _add_to_its_end(self, seq: WaitingSeq, unheld: int) -> str:
        """`add_one_req_ignore_eos`: the pool has to last at each of the ends to come, first to last."""
        needed = self.paged(seq.tokens) + self.page + unheld * self.page
        free = self._available - self._now
        if needed > min(free, self._left):
            return NO_MEMORY
        life = self._life(seq.id, seq.cached_tokens + seq.tokens)
        if self._lives is None:
            lives = [life, *(self._life(each.seq.id, each.prompt + each.emitted) for each in self._running)]
            lives += [self._goes_on] if self._goes_on is not None else []
            self._lives = sorted((life for life in lives if life[0] > 0), key=lambda life: life[0])
        elif life[0] > 0:
            # Behind the last one nothing is put there, but ahead of it.
            last = max(len(self._lives) - 1, 0)
            at = next((i for i, other in enumerate(self._lives) if life[0] <= other[0]), last)
            self._lives.insert(at, life)
        free -= needed
        for i, (left, holds) in enumerate(self._lives):
            n = len(self._lives) - i
            if free - left * n <= IGNORE_EOS_RESERVE_TOKENS * n:
                return NO_MEMORY
            free += holds
        self._available -= unheld * self.page
        if self._chunk is None or seq.tokens <= self._chunk:
            return self._take(seq, seq.tokens)
        return self._take(seq, self._chunk) if self._chunk > 0 else SPENT

    def _life(self, id_: int, tokens: int) -> tuple[int, int]:
        """Tokens that it may still emit, and tokens that it frees then."""
        return self.max_new(id_) - (tokens - self.prompt(id_)), tokens
