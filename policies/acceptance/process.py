"""The protocol of acceptance processes, and the base of those that draft a chain."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from policies.acceptance.checks import drafted

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]


class Acceptance(Protocol):
    """An acceptance process, as decoding methods use it; see the text of the package."""

    finite: ClassVar[bool]
    """Whether only so many rounds exist, so that none may be drawn in advance."""

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray: ...

    def per_position(self, k: int) -> FloatArray: ...

    def mean_length(self, k: int) -> float: ...

    def width(self, k: int) -> int: ...


class Chain:
    """Base of processes that draft one token after another."""

    __slots__ = ()
    finite: ClassVar[bool] = False

    def per_position(self, k: int) -> FloatArray:
        raise TypeError(f"{type(self).__name__} does not say per_position")

    def mean_length(self, k: int) -> float:
        """Mean acceptance length at *k*, the target's own token counted: in [1, k + 1]."""
        return 1.0 + float(self.per_position(k).sum())

    def width(self, k: int) -> int:
        """Query tokens verified per sequence: k drafts and the token before them."""
        return drafted(k) + 1
