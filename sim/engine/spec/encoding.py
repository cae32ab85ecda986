"""A stage before the prompt is computed: what comes with it, such as images, is encoded on machines of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from policies.routers import Router, knowledge_of
from sim.engine.spec.images import Image
from sim.engine.tiers.links import LinkSpec

ENCODE: Final = "encode"


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """A machine that encodes, first come, first served."""

    request_s: Callable[[int], float] | None = field(default=None, hash=False)
    """Seconds that a request takes, by the size of what is encoded for it; None: none."""
    together_s: Callable[[tuple[int, ...]], float] | None = field(default=None, hash=False)
    """Seconds that the images of a batch take together beside `request_s`, by the numbers of their sizes; None: none."""
    batch_s: float = 0.0
    """Seconds that a batch takes beside its requests."""
    max_batch: int = 1
    """Requests that are encoded together, and end together."""
    cache: int = 0
    """Embeddings of images that it keeps, those that were used longest ago going first; 0: none, and every image is encoded."""
    link: LinkSpec
    """Carries what it has encoded to the machines that compute prompts."""

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch is at least 1; got {self.max_batch}")
        if self.cache < 0:
            raise ValueError(f"cache is at least 0; got {self.cache}")


@dataclass(frozen=True, kw_only=True)
class EncodeSpec:
    """The stage: its machines, and what there is to encode."""

    stage: ClassVar[str] = ENCODE

    machines: tuple[EncoderSpec, ...]
    """Numbered after those that compute prompts and decode."""
    router: Router
    """Chooses among them."""
    sizes: Sequence[int] = field(hash=False)
    """The size of what is to be encoded, for each request; 0: nothing, and its prompt is computed at once."""
    images: Sequence[tuple[Image, ...]] | None = field(default=None, hash=False)
    """The images of each request, whose embeddings are its size; None: sizes are all that is known."""
    bytes_per_unit: float = 0.0
    """Bytes that are sent for each unit of size."""

    def __post_init__(self) -> None:
        if knowledge_of(self.router) is not None:
            raise ValueError(
                f"router {type(self.router).__name__} asks for more than loads as they are, which encoders do not report; choose "
                "round_robin, random, least_outstanding or power_of_two"
            )
        if not self.machines:
            raise ValueError("a stage that encodes has machines; got none")
        if min(self.sizes, default=0) < 0:
            raise ValueError(f"sizes are at least 0; got {min(self.sizes)}")
        if self.images is None and any(each.cache or each.together_s is not None for each in self.machines):
            raise ValueError("cache and together_s of a machine ask which images requests have; give images")
        if self.bytes_per_unit < 0:
            raise ValueError(f"bytes_per_unit is at least 0; got {self.bytes_per_unit}")

    @property
    def caches(self) -> bool:
        """Whether some machine keeps images."""
        return any(each.cache for each in self.machines)
