"""Result files spoiled at random: bytes flipped, ends cut off, keys lost, doubled or of another kind."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2].parent / "shared" / "serving" / "fixtures"
STRANGE: tuple[Any, ...] = (
    None, "", "abc", True, -1, 0, 1e308, -1e308, float("nan"), float("inf"), 10**400, [], {}, [None], [1, "a"], {"a": 1},
    [[-1.0]], "1e999", "\x00", "🙂",
)  # fmt: skip


def samples() -> list[tuple[str, bytes]]:
    """The published files, those of several MB cut to their first lines, and our own of tools that publish none."""
    from tests.bench import own

    found = [(path.name, path.read_bytes()) for path in sorted(FIXTURES.glob("*/*"))] if FIXTURES.is_dir() else []
    found = [(name, b"\n".join(data.splitlines()[-6:]) if len(data) > 200_000 else data) for name, data in found]
    return [*found, *((name, text.encode()) for name, text in own.FILES.items())]


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """*data* with one to three things wrong."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice((_flipped, _cut, _other_line, _other_value, _other_value, _other_value, _other_number))(
            data, rng
        )
    return data


def _flipped(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        if found:
            found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _other_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        at = rng.randrange(len(lines))
        lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [lines[at].rstrip()]))
    return b"".join(lines)


def _other_number(data: bytes, rng: random.Random) -> bytes:
    """A number of the text in place of another."""
    places = list(re.finditer(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", data))
    if not places:
        return data
    place = rng.choice(places)
    new = rng.choice((b"-1", b"0", b"nan", b"1e300", b"-1e-9", b"9" * 5000, b"x", b"", b"inf"))
    return data[: place.start()] + new + data[place.end() :]


def _other_value(data: bytes, rng: random.Random) -> bytes:
    """A key of a JSON document lost, doubled, or with a value of another kind."""
    try:
        document = json.loads(data)
    except ValueError:
        return _other_line(data, rng)
    holders = []

    def gather(value: Any) -> None:
        if isinstance(value, dict | list) and value:
            holders.append(value)
            for each in value.values() if isinstance(value, dict) else value[:30]:
                gather(each)

    gather(document)
    if not holders:
        return data
    holder = rng.choice(holders[:50] if rng.random() < 0.7 else holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.random()
    if kind < 0.3:
        del holder[key]
    elif kind < 0.4 and isinstance(holder, dict):
        # A doubled key can only be written by hand.
        text = json.dumps(document)
        pair = f"{json.dumps(key)}: {json.dumps(holder[key])}"
        return text.replace(pair, f"{pair}, {pair}", 1).encode()
    else:
        holder[key] = rng.choice(STRANGE)
    return json.dumps(document).encode()
