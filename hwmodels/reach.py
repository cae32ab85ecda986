"""The reach of a token into the past, where that is not a number alone."""

from __future__ import annotations

from typing import Any


class Chunk(int):
    """The `window_tokens` of a model whose local layers attend within chunks of fixed places (Llama 4).

    A token at place p (from 0) sees the p % chunk tokens before it in its chunk, and itself. Whoever takes it for a window of
    that size counts the most that can be seen.
    """

    __slots__ = ()


Window = Any
"""An int, a `Chunk` or None. Compiled code makes a plain number of what is declared as `int` and forgets its class."""
