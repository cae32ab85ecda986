"""Images that come with prompts: how many of which size, and which of them are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from workloads.columns import IntArray, int_column
from workloads.lengths import LengthDistribution
from workloads.streams import Stream, stream
from workloads.workload import Workload

W = TypeVar("W", bound=Workload)

NUMBERED_FROM: Final = 1 << 40
"""Numbers from here on are of images that a trace does not number; each has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnImages:
    """Images for each request, drawn apart from all else."""

    per_request: LengthDistribution
    width: LengthDistribution
    height: LengthDistribution
    """Pixels."""
    distinct: int | None = None
    """Different images that there are, each of one size and asked for equally often; None: every image is another."""

    def on(self, workload: W, seed: int) -> W:
        """The same requests with images; ValueError where they have some."""
        if workload.image_offsets is not None:
            raise ValueError("the trace says which images there are; leave workload.images out")
        rng = stream(seed, Stream.IMAGES)
        counts = self.per_request.sample(rng, len(workload))
        n = int(counts.sum())
        kinds = n if self.distinct is None else self.distinct
        width, height = (each.sample(rng, kinds) for each in (self.width, self.height))
        for name, pixels in (("width", width), ("height", height)):
            if (pixels < 1).any():
                raise ValueError(
                    f"workload.images.{name} is at least 1 pixel; the distribution gives {int(pixels.min())}"
                )
        content = np.arange(n, dtype=np.int64) if self.distinct is None else rng.integers(self.distinct, size=n)
        return replace(
            workload,
            image_offsets=np.concatenate(([0], np.cumsum(counts))),
            image_width=width[content],
            image_height=height[content],
            image_content=content,
        )


def parse_images(text: str) -> list[tuple[int, int, int]]:
    """Width, height and number of the images of a cell such as "1024x768#7 640x480": images of one number are the same, and one
    without has -1. ValueError for anything else."""
    found = []
    for word in text.split():
        size, _, content = word.partition("#")
        width, _, height = size.partition("x")
        numbers = (width, height, content) if "#" in word else (width, height)
        if not all(each.isascii() and each.isdigit() and len(each) < 13 for each in numbers):
            raise ValueError(f"an image is WIDTHxHEIGHT or WIDTHxHEIGHT#NUMBER; got {word!r}")
        found.append((int(width), int(height), int(content) if content else -1))
    return found


def columns_of(cells: list[list[tuple[int, int, int]]]) -> dict[str, IntArray]:
    """The columns of a workload from the images of each request; those without a number are different from all others."""
    images = [image for cell in cells for image in cell]
    content = np.array([number for _, _, number in images], dtype=np.int64)
    unnamed = content < 0
    content[unnamed] = NUMBERED_FROM + np.arange(int(unnamed.sum()))
    return {
        "image_offsets": np.concatenate(([0], np.cumsum([len(cell) for cell in cells]))).astype(np.int64),
        "image_width": int_column([width for width, _, _ in images], "image_width"),
        "image_height": int_column([height for _, height, _ in images], "image_height"),
        "image_content": content,
    }


def joined(parts: Sequence[Workload], *, shared: bool) -> dict[str, Any]:
    """The images of several workloads one behind the other. *shared*: images of one number are the same in all of them."""
    if all(part.image_offsets is None for part in parts):
        return {}
    columns: dict[str, list[IntArray]] = {name: [] for name in ("image_width", "image_height", "image_content")}
    counts, base = list[IntArray](), 0
    for part in parts:
        counts.append(
            np.zeros(len(part), dtype=np.int64) if part.image_offsets is None else np.diff(part.image_offsets)
        )
        if part.image_width is None or part.image_height is None or part.image_content is None:
            continue
        columns["image_width"].append(part.image_width)
        columns["image_height"].append(part.image_height)
        named = part.image_content < NUMBERED_FROM
        columns["image_content"].append(np.where(named, part.image_content + base, NUMBERED_FROM))
        base += 0 if shared else int(part.image_content[named].max(initial=-1)) + 1
    found = {name: np.concatenate(each) for name, each in columns.items()}
    unnamed = found["image_content"] == NUMBERED_FROM
    found["image_content"][unnamed] += np.arange(int(unnamed.sum()))
    return {"image_offsets": np.concatenate(([0], np.cumsum(np.concatenate(counts)))), **found}


def cells_of(workload: Workload) -> list[str] | None:
    """The images of each request as `parse_images` reads them; None where nobody says."""
    if workload.image_offsets is None:
        return None
    return [
        " ".join(
            f"{width}x{height}" + (f"#{content}" if content < NUMBERED_FROM else "")
            for width, height, content in workload.images_of(row)
        )
        for row in range(len(workload))
    ]
