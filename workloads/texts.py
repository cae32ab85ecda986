"""Tokens of texts, and names for what is in them."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

_PIECE: Final = re.compile(r" ?[A-Za-z]{1,6}|[0-9]{1,3}| ?[^\sA-Za-z0-9]|\s{1,16}")
MOST_CHARACTERS: Final = 16
"""A piece of the approximation is at most so long."""


class Tokens(Protocol):
    """Counts and names tokens."""

    @property
    def told(self) -> str:
        """The way in which they are counted, in words."""
        ...

    def of(self, text: str, /) -> Sequence[int]:
        """Numbers of the tokens of *text*, equal where the tokens are."""
        ...

    def least(self, characters: int, /) -> int:
        """Tokens that so many characters have at least."""
        ...


class Approximate:
    """Words in pieces of up to six letters, numbers of up to three digits, every other character by itself.

    English prose has about 4.4 characters a piece, as byte-pair vocabularies of 100,000 tokens and more have; code and other
    languages are further off.
    """

    told = "approximate: pieces of up to six letters or three digits, every other character by itself"

    def of(self, text: str, /) -> Sequence[int]:
        return [crc32(piece.encode("utf-8", "surrogatepass")) for piece in _PIECE.findall(text)]

    def least(self, characters: int, /) -> int:
        return characters // MOST_CHARACTERS


class FromFile:
    """A tokenizer of Hugging Face's `tokenizers`, read from a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        """ValueError where the package is missing or *path* cannot be read."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"the tokenizer {file} does not exist; give a tokenizer.json or the folder that it lies in"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                "a tokenizer needs the package tokenizers, which is not installed: pip install tokenizers, or leave it out to "
                "count tokens approximately"
            ) from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # whatever the package's own code raises
            raise ValueError(f"{file} is not a tokenizer.json that `tokenizers` reads: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._longest = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self.told = f"{file}, with the special tokens that it adds"

    def of(self, text: str, /) -> Sequence[int]:
        return self._tokenizer.encode(text).ids

    def least(self, characters: int, /) -> int:
        return characters // self._longest


def digests(tokens: Sequence[int], block: int) -> list[int]:
    """A name from 0 to 2**63 - 1 for the content of every full block of *block* tokens."""
    named = array("Q", tokens)
    return [
        int.from_bytes(blake2b(named[at : at + block].tobytes(), digest_size=8).digest(), "little") >> 1
        for at in range(0, len(named) - block + 1, block)
    ]


def chat_text(messages: Sequence[tuple[str, str]]) -> str:
    """The messages, (role, content) each, as one prompt in the manner of ChatML, the answer's beginning included."""
    parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
    return "".join(parts) + "<|im_start|>assistant\n"


def tokens_of(tokenizer: str | os.PathLike[str] | None) -> Tokens:
    """The tokens by the file or folder of a *tokenizer*; approximate ones without. ValueError as `FromFile` raises it."""
    return Approximate() if tokenizer is None else FromFile(Path(tokenizer))
