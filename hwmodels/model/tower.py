"""The encoder of images or of speech ahead of a language model: a transformer, and what an image or a clip is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from hwmodels.model.fields import Config, object_of

Family = TypeVar("Family")


class Encoded(NamedTuple):
    """An image or a clip of speech as the encoder sees it, and as the prompt does."""

    sequences: int
    """Sequences of positions, each of which attends to itself alone: tiles, the whole image, or half a minute of speech."""
    positions: int
    """Positions of each: patches of an image, or frames of speech behind the convolutions."""
    embeddings: int
    """Vectors that come out, which take the place of tokens in the prompt."""
    prompt_tokens: int
    """Those, and the tokens that mark where an image, a tile, a row or a clip begins or ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder: a transformer without a cache, and the projection of its positions to the language model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    out: int
    """Width of an embedding."""
    gated: bool = False
    stem: tuple[tuple[int, int, int], ...]
    """The products ahead of the layers: rows for each position, k and n. A convolution is one."""
    projection: tuple[tuple[int, int], ...]
    """The products (k, n) for each embedding."""
    full_layers: int
    """Layers in which all positions of a sequence see each other; in the others those of a window do."""
    window: int = 0
    """Positions of a window."""

    @property
    def params(self) -> int:
        """Parameters of the matrices."""
        layer = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * layer + sum(k * n for _, k, n in self.stem) + sum(k * n for k, n in self.projection)

    @property
    def weight_bytes(self) -> float:
        """In 16 bits, which checkpoints keep for the encoder where the language model has fewer."""
        return 2.0 * self.params


def family_of(
    families: Mapping[str, Family], config: Mapping[str, Any], section: str, where: str
) -> tuple[Family, Config] | None:
    """The family of a multimodal model, by the `model_type` of its config.json, and the *section* that describes its encoder; None
    where the section is missing or empty, or the family is not modelled."""
    given = object_of(config.get(section), f"{where}: {section}")
    family = families.get(str(config.get("model_type")))
    return None if family is None or not given else (family, Config(given, f"{where}: {section}"))
