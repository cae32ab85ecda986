from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def serving() -> Iterator:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.explore.serving import Loop

    found = Loop()
    yield found
    found.close()
