"""Images and clips of speech that come with prompts: how many of which size, and which of them are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np

from workloads.columns import IntArray, int_column
from workloads.lengths import LengthDistribution
from workloads.rollout import prompts_of
from workloads.streams import Stream, stream
from workloads.workload import MEDIA, Workload, taken_runs

W = TypeVar("W", bound=Workload)
Medium = Literal["image", "audio"]

NUMBERED_FROM: Final = 1 << 40
"""From here on are numbers of images and clips that a trace does not number, a different one for each."""


class Cells(NamedTuple):
    """The column of the plain format with what comes with the prompt of each request."""

    column: str
    expected: str
    """The form of a cell, in words."""


CELLS: Final[Mapping[Medium, Cells]] = {
    "image": Cells("images", "images with blanks between them, each WIDTHxHEIGHT or WIDTHxHEIGHT#NUMBER"),
    "audio": Cells("audio_s", "clips with blanks between them, each SECONDS or SECONDS#NUMBER"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Images or clips for each request, drawn from a stream of their own; all samples of a rollout's prompt have the same."""

    medium: Medium
    per_request: LengthDistribution
    size: Mapping[str, LengthDistribution]
    """The distribution of each number that is a size: `width` and `height` in pixels, or `ms`."""
    distinct: int | None = None
    """The number of different ones, each of one size; None: all are different."""
    zipf: float = 0.0
    """The i-th of them, from 1, is asked for in proportion to i to the power of minus this; 0: all equally often."""

    def on(self, workload: W, seed: int) -> W:
        """The same requests with images or clips; ValueError where they have some already."""
        *sizes, contents = MEDIA[self.medium]
        offsets, key = f"{self.medium}_offsets", _KEYS[self.medium]
        if getattr(workload, offsets) is not None:
            raise ValueError(f"the trace says which {key} there are; leave workload.{key} out")
        rng = stream(seed, _STREAMS[self.medium])
        of_row = prompts_of(workload)
        counts = self.per_request.sample(rng, int(of_row.max(initial=-1)) + 1)
        n = int(counts.sum())
        kinds = n if self.distinct is None else self.distinct
        drawn = {name: each.sample(rng, kinds) for name, each in self.size.items()}
        for name, values in drawn.items():
            if (values < 1).any():
                setting = "milliseconds" if name == "ms" else f"{name} in pixels"
                raise ValueError(f"workload.{key}.{setting} is at least 1; the distribution gives {int(values.min())}")
        ends, places = taken_runs(np.concatenate(([0], np.cumsum(counts))), of_row)
        content = self._contents(rng, n)[places]
        found = {f"{self.medium}_{name}": values[content] for name, values in drawn.items()}
        assert list(found) == sizes
        return replace(workload, **found, **{offsets: ends, contents: content})

    def _contents(self, rng: np.random.Generator, n: int) -> IntArray:
        if self.distinct is None:
            return np.arange(n, dtype=np.int64)
        if not self.zipf:
            return rng.integers(self.distinct, size=n)
        below = np.cumsum(np.arange(1, self.distinct + 1, dtype=float) ** -self.zipf)
        return np.searchsorted(below, rng.random(n) * below[-1], side="right")


_KEYS: Final = {"image": "images", "audio": "audio"}
_STREAMS: Final = {"image": Stream.IMAGES, "audio": Stream.AUDIO}


def parse_cell(medium: Medium, text: str) -> list[tuple[int, ...]]:
    """Sizes and number of the images or clips of a cell such as "1024x768#7 640x480" or "12.5#3 4": those of one number are the
    same, and one without has -1. ValueError for anything else."""
    found = []
    for word in text.split():
        size, _, content = word.partition("#")
        if ("#" in word and not _is_number(content)) or not (sizes := _size_of(medium, size)):
            raise ValueError(f"expected {CELLS[medium].expected}; got {word!r}")
        found.append((*sizes, int(content) if content else -1))
    return found


def _size_of(medium: Medium, text: str) -> tuple[int, ...]:
    """Pixels of the sides, or milliseconds; empty for what is no size."""
    if medium == "image":
        width, _, height = text.partition("x")
        sizes = (int(width), int(height)) if _is_number(width) and _is_number(height) else ()
        return sizes if all(sizes) else ()
    seconds, dot, part = text.partition(".")
    if not _is_number(seconds) or (dot and not _is_number(part)):
        return ()
    milliseconds = round(float(text) * 1000)
    return (milliseconds,) if milliseconds else ()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 13


def columns_of(medium: Medium, cells: Sequence[list[tuple[int, ...]]]) -> dict[str, IntArray]:
    """The columns of a workload from what each request has; those without a number are different from all others."""
    each = [one for cell in cells for one in cell]
    columns = {name: int_column([one[at] for one in each], name) for at, name in enumerate(MEDIA[medium][:-1])}
    content = np.array([one[-1] for one in each], dtype=np.int64)
    unnamed = content < 0
    content[unnamed] = NUMBERED_FROM + np.arange(int(unnamed.sum()))
    offsets = np.concatenate(([0], np.cumsum([len(cell) for cell in cells]))).astype(np.int64)
    return {f"{medium}_offsets": offsets, **columns, MEDIA[medium][-1]: content}


def joined(parts: Sequence[Workload], *, shared: bool) -> dict[str, Any]:
    """Images and clips of several workloads one behind the other. *shared*: those of one number are the same in all of them."""
    found: dict[str, Any] = {}
    for medium in MEDIA:
        found |= _joined(parts, medium, shared)
    return found


def _joined(parts: Sequence[Workload], medium: str, shared: bool) -> dict[str, Any]:
    offsets, (*sizes, contents) = f"{medium}_offsets", MEDIA[medium]
    if all(getattr(part, offsets) is None for part in parts):
        return {}
    columns: dict[str, list[IntArray]] = {name: [] for name in MEDIA[medium]}
    counts, base = list[IntArray](), 0
    for part in parts:
        if getattr(part, offsets) is None:
            counts.append(np.zeros(len(part), dtype=np.int64))
            continue
        counts.append(np.diff(getattr(part, offsets)))
        for name in sizes:
            columns[name].append(getattr(part, name))
        content = getattr(part, contents)
        named = content < NUMBERED_FROM
        columns[contents].append(np.where(named, content + base, NUMBERED_FROM))
        base += 0 if shared else int(content[named].max(initial=-1)) + 1
    found = {name: np.concatenate(each) for name, each in columns.items()}
    unnamed = found[contents] == NUMBERED_FROM
    found[contents][unnamed] += np.arange(int(unnamed.sum()))
    return {offsets: np.concatenate(([0], np.cumsum(np.concatenate(counts)))), **found}


def cells_of(workload: Workload, medium: Medium) -> list[str] | None:
    """The images or clips of each request as `parse_cell` reads them; None where no request has any."""
    if getattr(workload, f"{medium}_offsets") is None:
        return None
    return [
        " ".join(
            (f"{size[0]}x{size[1]}" if medium == "image" else str(size[0] / 1000))
            + (f"#{content}" if content < NUMBERED_FROM else "")
            for *size, content in workload.media_of(medium, row)
        )
        for row in range(len(workload))
    ]
