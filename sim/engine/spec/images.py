"""Images that a model encodes in its own iterations: those that stand in prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Image(NamedTuple):
    """An image in a prompt."""

    content: int
    """Equal for equal images."""
    first: int
    """The token of the prompt at which it begins."""
    tokens: int
    """Tokens of the prompt that it takes."""
    embeddings: int
    """Vectors that its encoding leaves in the cache."""
    size: int
    """A name for its size, by which its encoding is priced."""


@dataclass(frozen=True, kw_only=True)
class ImagesSpec:
    """Encoding beside the language model, in its steps."""

    of: Sequence[tuple[Image, ...]] = field(hash=False)
    """The images of each request, in their order in the prompt."""
    budget: int | None
    """Embeddings that an iteration encodes at most, of which the scheduler knows; None: as many as its chunks need, whether or not
    they can be kept."""
    cache: int
    """Embeddings that are kept."""
    seconds: Callable[[tuple[int, ...]], float] = field(hash=False)
    """Seconds of one pass over images of these sizes."""

    def __post_init__(self) -> None:
        largest = max((image.embeddings for images in self.of for image in images), default=0)
        if self.budget is not None and min(self.budget, self.cache) < max(largest, 1):
            raise ValueError(
                f"budget and cache hold at least one image, of {largest} embeddings here; got {self.budget} and {self.cache}"
            )
        for images in self.of:
            ends = 0
            for image in images:
                if image.first < ends or image.tokens < 1 or image.embeddings < 1:
                    raise ValueError(
                        f"images of a prompt stand one behind the other, with tokens of their own; got {images}"
                    )
                ends = image.first + image.tokens
