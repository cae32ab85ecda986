"""The draw of a round: one number from a hash of (seed, stream, request, round), and the thresholds that it meets."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.acceptance.checks import drafted
from policies.acceptance.process import IntArray

_MASK = (1 << 64) - 1
# splitmix64, Steele, Lea, Flood, OOPSLA 2014: Weyl increment and the two multipliers of its mixer.
_GAMMA, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROUND_STREAM, STATE_STREAM, REQUEST_STREAM = 1, 2, 3
_U64_A, _U64_B = np.uint64(_MIX_A), np.uint64(_MIX_B)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)
ONE = 1 << 53


def _weyl(n: int) -> npt.NDArray[np.uint64]:
    multiples = np.arange(n, dtype=np.uint64) * np.uint64(_GAMMA)
    multiples.flags.writeable = False
    return multiples


_WEYL = _weyl(4096)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_A) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_B) & _MASK
    return z ^ (z >> 31)


def _key(seed: int, stream: int, request_id: int) -> int:
    z = _mix((seed * _GAMMA + stream) & _MASK)
    return _mix((z + request_id * _GAMMA) & _MASK)


def draws(seed: int, stream: int | tuple[int, ...], request_id: int, round_start: int, n_rounds: int) -> IntArray:
    """Uniform whole numbers in [0, 2^53), the draw of a round being a hash of (seed, stream, request, round).

    Shape [n_rounds], or [streams, n_rounds] for several streams.
    """
    start = round_start * _GAMMA
    first: Any
    if isinstance(stream, tuple):
        first = np.array([[(_key(seed, s, request_id) + start) & _MASK] for s in stream], np.uint64)
    else:
        first = np.uint64((_key(seed, stream, request_id) + start) & _MASK)
    z = (_WEYL[:n_rounds] if n_rounds <= _WEYL.size else _weyl(n_rounds)) + first
    z ^= z >> _S30
    z *= _U64_A
    z ^= z >> _S27
    z *= _U64_B
    z ^= z >> _S31
    z >>= _S11
    return z.view(np.int64)


def count_below(draws: IntArray, thresholds: IntArray) -> IntArray:
    """The number of ascending *thresholds* that each draw stays below."""
    return thresholds.size - thresholds.searchsorted(draws, side="right")


def threshold(probability: float) -> int:
    """A draw stays below it with that probability, to 2^-53; never at 0, always at 1."""
    return round(probability * ONE)


@lru_cache(maxsize=4096)
def survival_thresholds(survival: tuple[float, ...]) -> IntArray:
    """Ascending thresholds of the chances that 1, 2, ... drafts survive: a draw accepts as many as it is below."""
    thresholds = np.array([threshold(s) for s in reversed(survival)], dtype=np.int64)
    thresholds.flags.writeable = False
    return thresholds


def fresh_powers(alpha: float, k: int) -> IntArray:
    """The same where each of *k* drafts survives with *alpha*."""
    return np.array([round(alpha**j * ONE) for j in range(drafted(k), 0, -1)], dtype=np.int64)
