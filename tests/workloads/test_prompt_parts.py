"""Blocks of prompts with images are equal where their tokens are, by a count that knows every token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from workloads import Trace
from workloads.prompt_parts import Part, named_by_content

Token = tuple[Any, ...]


def random_prompts(seed: int) -> tuple[Trace, list[list[Part]], list[list[Token]], int]:
    """Requests whose text begins alike, with images anywhere in it; the tokens of each, and those of a KV block."""
    rng = random.Random(seed)
    text_block, block = rng.choice([1, 3, 4, 8, 16]), rng.choice([2, 4, 8, 16])
    named = rng.random() < 0.8
    sizes = [rng.randrange(1, 40) for _ in range(4)]
    places = [rng.randrange(50) for _ in range(2)]
    parts: list[list[Part]] = []
    ids: list[list[int]] = []
    tokens: list[list[Token]] = []
    prompts, outputs = [], []
    for row in range(8):
        own = rng.randrange(1, 60)
        shared = [rng.randrange(2) for _ in range(rng.randrange(6))] if named else []
        text: list[Token] = [("text", tuple(shared[: i + 1]), k) for i in range(len(shared)) for k in range(text_block)]
        # A last block of text may be partly filled, or own text be behind it.
        text = text[: max(0, len(text) - rng.randrange(text_block))] if rng.random() < 0.5 else text
        if len(text) == len(shared) * text_block:
            text += [("own", row, k) for k in range(own)]
        mine, prompt = [], list(text) or [("own", row, 0)]
        spoken = 0
        for place in sorted(rng.choice(places) for _ in range(rng.randrange(3))):
            content = rng.randrange(4)
            first = min(place, len(prompt) - spoken) + spoken
            mine.append(Part(content, first, sizes[content]))
            prompt[first:first] = [("part", content, k) for k in range(sizes[content])]
            spoken += sizes[content]
        answer = rng.randrange(1, 9) if rng.random() < 0.5 and len(text) > len(shared) * text_block else 0
        parts.append(mine)
        ids.append(shared)
        tokens.append(prompt)
        prompts.append(len(prompt))
        outputs.append(answer)
    blocks: dict[str, Any] = {}
    if named:
        blocks = {
            "prefix_blocks": np.array([each for mine in ids for each in mine], dtype=np.int64),
            "prefix_offsets": np.cumsum([0, *map(len, ids)]),
            "prefix_block_tokens": text_block,
        }
    trace = Trace(arrival_ns=list(range(8)), prompt_tokens=prompts, output_tokens=outputs, **blocks)
    return trace, parts, tokens, block


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("first", range(0, 400, 200))
def test_two_prompts_share_as_many_blocks_as_they_have_full_blocks_of_equal_tokens(first: int) -> None:
    for seed in range(first, first + 200):
        assert_shared(seed)


def assert_shared(seed: int) -> None:
    trace, parts, tokens, block = random_prompts(seed)
    named = named_by_content(trace, parts, block)
    size = named.prefix_block_tokens
    assert size is not None
    assert block % size == 0
    for i in range(len(trace)):
        for j in range(i):
            equal = common(tokens[i], tokens[j])
            shared = common(named.prefix_of(i).tolist(), named.prefix_of(j).tolist())
            # A last block that is partly filled is equal as far as both have it.
            assert min(shared * size, len(tokens[i]), len(tokens[j])) // size == equal // size


def test_adapters_have_blocks_of_their_own() -> None:
    trace = Trace(arrival_ns=[0, 1, 2], prompt_tokens=[40] * 3, output_tokens=[1] * 3, adapter=np.array([0, 1, 0]))
    named = named_by_content(trace, [[Part(7, 0, 32)]] * 3, 16)
    first, other, again = (named.prefix_of(row).tolist() for row in range(3))
    assert first == again
    assert set(first).isdisjoint(other)
