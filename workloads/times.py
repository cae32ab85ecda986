"""Times as logs write them: ISO 8601 and its kin, and numbers whose unit their size tells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, TypeGuard

from workloads.columns import NS_PER_S

UNITS_NS = {"s": NS_PER_S, "ms": 1_000_000, "us": 1_000, "ns": 1}
_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_ISO = re.compile(
    r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})(?:[T ]\s*(\d{1,2}):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?)?"
    r"\s*(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)?",
    re.IGNORECASE,
)
_NGINX = re.compile(r"\[?(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-]\d{4})\]?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def number_of(value: Any) -> Decimal | int | None:
    """The number that a cell holds, exactly as it prints; None where it holds none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float | str):
        if isinstance(value, str):
            # Most cells are digits or dates, which a Decimal is slow to tell.
            if value.isdigit() and value.isascii():
                return int(value)
            if ":" in value or "_" in value:
                return None
        try:
            number = Decimal(value.strip() if isinstance(value, str) else repr(value))
        except InvalidOperation:
            return None
        return number if number.is_finite() else None
    return None


def unit_by_size(largest: Decimal | int) -> tuple[str, bool]:
    """The unit of times of which *largest* is the largest, and whether they count from 1970: a date after 1973 tells it.

    Seconds since 1970 are 10^8 to 10^11 then, milliseconds 10^11 to 10^14, and so on. Smaller numbers are seconds from some zero.
    """
    for unit, least in (("ns", 10**17), ("us", 10**14), ("ms", 10**11), ("s", 10**8)):
        if largest >= least:
            return unit, True
    return "s", False


def unit_word(unit: str) -> str:
    return _WORDS[unit]


def text_ns(text: str) -> tuple[int, bool] | None:
    """Nanoseconds since 1970 of a date with a time, and whether it says its zone (UTC is taken where not); None for no date."""
    text = text.strip()
    if found := _ISO.fullmatch(text):
        year, month, day, hour, minute, second, fraction, zone = found.groups()
    elif found := _NGINX.fullmatch(text):
        day, name, year, hour, minute, second, zone = found.groups()
        fraction, month = None, str(_MONTHS.index(name) + 1) if name in _MONTHS else "0"
    else:
        return None
    try:
        days = date(int(year), int(month), int(day)).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    h, m, s = int(hour or 0), int(minute or 0), int(second or 0)
    if h > 23 or m > 59 or s > 60:
        return None
    whole = ((days * 24 + h) * 60 + m) * 60 + s
    if zone and zone[0] in "+-":
        offset = int(zone[1:3]) * 3600 + int(zone[-2:] if len(zone) > 3 else 0) * 60
        whole -= offset if zone[0] == "+" else -offset
    return whole * NS_PER_S + int((fraction or "0")[:9].ljust(9, "0")), bool(zone)


def is_format(unit: str | None) -> TypeGuard[str]:
    """Whether what is said of a column of times is how its dates are written."""
    return unit is not None and "%" in unit


def _by_format(values: Sequence[Any], form: str) -> tuple[list[int | None], int | None, str]:
    found: list[int | None] = [None] * len(values)
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            at = datetime.strptime(str(value).strip(), form)
        except ValueError:
            return found, row, ""
        since = at.replace(tzinfo=at.tzinfo or UTC) - _EPOCH
        found[row] = (since.days * 86_400 + since.seconds) * NS_PER_S + since.microseconds * 1_000
    said = f"written as {form}"
    return found, None, said if "%z" in form else f"{said}, and taken as UTC, as no zone is said"


def moments_ns(values: Sequence[Any], unit: str | None) -> tuple[list[int | None], int | None, str]:
    """Nanoseconds of a column of times, the first row that holds none though it is not empty (None: there is no such), and what
    was taken for granted, in words ("" for nothing). *unit*: of numbers; found by their size where it is None; or the format of
    dates, by the codes of `strptime`."""
    if is_format(unit):
        return _by_format(values, unit)
    numbers = [number_of(each) if each is not None else None for each in values]
    largest = max((each for each in numbers if each is not None), default=None)
    from_1970 = True
    said = ""
    if largest is not None:
        if unit is None:
            unit, from_1970 = unit_by_size(largest)
            since = "since 1970, by their size" if from_1970 else "from a zero of its own, too small for a date"
            said = f"read as {_WORDS[unit]} {since}"
        scale = UNITS_NS[unit]
        found: list[int | None] = [None if each is None else round(each * scale) for each in numbers]
    else:
        found = [None] * len(values)
    zoneless = False
    for row, value in enumerate(values):
        if value is None or found[row] is not None:
            continue
        if isinstance(value, datetime):
            value = value.isoformat()
        read = text_ns(value) if isinstance(value, str) else None
        if read is None or (largest is not None and not from_1970):
            return found, row, said
        found[row] = read[0]
        zoneless = zoneless or not read[1]
    if zoneless:
        said = "taken as UTC, as no zone is said"
    return found, None, said
