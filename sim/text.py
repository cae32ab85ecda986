"""Words for people: durations, differences of shares, and what a message says of a name or value that cannot be used."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def seconds_text(value_s: float) -> str:
    """A duration for people: '8.31 ms', '1.20 s', '3.5 min'."""
    if value_s == 0:
        return "0 s"
    if value_s < 0.9995e-3:
        return f"{value_s * 1e6:.3g} µs"
    if value_s < 0.9995:
        return f"{value_s * 1e3:.3g} ms"
    return f"{value_s:.3g} s" if value_s < 600 else f"{value_s / 60:.3g} min"


def within_text(value: float, half_width: float | None, text: Callable[[float], str]) -> str:
    """A figure for people with the half-width of its interval: '8.31 ms ± 420 µs'; the figure alone where there is no interval, or
    one that lies below three digits of the figure."""
    if not half_width or half_width < 5e-4 * abs(value):
        return text(value)
    return f"{text(value)} ± {text(half_width)}"


_SHARES = re.compile(
    r"(^|\.)(slo_attainment|attainment|mfu|mbu|busy_fraction|hit_rate|block_hit_rate|best_hit_rate|draft_acceptance_rate|availability"
    r"|link_use|\w*share|kv_utilization\.\w+)$"
)


def is_share(metric: str) -> bool:
    """Whether the dotted *metric* is a share of a whole, whose differences are said in points."""
    return _SHARES.search(metric) is not None


def points_text(change: float, *, digits: int = 1, signed: bool = True) -> str:
    """A difference of two shares for people: '+1.3 points'."""
    return f"{100 * change:{'+' if signed else ''}.{digits}f} points"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The valid name that *word* was probably meant to be, first one of its parts in another order; None where none is close."""
    choices = list(choices)
    same = [each for each in choices if _parts(each) == _parts(word)]
    close = same or difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    return close[0] if close else None


def _parts(name: str) -> list[str]:
    return sorted(re.split(r"[\W_]+", name.lower()))


def unknown(what: str, word: str, choices: Iterable[str], *, hint: str = "") -> str:
    """'what is not ...' with the nearest valid name, or all of them where none is near."""
    choices = list(choices)
    close = nearest(word, choices)
    way_out = f"did you mean {close}?" if close else f"valid here: {', '.join(choices) or 'nothing'}"
    return f"{what}; {way_out}{hint}"


def shown(value: Any) -> str:
    """*value* as it is quoted in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def without_addresses(text: str) -> str:
    """*text* with functions by their names, which addresses follow in their `repr`."""
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", text)


def told_apart(texts: Sequence[str]) -> list[str]:
    """Sections in JSON by as few of their settings as tell them apart; a text that is no section as it is.

    >>> told_apart([f'{{"policy": "vllm", "watermark": 0, "max_num_seqs": {n}}}' for n in (8, 16)])
    ['vllm, max_num_seqs 8', 'vllm, max_num_seqs 16']
    """
    sections = {text: _settings(text) for text in texts if text.startswith("{")}
    keys = list(dict.fromkeys(key for settings in sections.values() for key in settings))
    said = [key for key in keys if key in _NAMES]

    def label(text: str) -> str:
        settings = sections.get(text, {})
        return ", ".join(
            settings[key] if key in _NAMES else f"{key} {settings[key]}" for key in said if key in settings
        )

    for key in keys:
        told = len(set(map(label, sections)))
        if told < len(sections) and key not in said:
            said.append(key)
            if len(set(map(label, sections))) == told:
                said.pop()
    labels = [label(text) or text for text in texts]
    return labels if len(set(labels)) == len(set(texts)) else list(texts)


_NAMES = ("policy", "method")
"""Settings whose values say what a section is."""


def _settings(text: str) -> dict[str, str]:
    """The settings of a section in JSON by dotted key; none where it is no such text."""
    try:
        rest = list(json.loads(text).items())
    except ValueError:
        return {}
    found: dict[str, str] = {}
    while rest:
        key, value = rest.pop(0)
        if isinstance(value, dict) and value:
            rest[:0] = [(f"{key}.{inner}", each) for inner, each in value.items()]
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def short_keys(keys: Sequence[str]) -> list[str]:
    """Dotted keys by as few of their last parts as tell them apart; those of a pool or a link have its name before these."""
    parts = [key.split(".") for key in keys]
    owner = [mine[1] if mine[0] in ("pools", "links") and len(mine) > 2 else "" for mine in parts]
    found = []
    for mine, of in zip(parts, owner, strict=True):
        least = len(mine) - (2 if of else 0)
        same = [each for each, other in zip(parts, owner, strict=True) if other == of]
        n = next((n for n in range(1, least) if sum(each[-n:] == mine[-n:] for each in same) == 1), least)
        found.append(".".join(([of] if of else []) + mine[-n:]))
    return [short if found.count(short) == 1 else key for short, key in zip(found, keys, strict=True)]
