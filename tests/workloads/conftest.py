from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture
def real_trace() -> Callable[[str], Path]:
    """The path of a published trace file, kept beside the repository; skips where it is absent."""

    def find(name: str) -> Path:
        path = TRACES / name
        if not path.exists():
            pytest.skip(f"the published trace {name} is not in ../shared/traces")
        return path

    return find


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small file and gives its path."""

    def write(text: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write
