"""Collectives of a library that chooses its protocol by the size of the message, whichever is fastest: a time that steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from hwmodels.kernels.collectives import moved_share
from hwmodels.kernels.fitting import Columns, Fit, errors
from hwmodels.kernels.form import KernelForm
from hwmodels.kernels.ops import none_is_free
from hwmodels.kernels.parameters import Datasheet, parameter

MEASURED_DEVICES = (2, 4, 8)


def _until(start: float) -> Any:
    return parameter(start, 1.0, 1e9, "bytes of the message up to which the protocol is taken", scales_with={})


def _least(start: float) -> Any:
    return parameter(start, 5e-7, 1e-3, "the time of its smallest message: launch, synchronisation and hops")


def _share(start: float) -> Any:
    return parameter(start, 0.005, 3.0, "share of one link direction that a long message reaches", scales_with={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedParams:
    """An all-reduce of 2, 4 and 8 devices: three protocols by size, and the link under the longest messages."""

    low_until_bytes_2: float = _until(3e4)
    mid_until_bytes_2: float = _until(3e5)
    low_s_2: float = _least(1e-5)
    mid_s_2: float = _least(3e-5)
    high_s_2: float = _least(3e-5)
    share_2: float = _share(0.1)
    low_until_bytes_4: float = _until(3e4)
    mid_until_bytes_4: float = _until(3e5)
    low_s_4: float = _least(1e-5)
    mid_s_4: float = _least(3e-5)
    high_s_4: float = _least(3e-5)
    share_4: float = _share(0.3)
    low_until_bytes_8: float = _until(3e4)
    mid_until_bytes_8: float = _until(3e5)
    low_s_8: float = _least(1e-5)
    mid_s_8: float = _least(3e-5)
    high_s_8: float = _least(5e-5)
    share_8: float = _share(0.8)


class Steps(NamedTuple):
    """The numbers of one count of devices."""

    low_until_bytes: float
    mid_until_bytes: float
    low_s: float
    mid_s: float
    high_s: float
    share: float

    @property
    def rising(self) -> Steps:
        """The same with protocols that are never faster than one before them: those that are meet in the middle."""
        levels: list[list[float]] = []
        for level in (self.low_s, self.mid_s, self.high_s):
            levels.append([level])
            while len(levels) > 1 and _middle(levels[-2]) > _middle(levels[-1]):
                last = levels.pop()
                levels[-1] += last
        pooled = [_middle(each) for each in levels for _ in each]
        return self._replace(low_s=pooled[0], mid_s=pooled[1], high_s=pooled[2])


def _middle(levels: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(levels))))


def steps_of(params: SteppedParams, devices: float) -> Steps:
    """The numbers of the least measured count that is not below *devices*, or of the largest."""
    n = next((each for each in MEASURED_DEVICES if each >= devices), MEASURED_DEVICES[-1])
    return Steps(*(getattr(params, f"{name}_{n}") for name in Steps._fields))


def stepped_s(
    params: SteppedParams,
    sheet: Datasheet,
    *,
    kind: str,
    message_bytes: Any,
    devices: Any,
    link_bytes_per_s: Any,
    rising: bool = False,
) -> Any:
    """Seconds of one collective; kinds other than an all-reduce are those of one that moves as much.

    As measured a longer message may take less time, where it brings a faster protocol. *rising*: it never does, as cost models
    ask, at the price of what both take in the middle.
    """
    n, size = np.broadcast_arrays(np.asarray(devices, float), np.asarray(message_bytes, float))
    size = size * (moved_share(kind, n) / np.maximum(moved_share("all_reduce", n), 1e-9))
    seconds = np.zeros(size.shape)
    for count in np.unique(n):
        own = steps_of(params, float(count))
        own = own.rising if rising else own
        level = np.where(size <= own.low_until_bytes, own.low_s, own.mid_s)
        level = np.where(size <= own.mid_until_bytes, level, own.high_s)
        volume_s = size * moved_share("all_reduce", count) / (link_bytes_per_s * own.share)
        seconds = np.where(n == count, np.maximum(level, volume_s), seconds)
    return none_is_free(seconds, (n > 1) & (size > 0))


@dataclass(frozen=True, slots=True)
class SteppedForm(KernelForm[SteppedParams]):
    """A form whose steps are searched rather than descended to: between two measured sizes one protocol ends."""

    def fit(
        self,
        sheet: Datasheet,
        columns: Columns,
        measured_s: Any,
        *,
        start: SteppedParams,
        shape_of: Callable[[Columns], Mapping[str, Any]] = dict,
        calls: float = 1.0,
        starts: Sequence[SteppedParams] = (),
        fixed: Sequence[str] = (),
        held_back: Any = None,
        max_points: int = 1500,
    ) -> Fit[SteppedParams]:
        """As `KernelForm.fit`; counts of devices without a row keep the numbers of *start*."""
        measured = np.asarray(measured_s, float)
        hold = np.zeros(len(measured), bool) if held_back is None else np.asarray(held_back, bool)
        shape = shape_of(columns)
        n, size = np.asarray(shape["devices"], float), np.asarray(shape["message_bytes"], float)
        link = np.broadcast_to(np.asarray(shape["link_bytes_per_s"], float), n.shape)
        values = asdict(start)
        for count in MEASURED_DEVICES:
            mine = np.flatnonzero((n == count) & ~hold)
            if len(mine):
                mine = mine[np.argsort(size[mine])]
                per_byte = float(moved_share("all_reduce", count)) / link[mine]
                found = _searched(size[mine], measured[mine] / calls, per_byte)
                values |= {f"{name}_{count}": value for name, value in found._asdict().items()}
        params = SteppedParams(**values)
        predicted = np.asarray(calls * self.seconds(params, sheet, shape), float)
        held = errors(predicted[hold], measured[hold]) if hold.any() else None
        return Fit(params=params, interval={}, fitted=errors(predicted[~hold], measured[~hold]), held_back=held)


def _threshold(last: float, first: float) -> float:
    """Where a protocol ends whose last message was *last* bytes, the next one's first *first*.

    The thresholds that are narrowed down are powers of two and three times such: 32, 256 and 384 KiB.
    """
    power = 2.0 ** np.floor(np.log2(last))
    return next((float(each) for each in (power, 1.5 * power, 2.0 * power) if last <= each < first), float(last))


def _searched(size: np.ndarray, seconds: np.ndarray, per_byte: np.ndarray) -> Steps:
    """The steps of one count of devices, rows by size, that leave the least mean error of the logarithm."""
    # The longest messages say what the link gives.
    longest = size >= 0.8 * size.max()
    share = float(np.exp(np.mean(np.log(size[longest] * per_byte[longest] / seconds[longest]))))
    volume_s = size * per_byte / share
    short = np.flatnonzero(seconds > 1.2 * volume_s)
    least_s = float(seconds.min())
    logs, best = np.log(seconds[short]), (np.inf, Steps(1.0, 1.0, least_s, least_s, least_s, share))
    pairs = itertools.pairwise(size[short].tolist())
    edges = [1.0, *(_threshold(last, first) for last, first in pairs), float(size.max())] if len(short) else []
    for first, second in itertools.combinations_with_replacement(range(1, len(edges)), 2):
        groups = [logs[:first], logs[first:second], logs[second:]]
        levels = [float(np.median(each)) if len(each) else np.nan for each in groups]
        for at in (1, 2):  # a protocol that no row shows is as the one before
            levels[at] = levels[at - 1] if np.isnan(levels[at]) else levels[at]
        cost = sum(float(np.abs(each - level).sum()) for each, level in zip(groups, levels, strict=True) if len(each))
        if cost < best[0] - 1e-12:
            low, mid, high = np.exp(levels).tolist()
            best = (cost, Steps(edges[first], edges[second], low, mid, high, share))
    return best[1]
