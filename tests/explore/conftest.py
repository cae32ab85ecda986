from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.explore.browser import launched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="session")
def serving() -> Iterator:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.explore.serving import Loop

    found = Loop()
    yield found
    found.close()
