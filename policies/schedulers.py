"""Batching policies. Each is a frozen dataclass with one pure method; CONTRIBUTING.md says how to add one.

`policies.wrappers` has those that change the view or the answer of another policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

from policies.view import DECODES, UNTIL_CHANGE, Plan, ReplicaView, prompts

_DECODES_THROUGH_ARRIVALS: Final = Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


_Class = TypeVar("_Class", bound=type)


def checked_as_given(cls: _Class) -> _Class:
    """Marks a class of a compiled module whose settings are checked as they were given, by `setting_at_least` and its like.

    It is there for mypyc, which leaves a class with a decorator that it does not know an ordinary one with compiled methods. In a
    native one the settings would have become what their types say before the check, a `true` for a number of tokens 1.
    """
    return cls


def at_least(name: str, value: object, least: int) -> None:
    """ValueError but for a whole number from *least*."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}; got {value!r}")


def setting_at_least(policy: object, name: str, least: int) -> None:
    """`at_least`, of a setting as it was given."""
    at_least(name, getattr(policy, name), least)


def fraction(name: str, value: Any) -> None:
    """ValueError unless *value* is in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is a fraction in [0, 1); got {value!r}")


def setting_is_fraction(policy: object, name: str) -> None:
    """The same for a fraction."""
    fraction(name, getattr(policy, name))


def admissible_blocks(view: ReplicaView, watermark: float) -> int:
    """KV blocks that admissions may take: free, less what the decodes need now, less the watermark.

    An empty replica keeps no watermark, or a request as large as the pool would wait for ever.
    """
    reserve = int(watermark * view.total_blocks) if view.n_running else 0
    return view.free_blocks - view.growth_blocks - reserve


def chunks_within(
    view: ReplicaView, budget: int, max_sequences: int, watermark: float
) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Prompt chunks of *budget* tokens at most, unfinished prompts before new ones; and whether the queue's head is
    held up, or the seats are taken, so that an arrival could not join either."""
    chunks: list[tuple[int, int]] = []
    for partial in view.prefilling:
        if budget <= 0:
            break
        tokens = min(partial.remaining_tokens, budget)
        budget -= tokens
        chunks.append((partial.id, tokens))
    seats = max_sequences - view.n_decoding - len(view.prefilling)
    full = seats <= 0
    if view.waiting and budget > 0:
        free = admissible_blocks(view, watermark)
        for seq in view.waiting:
            free -= view.blocks_to_admit(seq)
            if budget <= 0 or seats <= 0 or free < 0:
                full = True
                break
            tokens = min(seq.tokens, budget)
            budget -= tokens or view.query_tokens
            seats -= 1
            chunks.append((seq.id, tokens))
    return tuple(chunks), full


@checked_as_given
@dataclass(frozen=True)
class Sarathi:
    """Stall-free batching (Sarathi-Serve, OSDI 2024): all decodes, then prompt chunks up to the token budget."""

    token_budget: int = 512
    max_sequences: int = 128
    watermark: float = 0.01

    def __post_init__(self) -> None:
        setting_at_least(self, "token_budget", 1)
        setting_at_least(self, "max_sequences", 1)
        setting_is_fraction(self, "watermark")

    @property
    def decodes_below(self) -> int:
        """See `policies.view.decodes_below`."""
        return min(self.token_budget, self.max_sequences)

    def plan(self, view: ReplicaView, /) -> Plan:
        n_decoding = view.n_decoding
        left = self.token_budget - n_decoding * view.query_tokens
        if n_decoding and left <= 0:
            return _DECODES_THROUGH_ARRIVALS
        if n_decoding and not view.waiting and not view.prefilling:
            return _DECODES_THROUGH_ARRIVALS if n_decoding >= self.max_sequences else DECODES
        prefilling = view.prefilling
        if len(prefilling) == 1 and prefilling[0].remaining_tokens >= left:
            return prompts(((prefilling[0].id, left),), n_decoding > 0)
        chunks, full = chunks_within(view, left, self.max_sequences, self.watermark)
        if chunks:
            return prompts(chunks, n_decoding > 0 or any(not tokens for _, tokens in chunks))
        return Plan(n_decoding > 0, (), (), UNTIL_CHANGE, full)
