"""Texts and messages of a log as lengths and block ids: hashes only are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads.records import Rows
from workloads.texts import Tokens, chat_text, digests

BLOCK_TOKENS = 16
"""Tokens of the prompt that one id stands for."""
_SAMPLE = 200
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Lengths and blocks that the texts of a file say; all lists are of one length, an entry a request."""

    rows: list[int]
    """The row that each request is from; conversations by turns have several."""
    prompt: list[int | None]
    output: list[int | None]
    ids: list[Sequence[int]]
    """Hashes of the full blocks of the prompt and of what was answered."""
    turns: bool
    """Whether rows are conversations of which each answer is a request."""
    scale: float
    """Tokens as they are counted here for one that was logged."""
    notes: tuple[str, ...]

    @classmethod
    def read(
        cls, rows: Rows, of: Mapping[str, str], tokens: Tokens, logged: Sequence[int | None] | None, scale: float | None
    ) -> Prompts | None:
        """The prompts of *rows*; None where their column holds none. *logged*: the lengths of prompts that another column says;
        *scale*: tokens as *tokens* counts them for one of those, found here where it is None."""
        found, by_turns = _found(rows, of)
        if all(asked is None for _, asked, _ in found):
            return None
        if scale is None:
            scale = 1.0 if logged is None or by_turns else _scale(found, tokens, logged)
        # A block of so many tokens as they are counted is one of BLOCK_TOKENS of those that were logged.
        done = [_measured(asked, answer, tokens, max(1, round(BLOCK_TOKENS * scale))) for _, asked, answer in found]
        notes = [
            f"Lengths and blocks of {of['prompt']} are by tokens that are {tokens.told}; hashes of blocks alone are kept."
            if logged is None
            else f"Which prompts begin alike is found from {of['prompt']}, of which hashes of blocks alone are kept; its tokens "
            f"are {tokens.told}, {scale:.2f} for each that the log counts, by which blocks are stretched."
        ]
        if any(each is not None and each[3] for each in done):
            notes.append("Images and other parts of messages that are not text count as nothing.")
        if by_turns:
            notes.append(
                "Each answer of a conversation is a request, whose prompt is all before it; none waits for another."
            )
        return cls(
            rows=[row for row, _, _ in found],
            prompt=[None if each is None else each[0] for each in done],
            output=[None if each is None else each[1] for each in done],
            ids=[() if each is None else each[2] for each in done],
            turns=by_turns,
            scale=scale,
            notes=tuple(notes),
        )


def _found(rows: Rows, of: Mapping[str, str]) -> tuple[list[tuple[int, Any, str | None]], bool]:
    """The row, the prompt and the answer of each request, and whether rows are conversations with several."""
    answers = rows.column(of["answer"]) if "answer" in of else [None] * len(rows)
    by_turns = False
    found: list[tuple[int, Any, str | None]] = []
    for row, value in enumerate(rows.column(of["prompt"])):
        asked = _asked(value)
        if asked is None:
            found.append((row, None, None))
        elif isinstance(asked[0], tuple) and _by_turns(value):
            by_turns = True
            found += [(row, asked[:at], text) for at, (role, text) in enumerate(asked) if at and role == "assistant"]
        else:
            found.append((row, asked, _answer(answers[row])))
    return found, by_turns


def _scale(found: Sequence[tuple[int, Any, str | None]], tokens: Tokens, logged: Sequence[int | None]) -> float:
    """The number of tokens that are counted for one that was logged, by the first requests of which both are known."""
    pairs: list[tuple[int, int]] = []
    for row, asked, _ in found:
        told = logged[row]
        if asked is not None and told and (measured := _measured(asked, None, tokens, BLOCK_TOKENS)) is not None:
            pairs.append((measured[0], told))
        if len(pairs) == _SAMPLE:
            break
    return sum(counted for counted, _ in pairs) / sum(told for _, told in pairs) if pairs else 1.0


def _measured(
    asked: Any, answer: str | None, tokens: Tokens, block: int
) -> tuple[int, int | None, list[int], bool] | None:
    """Tokens of the prompt and of the answer, the names of their blocks, and whether something was not text."""
    if asked is None:
        return None
    if asked and isinstance(asked[0], int):
        told = None if answer is None else len(tokens.of(answer))
        return len(asked), told, digests(asked, block), False
    odd = False
    if isinstance(asked, list):
        odd = any("\0" in text for _, text in asked)
        asked = [(role, text.replace("\0", "")) for role, text in asked]
        if answer is None and len(asked) > 1 and asked[-1][0] == "assistant":
            asked, answer = asked[:-1], asked[-1][1]
        asked = chat_text(asked)
    named = tokens.of(asked)
    if answer is None:
        return len(named), None, digests(named, block), odd
    # As it is in the next prompt, so that the answer's blocks are found there again.
    both = tokens.of(f"{asked}{answer}<|im_end|>\n")
    length = len(tokens.of(answer))
    return len(named), length, digests(both, block)[: (len(named) + length) // block], odd


def _asked(value: Any) -> Any:
    """Messages as (role, content), a text, or numbers of tokens; None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        inner = next((value[key] for key in ("messages", "prompt", "input", "contents") if key in value), None)
        return _asked(inner) if inner is not None else _asked([value]) if "content" in value else None
    if isinstance(value, str):
        return None if value.replace(".", "").strip().isdigit() else value
    if isinstance(value, list) and value:
        if all(type(each) is int and 0 <= each < 2**63 for each in value):
            return value
        if all(isinstance(each, dict) for each in value):
            return [_message(each) for each in value]
        if all(isinstance(each, str) for each in value):
            return "\n".join(value)
    return None


def _by_turns(value: Any) -> bool:
    """Whether it is a conversation in the manner of ShareGPT, in which all answers are alike."""
    if isinstance(value, str):
        value = json.loads(value)
    return isinstance(value, list) and "from" in value[0]


def _message(each: Mapping[str, Any]) -> tuple[str, str]:
    role = str(each.get("role") or each.get("from") or "user")
    content = each.get("content", each.get("value", each.get("parts")))
    return _ROLES.get(role, role), _text(content)


def _text(content: Any) -> str:
    """The text of a message's content; NUL in it marks what is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        inner = content.get("text", content.get("content"))
        return "\0" if inner is None else _text(inner)
    if isinstance(content, list):
        return "".join(map(_text, content))
    return str(content)


def _answer(value: Any) -> str | None:
    """The text of an answer: a text, a message, or the first of a list of choices."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return _answer(value[0]) if value else None
    if isinstance(value, dict):
        inner = next(
            (value[key] for key in ("message", "choices", "text", "content") if value.get(key) is not None), None
        )
        return None if inner is None else _answer(inner)
    return value.replace("\0", "") if isinstance(value, str) else None
