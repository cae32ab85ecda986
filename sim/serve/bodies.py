"""Bodies of OpenAI's interface are read, checked and refused as OpenAI-compatible servers do it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sim.errors import RooftraceError
from workloads.texts import chat_text


class Refusal(RooftraceError):
    """A request that is answered by an error of OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or _KINDS.get(status, "BadRequestError")

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


_KINDS: Final = {
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

_WITHOUT_EFFECT: Final = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "presence_penalty",
        "frequency_penalty",
    ),
    *(
        "repetition_penalty",
        "logit_bias",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "guided_json",
    ),
    *("reasoning_effort", "store", "metadata", "service_tier"),
)
"""Keys that change what is said and not, here, how long it takes: the text is filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body, checked."""

    model: str | None
    text: str | None
    """The prompt, or the messages as one; None where it is given as numbers of tokens."""
    tokens: tuple[int, ...] | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    session: str | None
    without_effect: tuple[str, ...]
    """Keys that were given and change nothing."""


def read(data: bytes) -> Mapping[str, Any]:
    """The JSON object in *data*; Refusal where it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not valid JSON; send a JSON object in UTF-8") from None
    if not isinstance(found, dict):
        raise Refusal(400, f"the body is a JSON object; got {_named(found)}")
    return found


def _named(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else kinds.get(type(value), "something else")


def _get(body: Mapping[str, Any], key: str, kind: type, what: str, default: Any = None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refusal(400, f"{key} is {what}; got {_named(value)}", param=key)
    return value


def _count(body: Mapping[str, Any], key: str, least: int) -> int | None:
    value = _get(body, key, int, "a whole number")
    if value is not None and not least <= value < 2**31:
        raise Refusal(400, f"{key} is from {least} to {2**31 - 1}; got {value}", param=key)
    return value


def asked_of(body: Mapping[str, Any], *, chat: bool) -> Asked:
    """The request that *body* asks for; Refusal where it cannot be understood, or asks for what is not served."""
    for key, only in (("n", 1), ("best_of", 1)):
        if (_count(body, key, 1) or 1) != only:
            raise Refusal(400, f"{key} is 1 here: a request is one sequence; send several requests", param=key)
    for key in ("echo", "use_beam_search"):
        if _get(body, key, bool, "true or false", False):
            raise Refusal(400, f"{key} is not served: answers are filler of the length that was asked for", param=key)
    for key in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if body.get(key) not in (None, False, 0):
            raise Refusal(400, f"{key} are not served: no model runs here", param=key)
    text, tokens = (chat_text(_messages(body)), None) if chat else _prompt(body)
    options = _get(body, "stream_options", dict, "an object", {})
    stream = _get(body, "stream", bool, "true or false", False)
    if options and not stream:
        raise Refusal(400, "stream_options are for streams; give stream: true", param="stream_options")
    longest = _count(body, "max_tokens", 1)
    if chat:
        longest = _count(body, "max_completion_tokens", 1) or longest
    least = _count(body, "min_tokens", 0) or 0
    if longest is not None and least > longest:
        raise Refusal(400, f"min_tokens is at most max_tokens, {longest}; got {least}", param="min_tokens")
    session = _get(body, "session_id", str, "a text") or _get(body, "user", str, "a text")
    priority = _get(body, "priority", int, "a whole number", 0)
    if abs(priority) >= 2**62:
        raise Refusal(400, "priority is a number of 62 bits", param="priority")
    return Asked(
        model=_get(body, "model", str, "the name of a model"),
        text=text,
        tokens=tokens,
        max_tokens=longest,
        min_tokens=least,
        ignore_eos=_get(body, "ignore_eos", bool, "true or false", False),
        stream=stream,
        include_usage=_get(options, "include_usage", bool, "true or false", False),
        continuous_usage=_get(options, "continuous_usage_stats", bool, "true or false", False),
        priority=priority,
        session=None if session is None else session[:256],
        without_effect=tuple(key for key in _WITHOUT_EFFECT if body.get(key) is not None),
    )


def _prompt(body: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int and 0 <= token < 2**32 for token in prompt):
            return None, tuple(prompt)
        if all(isinstance(each, str | list) for each in prompt):
            raise Refusal(400, f"prompt is one here; got {len(prompt)}: send a request for each", param="prompt")
    what = "an empty one" if prompt in ("", []) else _named(prompt)
    raise Refusal(400, f"prompt is a text or a list of token numbers; got {what}", param="prompt")


def _messages(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages is a list of at least one message", param="messages")
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(400, f"messages[{i}] is an object with a role and a content", param="messages")
        found.append((message["role"], _content(message.get("content"), i)))
    return found


def _content(content: Any, i: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Refusal(400, f"messages[{i}].content has a part that is no text; images and sound are not served")
            parts.append(part["text"])
        return "".join(parts)
    raise Refusal(400, f"messages[{i}].content is a text or a list of parts; got {_named(content)}", param="messages")
