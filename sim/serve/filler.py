"""The texts of answers."""

from __future__ import annotations

from typing import Final

_TEXT: Final = (
    "the of and to in is that it for was on are as with his they at be this from have or by one had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other into has "
    "more her two like him see time could no make than first been its who now people my made over did down only way find use"
)
WORDS: Final = tuple(_TEXT.split())
"""Answers consist of these words: each, with the blank before it, is one token to the tokenizers in use."""


def filler(first: int, tokens: int) -> str:
    """The text of *tokens* tokens of an answer, from its token number *first* on."""
    n = len(WORDS)
    return " " + " ".join(WORDS[(first + i) % n] for i in range(tokens)) if tokens else ""
