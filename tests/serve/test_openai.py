"""The library `openai`, which nobody here wrote, as a client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")

from sim.serve.app import Limits
from tests.serve.serving import Serving, serving, until


@pytest.fixture(scope="module")
def openai() -> Any:
    """The library, which takes a second to import, in the process that asks for it."""
    return pytest.importorskip("openai", reason="needs the library openai (pip install -e '.[test]')")


@pytest.fixture(scope="module")
def at() -> Iterator[Serving]:
    with serving(speed=10.0, limits=Limits(streams=2), names=("gpt-4o",)) as found:
        yield found


@pytest.fixture
def client(openai: Any, at: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["llama-3.1-8b", "gpt-4o"]


def test_a_completion_is_read(client: Any) -> None:
    answer = client.completions.create(model="gpt-4o", prompt="Once upon a time", max_tokens=6, temperature=0)
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].text.split()) == 6


def test_a_chat_is_streamed_with_its_usage(client: Any) -> None:
    stream = client.chat.completions.create(
        model="llama-3.1-8b", messages=[{"role": "user", "content": "Say something"}], max_tokens=5, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == " the of and to in"
    assert chunks[-1].usage.completion_tokens == 5
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_a_chat_is_answered_at_once_with_simulated_times(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="gpt-4o", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=4
    )
    assert raw.parse().choices[0].message.content == " the of and to"
    assert float(raw.headers["x-rooftrace-e2el-seconds"]) > float(raw.headers["x-rooftrace-ttft-seconds"]) > 0


@pytest.mark.parametrize(
    ("error", "body"),
    [
        ("NotFoundError", {"model": "other", "prompt": "a"}),
        ("BadRequestError", {"model": "gpt-4o", "prompt": "a", "max_tokens": 10**6}),
        ("BadRequestError", {"model": "gpt-4o", "prompt": "a", "n": 3}),
    ],
)
def test_refusals_are_the_library_s_own_errors(openai: Any, client: Any, error: str, body: dict[str, Any]) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.completions.create(**body)
    assert caught.value.body["message"]


def test_a_client_that_leaves_a_stream_aborts_its_sequence(at: Serving, client: Any) -> None:
    stream = client.completions.create(model="gpt-4o", prompt="a", max_tokens=100_000, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: not at.session.open)


def test_its_retries_get_through_when_there_is_room_again(openai: Any, at: Serving) -> None:
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=5, timeout=30) as patient:
        held = [
            patient.completions.create(model="gpt-4o", prompt="a", max_tokens=100_000, stream=True) for _ in range(2)
        ]
        refused = at.endpoint.refused.get(503, 0)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(patient.completions.create, model="gpt-4o", prompt="a", max_tokens=2)
            until(lambda: at.endpoint.refused.get(503, 0) > refused)
            for stream in held:
                stream.close()
            assert answer.result().usage.completion_tokens == 2
