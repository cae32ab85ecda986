"""How far back a token sees, where that is not a number alone."""

from __future__ import annotations


class Chunk(int):
    """The `window_tokens` of a model whose local layers attend within chunks of fixed places (Llama 4).

    A token at place p (from 0) sees the p % chunk tokens before it in its chunk, and itself. Whoever takes it for a window of
    that size counts the most that can be seen.
    """

    __slots__ = ()
